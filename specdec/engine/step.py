"""One forward pass: which tokens, where, and what each of them sees.

Legend: B rows of the pass, T tokens of each, n tokens of a segment, D hidden.
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

    tokens, positions: [B, T]; tree_mask: [B, T, T], true where a token sees a token of this step;
    every token sees all committed positions of its row. Padding tokens see themselves. A mask of
    more columns, [B, T, N], begins with tokens of earlier steps that were not committed.
    earlier_positions: [B, N - T], the positions of those tokens; None where there are none.
    past: [B], positions that each row sees, where these are not what is committed: of a text that
    goes on in several rows of the step, each sees those before it.
    wanted: [B, T], the tokens whose last states are read; None is all. What a forward pass returns
    of others may be anything: the last layer need not go on with them.
    counts, kept: [B], the tokens of each row that are not padding, and how many of them, from the
    first, are certain to be committed; None is all, and none.
    """

    rows: IntArray
    tokens: IntArray
    positions: IntArray
    tree_mask: BoolArray
    past: IntArray | None = None
    wanted: BoolArray | None = None
    counts: IntArray | None = None
    kept: IntArray | None = None
    earlier_positions: IntArray | None = None

    @property
    def mask_positions(self) -> IntArray:
        """Positions of the tokens that the mask's columns stand for, [B, N]."""
        if self.earlier_positions is None:
            return self.positions
        return np.concatenate((self.earlier_positions, self.positions), axis=1)


@dataclasses.dataclass(frozen=True)
class States:
    """Hidden states of a forward pass.

    hidden: those of the last layer, normed, [B, T, D]. layers: outputs of the L observed layers,
    side by side, [B, T, L * D]; None where the decoder observes none.
    """

    hidden: Tensor
    layers: Tensor | None = None

    def split(self, num_rows: int) -> tuple[States, States]:
        """Return the states of the first num_rows rows, and those of all other rows."""
        hidden, layers = self.hidden, self.layers
        if layers is None:
            return States(hidden[:num_rows]), States(hidden[num_rows:])
        return (
            States(hidden[:num_rows], layers[:num_rows]),
            States(hidden[num_rows:], layers[num_rows:]),
        )

    def take(self, rows: Sequence[int]) -> States:
        """Return the states of some rows, in order."""
        if len(rows) == len(self.hidden):
            return self
        indices = to_device(rows, self.hidden.device)
        layers = None if self.layers is None else self.layers[indices]
        return States(self.hidden[indices], layers)


@dataclasses.dataclass(slots=True)
class Segment:
    """What a row of a step holds: a draft tree, or a piece of a prompt.

    row: of the cache. past: positions of it that the tokens see. tokens: [n]. offsets: [n], how far
    behind `past` each token stands. mask: [n, n], true where a token (row) sees another.
    wanted: [n], as in `Step`. num_kept: tokens, from the first, that are certain to be committed.
    """

    row: int
    past: int
    tokens: IntArray
    offsets: IntArray
    mask: BoolArray
    wanted: BoolArray
    num_kept: int = 0


def place_tree(tree: Tree, row: int, cache: KVCache) -> Segment:
    """A draft tree behind what is committed of a row."""
    mask = build_tree_mask(tree)
    wanted = mask[:, 0]  # every node sees the root
    return Segment(row, int(cache.past_lens[row]), tree.tokens, tree.depths, mask, wanted, 1)


def _pad(segment: Segment, size: int) -> Segment:
    """The same with padding, which sees itself."""
    n = len(segment.tokens)
    tokens, offsets = np.zeros((2, size), np.int64)
    wanted, mask = np.zeros(size, np.bool_), np.eye(size, dtype=np.bool_)
    tokens[:n], offsets[:n] = segment.tokens, segment.offsets
    wanted[:n], mask[:n, :n] = segment.wanted, segment.mask
    return Segment(segment.row, segment.past, tokens, offsets, mask, wanted)


def pack_segments(segments: Sequence[Segment], cache: KVCache, size: int = 0) -> Step:
    """Pad segments to one size, `size` or the longest's, and lay them side by side."""
    # Each kind of call of NumPy or torch is dear, as the kernels have emptied the caches.
    rows, pasts = [s.row for s in segments], [s.past for s in segments]
    counts, kept = [len(s.tokens) for s in segments], [s.num_kept for s in segments]
    size = size or max(counts)
    padded = [s if len(s.tokens) == size else _pad(s, size) for s in segments]
    is_plain = rows == sorted(set(rows)) and pasts == [cache.past_lens[row] for row in rows]
    past = np.array(pasts, np.int64)
    return Step(
        rows=np.array(rows, np.int64),
        tokens=np.array([s.tokens for s in padded]),
        positions=np.array([s.offsets for s in padded]) + past[:, None],
        tree_mask=np.array([s.mask for s in padded]),
        past=None if is_plain else past,
        wanted=np.array([s.wanted for s in padded]),
        counts=np.array(counts, np.int64),
        kept=np.array(kept, np.int64),
    )
