"""`--draft-len auto` beside draft-target: all requests of a step are drafted for, or none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.decode.drafters.prompt_lookup import PromptLookupProposer
from specdec.decode.drafters.suffix import SuffixProposer
from specdec.decode.drafters.switch import AdaptiveFollower, AdaptiveProposer, Switch, adapt
from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Options
from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from specdec.errors import UsageError
from specdec.methods.prompt_lookup import LookupOptions
from specdec.methods.suffix import SuffixOptions
from tests.conftest import make_drafter, make_eagle_drafter, make_llama, make_medusa_heads
from tests.engines import call, make_engine, make_tree_engine, run_here

METHODS = ("redrafter", "medusa", "eagle", "eagle3", "prompt_lookup", "suffix")
LIMIT = 128


# ---- What it costs, on simulated clocks.


def simulate(num_rows: int, ratio: float, emitted: float, *, noise: float = 0.0) -> float:
    """Time of a run relative to plain decoding of as many tokens.

    ratio: seconds of a drafted step over those of a plain one. emitted: tokens that it emits for a
    request, on average. noise: the most by which a step is slower than it would be alone.
    """
    chance = random.Random(f"{num_rows} {ratio} {emitted} {noise}")
    switch, left, seconds = Switch(), [LIMIT] * num_rows, 0.0
    while any(left):
        active = [row for row, count in enumerate(left) if count]
        is_drafted = switch.choose([left[row] for row in active])
        took = (ratio if is_drafted else 1.0) * (1 + noise * chance.random())
        mean = emitted if is_drafted else 1.0
        counts = [min(left[row], int(mean) + (chance.random() < mean % 1)) for row in active]
        switch.record(took, counts, is_drafted=is_drafted)
        for row, count in zip(active, counts, strict=True):
            left[row] -= count
        seconds += took
    return seconds / LIMIT / (1 + noise / 2)


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("ratio", [1.05, 1.3, 2.0, 3.0, 4.0])
def test_it_never_loses_more_than_a_twentieth(num_rows: int, ratio: float) -> None:
    for emitted in (1.0, 1.2, 1.5, 2.0, 2.5, 3.5):
        assert simulate(num_rows, ratio, emitted) <= 1.05, emitted
        assert simulate(num_rows, ratio, emitted, noise=0.1) <= 1.06, emitted


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize(("ratio", "emitted"), [(1.1, 1.8), (1.3, 2.5), (1.2, 3.5)])
def test_it_drafts_where_that_pays(num_rows: int, ratio: float, emitted: float) -> None:
    assert simulate(num_rows, ratio, emitted) <= 1.15 * ratio / emitted


def test_the_first_steps_are_plain_and_so_is_the_first_of_half_as_many_requests() -> None:
    switch = Switch()
    for _ in range(2):
        assert not switch.choose([50, 50])
        switch.record(1.0, [1, 1], is_drafted=False)
    assert switch.choose([50, 50])
    switch.record(1.2, [3, 3], is_drafted=True)
    assert switch.choose([50, 50])
    assert not switch.choose([50, 50, 50])
    assert not switch.choose([50])
    switch.record(1.0, [1], is_drafted=False)
    assert switch.choose([50])
    assert not switch.choose([1])
    switch.reset()
    assert not switch.choose([50, 50])


# ---- The text.


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("adaptive")
    target = make_llama(parent, layers=3, seed=3)
    found = {"redrafter": make_engine(parent / "r", target, make_drafter(parent, scale=3.0))}
    heads = make_medusa_heads(parent, scale=3.0)
    found["medusa"] = make_tree_engine("medusa", parent / "m", target, heads)
    eagles: dict[str, dict[str, Any]] = {
        "eagle": {}, "eagle3": {"version": 3, "aux_layers": (0, 2)},
    }  # fmt: skip
    for name, options in eagles.items():
        drafter = make_eagle_drafter(parent, scale=2.0, name=f"d-{name}", **options)
        found[name] = make_tree_engine("eagle", parent / name, target, drafter)
    found["prompt_lookup"] = found["suffix"] = found["redrafter"]
    return found


def load(folders: dict[str, Path], method: str) -> TorchEngine:
    if method == "prompt_lookup":
        engine = TorchEngine(folders[method], device="cpu", speculate=False)
        lookup = LookupOptions(num_tokens=4, max_ngram_size=2, target_devices=None)
        engine.use_method(method, PromptLookupProposer(lookup))
        return engine
    if method == "suffix":
        engine = TorchEngine(folders[method], device="cpu", speculate=False)
        engine.use_method(method, SuffixProposer(SuffixOptions(max_tokens=6, min_probability=0)))
        return engine
    return TorchEngine(folders[method], device="cpu")


def make_requests(**sampling: Any) -> list[Request]:
    return [
        Request(
            index=i, input_ids=list(range(3 + i, 8 + 13 * i)), max_output_len=30 - 9 * (i % 3),
            end_ids=frozenset(), sampling=SamplingParams(seed=i, **sampling),
        )
        for i in range(5)
    ]  # fmt: skip


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95}])
@pytest.mark.parametrize("method", METHODS)
def test_the_text_is_that_of_plain_decoding(
    folders: dict[str, Path], method: str, sampling: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Drafted and plain steps in any order, rows that are refilled and that share prefixes."""
    plain = TorchEngine(folders[method], device="cpu", speculate=False)
    requests = make_requests(**sampling)
    expected = [r.output_ids for r in plain.generate(requests)]
    engine = load(folders, method)
    engine.proposer = adapt(engine.proposer)
    chance = random.Random(method)
    chosen: list[bool] = []

    def choose(self: Switch, remaining: Sequence[int]) -> bool:
        chosen.append(chance.random() < 0.5)
        return chosen[-1]

    monkeypatch.setattr(Switch, "choose", choose)
    for options in (Options(), Options(reuse_blocks=True)):
        results = engine.generate(requests, options)
        assert [r.output_ids for r in results] == expected
        drafted = sum(r.stats.num_draft_tokens for r in results)
        assert drafted > 0 or method in ("prompt_lookup", "suffix")
    assert 0.2 < sum(chosen) / len(chosen) < 0.8
    kind = AdaptiveFollower if method.startswith("eagle") else AdaptiveProposer
    assert type(engine.proposer) is kind


def test_steps_are_timed_and_prompts_are_not(folders: dict[str, Path]) -> None:
    engine = load(folders, "redrafter")
    ticks = iter(range(10_000))
    engine.proposer = adaptive = AdaptiveProposer(engine.proposer, lambda: float(next(ticks)))
    (result,) = engine.generate(make_requests()[:1])
    # Two readings a step, one apart; what is drafted costs the same here, so all but the steps
    # that measure a plain one are drafted.
    assert next(ticks) == 2 * result.stats.num_verify_steps
    assert adaptive.switch._spent == result.stats.num_verify_steps
    assert result.stats.num_draft_tokens > 0


# ---- The flag.


def write_prompt(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text('{"input_ids": [5, 6, 7]}\n', encoding="utf-8")
    return path


def test_the_command(folders: dict[str, Path], tmp_path: Path) -> None:
    flags = ["--engine-dir", str(folders["redrafter"]), "--max-output-len", "12"]
    flags += ["--input-file", str(write_prompt(tmp_path))]
    plain = run_here([*flags, "--no-speculation"])
    found = run_here([*flags, "--draft-len", "auto"])
    assert found["outputs"][0]["output_ids"] == plain["outputs"][0]["output_ids"]
    assert found["stats"]["method"] == "redrafter"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft-len", "auto", "--no-speculation"], "no effect with --no-speculation"),
        (["--draft-len", "auto", "--lookahead-config", "[2,2,2]"], "no effect with lookahead"),
        (["--draft-len", "3"], "--draft-len without --draft-engine-dir"),
        (["--draft-len", "auto", "--use-logits"], "--use-logits without --draft-engine-dir"),
    ],
)
def test_flags_that_have_no_effect(
    tmp_path: Path, folders: dict[str, Path], flags: list[str], message: str
) -> None:
    folder = folders["redrafter"]
    if "--lookahead-config" in flags:
        folder = make_engine(
            tmp_path, make_llama(tmp_path, layers=1),
            build=["--speculative-decoding-mode", "lookahead_decoding", "--max-draft-len", 5],
        )  # fmt: skip
    with pytest.raises(UsageError, match=message):
        call("run", "--engine-dir", folder, "--input-file", write_prompt(tmp_path), *flags)
