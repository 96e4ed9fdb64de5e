"""Prompts into the cache: in pieces, side by side, behind what a row already holds of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Segment, States, Step, pack_segments
from specdec.engine.transfers import to_device
from specdec.engine.tree import IntArray

# Committed positions whose keys and values take about as long as the products of a token.
ROW_POSITIONS = 2048


# Takes what a pass was about: rows, the first token of each, their number, states [B, T, D].
Follow = Callable[[Sequence[int], Sequence[int], Sequence[int], States], None]


def fill_cache(
    decoder: Decoder,
    cache: KVCache,
    rows: Sequence[int],
    prompts: Sequence[Sequence[int]],
    max_num_tokens: int,
    follow: Follow | None = None,
    forward: Callable[[Step, KVCache], Tensor] | None = None,
) -> Tensor:
    """Run the part of each prompt that its row does not hold yet.

    Returns the hidden states [B, D] of the prompts' last tokens, so at least that one must be left
    to run. follow: called after every pass. forward: what runs a pass; None is the decoder's.
    """
    forward = forward or decoder.forward
    reader = PromptReader(decoder, cache, max_num_tokens)
    for row, prompt in zip(rows, prompts, strict=True):
        reader.add(row, prompt)
    hidden: dict[int, Tensor] = {}
    while reader.is_busy:
        reading = reader.plan(reads_all=follow is not None)
        states = forward(pack_segments(reading.segments, cache, reading.size), cache)
        hidden |= dict(zip(reading.ended, reading.pick_last(states), strict=True))
        reader.commit(reading)
        if follow is not None:
            found = reading.gather(States(states, decoder.observed))
            follow(reading.rows, reading.starts, reading.counts, found)
    return torch.stack([hidden[row] for row in rows])


@dataclasses.dataclass(frozen=True)
class Reading:
    """The next tokens of some prompts.

    rows, starts, counts: of each prompt, its cache row, its tokens that are in there already, and
    those that are read now. ended: rows whose prompts end here. segments: of `size` tokens at most;
    a prompt of more goes on in the segments after its first.
    """

    rows: list[int]
    starts: list[int]
    counts: list[int]
    ended: list[int]
    segments: list[Segment]
    size: int

    @property
    def _first(self) -> IntArray:
        """Where each prompt begins among the tokens of a pass, segment after segment, [R]."""
        parts = [-(-count // self.size) for count in self.counts]
        return self.size * np.cumsum([0, *parts])[:-1]

    def pick_last(self, states: Tensor) -> Tensor:
        """The states [E, D] of the last tokens of prompts that end, of the pass's [B, T, D]."""
        ended_rows = set(self.ended)
        ended = [at for at, row in enumerate(self.rows) if row in ended_rows]
        last = (self._first + np.array(self.counts) - 1)[ended]
        return states.reshape(-1, states.shape[-1])[to_device(last, states.device)]

    def gather(self, states: States) -> States:
        """Those of all tokens, of the pass's [B, T, D], a row for each prompt."""
        if len(self.rows) == len(self.segments):
            return states
        counts = np.array(self.counts)[:, None]
        places = self._first[:, None] + np.minimum(np.arange(counts.max()), counts - 1)
        at = to_device(places, states.last.device)
        last, layers = states.last, states.layers
        return States(
            last.reshape(-1, last.shape[-1])[at],
            None if layers is None else layers.reshape(-1, layers.shape[-1])[at],
        )


class PromptReader:
    """Prompts on their way into a cache, a pass at a time.

    Where a decoder allows it, the tokens of all prompts share a pass, each prompt in as many rows
    of the step as it takes; else rows of like length do. Padding is never committed. A prompt of n
    tokens is due when n more tokens have been read, and the prompt that is due first is read first.
    So short ones overtake long ones, and none waits forever.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, max_num_tokens: int) -> None:
        """max_num_tokens: of a pass."""
        self._decoder, self._cache, self._max_num_tokens = decoder, cache, max_num_tokens
        self._prompts: dict[int, Sequence[int]] = {}  # by row, the one that is due first first
        self._due: dict[int, int] = {}
        self.num_read = 0  # tokens so far

    @property
    def is_busy(self) -> bool:
        return bool(self._prompts)

    @property
    def num_left(self) -> int:
        """Tokens that are still to be read."""
        return sum(self._count_left().values())

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

    def plan(
        self,
        max_tokens: int | None = None,
        *,
        num_others: int = 0,
        longest: int = 0,
        min_size: int = 1,
        reads_all: bool = False,
    ) -> Reading:
        """What to read next.

        max_tokens: of the pass; None is as many as one should have. num_others: rows of `min_size`
        tokens or fewer that the pass will have as well, padded to its size behind `longest`
        committed positions at most. reads_all: whether the last states of all tokens are read,
        instead of only those with which prompts end.
        """
        left = self._count_left()
        joined = self._decoder.max_joined_tokens
        if joined is None:
            counts = self._pause(self._choose_alike(left, max_tokens))
            size = max(counts.values())
        else:
            counts = _share_out(left, min(max_tokens or joined, self._max_num_tokens))
            counts = self._pause(counts)
            size = self._choose_size(counts, num_others, longest, min_size)
        rows = sorted(counts)
        return Reading(
            rows=rows,
            starts=self._cache.past_lens[rows].tolist(),
            counts=[counts[row] for row in rows],
            ended=[row for row in rows if counts[row] == left[row]],
            segments=[
                segment
                for row in rows
                for segment in self._cut(row, counts[row], size, reads_all=reads_all)
            ],
            size=size,
        )

    def commit(self, reading: Reading) -> None:
        """Keep what a pass has read."""
        for row, count in zip(reading.rows, reading.counts, strict=True):
            self._cache.commit(row, list(range(count)))
        self.num_read += sum(reading.counts)
        for row in reading.ended:
            self.drop(row)

    def _count_left(self) -> dict[int, int]:
        """Tokens of each row that are still to be read, the one that is due first first."""
        past = self._cache.past_lens
        return {row: len(prompt) - int(past[row]) for row, prompt in self._prompts.items()}

    def _pause(self, counts: dict[int, int]) -> dict[int, int]:
        """Tokens to read of each row, no further than where its state is to be kept."""
        if (states := self._cache.states) is None:
            return counts
        past = self._cache.past_lens
        return {row: min(n, states.find_stop(row) - int(past[row])) for row, n in counts.items()}

    def _choose_alike(self, left: dict[int, int], max_tokens: int | None) -> dict[int, int]:
        """Tokens to read of each row, in a pass in which a prompt has one row."""
        most = self._max_num_tokens
        if max_tokens is None:
            longest, chunk = max(left.values()), most // len(left)
        else:
            most = min(max_tokens, most)
            longest, chunk = next(iter(left.values())), most
        size = min(max(1, chunk), self._decoder.max_chunk_tokens, longest)
        # Padding at most doubles what a row costs, and stays inside of the cache.
        past = self._cache.past_lens
        rows = [
            row
            for row, count in left.items()
            if min(count, size) * 2 >= size and past[row] + size <= self._cache.num_positions
        ]
        if max_tokens is not None:
            rows = rows[: max(1, most // size)]
        return {row: min(left[row], size) for row in rows}

    def _choose_size(
        self, counts: dict[int, int], num_others: int, furthest: int, min_size: int
    ) -> int:
        """Tokens of a row, for the fewest of padding and the fewest rows.

        Every row goes through all keys before it, which takes about as long as the products of one
        token do for some thousand of them.
        """
        longest = min(max(counts.values()), self._decoder.max_chunk_tokens)
        if longest <= min_size or (longest == 1 and not num_others):
            return min_size
        past = self._cache.past_lens[list(counts)][:, None]
        tokens = np.array(list(counts.values()))[:, None]
        sizes = np.arange(min_size, max(min_size, longest) + 1)
        parts = -(-tokens // sizes)
        price = (parts * (sizes + (past + tokens) / ROW_POSITIONS)).sum(0) + num_others * sizes
        # One token per row always fits.
        fits = (past + parts * sizes <= self._cache.num_positions).all(0)
        fits &= furthest + sizes <= self._cache.num_positions
        return int(sizes[np.where(fits, price, np.inf).argmin()])

    def _cut(self, row: int, count: int, size: int, *, reads_all: bool) -> list[Segment]:
        """The next tokens of a row's prompt, in pieces of `size`."""
        start, segments = int(self._cache.past_lens[row]), []
        end = start + count
        tokens = np.array(self._prompts[row][start:end], np.int64)
        for at in range(start, end, size):
            own = tokens[at - start : at - start + size]
            offsets = np.arange(len(own))
            causal = offsets[:, None] >= offsets
            is_end = at + len(own) == len(self._prompts[row])
            wanted = reads_all | ((offsets == len(own) - 1) & is_end)
            segments.append(Segment(row, at, own, offsets, causal, wanted, len(own)))
        return segments


def _share_out(left: dict[int, int], max_tokens: int) -> dict[int, int]:
    """Tokens to read of each row, of so many in all."""
    counts = {}
    for row, count in left.items():
        if max_tokens <= 0:
            break
        counts[row] = min(count, max_tokens)
        max_tokens -= count
    return counts


def count_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that two sequences have in common from the start."""
    size = min(len(first), len(second))
    equal = np.asarray(first[:size]) == np.asarray(second[:size])
    return size if equal.all() else int(equal.argmin())
