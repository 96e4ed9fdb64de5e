"""The key/value cache: one static block; draft entries are written after the committed ones.

Legend: R cache rows (requests), N K/V heads, S positions, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.engine.transfers import to_device
from specdec.engine.tree import IntArray

# Cache positions are visited in whole blocks of this many, so that few shapes occur.
POSITION_BLOCK = 64


class BlockLender(Protocol):
    """Who has memory for a cache: that must stay in its place, or that is read fastest."""

    def lend_blocks(
        self, cache: KVCache, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """Zeros for a cache of this shape as long as it lives; None where none can be lent."""


class KVCache:
    """Keys and values of every layer, [layers, 2, R, N, S, H], and each row's committed length.

    A step writes its T tokens at positions past_lens[r] ... past_lens[r] + T - 1 of row r; they
    count only once `commit` has moved the accepted ones together.
    """

    def __init__(
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
    ) -> None:
        shape = (num_layers, 2, num_rows, num_heads, num_positions, head_size)
        lent = lender.lend_blocks(self, shape, dtype) if lender is not None else None
        # Zeros, not empty: masked positions are multiplied by a zero weight, and 0 * NaN is NaN.
        self.blocks = torch.zeros(shape, dtype=dtype, device=device) if lent is None else lent
        self.num_positions = num_positions
        self.past_lens: IntArray = np.zeros(num_rows, np.int64)
        # Where each row's request begins in the decoder's rotary tables.
        self.rotary_starts: IntArray = np.zeros(num_rows, np.int64)

    def commit(self, row: int, path: list[int]) -> None:
        """Keep the entries of tree nodes `path` (root first) of the last step; drop the others."""
        start = int(self.past_lens[row])
        if path != list(range(len(path))):
            self.move(row, row, np.array(path, np.int64) + start, start)
        self.past_lens[row] += len(path)

    def copy_prefix(self, source: int, row: int, length: int) -> None:
        """Let `row` start over with the first `length` committed positions of row `source`."""
        assert length <= self.past_lens[source]
        if source != row and length:
            self.move(source, row, np.arange(length), 0)
        self.past_lens[row] = length
        self.rotary_starts[row] = self.rotary_starts[source]

    def move(self, source: int, row: int, positions: IntArray, start: int) -> None:
        """Copy the entries at `positions` of row `source` to `start` and after in `row`."""
        chosen = to_device(positions, self.blocks.device)
        entries = self.blocks[:, :, source].index_select(3, chosen)  # [layers, 2, N, len, H]
        self.blocks[:, :, row, :, start : start + len(positions)] = entries
