"""Prompts into the cache: in chunks, side by side, reusing what a row already holds of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Step
from specdec.engine.transfers import to_device
from specdec.engine.tree import IntArray

# Committed positions whose keys and values take about as long as the products of a token.
ROW_POSITIONS = 2048


class StepRunner(Protocol):
    """What prompts are run by: the decoder, or what stands in its place."""

    @property
    def max_chunk_tokens(self) -> int: ...

    @property
    def max_joined_tokens(self) -> int | None: ...

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


@dataclasses.dataclass(frozen=True)
class Reading:
    """The next tokens of some prompts, as rows of one step.

    rows, starts, counts: of each prompt, its cache row, its tokens that are in there already, and
    those of the step. first: the step's row in which they begin; a prompt of more tokens than
    `size` goes on in the rows after it. ended: the prompts that end here, by their place.
    """

    rows: list[int]
    starts: list[int]
    counts: list[int]
    first: IntArray
    ended: IntArray
    step: Step

    @property
    def size(self) -> int:
        """Tokens of each row of the step, padding included."""
        return int(self.step.tokens.shape[1])

    def pick_last(self, states: Tensor) -> Tensor:
        """The states [E, D] of the last tokens of prompts that end, of the step's [B, T, D]."""
        return states.reshape(-1, states.shape[-1])[to_device(self.find_last(), states.device)]

    def find_last(self) -> IntArray:
        """Where the last tokens [E] of prompts that end are, among the step's, row after row."""
        last: IntArray = self.first * self.size + np.array(self.counts) - 1
        return last[self.ended]

    def gather(self, states: Tensor) -> Tensor:
        """Those of all tokens, of the step's [B, T, D], a row for each prompt."""
        if len(self.first) == len(states):
            return states
        places = np.minimum(np.arange(max(self.counts)), np.array(self.counts)[:, None] - 1)
        places += (self.first * self.size)[:, None]
        return states.reshape(-1, states.shape[-1])[to_device(places, states.device)]


class PromptReader:
    """Prompts on their way into a cache, a pass at a time.

    Where a decoder allows it, the tokens of all prompts share a pass, each prompt in as many rows
    of the step as it takes; else rows of like length do. Padding is never committed. Who is first:
    each prompt should be read by the time that as many tokens more as it has were, and the one that
    is due first goes first. So short ones overtake long ones, and nobody waits forever.
    follow: called after every pass; None for nobody. reads_all: whether it reads the states of all
    tokens, not of those alone with which prompts end.
    """

    def __init__(
        self,
        decoder: StepRunner,
        cache: KVCache,
        max_num_tokens: int,
        follow: Follow | None = None,
    ) -> None:
        self._decoder, self._cache, self.follow = decoder, cache, follow
        self.reads_all = follow is not None
        self._max_num_tokens = max_num_tokens
        self._prompts: dict[int, Sequence[int]] = {}  # by row, the one that is due first first
        self._due: dict[int, int] = {}
        self.num_read = 0  # tokens so far

    @property
    def is_busy(self) -> bool:
        return bool(self._prompts)

    @property
    def num_left(self) -> int:
        """Tokens that are still to be read."""
        past = self._cache.past_lens
        return sum(len(prompt) - int(past[row]) for row, prompt in self._prompts.items())

    @property
    def joins(self) -> bool:
        """Whether what is read may be part of a step with other rows."""
        return self._decoder.max_joined_tokens is not None

    def add(self, row: int, prompt: Sequence[int]) -> None:
        """Take a prompt, of which the row may hold a beginning, but not its last token."""
        self._decoder.start_row(self._cache, row, len(prompt))
        left = len(prompt) - int(self._cache.past_lens[row])
        assert left > 0
        self._prompts[row], self._due[row] = prompt, self.num_read + left
        if len(self._prompts) > 1:
            order = sorted(self._prompts, key=self._due.__getitem__)
            self._prompts = {row: self._prompts[row] for row in order}

    def drop(self, row: int) -> None:
        """Forget a row's prompt; what the row holds of it stays."""
        del self._prompts[row], self._due[row]

    def run_pass(self, budget: int | None = None) -> dict[int, Tensor]:
        """Run one pass; return the hidden state [D] of each prompt that has come to its end.

        budget: most tokens of the pass; None is as many as one should have.
        """
        reading = self.plan(budget)
        states = self._decoder.forward(reading.step, self._cache)
        ended = [reading.rows[at] for at in reading.ended]
        found = dict(zip(ended, reading.pick_last(states), strict=True))
        self.finish(reading, states)
        return found

    def plan(self, budget: int | None = None, *, beside: int = 0, least: int = 1) -> Reading:
        """What to read next.

        beside: rows of `least` tokens or fewer that the step will have besides.
        """
        past = self._cache.past_lens
        left = {row: len(prompt) - int(past[row]) for row, prompt in self._prompts.items()}
        joined = self._decoder.max_joined_tokens
        if joined is None:
            counts = self._choose_alike(left, budget)
            size = max(counts.values())
        else:
            counts = _share_out(left, min(budget or joined, self._max_num_tokens))
            size = self._choose_size(counts, beside, least)
        rows = sorted(counts)
        starts, sizes = past[rows].tolist(), [counts[row] for row in rows]
        first = np.cumsum([0, *(-(-count // size) for count in sizes)])
        reading = Reading(
            rows=rows, starts=starts, counts=sizes, first=first[:-1],
            ended=np.flatnonzero([left[row] == counts[row] for row in rows]),
            step=self._pack(rows, starts, sizes, size),
        )  # fmt: skip
        if self.reads_all:
            return reading
        wanted = np.zeros(reading.step.tokens.shape, np.bool_)
        wanted.flat[reading.find_last()] = True
        return dataclasses.replace(reading, step=dataclasses.replace(reading.step, wanted=wanted))

    def finish(self, reading: Reading, states: Tensor) -> None:
        """Commit what a step has read, of which these are the states [B, T, D]."""
        for row, count in zip(reading.rows, reading.counts, strict=True):
            self._cache.commit(row, list(range(count)))
        self.num_read += sum(reading.counts)
        if self.follow is not None:
            if isinstance(self._decoder, Decoder) and self._decoder.observed is not None:
                self._decoder.observed = reading.gather(self._decoder.observed)
            self.follow(reading.rows, reading.starts, reading.counts, reading.gather(states))
        for at in reading.ended:
            self.drop(reading.rows[at])

    def _choose_alike(self, left: dict[int, int], budget: int | None) -> dict[int, int]:
        """Tokens to read of each row, in a pass in which a prompt has one row."""
        if budget is None:
            longest, chunk = max(left.values()), self._max_num_tokens // len(left)
        else:
            budget = min(budget, self._max_num_tokens)
            longest, chunk = next(iter(left.values())), budget
        size = min(max(1, chunk), self._decoder.max_chunk_tokens, longest)
        # Padding at most doubles what a row costs, and stays inside of the cache.
        past = self._cache.past_lens
        rows = [
            row
            for row, count in left.items()
            if min(count, size) * 2 >= size and past[row] + size <= self._cache.num_positions
        ]
        if budget is not None:
            rows = rows[: max(1, budget // size)]
        return {row: min(left[row], size) for row in rows}

    def _choose_size(self, counts: dict[int, int], beside: int, least: int) -> int:
        """Tokens of a row, for the fewest of padding and the fewest rows.

        Every row goes through all keys before it, which takes about as long as the products of one
        token do for some thousand of them.
        """
        longest = min(max(counts.values()), self._decoder.max_chunk_tokens)
        if longest <= least or (longest == 1 and not beside):
            return least
        past = self._cache.past_lens[list(counts)][:, None]
        tokens = np.array(list(counts.values()))[:, None]
        sizes = np.arange(least, max(least, longest) + 1)
        parts = -(-tokens // sizes)
        price = (parts * (sizes + (past + tokens) / ROW_POSITIONS)).sum(0) + beside * sizes
        # One token a row always fits.
        fits = (past + parts * sizes <= self._cache.num_positions).all(0)
        return int(sizes[np.where(fits, price, np.inf).argmin()])

    def _pack(
        self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], size: int
    ) -> Step:
        lines, places, tokens = [], [], []
        for row, start, count in zip(rows, starts, counts, strict=True):
            prompt = self._prompts[row]
            for at in range(start, start + count, size):
                own = list(prompt[at : min(at + size, start + count)])
                lines.append(row)
                places.append(at)
                tokens.append(own + [0] * (size - len(own)))
        past, causal = np.array(places, np.int64), np.tril(np.ones((size, size), np.bool_))
        return Step(
            rows=np.array(lines, np.int64),
            tokens=np.array(tokens, np.int64),
            positions=past[:, None] + np.arange(size),
            tree_mask=np.broadcast_to(causal, (len(lines), size, size)),
            past=None if len(lines) == len(rows) else past,
        )


def _share_out(left: dict[int, int], budget: int) -> dict[int, int]:
    """Tokens to read of each row, of so many in all."""
    counts = {}
    for row, count in left.items():
        if budget <= 0:
            break
        counts[row] = min(count, budget)
        budget -= count
    return counts


def count_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that two sequences have in common from the start."""
    size = min(len(first), len(second))
    equal = np.asarray(first[:size]) == np.asarray(second[:size])
    return size if equal.all() else int(equal.argmin())
