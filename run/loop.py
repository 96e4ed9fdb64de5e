"""The loop of speculative decoding: propose, one target forward over a tree, accept, commit.

Methods only propose; what is emitted is decided by `verify.accept` alone.
Legend: B active rows, T tree nodes, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.engine.decoder import MAX_CHUNK_TOKENS, Decoder, Step
from specdec.engine.kv_cache import KVCache
from specdec.engine.tree import Tree, build_tree_mask

from .methods.base import Proposer
from .requests import FinishReason, Request, RequestStats, Result
from .verify import accept


@dataclasses.dataclass
class Timing:
    """Seconds spent, by part."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0


@dataclasses.dataclass
class _Sequence:
    """A request that occupies a cache row."""

    request: Request
    row: int
    stats: RequestStats
    output_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None

    def emit(self, tokens: Iterable[int]) -> int:
        """Append tokens up to the first that ends the request; return how many were taken."""
        taken = 0
        for token in tokens:
            self.output_ids.append(token)
            taken += 1
            if token in self.request.end_ids:
                self.finish_reason = "eos"
                break
            if len(self.output_ids) == self.request.max_output_len:
                self.finish_reason = "length"
                break
        self.stats.num_output_tokens = len(self.output_ids)
        return taken


@torch.inference_mode()
def generate(
    decoder: Decoder,
    proposer: Proposer,
    requests: Sequence[Request],
    *,
    max_num_tokens: int,
    timing: Timing | None = None,
) -> list[Result]:
    """Decode one batch of requests greedily; results come in the order of `requests`.

    `max_num_tokens` bounds the tokens of one prompt pass; longer prompts go in chunks.
    """
    timing = timing if timing is not None else Timing()
    clock = time.perf_counter
    began = clock()
    step_tokens = proposer.max_draft_tokens + 1
    longest = max(len(r.input_ids) + r.max_output_len for r in requests)
    cache = decoder.make_cache(len(requests), longest + step_tokens)
    histogram_size = proposer.max_draft_depth + 1
    sequences = [
        _Sequence(request, row, RequestStats(accepted_histogram=[0] * histogram_size))
        for row, request in enumerate(requests)
    ]
    proposer.start([r.input_ids for r in requests])
    hidden = fill_cache(decoder, cache, requests, max_num_tokens)
    for sequence, token in zip(sequences, _choose(decoder, hidden), strict=True):
        sequence.emit([int(token)])
    proposer.observe(np.arange(len(requests)), hidden[:, None], [[0]] * len(requests))
    now = clock()
    timing.prefill += now - began

    while active := [s for s in sequences if s.finish_reason is None]:
        began = now
        rows = np.array([s.row for s in active])
        trees = proposer.propose(rows, [s.output_ids for s in active])
        drafted = clock()
        states = decoder.forward(pack_step(trees, rows, cache), cache)  # [B, T, D]
        choices = _choose(decoder, states)  # [B, T]
        verified = clock()
        paths = []
        for sequence, tree, row_choices in zip(active, trees, choices, strict=True):
            path, bonus = accept(tree, row_choices)
            drafted_tokens = tree.tokens[path[1:]].tolist()
            taken = sequence.emit([*drafted_tokens, bonus])
            sequence.stats.count_step(
                num_draft_tokens=tree.num_draft_tokens,
                depth=tree.depth,
                num_accepted=min(taken, len(drafted_tokens)),
            )
            cache.commit(sequence.row, path)
            paths.append(path)
        proposer.observe(rows, states, paths)
        now = clock()
        timing.draft += drafted - began
        timing.verify += verified - drafted
        timing.other += now - verified
    return [_finish(sequence) for sequence in sequences]


def _choose(decoder: Decoder, hidden: Tensor) -> np.ndarray:
    """The target's token after each position: [..., D] -> [...] on the host."""
    choices: np.ndarray = decoder.compute_logits(hidden).argmax(-1).cpu().numpy()
    return choices


def _finish(sequence: _Sequence) -> Result:
    assert sequence.finish_reason is not None
    return Result(
        request=sequence.request,
        output_ids=sequence.output_ids,
        finish_reason=sequence.finish_reason,
        stats=sequence.stats,
    )


def fill_cache(
    decoder: Decoder, cache: KVCache, requests: Sequence[Request], max_num_tokens: int
) -> Tensor:
    """Fill the cache with the prompts; return the hidden state of each one's last token [B, D].

    Rows are padded on the right to the longest in the chunk; padding is never committed.
    """
    lengths = np.array([len(r.input_ids) for r in requests])
    chunk = max(1, min(MAX_CHUNK_TOKENS, max_num_tokens // len(requests)))
    hidden: list[Tensor | None] = [None] * len(requests)
    for start in range(0, int(lengths.max()), chunk):
        rows = np.flatnonzero(lengths > start)
        counts = np.minimum(lengths[rows] - start, chunk)
        num_tokens = int(counts.max())
        tokens = np.zeros((len(rows), num_tokens), np.int64)
        for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
            tokens[at, :count] = requests[int(row)].input_ids[start : start + count]
        positions = np.tile(np.arange(start, start + num_tokens), (len(rows), 1))
        causal = np.tril(np.ones((num_tokens, num_tokens), np.bool_))
        mask = np.broadcast_to(causal, (len(rows), num_tokens, num_tokens))
        step = Step(rows=rows, tokens=tokens, positions=positions, tree_mask=mask)
        states = decoder.forward(step, cache)
        for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
            cache.commit(int(row), list(range(count)))
            if start + count == lengths[row]:
                hidden[row] = states[at, count - 1]
    return torch.stack([h for h in hidden if h is not None])


def pack_step(trees: Sequence[Tree], rows: np.ndarray, cache: KVCache) -> Step:
    """Pad trees to one size: [B, T] tokens and positions, [B, T, T] mask."""
    size = max(tree.num_nodes for tree in trees)
    tokens = np.zeros((len(trees), size), np.int64)
    positions = np.zeros((len(trees), size), np.int64)
    mask = np.zeros((len(trees), size, size), np.bool_)
    mask[:, np.arange(size), np.arange(size)] = True
    for at, (tree, row) in enumerate(zip(trees, rows, strict=True)):
        num_nodes = tree.num_nodes
        tokens[at, :num_nodes] = tree.tokens
        positions[at, :num_nodes] = cache.past_lens[row] + tree.depths
        mask[at, :num_nodes, :num_nodes] = build_tree_mask(tree)
    return Step(rows=rows, tokens=tokens, positions=positions, tree_mask=mask)
