"""Products with matrices in GGML's block types, and rows of them: as a GGUF file has them.

The kernels round the inputs of such products by the weights' own groups, of 32 or of 16 inputs, as
integers.py describes it. Without kernels weights are widened when they are loaded.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor

from specdec.engine.native import NativeKernels
from specdec.files.torch_tensors import to_array
from specdec.model.blocks import TYPES, dequantize, find_runs

BLOCK_ROWS = 1024  # widened at a time


@dataclasses.dataclass(frozen=True)
class BlockMatrix:
    """A matrix [N, depth] as its file has it, see specdec/model/blocks.py.

    rows: uint8 [N, bytes]; types: uint8 [N].
    """

    rows: Tensor
    types: Tensor

    input_scales = order = None

    @property
    def num_outputs(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def depth(self) -> int:
        """Number of weights in a row, by its widest type, whose rows have no zeros after them."""
        kinds = [TYPES[number] for number, _, _ in self.list_parts()]
        widest = max(kinds, key=lambda kind: kind.num_bytes / kind.size)
        return self.rows.shape[1] // widest.num_bytes * widest.size

    @property
    def shape(self) -> tuple[int, int]:
        """[N, depth]."""
        return self.num_outputs, self.depth

    def list_parts(self) -> list[tuple[int, int, int]]:
        """List runs of rows of one type: type, start, stop."""
        return find_runs(to_array(self.types))

    def measure(self, kernels: NativeKernels) -> int:
        """Return the bytes of the packed matrix."""
        return kernels.plan_blocks(self.list_parts(), self.depth)[1][-1]

    def pack(self, kernels: NativeKernels) -> Tensor:
        """Lay the matrix out for the kernels."""
        return kernels.pack_blocks(self.rows, self.list_parts(), self.depth)

    def widen(self, start: int, stop: int) -> Tensor:
        """Return rows of the weight, float32 [rows, depth]."""
        return self.look_up(torch.arange(start, stop))

    def widen_all(self, dtype: torch.dtype) -> Tensor:
        """Return the whole weight [N, depth], rounded to a type."""
        widened = torch.empty(self.num_outputs, self.depth, dtype=dtype)
        for start in range(0, len(widened), BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, len(widened))
            widened[start:stop] = self.widen(start, stop)
        return widened

    def look_up(self, indices: Tensor, kernels: NativeKernels | None = None) -> Tensor:
        """Return rows of the weight by their numbers, float32 [..., depth]."""
        if kernels is not None:
            return kernels.widen_blocks(self.rows, self.types, indices, self.depth)
        row_numbers = indices.flatten()
        rows, types = to_array(self.rows[row_numbers]), to_array(self.types[row_numbers])
        order = np.argsort(types, kind="stable")
        weights = np.empty((len(rows), self.depth), np.float32)
        weights[order] = dequantize(rows[order], types[order], self.depth)
        return torch.from_numpy(weights).view(*indices.shape, -1)

    def take_rows(self, start: int, height: int) -> BlockMatrix:
        """Return `height` rows from `start` on, those beyond the end zeros."""
        rows, types = (t[start : start + height] for t in (self.rows, self.types))
        num_padding_rows = height - len(rows)
        if not num_padding_rows:
            return BlockMatrix(rows, types)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, num_padding_rows))
        return BlockMatrix(padded, torch.cat([types, self.types[-1:].expand(num_padding_rows)]))
