"""DFlash on the torch engine: the drafts are the paper's, the text is the target's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.decode.drafters import base
from specdec.decode.drafters.dflash import DFlashDrafter
from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Options, generate
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Step
from specdec.errors import SpecDecError
from tests.conftest import make_dflash_drafter, make_llama
from tests.engine.dflash_reference import DFlashReference
from tests.engines import (
    continue_by_transformers,
    make_constant_pair,
    make_tree_engine,
)
from tests.run.drafting import (
    LIMIT,
    PROMPTS,
    check_drafts_depend_on_the_text_alone,
    check_text,
    make_requests,
    record,
)

TREES = {"default": (None, None), "chain": (None, 1), "short": (2, 1), "wide": (30, 5)}
WINDOW = {
    "use_sliding_window": True, "sliding_window": 6, "is_causal": False,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
DRAFTERS: dict[str, dict[str, Any]] = {
    "z-lab": {},
    "biased": {"bias": True, "layers": 1, "kv_heads": 4, "block_size": 2},
    "window": {"net": WINDOW, "block_size": 4},
    "scaled": {
        "dflash_config": {
            "mask_token_id": 1, "target_layer_ids": [1], "block_size": 6, "embedding_scale": 3.0,
        },
        "aux_layers": (1,), "block_size": None,
    },
    "speculators": {"form": "speculators", "draft_vocab": 70, "aux_layers": (0, 2)},
    "anchored": {"form": "speculators", "sample_from_anchor": True, "block_size": 3},
    "deepspec": {"form": "deepspec", "markov_rank": 0, "block_size": 4},
    "dspark": {"form": "deepspec", "markov_rank": 24, "block_size": 4},
    "dspark, speculators": {
        "form": "speculators", "markov_rank": 12, "draft_vocab": 70, "sample_from_anchor": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("target"), layers=3, seed=3)


class Case:
    """A drafter's folder, its engine with or without kernels, and the reference."""

    def __init__(self, name: str, parent: Path, target: Path) -> None:
        drafter = make_dflash_drafter(parent, scale=2.0, **DRAFTERS[name])
        plain = ("biased", "anchored", "dspark, speculators")
        optimize = "none" if name in plain else "auto"
        folder = make_tree_engine("dflash", parent, target, drafter, optimize=optimize)
        self.engine = TorchEngine(folder, device="cpu")
        assert isinstance(self.engine.drafter, DFlashDrafter)
        self.drafter: DFlashDrafter = self.engine.drafter
        self.reference = DFlashReference(target, drafter)
        self.most_waiting = (base.MAX_WAITING_STATES, 5, 0)[[*DRAFTERS].index(name) % 3]


@pytest.fixture(scope="module", params=list(DRAFTERS))
def case(
    request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param), target)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    """What transformers continues the prompts with, no end token."""
    return continue_by_transformers(target, PROMPTS, LIMIT)


@pytest.mark.thorough
def test_logits_are_the_reference_s(case: Case) -> None:
    """After a prompt, and after accepted tokens have joined the context."""
    drafter, text = case.drafter, PROMPTS[1] + [5, 88, 17, 4, 60]
    net, decoder = drafter.net, case.engine.decoder
    drafter.allocate(1, 64)
    cache = decoder.make_cache(1, 64)
    from specdec.decode.prefill import fill_cache

    with torch.inference_mode():
        for end in (20, 25):
            fill_cache(decoder, cache, [0], [text[: end - 1]], 7, drafter.follow)
            assert drafter._cache.past_lens[0] < end - 1, "nothing is made before it is needed"
            drafter._read([0])
            hidden = net.run_blocks(drafter._cache, np.array([0]), np.array([text[end - 1]]))
            found = net.compute_logits(hidden)[0].double().cpu()
            wanted = case.reference.compute_logits(text[:end])
            if net.offsets is not None:
                wanted = wanted[:, torch.arange(found.shape[1]) + net.offsets.cpu()]
            assert found.shape == wanted.shape
            torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.thorough
def test_drafts_are_the_reference_s(case: Case) -> None:
    """The paths of a whole generation; chains and trees."""
    for num_tokens, top_k in ((None, 1), (9, 3)):
        case.drafter.use_tree(num_tokens, top_k)
        for drafts in record(case.engine, make_requests(PROMPTS[:2], limit=6)).values():
            for text, paths in drafts[:1] + drafts[-1:]:
                wanted = case.reference.draft(text, case.drafter.max_draft_tokens, top_k)
                if top_k == 1:  # a chain goes on to its end
                    wanted = {path[:n] for path in wanted for n in range(1, len(path) + 1)}
                assert paths == wanted


@pytest.mark.thorough
def test_drafts_depend_on_the_text_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how many states wait, and for how long."""
    monkeypatch.setattr(base, "MAX_WAITING_STATES", case.most_waiting)
    case.drafter.use_tree()
    check_drafts_depend_on_the_text_alone(case.engine)


@pytest.mark.thorough
def test_states_wait_until_a_row_is_drafted_for(case: Case) -> None:
    """In a step that reads prompts a few at a time, none of it drafts before all of it is read."""
    case.drafter.use_tree()
    requests = make_requests([[3] * 20, [5] * 31, [7] * 4], limit=24)
    alone = [dict_of(record(case.engine, [request])[request.index]) for request in requests]
    drafts = record(case.engine, requests, prompt_chunk=2)
    drafted = 0
    for request, own in zip(requests, alone, strict=True):
        steps = drafts[request.index]
        is_long = len(request.input_ids) > 8  # four times as many as the target reads
        assert (not steps[0][1]) == is_long
        assert steps[-1][1]
        for text, paths in steps:
            if paths and tuple(text) in own:
                drafted += 1
                assert paths == own[tuple(text)]
    assert drafted > 3


@pytest.mark.parametrize("wants_prompt_logprobs", [False, True])
def test_the_last_layer_runs_the_ends_of_prompts(
    case: Case, wants_prompt_logprobs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the drafter reads is of layers before it; log-probabilities are of every token."""
    decoder, wanted = case.engine.decoder, []
    forward = decoder.forward

    def note(step: Step, cache: KVCache) -> torch.Tensor:
        wanted.append(step.output_mask)
        return forward(step, cache)

    monkeypatch.setattr(decoder, "forward", note)
    requests = make_requests(PROMPTS[1:2], limit=2)
    if wants_prompt_logprobs:
        requests = [
            dataclasses.replace(r, wants_prompt_logprobs=True, num_logprobs=0) for r in requests
        ]
    with torch.inference_mode():
        generate(decoder, case.drafter, requests, Options())
    if wants_prompt_logprobs:
        assert np.all(wanted[0])
    else:
        assert wanted[0] is not None
        assert wanted[0].size >= len(PROMPTS[1])
        assert wanted[0].sum() == 1


def dict_of(steps: list[tuple[list[int], set[tuple[int, ...]]]]) -> dict[tuple[int, ...], object]:
    """Paths by the text that they were drafted after."""
    return {tuple(text): paths for text, paths in steps}


@pytest.mark.thorough
@pytest.mark.parametrize("tree", list(TREES))
def test_random_drafters_leave_the_text_unchanged(
    case: Case, tree: str, expected: list[list[int]]
) -> None:
    case.drafter.use_tree(*TREES[tree])
    check_text(case.engine, expected)


@pytest.mark.parametrize("token", [7, None])
def test_perfect_and_hostile_drafters(token: int | None, tmp_path: Path) -> None:
    """All of a block is accepted, or nothing is; either costs steps only."""
    drafter_dir = make_constant_pair(tmp_path, token)
    folder = make_tree_engine("dflash", tmp_path, tmp_path / "target", drafter_dir)
    engine = TorchEngine(folder, device="cpu")
    drafter = engine.drafter
    assert isinstance(drafter, DFlashDrafter)
    for (num_tokens, top_k), depth in (((None, 1), 4), ((2, 1), 2), ((30, 2), 4)):
        drafter.use_tree(num_tokens, top_k)
        for result in engine.generate(make_requests([[14], [10, 12]], limit=11)):
            start = result.request.input_ids[-1] + 1
            if token is None:
                assert result.output_ids == [(start + n) % 32 for n in range(11)]
                assert result.stats.num_verify_steps == 10
                assert result.stats.num_accepted == 0 or top_k == 2
            else:
                assert result.output_ids == [token] * 11
                assert result.stats.num_verify_steps == -(-10 // (depth + 1))


def test_trees_beyond_the_limits(case: Case) -> None:
    with pytest.raises(SpecDecError, match="--dflash-tokens is 64, the engine's max_draft_len is"):
        case.drafter.use_tree(64)
    with pytest.raises(SpecDecError, match="--dflash-top-k is 200, the drafter has"):
        case.drafter.use_tree(None, 200)


def test_a_layer_that_the_target_has_not(target: Path, case: Case) -> None:
    net = case.drafter.net
    before = net.params
    net.params = dataclasses.replace(before, aux_layers=(0, 3))
    try:
        with pytest.raises(SpecDecError, match="reads the target's layer 3, of 3 from 0"):
            DFlashDrafter(net, case.engine.decoder)
    finally:
        net.params = before
