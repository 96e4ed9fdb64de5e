"""`--draft-chain`: several methods draft, by turns or in one tree; the text stays the target's."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from specdec.decode.accept import Candidates
from specdec.decode.cost_table import CostTable
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.merging import join_candidates, merge_candidates
from specdec.decode.drafters.pace import Pace
from specdec.decode.drafters.paced import PacedDrafter
from specdec.decode.engine import TorchEngine, load_engine
from specdec.decode.loop import Options
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.sampling import SamplingParams
from specdec.decode.settings import DecodeSettings
from specdec.engine.tree import build_tree_mask, make_root, pack_beams
from specdec.errors import SpecDecError, UsageError
from tests.conftest import make_llama
from tests.costs import make_costs, make_grid
from tests.engines import list_path_tokens
from tests.methods import build_methods

SUFFIX: dict[str, Any] = {"suffix_max_tokens": 5, "suffix_min_probability": 0.0}
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
PAIR: dict[str, Any] = {"draft_len": "3"}
TREE: dict[str, Any] = {"draft_len": None, "draft_tree_tokens": 5}
ADAPTED: dict[str, Any] = {"draft_len": "auto", "draft_budget": None}
PROMPT = SimpleNamespace(input_ids=[3])


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = make_llama(tmp_path_factory.mktemp("chain"), layers=3, seed=3)
    build_methods(
        target, "redrafter", "medusa", "eagle3", "dflash", "mtp", "pair", "noisy", layers=3
    )
    return target.parent


def load(parent: Path, name: str, chain: str, **options: Any) -> TorchEngine:
    if "draft_target" in chain:
        options = {"draft_engine_dir": parent / "noisy-engine", **PAIR, **options}
    options |= {"engine_dir": parent / f"{name}-engine", "device": "cpu", "draft_chain": chain}
    options = {"draft_budget": "fixed"} | options
    return load_engine(DecodeSettings(**options), None)


def make_requests(**sampling: Any) -> list[Request]:
    """Prompts that repeat themselves, so that lookups find something, of many lengths."""
    return [
        Request(
            index=i, input_ids=[*range(3 + i, 8 + 5 * i), *range(3 + i, 8 + i)],
            max_output_len=30 - 9 * (i % 3), end_ids=frozenset(),
            sampling=SamplingParams(seed=i, **sampling),
        )
        for i in range(5)
    ]  # fmt: skip


CHAINS = (
    ("redrafter", "suffix,redrafter", SUFFIX | {"suffix_max_tokens": 30}),
    ("medusa", "prompt_lookup,medusa", LOOKUP),
    ("eagle3", "suffix,eagle", SUFFIX),
    ("dflash", "suffix+dflash", SUFFIX),
    ("mtp", "suffix,mtp", SUFFIX),
    ("pair", "suffix,draft_target", SUFFIX),
    ("pair", "prompt_lookup,draft_target", LOOKUP),
    ("redrafter", "suffix+redrafter", SUFFIX),
    ("eagle3", "prompt_lookup,suffix+eagle", SUFFIX | LOOKUP),
    ("pair", "suffix+draft_target", SUFFIX),
    ("pair", "draft_target,suffix+prompt_lookup", SUFFIX | LOOKUP),
    ("pair", "suffix,draft_target", SUFFIX | TREE),
    ("pair", "suffix+draft_target", SUFFIX | TREE),
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "chain", "options", "sampling"),
    [
        *((*case, {}) for case in CHAINS),
        *((*case, {"temperature": 0.9, "top_p": 0.95}) for case in CHAINS[::3]),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_the_text_is_that_of_plain_decoding(
    parent: Path, name: str, chain: str, options: dict[str, Any],
    sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Any member for any request of a step; rows that are refilled and that share prefixes."""
    requests = make_requests(**sampling)
    plain = TorchEngine(parent / "pair-engine", device="cpu", speculate=False)
    expected = [r.output_ids for r in plain.generate(requests)]
    engine = load(parent, name, chain, **options)
    assert engine.method == engine.describe()["method"] == chain
    assert isinstance(engine.drafter, PacedDrafter)
    assert engine.drafter.follows_prompts == (name in ("eagle3", "dflash", "mtp"))
    chance, chosen = random.Random(chain), []

    def choose(*_: Any) -> bool:
        chosen.append(chance.random() < 0.5)
        return chosen[-1]

    if "," in chain:
        monkeypatch.setattr(Pace, "is_best", choose)
    for limits in (Options(max_batch_size=3), Options(max_batch_size=2, reuse_blocks=True)):
        results = [r.output_ids for r in engine.generate(requests, limits)]
        assert results == expected
    if "," in chain:
        assert 0.2 < sum(chosen) / len(chosen) < 0.8
    engine.close()


@pytest.mark.parametrize("chain", ["suffix,mtp", "suffix+mtp"])
def test_the_first_step_may_be_the_last_of_all_its_requests(parent: Path, chain: str) -> None:
    """A fixed budget drafts in it, too, though no plan was made before."""
    requests = [dataclasses.replace(r, max_output_len=2) for r in make_requests()]
    plain = TorchEngine(parent / "pair-engine", device="cpu", speculate=False)
    expected = [r.output_ids for r in plain.generate(requests)]
    results = load(parent, "mtp", chain, **SUFFIX).generate(requests)
    assert [r.output_ids for r in results] == expected


def test_accepted_tokens_come_from_every_member(parent: Path) -> None:
    """By the real record, on a text in which both are right now and then."""
    engine = load(parent, "pair", "suffix,draft_target", **SUFFIX)
    drafted = {0: 0, 1: 0}
    chain = engine.drafter
    assert isinstance(chain, PacedDrafter)
    propose = chain.propose

    def watch(requests: Sequence[ActiveRequest]) -> list[Candidates]:
        found = propose(requests)
        for candidates in chain._drafts:
            drafted[candidates.source] += candidates.tree.depth > 0
        return found

    chain.propose = watch  # type: ignore[method-assign]
    requests = [dataclasses.replace(r, max_output_len=60) for r in make_requests()]
    results = engine.generate(requests)
    assert sum(r.stats.num_accepted for r in results) > 60
    assert min(drafted.values()) > 3
    engine.close()


def test_trees_are_merged_path_by_path() -> None:
    one = pack_beams(7, np.array([[4, 5, 6], [4, 5, 8]]))
    two = pack_beams(7, np.array([[4, 9, 6], [3, 5, 8]]))
    merged = merge_candidates([Candidates(one), Candidates(two)]).tree
    assert list_path_tokens(merged) == list_path_tokens(one) | list_path_tokens(two)
    assert merged.num_nodes == 10  # 4 is shared
    assert merged.depth == 3
    for node in range(1, merged.num_nodes):  # parents first, and siblings differ
        assert merged.parents[node] < node
    assert len({*zip(merged.parents.tolist(), merged.tokens.tolist(), strict=True)}) == 10
    assert build_tree_mask(merged).sum(1).tolist() == (merged.depths + 1).tolist()


def test_nothing_drafted_leaves_the_other_as_it_is() -> None:
    """Also a chain that was drawn, with what it was drawn from."""
    drawn = Candidates(pack_beams(7, np.array([[4, 5]])), draft_probs=[])
    assert join_candidates([Candidates(make_root(7)), drawn]) is drawn
    assert join_candidates([Candidates(make_root(7))] * 2).tree.num_nodes == 1


def test_the_drafter_is_chosen_that_promises_most_for_its_time() -> None:
    """By what a lookup has in hand and what the others have brought; what is dear is left out."""
    counts = []
    for rate, seconds in ((0.9, 0.3), (0.2, 0.3), (0.6, 1.0), (0.6, 3.0)):
        steps, free = make_grid(lambda tokens: 1.0), make_grid(lambda levels: 0.0)
        dear = make_grid(lambda levels, seconds=seconds: seconds)  # type: ignore[misc]
        pace, chosen = Pace(4, CostTable(steps=steps, drafts=(free, dear)), max_depths=(4, 4)), 0
        for _ in range(200):
            pace.plan([100])
            chances = np.cumprod([[rate] * 4], axis=1).tolist()
            pace.note_first(chances)
            if pace.forecast.left_out:  # the lookup drafts alone
                pace.choose(chances)
            (value,) = pace.value(chances)
            is_best = pace.is_best(0, value, 1)
            chosen += is_best
            pace.drafters[0].record([value])
            if not is_best:
                pace.drafters[1].record(pace.value(np.cumprod([[0.6] * 4], axis=1).tolist()))
            pace.record(5, [3], [(0, 1, 1)] if is_best else [(0, 1, 1), (1, 1, 1)])
        counts.append(chosen)
    assert counts[0] > 190
    assert counts[1] < 20
    assert min(counts[2:]) > 190, "as many tokens: the cheaper one"


@pytest.mark.parametrize(
    ("name", "chain", "options", "message"),
    [
        ("pair", "suffix", SUFFIX, "name two or more methods"),
        ("pair", "suffix,sufix", SUFFIX, "'sufix' is no method"),
        ("pair", "suffix,lookahead", SUFFIX, "'lookahead' is no method"),
        ("pair", "suffix,suffix", SUFFIX, "a method twice"),
        ("pair", "", SUFFIX, "name two or more"),
        ("pair", "suffix,prompt_lookup", SUFFIX, "add --prompt-lookup-num-tokens"),
        ("pair", "suffix,redrafter", SUFFIX, "the engine has no drafter of its own"),
        ("medusa", "suffix,redrafter", SUFFIX, "the engine has a drafter for medusa"),
        ("redrafter", "suffix,redrafter", SUFFIX | LOOKUP, "no effect with an engine that runs"),
        ("pair", "suffix,draft_target", SUFFIX | ADAPTED, "give --draft-len N"),
        ("pair", "suffix+draft_target", SUFFIX | {"use_logits": True}, "leave --use-logits out"),
        ("redrafter", "suffix,redrafter", {"suffix_max_tokens": 9999}, "has room for 1023"),
    ],
)  # fmt: skip
def test_wrong_chains(
    parent: Path, name: str, chain: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((UsageError, SpecDecError)) as caught:
        load(parent, name, chain, **options)
    assert message in f"{caught.value.message}; {caught.value.hint}"


def test_a_chain_leaves_the_engines_own_drafter_out(parent: Path) -> None:
    """Nor does a method without weights need a chain on such an engine."""
    requests = make_requests()
    plain = TorchEngine(parent / "medusa-engine", device="cpu", speculate=False)
    expected = [r.output_ids for r in plain.generate(requests)]
    chained = load(parent, "medusa", "suffix,prompt_lookup", **SUFFIX, **LOOKUP)
    settings = DecodeSettings(engine_dir=parent / "medusa-engine", device="cpu", **SUFFIX)
    for engine, method in (
        (chained, "suffix,prompt_lookup"),
        (load_engine(settings, None), "suffix"),
    ):
        assert engine.method == method
        assert [r.output_ids for r in engine.generate(requests)] == expected
        engine.close()


def test_two_drafters_need_a_chain(parent: Path) -> None:
    settings = DecodeSettings(engine_dir=parent / "pair-engine", device="cpu", **SUFFIX, **LOOKUP)
    with pytest.raises(UsageError, match="are both given") as caught:
        load_engine(settings, None)
    assert "--draft-chain" in caught.value.hint


def test_all_members_are_told_of_prompts_in_a_step() -> None:
    timer = Drafter()
    outer = PacedDrafter([[Drafter(), timer]], make_costs(), is_fixed=True)
    requests = [cast(ActiveRequest, SimpleNamespace(output_ids=[4], remaining=99, request=PROMPT))]
    for number in (9, 0):
        outer.plan_step(number, 4 * number)
        (found,) = outer.propose(requests)
        assert found.tree.tokens.tolist() == [4]
        assert timer.max_prefill == 4 * number
