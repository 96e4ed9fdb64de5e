"""`--draft-budget auto`: of what is drafted that is verified which pays, whatever the text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from specdec.decode.accept import Candidates
from specdec.decode.drafters import Drafting
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.calibration import Calibration, follow_chances
from specdec.decode.drafters.draft_tree import ModelTreeDrafter
from specdec.decode.drafters.eagle import EagleDrafter
from specdec.decode.drafters.pace import TRIAL_CHUNK_TOKENS, Pace
from specdec.decode.drafters.paced import PacedDrafter
from specdec.decode.drafters.redrafter import BeamDrafter, BeamTreeDrafter
from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Options
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.sampling import SamplingParams
from specdec.engine.step import States
from specdec.engine.tree import pack_beams
from specdec.errors import SpecDecError, UsageError
from specdec.methods.budget import DraftBudget
from tests.conftest import make_llama
from tests.costs import bind, make_costs
from tests.engines import call, list_paths, run_here
from tests.methods import build_methods, load_method

METHODS = (
    "draft_target, tree", "redrafter", "redrafter, tree", "medusa", "eagle", "eagle3", "dflash",
    "mtp", "prompt_lookup", "suffix", "lookahead",
)  # fmt: skip
PROMPT = SimpleNamespace(input_ids=[3])


def test_what_a_drafter_is_sure_of_is_held_against_what_was_accepted() -> None:
    """Tokens that it calls certain are right half the time, those it doubts always."""
    calibration = Calibration()
    sure = Candidates(pack_beams(0, np.array([[1, 2, 3]])), None, np.array([1.0, 0.95, 0.35, 0.95]))
    assert np.allclose(calibration.estimate(sure), [1, 0.95, 0.35, 0.95])
    for step in range(200):
        calibration.record([sure], [[0, 1, 2, 3] if step % 2 else [0]])
    calibration.learn()
    chances = calibration.estimate(sure)
    assert chances[1] == pytest.approx(0.5, abs=0.05)
    assert chances[2] > 0.9
    assert chances[3] > 0.9
    other = Candidates(sure.tree, None, sure.confidence, source=1)
    assert np.allclose(calibration.estimate(other), [1, 0.95, 0.35, 0.95])


def test_confidence_that_is_no_number_is_little() -> None:
    """A drafter may leave the range of its type: float16 ends at 65504."""
    calibration, confidence = Calibration(), np.array([1.0, 0.9, np.nan, np.nan])
    lost = Candidates(pack_beams(0, np.array([[1, 2, 3]])), None, confidence)
    assert np.allclose(calibration.estimate(lost), [1, 0.9, 0.01, 0.01])
    calibration.record([lost], [[0, 1, 2]])
    calibration.learn()
    assert calibration.estimate(lost)[2] > 0.01


class Unready(Drafter):
    """Reads much of prompts and drafts nothing yet."""

    max_draft_tokens = max_draft_depth = 3

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        self.num_prefilled = 100
        return super().propose(requests)


def test_a_step_in_which_drafters_only_read() -> None:
    drafter, read = PacedDrafter([[Unready()]], make_costs()), 0
    requests = [cast(ActiveRequest, SimpleNamespace(output_ids=[4], remaining=99, request=PROMPT))]
    for _ in range(30):
        for found in drafter.propose(requests):
            assert found.tree.tokens.tolist() == [4]
        read += drafter.num_prefilled
        drafter.observe(requests, States(torch.zeros(1, 1, 1)), [[0]])
    assert read >= 100, "it was asked"


class Forking(Drafter):
    """Drafts two tokens, and is surer of the first."""

    max_draft_tokens, max_draft_depth = 2, 1

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        return [Candidates(pack_beams(4, np.array([[5], [6]])), None, np.array([1.0, 0.9, 0.4]))]


class Drawing(Drafter):
    """Draws a chain of two tokens."""

    max_draft_tokens = max_draft_depth = 2

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        return [Candidates(pack_beams(4, np.array([[5, 6]])), [torch.full((8,), 0.125)] * 2)]


def test_what_a_grammar_leaves_out_was_wrong_and_not_verified() -> None:
    """Also where the nodes that are left have other numbers."""
    requests = [cast(ActiveRequest, SimpleNamespace(output_ids=[4], remaining=99, request=PROMPT))]
    seconds = []
    for kept in ([0, 1, 2], [0, 2]):
        drafter = PacedDrafter([[Forking()]], make_costs(step=float), is_fixed=True)
        (draft,) = drafter.propose(requests)
        drafter.note_verified([draft.keep(kept)])
        drafter.observe(requests, States(torch.zeros(1, 3, 1)), [[0, kept.index(2)]])
        drafter.pace.learn()
        seconds.append(drafter.pace.account.spent_seconds)
        chances = drafter.pace.calibration.estimate(draft)
        assert chances[1] < 0.9
        assert chances[2] > 0.4
    assert seconds[0] - seconds[1] == pytest.approx(1.0), "a node less"


def test_what_a_grammar_leaves_of_a_drawn_draft_is_not_looked_at() -> None:
    """It depends on what was drawn, and the next draft must not."""
    requests = [cast(ActiveRequest, SimpleNamespace(output_ids=[4], remaining=99, request=PROMPT))]
    seconds = set()
    for kept in ([0, 1, 2], [0, 1]):
        drafter = PacedDrafter([[Drawing()]], make_costs(step=float), is_fixed=True)
        (draft,) = drafter.propose(requests)
        drafter.note_verified([draft.keep(kept)])
        drafter.observe(requests, States(torch.zeros(1, 3, 1)), [[0]])
        seconds.add(drafter.pace.account.spent_seconds)
    assert len(seconds) == 1


def test_a_tree_is_cut_to_its_likeliest_nodes() -> None:
    """By their whole paths; siblings count as the drafter ranks them where it tells no more."""
    tree = pack_beams(7, np.array([[4, 5, 6], [4, 5, 8], [3, 5, 8]]))
    (chances,) = follow_chances([tree], Calibration().estimate(Candidates(tree)))
    kept = tree.keep(np.sort(np.argsort(-np.array(chances), kind="stable")[:4]))
    assert list_paths(kept) == [[0, 2], [0, 1, 3]]
    assert kept.tokens.tolist() == [7, 4, 3, 5]
    everything = tree.keep(range(tree.num_nodes))
    assert everything.parents.tolist() == tree.parents.tolist()


# ---- The text.


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = make_llama(tmp_path_factory.mktemp("adaptive"), layers=3, seed=3)
    names = ("redrafter", "medusa", "eagle", "eagle3", "dflash", "mtp", "pair", "noisy")
    build_methods(target, *names, layers=3, build=["--max-batch-size", 3])
    return target.parent


def load(parent: Path, method: str) -> TorchEngine:
    engine = load_method(parent, method, "noisy")
    if method == "redrafter, tree":
        assert isinstance(engine.drafter, BeamDrafter)
        engine.drafter = engine.drafter.fit_budget()
    return engine


def make_requests(**sampling: Any) -> list[Request]:
    return [
        Request(
            index=i, input_ids=list(range(3 + i, 8 + 13 * i)), max_output_len=30 - 9 * (i % 3),
            end_ids=frozenset(), sampling=SamplingParams(seed=i, **sampling),
        )
        for i in range(5)
    ]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95}])
@pytest.mark.parametrize("method", METHODS)
def test_the_text_is_that_of_plain_decoding(
    parent: Path, method: str, sampling: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Drafted and plain steps in any order, rows that are refilled and that share prefixes."""
    plain = TorchEngine(parent / "pair-engine", device="cpu", speculate=False)
    requests = make_requests(**sampling)
    expected = [r.output_ids for r in plain.generate(requests)]
    engine = load(parent, method)
    engine.drafter = bind(engine.drafter, make_costs())
    chance = random.Random(method)
    chosen: list[bool] = []

    def plan(self: Pace, *_: Any) -> bool:
        self.prices.step_seconds = [1.0] * (self.max_tokens + 1)
        chosen.append(chance.random() < 0.5)
        return chosen[-1]

    monkeypatch.setattr(Pace, "plan", plan)
    monkeypatch.setattr(Pace, "choose", lambda self, chances: chance.randrange(4))
    monkeypatch.setattr(Pace, "price_level", lambda self: chance.choice([-np.inf, 0.2, 1.0]))
    for options in (Options(), Options(reuse_blocks=True)):
        results = engine.generate(requests, options)
        assert [r.output_ids for r in results] == expected
        drafted = sum(r.stats.num_draft_tokens for r in results)
        assert drafted > 0 or method in ("prompt_lookup", "suffix")
    assert 0.2 < sum(chosen) / len(chosen) < 0.8
    assert engine.drafter.follows_prompts == method.startswith(("eagle", "dflash", "mtp"))
    assert engine.drafter.is_indivisible == (method == "lookahead")


@pytest.mark.parametrize("method", ["eagle", "draft_target, tree"])
def test_a_drafter_reads_a_piece_of_the_prompts_first(parent: Path, method: str) -> None:
    plain = TorchEngine(parent / "pair-engine", device="cpu", speculate=False)
    requests = [
        Request(
            index=i, input_ids=[*range(3 + i, 83 + i)], max_output_len=30, end_ids=frozenset(),
        )
        for i in range(4)
    ]  # fmt: skip
    expected = [r.output_ids for r in plain.generate(requests)]
    engine = load(parent, method)
    drafter, read = engine.drafter, []
    assert isinstance(drafter, EagleDrafter | ModelTreeDrafter)
    propose = drafter.propose

    def watch(requests: Sequence[ActiveRequest]) -> list[Candidates]:
        num_unread, drafts = drafter.count_unread(requests), propose(requests)
        read.append((num_unread, drafter.num_prefilled))
        assert drafter.num_prefilled == num_unread - drafter.count_unread(requests)
        return drafts

    drafter.propose = watch  # type: ignore[method-assign]
    engine.drafter = bound = bind(drafter, make_costs(reading=0.008))
    assert [r.output_ids for r in engine.generate(requests)] == expected
    num_unread, num_read = read[0]
    assert TRIAL_CHUNK_TOKENS <= num_read < num_unread
    assert bound.pace.account.reading_seconds > 0


# ---- The flag.


def write_prompt(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text('{"input_ids": [5, 6, 7]}\n', encoding="utf-8")
    return path


def test_the_command(parent: Path, tmp_path: Path) -> None:
    flags = ["--engine-dir", str(parent / "redrafter-engine"), "--max-output-len", "12"]
    flags += ["--input-file", str(write_prompt(tmp_path))]
    plain = run_here([*flags, "--no-speculation"])
    found = run_here([*flags, "--draft-len", "auto"])
    assert found["outputs"][0]["output_ids"] == plain["outputs"][0]["output_ids"]
    assert found["stats"]["method"] == "suffix,redrafter"


def test_trees_of_redrafter(parent: Path, tmp_path: Path) -> None:
    """A size bounds what a step drafts; a budget has such trees by itself, and they end early."""
    folder = parent / "redrafter-engine"  # 5 beams of 5 tokens
    flags = ["--engine-dir", str(folder), "--max-output-len", "12", "--draft-budget", "fixed"]
    flags += ["--input-file", str(write_prompt(tmp_path)), "--redrafter-tree-tokens"]
    plain = run_here([*flags[:4], *flags[6:8], "--no-speculation"])
    found = run_here([*flags, "7"])
    assert found["outputs"][0]["output_ids"] == plain["outputs"][0]["output_ids"]
    stats = found["outputs"][0]["stats"]
    assert 0 < stats["num_draft_tokens"] <= 7 * stats["num_verify_steps"]
    with pytest.raises(SpecDecError, match="tokens is 26, the engine has num_beams=5 x draft_len"):
        call("run", *flags, "26")
    with pytest.raises(UsageError, match="--redrafter-tree-tokens has no effect with an engine"):
        call("run", "--engine-dir", parent / "medusa-engine", *flags[2:], "7")
    drafting = Drafting(options={}, flags={}, budget=DraftBudget("auto", "--draft-budget auto"))
    engine = TorchEngine(folder, device="cpu", drafting=drafting)
    assert isinstance(engine.drafter, PacedDrafter)
    _, drafter = engine.drafter.members
    assert isinstance(drafter, BeamTreeDrafter)
    drafter.min_gain = 1.0
    drafter.allocate(2, 8)
    request = ActiveRequest(
        Request(index=0, input_ids=[5], max_output_len=9, end_ids=frozenset()), 1,
        max_depth=5, text_stream=None,
    )  # fmt: skip
    request.output_ids.append(6)
    drafter.observe([request], States(torch.zeros(1, 1, 64)), [[0]])
    (candidates,) = drafter.propose([request])
    assert candidates.tree.depth == drafter.num_levels == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft-len", "auto", "--no-speculation"], "no effect with --no-speculation"),
        (["--draft-len", "3"], "--draft-len without --draft-engine-dir"),
        (["--draft-len", "auto", "--use-logits"], "--use-logits without --draft-engine-dir"),
    ],
)
def test_flags_that_have_no_effect(
    tmp_path: Path, parent: Path, flags: list[str], message: str
) -> None:
    folder, file = parent / "redrafter-engine", write_prompt(tmp_path)
    with pytest.raises(UsageError, match=message):
        call("run", "--engine-dir", folder, "--input-file", file, *flags)
