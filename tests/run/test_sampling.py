"""Sampled output follows the target's distribution, whatever is drafted and however batched.

A toy target and a toy draft model stand in: tables of logits by the last two tokens, so that the
exact probability of every text is known. The accept rule and the random numbers are the real ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.decode import accept as verify
from specdec.decode.accept import Candidates, accept_batch
from specdec.decode.drafters.base import ALL_LEVELS
from specdec.decode.drafters.levels import DynamicTree, Level
from specdec.decode.sampling import (
    CHOICE,
    DRAFT,
    Sampler,
    SamplingParams,
    draw,
    draw_residual,
    process_logits,
)  # fmt: skip
from specdec.engine.tree import Tree, TreeBuilder, make_root, pack_beams
from tests.conftest import make_llama
from tests.covering import cover
from tests.run.statistics import FALSE_ALARM_RATE, compute_p_value

VOCAB = 5
LENGTH = 3  # tokens of a text: 125 texts
NUM_TEXTS = 2000

SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7, top_k=4),
    SamplingParams(temperature=1.0, top_p=0.85),
    SamplingParams(temperature=0.8, top_k=4, top_p=0.9),
]


class Toy:
    """Logits [V] after a text, by its last two tokens; token 0 stands before the start."""

    def __init__(self, seed: int, spread: float = 1.2) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn((VOCAB, VOCAB, VOCAB), generator=generator) * spread
        self._probs: dict[Any, Tensor] = {}
        self._sums: dict[Any, np.ndarray] = {}

    def get_logits(self, text: Sequence[int]) -> Tensor:
        before = [0, 0, *text]
        return self.table[before[-2], before[-1]]

    def get_probs(self, text: Sequence[int], params: SamplingParams) -> Tensor:
        """What `params` leave, [V]; equal contexts are computed once."""
        key = (*[0, 0, *text][-2:], params.temperature, params.top_k, params.top_p)
        if key not in self._probs:
            self._probs[key] = process_logits(self.get_logits(text)[None], [params])[0]
        return self._probs[key]

    def get_sums(self, text: Sequence[int], params: SamplingParams) -> np.ndarray:
        """Cumulative sums of `get_probs`, by which a token is drawn."""
        key = (*[0, 0, *text][-2:], params.temperature, params.top_k, params.top_p)
        if key not in self._sums:
            self._sums[key] = self.get_probs(text, params).double().numpy().cumsum()
        return self._sums[key]


TARGET = Toy(1)
DRAFT_MODEL = Toy(2)
Drafter = Callable[[list[int], Sampler], Candidates]


def draft_nothing(text: list[int], sampler: Sampler) -> Candidates:
    return Candidates(make_root(text[-1] if text else 0))


def draft_beams(text: list[int], sampler: Sampler) -> Candidates:
    """Three beams of two tokens, the draft model's likeliest: as ReDrafter proposes."""
    return Candidates(pack_beams(text[-1] if text else 0, _search_beams(*[0, 0, *text][-2:])))


@functools.cache
def _search_beams(*context: int) -> np.ndarray:
    scores = {}
    for pair in itertools.product(range(VOCAB), repeat=2):
        first = DRAFT_MODEL.get_logits(context).log_softmax(-1)[pair[0]]
        second = DRAFT_MODEL.get_logits([*context, pair[0]]).log_softmax(-1)[pair[1]]
        scores[pair] = float(first + second)
    return np.array(sorted(scores, key=scores.__getitem__, reverse=True)[:3])


class ToyDraft:
    """The draft model after EAGLE's trees, for one row: what `methods.eagle.Draft` is to them."""

    def __init__(self, text: Sequence[int]) -> None:
        self.roots = np.array([text[-1] if text else 0])
        self.texts = [list(text[:-1])]  # of the newest level
        self.min_gain = ALL_LEVELS

    def rank(self, level: Level) -> tuple[np.ndarray, np.ndarray]:
        pairs = zip(level.parents[0].tolist(), level.tokens[0].tolist(), strict=True)
        self.texts = [[*self.texts[parent], token] for parent, token in pairs]
        logits = torch.stack([DRAFT_MODEL.get_logits(text) for text in self.texts])
        best = logits.log_softmax(-1).topk(level.width)
        return best.indices[None].numpy(), best.values[None].numpy()


def draft_sure(text: list[int], sampler: Sampler) -> Candidates:
    """A tree that grows where the draft model is sure, as EAGLE-2's."""
    return _grow(*text[-2:])


@functools.cache
def _grow(*text: int) -> Candidates:
    draft: Any = ToyDraft(text)
    return DynamicTree(top_k=3, depth=3, num_tokens=7).grow(draft)[0]


def draft_anything(text: list[int], sampler: Sampler) -> Candidates:
    """A tree of random tokens; the random numbers that decide about them may be among its own."""
    generator = np.random.default_rng([*text, sampler.params.seed % 1000])
    builder = TreeBuilder(text[-1] if text else 0)
    nodes = [0]
    for token in generator.integers(VOCAB, size=7).tolist():
        nodes.append(builder.add(nodes[generator.integers(len(nodes))], token))
    return Candidates(builder.build())


def draft_chain(stream: int, length: int) -> Drafter:
    """A chain drawn token by token, as draft-target proposes."""

    def draft(text: list[int], sampler: Sampler) -> Candidates:
        tokens: list[int] = []
        all_probs = []
        for _ in range(length):
            context = [*text, *tokens]
            if sampler.params.is_greedy:
                tokens.append(int(DRAFT_MODEL.get_logits(context).argmax()))
                continue
            uniform = sampler.get_uniform(stream, len(context))
            sums = DRAFT_MODEL.get_sums(context, sampler.params)
            tokens.append(int(np.searchsorted(sums, uniform * sums[-1], side="right")))
            all_probs.append(DRAFT_MODEL.get_probs(context, sampler.params))
        tree = pack_beams(text[-1] if text else 0, np.array([tokens]))
        return Candidates(tree, all_probs if stream == DRAFT and all_probs else None)

    return draft


# What real drafters propose is compared, as "beams", or drawn; test_requests.py runs them all.
METHODS: dict[str, Drafter] = {
    "plain": draft_nothing,
    "beams": draft_beams,
    "draft model, ratio": draft_chain(DRAFT, 2),
    "draft model, long chain, ratio": draft_chain(DRAFT, 4),
    "draft model, compared": draft_chain(CHOICE, 2),
    "dynamic tree": draft_sure,
    "random tree": draft_anything,
}
EXACT_BY_SEED = ["beams", "draft model, compared", "dynamic tree", "random tree"]


@functools.cache
def make_sampler(params: SamplingParams) -> Sampler:
    """Its numbers are by place, so tests of equal seeds can share it."""
    return Sampler(params, LENGTH + 8)


def write_texts(drafters: Sequence[Drafter], params: Sequence[SamplingParams]) -> list[list[int]]:
    """Write one text a row, all rows in one batch."""
    samplers = [make_sampler(p) for p in params]
    texts: list[list[int]] = [[] for _ in params]
    while rows := [row for row, text in enumerate(texts) if len(text) < LENGTH]:
        candidates = [drafters[row](texts[row], samplers[row]) for row in rows]
        size = max(c.tree.num_nodes for c in candidates)
        logits = torch.zeros((len(rows), size, VOCAB))
        for at, row in enumerate(rows):
            known = compute_tree_logits(candidates[at].tree, texts[row])
            logits[at, : len(known)] = known
        accepted = accept_batch(
            candidates, logits, [samplers[r] for r in rows], [len(texts[r]) for r in rows]
        )
        for at, (row, (path, bonus)) in enumerate(zip(rows, accepted, strict=True)):
            texts[row] += [*candidates[at].tree.tokens[path[1:]].tolist(), bonus]
    return [text[:LENGTH] for text in texts]


_TREE_LOGITS: dict[Any, Tensor] = {}


def compute_tree_logits(tree: Tree, text: list[int]) -> Tensor:
    """The target's logits [T, V] after each node; equal trees after equal tokens once."""
    key = (*text[-2:], tree.tokens.tobytes(), tree.parents.tobytes())
    if key not in _TREE_LOGITS:
        rows = [TARGET.get_logits(longer) for longer in list_texts(tree, text)]
        _TREE_LOGITS[key] = torch.stack(rows)
    return _TREE_LOGITS[key]


def list_texts(tree: Tree, text: list[int]) -> list[list[int]]:
    """The text that each node ends."""
    texts = [text]
    for node in range(1, tree.num_nodes):
        texts.append([*texts[tree.parents[node]], int(tree.tokens[node])])
    return texts


def compute_text_probs(params: SamplingParams) -> np.ndarray:
    """Exact probability of each of the VOCAB ** LENGTH texts."""
    probs = np.zeros((VOCAB,) * LENGTH)
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        probs[text] = np.prod(
            [float(TARGET.get_probs(text[:at], params)[token]) for at, token in enumerate(text)]
        )
    flat: np.ndarray = probs.reshape(-1) / probs.sum()
    return flat


def count_texts(texts: Sequence[Sequence[int]]) -> np.ndarray:
    counts = np.zeros((VOCAB,) * LENGTH, np.int64)
    for text in texts:
        counts[tuple(text)] += 1
    return counts.reshape(-1)


def with_seeds(params: SamplingParams, start: int, number: int) -> list[SamplingParams]:
    return [dataclasses.replace(params, seed=start + n) for n in range(number)]


def test_p_value() -> None:
    """The check itself: the right distribution passes, one a little off does not."""
    generator = np.random.Generator(np.random.PCG64(3))
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    counts = generator.multinomial(4000, probs)
    assert compute_p_value(counts, probs) > 0.01
    assert compute_p_value(counts, np.array([0.36, 0.34, 0.2, 0.1])) < FALSE_ALARM_RATE
    values = [compute_p_value(generator.multinomial(500, probs), probs) for _ in range(400)]
    assert 0.02 < np.mean(np.array(values) < 0.05) < 0.09, "p-values are uniform"


# Each method without limits, and with two kinds of limits.
WAYS = [
    (method, SETTINGS[number])
    for at, method in enumerate(METHODS)
    for number in (0, 1 + at % 4, 1 + (at + 2) % 4)
]


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "params"), WAYS)
def test_texts_follow_the_target(method: str, params: SamplingParams) -> None:
    texts = write_texts([METHODS[method]] * NUM_TEXTS, with_seeds(params, 10**6, NUM_TEXTS))
    p_value = compute_p_value(count_texts(texts), compute_text_probs(params))
    assert p_value > FALSE_ALARM_RATE


def test_rows_of_a_mixed_batch_follow_the_target() -> None:
    """Methods, temperatures and greedy rows side by side in every batch."""
    drafters, params = [], []
    kinds = [(m, n) for m in METHODS for n in range(0, len(SETTINGS), 2)]
    for row in range(len(kinds) * 125):  # fewer of a kind leave too few cells
        method, number = kinds[row % len(kinds)]
        drafters.append(METHODS[method])
        seed = 2 * 10**6 + row
        params.append(dataclasses.replace(SETTINGS[number], seed=seed))
    greedy = len(params)
    drafters += list(METHODS.values())
    params += [SamplingParams(seed=n) for n in range(len(METHODS))]
    texts = write_texts(drafters, params)
    for number in range(0, len(SETTINGS), 2):
        own = [t for row, t in enumerate(texts[:greedy]) if kinds[row % len(kinds)][1] == number]
        p_value = compute_p_value(count_texts(own), compute_text_probs(SETTINGS[number]))
        assert p_value > FALSE_ALARM_RATE / 3, number
    for at, (method, number) in enumerate(kinds):  # a wrong one of ten would be lost among them
        own = texts[at : greedy : len(kinds)]
        p_value = compute_p_value(count_texts(own), compute_text_probs(SETTINGS[number]))
        assert p_value > FALSE_ALARM_RATE / len(kinds), (method, number)
    best: list[int] = []
    for _ in range(LENGTH):
        best.append(int(TARGET.get_logits(best).argmax()))
    assert texts[greedy:] == [best] * len(METHODS)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "params"), [(method, params) for method, params in WAYS if method in EXACT_BY_SEED]
)
def test_equal_seeds_give_the_text_of_plain_sampling(method: str, params: SamplingParams) -> None:
    """Candidates that are only compared change nothing at all, not even the drawn text."""
    number = 300
    seeds = with_seeds(params, 77, number)
    plain = write_texts([draft_nothing] * number, seeds)
    assert write_texts([METHODS[method]] * number, seeds) == plain
    assert len({tuple(t) for t in plain}) > 10, "the seeds draw different texts"


def test_a_text_does_not_depend_on_its_batch() -> None:
    for method, drafter in METHODS.items():
        params = with_seeds(SETTINGS[0], 5, 40)
        together = write_texts([drafter] * 40, params)
        alone = [write_texts([drafter], [p])[0] for p in params]
        assert together == alone, method


# --- deliberate breaks: each is one that a known implementation has or had ---


def unnormalize(honest: Drafter) -> Drafter:
    """Draft probabilities as TensorRT-LLM's ReDrafter stored them: exp of max-shifted logits."""

    def draft(text: list[int], sampler: Sampler) -> Candidates:
        candidates = honest(text, sampler)
        assert candidates.draft_probs is not None
        return dataclasses.replace(
            candidates, draft_probs=[probs / probs.max() for probs in candidates.draft_probs]
        )

    return draft


def accept_longest_beam(
    candidates: Sequence[Candidates],
    logits: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
) -> list[tuple[list[int], int]]:
    """Try every beam with random numbers of its own and take the longest accepted one."""
    generator = np.random.Generator(np.random.PCG64(int(positions[0]) + 1))
    results = []
    for at, (candidate, sampler) in enumerate(zip(candidates, samplers, strict=True)):
        best: tuple[list[int], int] = ([], 0)
        for _ in range(3):
            choices = [
                draw(process_logits(logits[at, n][None], [sampler.params]), [generator.random()])[0]
                for n in range(candidate.tree.num_nodes)
            ]
            best = max(best, verify.accept(candidate.tree, choices), key=lambda r: len(r[0]))
        results.append(best)
    return results


def reject_wrongly(target: Tensor, draft: Tensor, uniform: float) -> int:
    """A rejected token replaced by any of the target's, not by what the draft model lacks."""
    token: int = draw(target[None], [uniform])[0]
    return token


@pytest.mark.parametrize("broken", ["unnormalized", "residual", "longest beam", "draft reused"])
def test_a_broken_rule_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = METHODS["draft model, ratio"]
    if broken == "unnormalized":
        drafter = unnormalize(drafter)
    elif broken == "residual":
        monkeypatch.setattr(verify, "draw_residual", reject_wrongly)
    elif broken == "longest beam":
        drafter = METHODS["beams"]
        monkeypatch.setitem(globals(), "accept_batch", accept_longest_beam)
    else:  # the random number of the draft decides again whether it is accepted
        monkeypatch.setattr(verify, "ACCEPT", DRAFT)
    number = NUM_TEXTS // 3 if broken == "longest beam" else NUM_TEXTS
    texts = write_texts([drafter] * number, with_seeds(SETTINGS[0], 10**6, number))
    p_value = compute_p_value(count_texts(texts), compute_text_probs(SETTINGS[0]))
    assert p_value < FALSE_ALARM_RATE


# --- the processed distribution ---


@pytest.mark.parametrize(
    ("vocab_size", "temperature", "top_k", "top_p"),
    cover(itertools.product(
        [7, 1000], [0.3, 1.0, 2.5], [0, 1, 5, 10**6], [1.0, 0.9, 0.5, 1e-6]
    )),
)  # fmt: skip
def test_processing_equals_transformers(
    vocab_size: int, temperature: float, top_k: int, top_p: float
) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn((4, vocab_size), generator=generator) * 3
    ids = torch.zeros((4, 1), dtype=torch.long)
    expected = TemperatureLogitsWarper(temperature)(ids, logits.clone())
    if top_k:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(ids, expected)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    probs = process_logits(logits, [params] * 4)
    assert torch.equal(probs > 0, expected > -torch.inf)
    torch.testing.assert_close(probs, expected.softmax(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(3, 1.0), (0, 0.5), (5, 0.7), (4, 0.999), (0, 1e-4), (6, 1e-4), (2, 0.4)]
)
def test_of_equal_tokens_the_lower_ids_are_kept(top_k: int, top_p: float) -> None:
    """By top-k as by top-p, and never another than the greedy one alone."""
    logits = torch.tensor(
        [[2.0, 1, 1, 1, 0, -3, 1], [1.0] * 7, [0.0, 3, 3, 0, 3, 3, 0], [5.0, 5, -1, -1, -1, -1, 5]]
    )
    params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p)
    probs = process_logits(logits, [params] * len(logits))
    for row, found in zip((logits / 0.8).tolist(), probs, strict=True):
        ids = sorted(range(7), key=lambda at: (-row[at], at))[: top_k or 7]
        masses = torch.tensor([row[at] for at in ids]).softmax(0).cumsum(0).tolist()
        count = next(n for n, mass in enumerate(masses, 1) if mass >= top_p - 1e-6)
        expected = torch.zeros(7)
        expected[ids[:count]] = torch.tensor([row[at] for at in ids[:count]]).softmax(0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_logits_that_a_temperature_makes_equal_are_no_tie() -> None:
    """Greedy decoding tells them apart, so what narrow sampling leaves is the same token."""
    low, high = torch.tensor(3.0), torch.nextafter(torch.tensor(3.0), torch.tensor(4.0))
    for temperature in np.linspace(1.1, 4, 30).tolist():
        logits = torch.stack((low, low, high, low))[None]
        for top_k in (0, 2):
            params = SamplingParams(temperature=temperature, top_k=top_k, top_p=1e-4)
            assert process_logits(logits, [params]).tolist() == [[0, 0, 1, 0]]


def test_processing_equals_what_generate_samples_from(tmp_path: Path) -> None:
    """The order of the steps is transformers' own, whatever its version."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_llama(tmp_path))
    ids = torch.tensor([[5, 9, 40]])
    torch.manual_seed(0)
    for temperature, top_k, top_p in ((0.7, 20, 0.8), (1.6, 0, 0.9), (1.3, 5, 1.0)):
        kept = []
        done = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=True,
            temperature=temperature, top_k=top_k, top_p=top_p, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True, output_logits=True,
        )  # fmt: skip
        params = [SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)]
        for raw, scores in zip(done.logits, done.scores, strict=True):
            probs = process_logits(raw, params)
            torch.testing.assert_close(probs, scores.softmax(-1), rtol=1e-5, atol=0)
            kept.append(int((probs > 0).sum()))
        assert 1 < max(kept) < 128, "something is cut off, and something is left"


@pytest.mark.parametrize("temperature", [1e-29, 1e-38, 1e-45, 5e-324])
def test_the_coldest_temperature_is_greedy(temperature: float) -> None:
    """Logits over it are beyond float32: not a number would be a token beyond the vocabulary."""
    logits = torch.randn((3, 50), generator=torch.Generator().manual_seed(2)) * 8
    logits[2, :2] = 40.0  # ties
    for params in (
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_k=4, top_p=0.9),
    ):
        probs = process_logits(logits, [params] * 3)
        best = logits.argmax(-1)
        assert probs[[0, 1], best[:2]].tolist() == [1.0, 1.0]
        assert probs[2, :2].tolist() == [0.5, 0.5]
        warm = dataclasses.replace(params, temperature=1.0)
        mixed = process_logits(logits[:2], [params, warm])
        torch.testing.assert_close(mixed[1], process_logits(logits[1][None], [warm])[0])


def test_the_hottest_temperature_is_even() -> None:
    """Infinity in float32 would make no number of a banned token's logit, minus infinity."""
    logits = torch.tensor([[4.0, -torch.inf, 900.0, 0.0]])
    params = [SamplingParams(temperature=1e300)]
    torch.testing.assert_close(
        process_logits(logits, params), torch.tensor([[1.0, 0.0, 1.0, 1.0]]) / 3
    )


def test_each_row_has_its_own_settings() -> None:
    logits = torch.randn((len(SETTINGS), 50), generator=torch.Generator().manual_seed(0))
    together = process_logits(logits, SETTINGS)
    for row, params in enumerate(SETTINGS):
        alone = process_logits(logits[row][None], [params])[0]
        torch.testing.assert_close(together[row], alone, rtol=0, atol=0)


def test_draw_takes_the_token_at_which_the_sum_passes() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25]])
    cases = [(0.0, 1), (0.2499, 1), (0.25, 3), (0.74, 3), (0.75, 4), (1 - 1e-12, 4)]
    for uniform, token in cases:
        assert draw(probs, [uniform]) == [token], uniform


def test_residual() -> None:
    target, other = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.5, 0.1, 0.4])
    assert {draw_residual(target, other, u) for u in (0.0, 0.5, 0.999)} == {1}
    drawn = {draw_residual(target, target, u) for u in (0.1, 0.6, 0.9)}
    assert drawn == {0, 1, 2}, "nothing in excess: the target itself"


def test_streams_are_independent_and_repeatable() -> None:
    first, again = (Sampler(SamplingParams(temperature=1, seed=9), 500) for _ in range(2))
    others = [
        Sampler(SamplingParams(temperature=1, seed=n), 500)
        for n in (8, 10, 9 + 2**16, 9 + 2**32, 9 + 2**63)
    ]
    numbers = np.array([[first.get_uniform(s, n) for n in range(500)] for s in range(3)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.abs(np.corrcoef(numbers) - np.eye(3)).max() < 0.15
    assert [again.get_uniform(0, n) for n in range(500)] == numbers[0].tolist()
    for other in others:
        assert [other.get_uniform(0, n) for n in range(500)] != numbers[0].tolist()
    longer = Sampler(SamplingParams(temperature=1, seed=9), 900)
    assert longer.get_uniform(2, 499) == numbers[2, 499], "the limit changes nothing"
