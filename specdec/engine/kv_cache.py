"""The key/value cache: one static block; draft entries are written after the committed ones.

Legend: R cache rows (requests), N K/V heads, S positions, H head size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.engine.linear_states import LinearStates
from specdec.engine.transfers import make_zeros, to_device
from specdec.engine.tree import IntArray

# Cache positions are visited in whole blocks of this many, so that few shapes occur.
POSITION_BLOCK = 64


class CachedTensor(NamedTuple):
    """Tensor of what is kept for the tokens of each row's text, and by which the text can go on.

    values: with an axis of rows and one of positions. lens: of each row, the tokens that have
    values. num_ahead: tokens after its own that a position's values depend on. is_needed: whether a
    text goes on only after tokens that have values.
    """

    name: str
    values: Tensor
    row_axis: int
    position_axis: int
    lens: IntArray
    num_ahead: int = 0
    is_needed: bool = True

    def view(self, row: int, start: int, end: int) -> Tensor:
        """Return a row's values of some positions, which are not copied."""
        axis = self.position_axis - (self.row_axis < self.position_axis)
        return self.values.select(self.row_axis, row).narrow(axis, start, end - start)


class BlockLender(Protocol):
    """Owner of memory for a cache: memory that stays in its place, or that is read fastest."""

    def lend_blocks(
        self, cache: KVCache, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """Lend zeros for a cache of this shape while it lives; None where none can be lent."""


class KVCache:
    """Keys and values of every layer, [2, R, N, S, H] each, and each row's committed length.

    They lie in one block, [layers, 2, R, N, S, H] where all layers have the same heads.

    A step writes its T tokens at positions past_lens[r] ... past_lens[r] + T - 1 of row r; they
    count only once `commit` has moved the accepted ones together. layers: those that have keys.
    states: of the others of a hybrid, None where there are none. heads: of each layer their number
    and size, where these differ.
    """

    def __init__(  # noqa: PLR0913 - the sizes of a cache
        self,
        *,
        num_layers: int,
        num_rows: int,
        num_heads: int,
        num_positions: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        lender: BlockLender | None = None,
        states: LinearStates | None = None,
        heads: Sequence[tuple[int, int]] = (),
    ) -> None:
        plane = 2 * num_rows * num_positions
        shape: tuple[int, ...] = (num_layers, 2, num_rows, num_heads, num_positions, head_size)
        if heads:
            shape = (sum(number * size for number, size in heads) * plane,)
        lent = lender.lend_blocks(self, shape, dtype) if lender is not None else None
        # Zeros, not empty: masked positions are multiplied by a zero weight, and 0 * NaN is NaN.
        self.blocks = make_zeros(shape, dtype, device) if lent is None else lent
        # Of each layer, or of all layers together where their heads are alike.
        self.layers: Sequence[Tensor] = list(self.blocks) if not heads else []
        self._groups: Sequence[Tensor] = (self.blocks,)
        if heads:
            widths = [number * size * plane for number, size in heads]
            parts = torch.split(self.blocks, widths)
            self.layers = [
                part.view(2, num_rows, number, num_positions, size)
                for part, (number, size) in zip(parts, heads, strict=True)
            ]
            self._groups = [layer[None] for layer in self.layers]
        self.num_positions, self.states = num_positions, states
        self.past_lens: IntArray = np.zeros(num_rows, np.int64)
        # Where each row's request begins in the decoder's rotary tables.
        self.rotary_starts: IntArray = np.zeros(num_rows, np.int64)

    def get_cached_tensor(
        self, name: str, num_ahead: int = 0, *, is_needed: bool = True
    ) -> CachedTensor:
        """Return the keys and values of each row's committed tokens."""
        return CachedTensor(name, self.blocks, 2, 4, self.past_lens, num_ahead, is_needed)

    def commit(self, row: int, path: list[int]) -> None:
        """Keep the entries of tree nodes `path` (root first) of the last step; drop the others."""
        start = int(self.past_lens[row])
        if len(path) > 1 and path != list(range(len(path))):
            assert self.states is None, "a hybrid's drafts are chains"
            self.move(row, row, np.array(path, np.int64) + start, start)
        self.past_lens[row] += len(path)
        if self.states is not None:
            self.states.reach(row, start + len(path))

    def find_prefix(self, row: int, length: int) -> int:
        """Find the longest prefix of a row, up to `length`, after which a text can go on."""
        past = int(self.past_lens[row])
        length = min(length, past)
        return length if self.states is None else self.states.find_length(row, length, past)

    def request_prefixes(self, row: int, lengths: Collection[int]) -> bool:
        """Return whether `find_prefix` will find prefixes of these lengths in a row in use.

        A hybrid's states are copied after each of these lengths from now on.
        """
        return self.states is None or self.states.request_snapshots(row, lengths)

    def fill(self, length: int) -> None:
        """Take so many positions of every row as committed, whatever they hold."""
        self.past_lens[:] = length
        if self.states is not None:
            self.states.lens[:] = length

    def copy_prefix(self, source: int, row: int, length: int) -> None:
        """Let `row` start over with the first `length` committed positions of row `source`.

        It has those that `find_prefix` finds.
        """
        assert length <= self.past_lens[source]
        length = self.find_prefix(source, length)
        if self.states is not None:
            self.states.copy(source, row, length)
        if source != row and length:
            self.move(source, row, np.arange(length), 0)
        self.past_lens[row] = length
        self.rotary_starts[row] = self.rotary_starts[source]

    def move(self, source: int, row: int, positions: IntArray, start: int) -> None:
        """Copy the entries at `positions` of row `source` to `start` and after in `row`."""
        if source == row and self.blocks.device.type == "cpu":
            self._move_singly(row, positions, start)
            return
        position_index = to_device(positions, self.blocks.device)
        for blocks in self._groups:
            entries = blocks[:, :, source].index_select(3, position_index)
            blocks[:, :, row, :, start : start + len(positions)] = entries  # [layers, 2, N, len, H]

    def _move_singly(self, row: int, positions: IntArray, start: int) -> None:
        """Move entries of a row to earlier positions, one by one. positions: rising.

        Few are moved after a step. For them torch would wake its threads, which takes longer.
        """
        for blocks in self._groups:
            entries = blocks[:, :, row]
            for new_position, position in enumerate(positions.tolist(), start):
                if position != new_position:
                    entries[:, :, :, new_position].copy_(entries[:, :, :, position])
