"""Rules at the very place where they turn: broken by a hair, each of these tests fails."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.decode.accept import Candidates, accept_at_once, accept_batch
from specdec.decode.engine import TorchEngine
from specdec.decode.prefill import PromptReader, fill_cache
from specdec.decode.sampling import ACCEPT, Sampler, SamplingParams, process_logits
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import States, Step, pack_segments
from specdec.engine.tree import pack_beams
from tests.engines import make_engine
from tests.parity.models import SWITCH, make_model

SHORT, LONG = SWITCH - 10, SWITCH + 12  # prompts on the two sides of longrope's switch


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    """An engine whose requests have one of two rotary tables, by the length of the prompt."""
    parent = tmp_path_factory.mktemp("longrope")
    target = make_model(parent / "target", "Phi3ForCausalLM-longrope")
    return TorchEngine(make_engine(parent, target), device="cpu")


def fill(engine: TorchEngine, cache: KVCache, row: int, prompt: list[int]) -> Tensor:
    return fill_cache(engine.decoder, cache, [row], [prompt], 4096)


@pytest.mark.parametrize("before", [SHORT, LONG])
@pytest.mark.parametrize("source", [SHORT, LONG])
@pytest.mark.parametrize("after", [SHORT, LONG])
@torch.inference_mode()
def test_a_reused_prefix_brings_its_rotary_table(
    before: int, source: int, after: int, longrope: TorchEngine
) -> None:
    """Row 1 had a request of its own, and now takes a prefix of row 0 for a third one.

    Where prefix and request have one table, the prefix is used; where not, it is dropped; the
    result is that of an empty cache either way.
    """
    generator = np.random.default_rng(0)
    shared = generator.integers(3, 90, SHORT // 2).tolist()
    own, first, third = (
        head + generator.integers(3, 90, size - len(head)).tolist()
        for head, size in (([], before), (shared, source), (shared, after))
    )
    cache = longrope.decoder.make_cache(2, 128)
    fill(longrope, cache, 1, own)
    fill(longrope, cache, 0, first)
    cache.copy_prefix(0, 1, len(shared))
    assert cache.rotary_starts[1] == cache.rotary_starts[0]
    longrope.decoder.start_row(cache, 1, len(third))
    assert cache.past_lens[1] == (len(shared) if (source > SWITCH) == (after > SWITCH) else 0)
    found = fill(longrope, cache, 1, third)
    expected = fill(longrope, longrope.decoder.make_cache(1, 128), 0, third)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class PassRecorder:
    """Stands in for a decoder, and keeps the rows and the size of every pass."""

    max_chunk_tokens = 4
    observed = None

    def __init__(self, max_joined_tokens: int | None = None) -> None:
        self.max_joined_tokens = max_joined_tokens
        self.passes: list[tuple[list[int], int]] = []

    def start_row(self, cache: KVCache, row: int, prompt_len: int) -> None:
        return None

    def forward(self, step: Step, cache: KVCache) -> Tensor:
        assert step.positions.max() < cache.num_positions, "a pass leaves the cache"
        self.passes.append((step.rows.tolist(), step.tokens.shape[1]))
        return torch.zeros(*step.tokens.shape, 2)


def make_small_cache(num_rows: int, num_positions: int) -> KVCache:
    return KVCache(
        num_layers=1, num_rows=num_rows, num_heads=1, num_positions=num_positions, head_size=2,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


def make_reader(cache: KVCache) -> PromptReader:
    recorder: Any = PassRecorder(512)
    return PromptReader(recorder, cache, 512)


def test_short_prompts_overtake_long_ones_which_are_not_starved() -> None:
    """Row 0 has 100 tokens and should be read when 100 were; at every pass a short one comes."""
    reader = make_reader(make_small_cache(30, 128))
    reader.add(0, [1] * 100)
    order: list[int] = []
    for row in range(1, 30):
        reader.add(row, [2] * 16)
        chunk = reader.plan(16)
        order += chunk.ended_rows
        reader.commit(chunk)
    assert order == [*range(1, 7), 0, *range(7, 23)]


def test_a_pass_stays_in_the_cache_of_a_row_that_is_nearly_full() -> None:
    """That row is padded to the pass's size, which would be 4 for the prompt's own sake."""
    cache = make_small_cache(2, 2048)
    reader = make_reader(cache)
    cache.past_lens[:] = 2046, 1500
    reader.add(1, [5] * 2020)
    assert reader.plan(512, num_others=1).size == 4
    assert reader.plan(512, num_others=1, max_past=2046).size == 2


@pytest.mark.parametrize("least", [1, 5])
def test_a_pass_over_many_prompts_has_little_padding(least: int) -> None:
    cache = make_small_cache(8, 128)
    reader = make_reader(cache)
    for row in range(8):
        reader.add(row, [row] * (row * 9 + 1))
    chunk = reader.plan(None, num_others=8, min_size=least)
    assert sum(chunk.counts) == 260
    step = pack_segments(chunk.segments, cache, chunk.size)
    assert step.tokens.size < 1.2 * 260
    assert chunk.size >= least
    places = torch.from_numpy(step.positions)[..., None]
    assert chunk.pick_last(places).flatten().tolist() == [row * 9 for row in range(8)]
    gathered = chunk.gather(States(places)).hidden[..., 0].tolist()
    assert [own[: row * 9 + 1] for row, own in enumerate(gathered)] == [
        [*range(row * 9 + 1)] for row in range(8)
    ]


def test_of_prompts_that_nobody_follows_the_last_tokens_are_wanted() -> None:
    cache = make_small_cache(3, 128)
    reader = make_reader(cache)
    for row, size in enumerate((30, 9, 90)):
        reader.add(row, [row] * size)
    for reads_all, positions in ((False, [29, 8]), (True, [*range(30), *range(9), *range(11)])):
        chunk = reader.plan(50, reads_all=reads_all)
        step = pack_segments(chunk.segments, cache, chunk.size)
        assert step.output_mask is not None
        assert step.positions[step.output_mask].tolist() == positions, "the third does not end here"


@pytest.mark.parametrize(
    ("room", "passes"),
    [
        (4, [([0, 1], 4)]),  # the padded row just fits
        (3, [([1], 4), ([0], 2)]),  # one position too few
        (2, [([1], 4), ([0], 2)]),
    ],
)
def test_rows_share_a_pass_only_inside_of_the_cache(
    room: int, passes: list[tuple[list[int], int]]
) -> None:
    """Row 0 has two tokens left and is padded to the four of row 1, up to the cache's end."""
    num_positions = 16
    cache = make_small_cache(2, num_positions)
    cache.past_lens[0] = num_positions - room
    prompts = [list(range(num_positions - room + 2)), list(range(4))]
    recorder: Any = PassRecorder()
    fill_cache(recorder, cache, [0, 1], prompts, max_num_tokens=64)
    assert recorder.passes == passes


class FixedSampler(Sampler):
    """Gives one number wherever it is asked whether a draft is kept."""

    def __init__(self, uniform: float) -> None:
        super().__init__(SamplingParams(temperature=1.0), 8)
        self.uniform = uniform

    def get_uniform(self, stream: int, position: int) -> float:
        return self.uniform if stream == ACCEPT else super().get_uniform(stream, position)


# Probabilities of the drafted token by target and draft.
RATIOS = ((0.25, 0.5), (0.3, 0.7), (0.05, 0.9), (0.59, 0.6), (0.004, 0.5))


@pytest.mark.parametrize("accept", [accept_batch, accept_at_once])
@pytest.mark.parametrize(("target", "draft"), RATIOS)
def test_a_draft_is_kept_up_to_the_ratio_of_probabilities(
    accept: object, target: float, draft: float
) -> None:
    """Kept for every number below p / q, and none above: a hair to each side decides."""
    assert callable(accept)
    token = 2
    p = torch.tensor([0.4 * (1 - target), 0.6 * (1 - target), target])
    q = torch.tensor([0.7 * (1 - draft), 0.3 * (1 - draft), draft])
    chain = [Candidates(pack_beams(0, np.array([[token]])), [q])]
    logits = p.log().expand(1, 2, 3)
    ratio = target / draft
    for hair, num_accepted in ((-1e-5, 1), (1e-5, 0)):
        ((path, bonus),) = accept(chain, logits, [FixedSampler(ratio * (1 + hair))], [0])
        assert len(path) - 1 == num_accepted
        assert num_accepted or bonus != token, "what is left has nothing of this token"
    # Numbers are drawn from [0, 1): at the ratio itself, which is exact here, a draft is rejected.
    assert 0.5 / 0.75 * 0.75 == 0.5
    even = [Candidates(pack_beams(0, np.array([[1]])), [torch.tensor([0.25, 0.75])])]
    for uniform, num_accepted in ((0.5 / 0.75, 0), (math.nextafter(0.5 / 0.75, 0), 1)):
        ((path, _),) = accept(even, torch.zeros(1, 2, 2), [FixedSampler(uniform)], [0])
        assert len(path) - 1 == num_accepted


def keep(logits: list[float], top_p: float) -> list[float]:
    params = SamplingParams(temperature=1.0, top_p=top_p)
    kept: list[float] = process_logits(torch.tensor([logits]), [params])[0].tolist()
    return kept


def test_top_p_at_equality_takes_no_token_more() -> None:
    """The smallest set whose probabilities sum to top_p or more: the first token alone is 0.5."""
    logits = [-math.log(2.0), -math.log(4.0), -math.log(4.0)]
    assert torch.tensor(logits).softmax(-1).tolist() == [0.5, 0.25, 0.25]
    assert keep(logits, 0.5) == [1.0, 0.0, 0.0]
    assert keep(logits[::-1], 0.5) == [0.0, 0.0, 1.0]
    above = float(np.nextafter(np.float32(0.5), np.float32(1)))
    assert sum(value > 0 for value in keep(logits, above)) == 2
    assert sum(value > 0 for value in keep(logits, 0.75)) == 2
    assert keep([0.0] * 4, 0.5).count(0.5) == 2
