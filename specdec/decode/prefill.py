"""Prefill: prompts go into the cache in chunks, side by side, after their cached prefixes."""

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


# Observer of a prefill pass: cache rows, first token of each, number of tokens, states [B, T, D].
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
    """Run the tokens of each prompt that are not in its row of the cache yet.

    Returns the hidden states [B, D] of the prompts' last tokens, so at least that one must be left
    to run. follow: called after every pass. forward: runs a pass; None is `decoder.forward`.
    """
    forward = forward or decoder.forward
    reader = PromptReader(decoder, cache, max_num_tokens)
    for row, prompt in zip(rows, prompts, strict=True):
        reader.add(row, prompt)
    hidden: dict[int, Tensor] = {}
    while reader.is_busy:
        chunk = reader.plan(reads_all=follow is not None)
        pass_hidden = forward(pack_segments(chunk.segments, cache, chunk.size), cache)
        hidden |= dict(zip(chunk.ended_rows, chunk.pick_last(pass_hidden), strict=True))
        reader.commit(chunk)
        if follow is not None:
            prompt_states = chunk.gather(States(pass_hidden, decoder.observed_outputs))
            follow(chunk.rows, chunk.starts, chunk.counts, prompt_states)
    return torch.stack([hidden[row] for row in rows])


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """The prompt tokens of one forward pass.

    rows, starts, counts: for each prompt, its cache row, the number of its tokens that are cached
    already, and the number that the pass reads. ended_rows: rows whose prompts end in this chunk.
    segments: of at most `size` tokens; a longer prompt goes on in the segments after its first.
    """

    rows: list[int]
    starts: list[int]
    counts: list[int]
    ended_rows: list[int]
    segments: list[Segment]
    size: int

    @property
    def _offsets(self) -> IntArray:
        """Index of each prompt's first token among the pass's tokens, segment by segment, [R]."""
        num_segments = [-(-count // self.size) for count in self.counts]
        return self.size * np.cumsum([0, *num_segments])[:-1]

    def pick_last(self, hidden: Tensor) -> Tensor:
        """Return the hidden states [E, D] of the prompts' last tokens, of a pass's [B, T, D]."""
        ended_rows = set(self.ended_rows)
        ended_prompts = [index for index, row in enumerate(self.rows) if row in ended_rows]
        last_tokens = (self._offsets + np.array(self.counts) - 1)[ended_prompts]
        return hidden.reshape(-1, hidden.shape[-1])[to_device(last_tokens, hidden.device)]

    def gather(self, states: States) -> States:
        """Return the states of the chunk's tokens, a row for each prompt, of the pass's states."""
        if len(self.rows) == len(self.segments):
            return states
        counts = np.array(self.counts)[:, None]
        tokens = self._offsets[:, None] + np.minimum(np.arange(counts.max()), counts - 1)
        hidden, layers = states.hidden, states.layers
        indices = to_device(tokens, hidden.device)
        return States(
            hidden.reshape(-1, hidden.shape[-1])[indices],
            None if layers is None else layers.reshape(-1, layers.shape[-1])[indices],
        )


class PromptReader:
    """Prompts on their way into a cache, one prefill chunk at a time.

    Where a decoder allows it, the tokens of all prompts share a pass, each prompt in as many rows
    of the step as it takes; else rows of like length do. Padding is never committed. A prompt of n
    tokens is due when n more tokens have been read, and the prompt that is due first is read first.
    So short ones overtake long ones, and none waits forever.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, max_num_tokens: int) -> None:
        """Start without prompts; max_num_tokens: most tokens of a pass."""
        self._decoder, self._cache, self._max_num_tokens = decoder, cache, max_num_tokens
        self._prompts: dict[int, Sequence[int]] = {}  # by row, ordered by when they are due
        self._due: dict[int, int] = {}  # by row, the value of num_read at which its prompt is due
        self.num_read = 0  # tokens so far

    @property
    def is_busy(self) -> bool:
        return bool(self._prompts)

    @property
    def num_unread(self) -> int:
        """Tokens of all prompts that are still to be read."""
        return sum(self._count_unread().values())

    @property
    def joins(self) -> bool:
        """Return whether a prefill chunk may share its pass with the rows of running requests."""
        return self._decoder.max_joined_tokens is not None

    def add(self, row: int, prompt: Sequence[int]) -> None:
        """Take a prompt, of which the row may hold a beginning, but not its last token."""
        self._decoder.start_row(self._cache, row, len(prompt))
        num_unread = len(prompt) - int(self._cache.past_lens[row])
        assert num_unread > 0
        self._prompts[row], self._due[row] = prompt, self.num_read + num_unread
        if len(self._prompts) > 1:
            order = sorted(self._prompts, key=self._due.__getitem__)
            self._prompts = {row: self._prompts[row] for row in order}

    def drop(self, row: int) -> None:
        """Forget a row's prompt; its tokens that are cached stay."""
        del self._prompts[row], self._due[row]

    def plan(
        self,
        max_tokens: int | None = None,
        *,
        num_others: int = 0,
        max_past: int = 0,
        min_size: int = 1,
        reads_all: bool = False,
    ) -> PrefillChunk:
        """Choose the next chunk.

        max_tokens: of the pass; None is as many as one should have. num_others: rows of `min_size`
        tokens or fewer that the pass will have as well, padded to its size after `max_past`
        committed positions at most. reads_all: whether the hidden states of all tokens are read,
        instead of only those of the prompts' last tokens.
        """
        unread_counts = self._count_unread()
        max_joined = self._decoder.max_joined_tokens
        if max_joined is None:
            counts = self._pause(self._choose_alike(unread_counts, max_tokens))
            size = max(counts.values())
        else:
            counts = _share_out(unread_counts, min(max_tokens or max_joined, self._max_num_tokens))
            counts = self._pause(counts)
            size = self._choose_size(counts, num_others, max_past, min_size)
        rows = sorted(counts)
        return PrefillChunk(
            rows=rows,
            starts=self._cache.past_lens[rows].tolist(),
            counts=[counts[row] for row in rows],
            ended_rows=[row for row in rows if counts[row] == unread_counts[row]],
            segments=[
                segment
                for row in rows
                for segment in self._make_segments(row, counts[row], size, reads_all=reads_all)
            ],
            size=size,
        )

    def commit(self, chunk: PrefillChunk) -> None:
        """Commit the tokens of a chunk whose pass is done, and drop the prompts that end there."""
        for row, count in zip(chunk.rows, chunk.counts, strict=True):
            self._cache.commit(row, list(range(count)))
        self.num_read += sum(chunk.counts)
        for row in chunk.ended_rows:
            self.drop(row)

    def _count_unread(self) -> dict[int, int]:
        """Count the tokens of each row that are still to be read, ordered by when they are due."""
        past = self._cache.past_lens
        return {row: len(prompt) - int(past[row]) for row, prompt in self._prompts.items()}

    def _pause(self, counts: dict[int, int]) -> dict[int, int]:
        """Lower each row's number of tokens so that it ends where its state is to be kept."""
        if (states := self._cache.states) is None:
            return counts
        past = self._cache.past_lens
        return {row: min(n, states.find_stop(row) - int(past[row])) for row, n in counts.items()}

    def _choose_alike(
        self, unread_counts: dict[int, int], max_tokens: int | None
    ) -> dict[int, int]:
        """Choose the number of tokens of each row, in a pass in which a prompt has one row."""
        max_pass_tokens = self._max_num_tokens
        if max_tokens is None:
            max_unread, row_tokens = (
                max(unread_counts.values()),
                max_pass_tokens // len(unread_counts),
            )
        else:
            max_pass_tokens = min(max_tokens, max_pass_tokens)
            max_unread, row_tokens = next(iter(unread_counts.values())), max_pass_tokens
        size = min(max(1, row_tokens), self._decoder.max_chunk_tokens, max_unread)
        # Padding at most doubles what a row costs, and stays inside of the cache.
        past = self._cache.past_lens
        rows = [
            row
            for row, count in unread_counts.items()
            if min(count, size) * 2 >= size and past[row] + size <= self._cache.num_positions
        ]
        if max_tokens is not None:
            rows = rows[: max(1, max_pass_tokens // size)]
        return {row: min(unread_counts[row], size) for row in rows}

    def _choose_size(
        self, counts: dict[int, int], num_others: int, max_past: int, min_size: int
    ) -> int:
        """Choose the number of tokens of a segment, for little padding and few segments.

        Every segment's attention goes through all keys before it, which takes about as long for
        some thousand keys as the products of one token do.
        """
        max_size = min(max(counts.values()), self._decoder.max_chunk_tokens)
        if max_size <= min_size or (max_size == 1 and not num_others):
            return min_size
        past = self._cache.past_lens[list(counts)][:, None]
        tokens = np.array(list(counts.values()))[:, None]
        sizes = np.arange(min_size, max(min_size, max_size) + 1)
        num_segments = -(-tokens // sizes)
        prices = (num_segments * (sizes + (past + tokens) / ROW_POSITIONS)).sum(0)
        prices += num_others * sizes
        # One token per segment always fits.
        fits = (past + num_segments * sizes <= self._cache.num_positions).all(0)
        fits &= max_past + sizes <= self._cache.num_positions
        return int(sizes[np.where(fits, prices, np.inf).argmin()])

    def _make_segments(self, row: int, count: int, size: int, *, reads_all: bool) -> list[Segment]:
        """Cut the next `count` tokens of a row's prompt into segments of `size`."""
        start, segments = int(self._cache.past_lens[row]), []
        end = start + count
        tokens = np.array(self._prompts[row][start:end], np.int64)
        for past in range(start, end, size):
            segment_tokens = tokens[past - start : past - start + size]
            num_tokens = len(segment_tokens)
            offsets = np.arange(num_tokens)
            causal = offsets[:, None] >= offsets
            is_end = past + num_tokens == len(self._prompts[row])
            is_read = reads_all | ((offsets == num_tokens - 1) & is_end)
            segment = Segment(row, past, segment_tokens, offsets, causal, is_read, num_tokens)
            segments.append(segment)
        return segments


def _share_out(unread_counts: dict[int, int], max_tokens: int) -> dict[int, int]:
    """Share max_tokens out to the rows in order; return the tokens of each row that gets any."""
    counts = {}
    for row, count in unread_counts.items():
        if max_tokens <= 0:
            break
        counts[row] = min(count, max_tokens)
        max_tokens -= count
    return counts


def count_shared(tokens: Sequence[int], other_tokens: Sequence[int]) -> int:
    """Count the tokens that two sequences have in common from the start."""
    size = min(len(tokens), len(other_tokens))
    is_equal = np.asarray(tokens[:size]) == np.asarray(other_tokens[:size])
    return size if is_equal.all() else int(is_equal.argmin())
