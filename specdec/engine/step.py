"""Tokens of one forward pass: their positions, and which tokens each of them sees.

Legend: B rows of the pass, T tokens of each, N tokens that a mask's columns stand for, n tokens of
a segment, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specdec.engine.kv_cache import KVCache
from specdec.engine.transfers import to_device
from specdec.engine.tree import BoolArray, IntArray, Tree, build_tree_mask


@dataclasses.dataclass(frozen=True)
class Step:
    """One forward pass: row b of the step is row rows[b] of the cache.

    tokens, positions: [B, T]. tree_mask: [B, T, N], true where a token sees another; every token
    sees all committed positions of its row, and padding tokens see themselves. N is T, and the
    columns are this step's tokens; where N is greater, the first N - T columns are of earlier
    steps' tokens that are in the cache and not committed. earlier_positions: [B, N - T], their
    positions; None where there are none. past: [B], number of cached positions visible to each
    row; defaults to the committed length. Where one text goes on from row to row of the step, each
    of its rows sees more positions than the one before.
    output_mask: [B, T], true for tokens whose last hidden states are read; None is all tokens. The
    last layer may leave the others out, and their hidden states may be anything.
    counts: [B], number of tokens of each row that are not padding; None is all of them.
    certain_counts: [B], number of tokens of each row, from the first, that are certain to be
    committed; None is none of them.
    """

    rows: IntArray
    tokens: IntArray
    positions: IntArray
    tree_mask: BoolArray
    past: IntArray | None = None
    output_mask: BoolArray | None = None
    counts: IntArray | None = None
    certain_counts: IntArray | None = None
    earlier_positions: IntArray | None = None

    @property
    def mask_positions(self) -> IntArray:
        """Positions of the tokens that the mask's columns stand for, [B, N]."""
        if self.earlier_positions is None:
            return self.positions
        return np.concatenate((self.earlier_positions, self.positions), axis=1)


@dataclasses.dataclass(frozen=True)
class States:
    """Hidden states of a forward pass: the last layer's, and the outputs of observed layers.

    hidden: [B, T, D], normed. layers: [B, T, L * D], the observed outputs side by side; None where
    the decoder observes none.
    """

    hidden: Tensor
    layers: Tensor | None = None

    def split(self, num_rows: int) -> tuple[States, States]:
        """Return the states of the first rows, and of the others."""
        return self._select(slice(num_rows)), self._select(slice(num_rows, None))

    def take(self, rows: Sequence[int]) -> States:
        """Return the states of some rows, in order."""
        if len(rows) == len(self.hidden):
            return self
        return self._select(to_device(rows, self.hidden.device))

    def _select(self, rows: slice | Tensor) -> States:
        return States(self.hidden[rows], None if self.layers is None else self.layers[rows])


@dataclasses.dataclass(slots=True)
class Segment:
    """The tokens of one row of a step: a draft tree, or consecutive tokens of a prompt.

    row: of the cache. past: number of its positions that the tokens see. tokens: [n]. offsets: [n],
    the distance of each token's position from `past`. mask: [n, n], true where a token (row) sees
    another. output_mask: [n], as in `Step`. num_certain: number of tokens, from the first, that are
    certain to be committed.
    """

    row: int
    past: int
    tokens: IntArray
    offsets: IntArray
    mask: BoolArray
    output_mask: BoolArray
    num_certain: int = 0


def place_tree(tree: Tree, row: int, cache: KVCache) -> Segment:
    """Return the segment of a draft tree after the committed tokens of a row."""
    mask = build_tree_mask(tree)
    output_mask = mask[:, 0]  # every node sees the root
    return Segment(row, int(cache.past_lens[row]), tree.tokens, tree.depths, mask, output_mask, 1)


def _pad(segment: Segment, size: int) -> Segment:
    """Return a segment of `size` tokens, which ends in padding that sees itself."""
    n = len(segment.tokens)
    if n == size:
        return segment
    tokens, offsets = np.zeros((2, size), np.int64)
    output_mask, mask = np.zeros(size, np.bool_), np.eye(size, dtype=np.bool_)
    tokens[:n], offsets[:n] = segment.tokens, segment.offsets
    output_mask[:n], mask[:n, :n] = segment.output_mask, segment.mask
    return Segment(segment.row, segment.past, tokens, offsets, mask, output_mask)


def pack_segments(segments: Sequence[Segment], cache: KVCache, size: int = 0) -> Step:
    """Pad segments to one size, `size` or the longest's, and lay them side by side."""
    # As few calls of NumPy and torch as can be: each is slow after kernels that use all caches.
    rows, pasts = [s.row for s in segments], [s.past for s in segments]
    counts = [len(s.tokens) for s in segments]
    size = size or max(counts)
    padded = [_pad(segment, size) for segment in segments]
    has_default_past = rows == sorted(set(rows)) and pasts == [cache.past_lens[row] for row in rows]
    past = np.array(pasts, np.int64)
    return Step(
        rows=np.array(rows, np.int64),
        tokens=_stack(padded, "tokens"),
        positions=_stack(padded, "offsets") + past[:, None],
        tree_mask=_stack(padded, "mask"),
        past=None if has_default_past else past,
        output_mask=_stack(padded, "output_mask"),
        counts=np.array(counts, np.int64),
        certain_counts=_stack(segments, "num_certain"),
    )


def _stack(segments: Sequence[Segment], field: str) -> np.ndarray:
    """Return a field of all segments as one array, a row for each."""
    return np.array([getattr(segment, field) for segment in segments])
