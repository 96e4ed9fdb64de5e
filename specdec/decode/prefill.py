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
    to run.
    """
    reader = PromptReader(decoder, cache, max_num_tokens, follow)
    for row, prompt in zip(rows, prompts, strict=True):
        reader.add(row, prompt)
    hidden: dict[int, Tensor] = {}
    while reader.is_busy:
        hidden |= reader.run_pass()
    return torch.stack([hidden[row] for row in rows])


class PromptReader:
    """Prompts on their way into a cache, a pass at a time.

    Rows of like length share a pass, padded on the right; padding is never committed.
    follow: called after every pass.
    """

    def __init__(
        self,
        decoder: StepRunner,
        cache: KVCache,
        max_num_tokens: int,
        follow: Follow | None = None,
    ) -> None:
        self._decoder, self._cache, self._follow = decoder, cache, follow
        self._max_num_tokens = max_num_tokens
        self._prompts: dict[int, Sequence[int]] = {}  # by row, in the order they came

    @property
    def is_busy(self) -> bool:
        return bool(self._prompts)

    def add(self, row: int, prompt: Sequence[int]) -> None:
        """Take a prompt, of which the row may hold a beginning, but not its last token."""
        self._decoder.start_row(self._cache, row, len(prompt))
        assert self._cache.past_lens[row] < len(prompt)
        self._prompts[row] = prompt

    def drop(self, row: int) -> None:
        """Forget a row's prompt; what the row holds of it stays."""
        del self._prompts[row]

    def run_pass(self, budget: int | None = None) -> dict[int, Tensor]:
        """Run one pass; return the hidden state [D] of each prompt that has come to its end.

        budget: most tokens of the pass, for those that came first; None is max_num_tokens, for as
        many as can share it.
        """
        past = self._cache.past_lens
        left = {row: len(prompt) - int(past[row]) for row, prompt in self._prompts.items()}
        if budget is None:
            longest, chunk = max(left.values()), self._max_num_tokens // len(left)
        else:
            budget = min(budget, self._max_num_tokens)
            longest, chunk = next(iter(left.values())), budget
        size = min(max(1, chunk), self._decoder.max_chunk_tokens, longest)
        # Padding at most doubles what a row costs, and stays inside of the cache.
        rows = [
            row
            for row, count in left.items()
            if min(count, size) * 2 >= size and past[row] + size <= self._cache.num_positions
        ]
        if budget is not None:
            rows = rows[: max(1, budget // size)]
        rows.sort()  # a step's rows are
        counts = [min(left[row], size) for row in rows]
        starts = past[rows].tolist()
        prompts = [self._prompts[row] for row in rows]
        states = _run_pass(self._decoder, self._cache, rows, prompts, counts)
        if self._follow is not None:
            self._follow(rows, starts, counts, states)
        ended = {}
        for line, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if left[row] == count:
                ended[row] = states[line, count - 1]
                del self._prompts[row]
        return ended


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
