"""Prompts into the cache: in chunks, side by side, reusing what a row already holds of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Step


class StepRunner(Protocol):
    """What prompts are run by: the decoder, or what stands in its place."""

    @property
    def max_chunk_tokens(self) -> int: ...

    def start_row(self, cache: KVCache, row: int, prompt_len: int) -> None: ...

    def forward(self, step: Step, cache: KVCache) -> Tensor: ...


# Takes what a pass was about: rows, the first token of each, their number, states [B, T, D].
Follow = Callable[[Sequence[int], Sequence[int], Sequence[int], Tensor], None]


def fill_cache(
    decoder: StepRunner,
    cache: KVCache,
    rows: Sequence[int],
    prompts: Sequence[Sequence[int]],
    max_num_tokens: int,
    follow: Follow | None = None,
) -> Tensor:
    """Run the part of each prompt that its row does not hold yet.

    Returns the hidden states [B, D] of the prompts' last tokens, so at least that one must be left
    to run. Rows of like length share a pass, padded on the right; padding is never committed.
    follow: called after every pass.
    """
    for row, prompt in zip(rows, prompts, strict=True):
        decoder.start_row(cache, row, len(prompt))
    chunk = max(1, min(decoder.max_chunk_tokens, max_num_tokens // len(rows)))
    left = [
        len(prompt) - int(cache.past_lens[row]) for row, prompt in zip(rows, prompts, strict=True)
    ]
    assert min(left) > 0
    hidden: list[Tensor | None] = [None] * len(rows)
    while any(left):
        size = min(chunk, max(left))
        # Padding at most doubles what a row costs, and stays inside of the cache.
        sharing = [
            at
            for at, row in enumerate(rows)
            if min(left[at], size) * 2 >= size
            and cache.past_lens[row] + size <= cache.num_positions
        ]
        sharing.sort(key=lambda at: rows[at])  # a step's rows are sorted
        counts = [min(left[at], size) for at in sharing]
        chosen = [rows[at] for at in sharing]
        starts = cache.past_lens[chosen].tolist()
        states = _run_pass(decoder, cache, chosen, [prompts[at] for at in sharing], counts)
        if follow is not None:
            follow(chosen, starts, counts, states)
        for line, (at, count) in enumerate(zip(sharing, counts, strict=True)):
            left[at] -= count
            if left[at] == 0:
                hidden[at] = states[line, count - 1]
    return torch.stack([h for h in hidden if h is not None])


def _run_pass(
    decoder: StepRunner,
    cache: KVCache,
    rows: Sequence[int],
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
) -> Tensor:
    """Run and commit the next `counts` tokens of each prompt; return hidden states [B, T, D]."""
    size = max(counts)
    starts = cache.past_lens[list(rows)]
    tokens = np.zeros((len(rows), size), np.int64)
    for line, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        tokens[line, :count] = prompt[starts[line] : starts[line] + count]
    causal = np.tril(np.ones((size, size), np.bool_))
    step = Step(
        rows=np.array(rows, np.int64),
        tokens=tokens,
        positions=starts[:, None] + np.arange(size),
        tree_mask=np.broadcast_to(causal, (len(rows), size, size)),
    )
    states = decoder.forward(step, cache)
    for row, count in zip(rows, counts, strict=True):
        cache.commit(row, list(range(count)))
    return states


def count_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that two sequences have in common from the start."""
    size = min(len(first), len(second))
    equal = np.asarray(first[:size]) == np.asarray(second[:size])
    return size if equal.all() else int(equal.argmin())
