"""Matrices in the order that the native kernels read: packed, measured and multiplied."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.engine.native_border import (
    ALIGNMENT,
    TILE,
    check,
    check_packed,
    get_packed_shape,
    get_pointer,
    read_head,
)
from specdec.engine.native_library import KernelLibrary
from specdec.model.blocks import TYPES
from specdec.model.int4 import ENGINE_GROUPS

COMPARED_ROWS = 1024  # of a packed matrix, unpacked at a time


class MatrixKernels(KernelLibrary):
    """Kernels that pack matrices and multiply with packed ones."""

    def pack_matrix(self, weight: Tensor) -> Tensor:
        """Lay out a matrix [N, depth] by tiles of outputs, see kernels/gemm.h.

        float32: [ceil(N / TILE), depth, TILE]; half precision: [ceil(N / TILE), ceil(depth / 2),
        TILE, 2]. The order within is the kernels' own.
        """
        return self._pack("a matrix", weight, self.dtype, "pack_matrix")

    def pack_router(self, weight: Tensor) -> Tensor:
        """Lay out a float32 matrix [N, depth] with weights of any type, as `pack_matrix` does."""
        return self._pack("a router", weight, torch.float32, "pack_matrix_f32")

    def _pack(self, name: str, weight: Tensor, dtype: torch.dtype, kernel: str) -> Tensor:
        weight = weight.contiguous()
        num_outputs, depth = weight.shape
        check(name, weight, dtype, num_outputs, depth)
        packed = weight.new_empty(get_packed_shape(num_outputs, depth, dtype))
        if num_outputs % TILE:
            packed[-1].zero_()  # kernels of narrow vectors end before it does
        self._call_with_threads(kernel, weight.data_ptr(), num_outputs, depth, packed.data_ptr())
        return packed

    def measure_integers(self, sizes: Sequence[int]) -> int:
        """Return the bytes of a packed matrix of these sizes, see `Integers` in integers.h."""
        return int(self._call("measure_integers", np.array(sizes, np.int64).ctypes.data))

    def pack_integers(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        *,
        bits: int,
        group: int,
        input_scales: Tensor | None = None,
        order: Tensor | None = None,
    ) -> Tensor:
        """Lay out a matrix [N, depth] of integers, see `Integers` in kernels/integers.h.

        codes: int8 [N, depth], or of 4 bits [N / 2, depth] as specdec/model/int4.py packs them.
        scales: float32, zeros: uint8 (8 if None), of each group of `group` inputs [N, groups], or
        one a row [N, 1]. input_scales: float32 [depth], by which inputs are multiplied; order:
        int32 [depth], which of the inputs each column is for. Returns uint8 [n].
        """
        codes, scales = codes.contiguous(), scales.contiguous()
        rows, depth = codes.shape
        num_outputs = rows * 8 // bits
        num_groups = -(-depth // group)
        by_row = scales.shape == (num_outputs, 1)
        check("codes", codes, torch.int8, rows, depth)
        check("scales", scales, torch.float32, num_outputs, 1 if by_row else num_groups)
        check("zeros", zeros, torch.uint8, *scales.shape)
        check("input scales", input_scales, torch.float32, depth)
        check("an order", order, torch.int32, depth)
        if group not in ENGINE_GROUPS or (bits, zeros is not None) == (8, True):
            raise ValueError(f"{bits} bits in groups of {group}, zeros {zeros is not None}")
        if order is not None and not 0 <= int(order.min()) <= int(order.max()) < depth:
            raise ValueError(f"an order of {depth} inputs has others")
        has_options = [t is not None for t in (zeros, input_scales, order)]
        sizes = np.array([num_outputs, depth, bits, group, by_row, *has_options], np.int64)
        num_bytes = self.measure_integers(sizes.tolist())
        packed = codes.new_empty(num_bytes, dtype=torch.uint8)
        if any(has_options[1:]):
            packed.zero_()  # what is between lists
        self._call_with_threads(
            "pack_integers",
            codes.data_ptr(), scales.data_ptr(), get_pointer(zeros), get_pointer(input_scales),
            get_pointer(order), sizes.ctypes.data, packed.data_ptr(),
        )  # fmt: skip
        return packed

    def plan_blocks(
        self, runs: Sequence[tuple[int, int, int]], depth: int
    ) -> tuple[list[np.ndarray[Any, Any]], list[int]]:
        """Plan a packed matrix whose rows come in runs of one type.

        runs: of each run its type, its first row and the first row after it. Returns the header of
        each, see `BlockRows` in kernels/blocks.h, and the offsets where each begins, the end last.
        """
        headers, offsets = [], [0]
        for kind, start, stop in runs:
            header = np.array([runs[-1][2], depth, 0, kind, stop - start, 0, 0, 0], np.int64)
            num_bytes = self._call("measure_blocks", header.ctypes.data)
            header[5] = -(-num_bytes // ALIGNMENT) * ALIGNMENT
            offsets.append(offsets[-1] + int(header[5]))
            headers.append(header)
        headers[-1][5] = 0
        return headers, offsets

    def pack_blocks(self, rows: Tensor, runs: Sequence[tuple[int, int, int]], depth: int) -> Tensor:
        """Lay out a matrix [N, depth] in GGML's blocks, see kernels/blocks.h.

        rows: uint8 [N, bytes]; runs: as in `plan_blocks`. Returns uint8 [n].
        """
        check("rows of blocks", rows, torch.uint8, *rows.shape)
        for kind, _, stop in runs:
            block_type = TYPES.get(kind)
            if block_type is None or depth % block_type.size or stop > len(rows):
                raise ValueError(f"rows of type {kind} up to {stop} of {list(rows.shape)}")
            if block_type.count_bytes(depth) > rows.shape[1]:
                raise ValueError(f"rows of {rows.shape[1]} bytes for {depth} weights of {kind}")
        headers, offsets = self.plan_blocks(runs, depth)
        packed = rows.new_zeros(offsets[-1])
        for header, (_, start, _), offset in zip(headers, runs, offsets, strict=False):
            source = rows[start].data_ptr(), rows.shape[1], header.ctypes.data
            self._call_with_threads("pack_blocks", *source, packed.data_ptr() + offset)
        return packed

    def widen_blocks(self, rows: Tensor, types: Tensor, indices: Tensor, depth: int) -> Tensor:
        """Return rows of a matrix in GGML's blocks by their numbers: float32 [..., depth].

        rows: uint8 [N, bytes]; types: uint8 [N], of each row.
        """
        row_numbers = indices.contiguous()
        check("rows of blocks", rows, torch.uint8, *rows.shape)
        check("types of rows", types, torch.uint8, len(rows))
        check("numbers of rows", row_numbers, torch.int64, *indices.shape)
        widened = torch.empty(*indices.shape, depth)
        num_widened = self._call(
            "widen_blocks",
            rows.data_ptr(), *rows.shape, types.data_ptr(), row_numbers.data_ptr(),
            row_numbers.numel(), depth, widened.data_ptr(),
        )  # fmt: skip
        if num_widened < row_numbers.numel():
            row = int(row_numbers.flatten()[num_widened])
            raise ValueError(f"row {row} of {list(rows.shape)} is not there, or no blocks")
        return widened

    def unpack_rows(self, packed: Tensor, shape: tuple[int, int], indices: Tensor) -> Tensor:
        """Return rows of a matrix [N, depth] by their numbers: [..., depth], of the kernels' type.

        `packed` is of `pack_matrix` or `pack_blocks`.
        """
        row_numbers = indices.contiguous()
        num_rows, depth = shape
        check_packed("a packed matrix", packed, self.dtype, num_rows, depth)
        check("numbers of rows", row_numbers, torch.int64, *indices.shape)
        numbers = row_numbers.data_ptr(), row_numbers.numel()
        if packed.dtype is torch.uint8:
            if read_head(packed)[2]:
                raise ValueError("rows of a packed matrix of integers")
            rows = torch.empty(*indices.shape, depth)
            num_inside = self._call_with_threads(
                "unpack_block_rows", packed.data_ptr(), *numbers, rows.data_ptr()
            )
        else:
            rows = torch.empty(*indices.shape, depth, dtype=self.dtype)
            num_inside = self._call_with_threads(
                "unpack_rows", packed.data_ptr(), num_rows, depth, *numbers, rows.data_ptr()
            )
        if num_inside < row_numbers.numel():
            raise ValueError(f"row {int(row_numbers.flatten()[num_inside])} of {num_rows}")
        return rows.to(self.dtype)

    def multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
        """Return x W^T + bias: [..., depth] -> [..., num_outputs].

        `packed` is of `pack_matrix`, `pack_integers` or `pack_blocks`.

        A row's result is the same to the last bit whatever other rows there are.
        """
        x = x if x.is_contiguous() else x.contiguous()
        depth = x.shape[-1]
        self._check_product(x, packed, bias, num_outputs)
        y = x.new_empty((*x.shape[:-1], num_outputs))
        self._call_with_threads(
            "multiply_integers" if packed.dtype is torch.uint8 else "multiply",
            x.data_ptr(), x.numel() // depth, depth, packed.data_ptr(), get_pointer(bias),
            num_outputs, y.data_ptr(),
        )  # fmt: skip
        return y

    def rank_outputs(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int, width: int
    ) -> tuple[Tensor, Tensor]:
        """Rank the `width` most probable outputs of x W^T + bias, best first: x [..., depth].

        Returns their numbers and their log-probabilities, both [..., width].
        """
        x = x.contiguous()
        depth = x.shape[-1]
        self._check_product(x, packed, bias, num_outputs)
        if not 0 < width <= num_outputs:
            raise ValueError(f"the best {width} of {num_outputs} outputs")
        tokens = x.new_empty((*x.shape[:-1], width), dtype=torch.int64)
        scores = torch.empty_like(tokens, dtype=torch.float32)
        self._call_with_threads(
            "rank_outputs",
            x.data_ptr(), x.numel() // depth, depth, packed.data_ptr(), get_pointer(bias),
            num_outputs, width, tokens.data_ptr(), scores.data_ptr(), packed.dtype is torch.uint8,
        )  # fmt: skip
        return tokens, scores

    def _check_product(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int
    ) -> None:
        check("x", x, self.dtype, *x.shape)
        check_packed("a packed matrix", packed, self.dtype, num_outputs, x.shape[-1])
        check("a bias", bias, self.dtype, num_outputs)


@dataclasses.dataclass(frozen=True)
class KernelMatrix:
    """A matrix [N, depth] that an engine holds in the order of its kernels, and in no other form.

    numbers: of `pack_matrix`, `pack_integers` or `pack_blocks`.
    """

    numbers: Tensor
    shape: tuple[int, int]
    kernels: MatrixKernels

    def look_up(self, indices: Tensor) -> Tensor:
        """Return rows by their numbers, [..., depth]; not of a matrix of integers."""
        return self.kernels.unpack_rows(self.numbers, self.shape, indices)

    def unpack(self, start: int = 0) -> Tensor:
        """Return the rows from `start` on, [N - start, depth]."""
        return self.look_up(torch.arange(start, self.shape[0]))

    def equals(self, weight: Tensor) -> bool:
        """Return whether this is a matrix that is not packed, compared a few rows at a time."""
        if self.shape != weight.shape or self.numbers.dtype is torch.uint8:
            return False
        num_rows = self.shape[0]
        starts = range(0, num_rows, COMPARED_ROWS)
        ranges = (torch.arange(start, min(start + COMPARED_ROWS, num_rows)) for start in starts)
        return all(torch.equal(self.look_up(rows), weight[rows]) for rows in ranges)


# An engine's weights have under a tensor's name: the tensor, or the matrix as it is packed, or
# those of all experts.
Weight = Tensor | KernelMatrix | tuple[KernelMatrix, ...]


def are_equal(weight: Weight, other_weight: Weight) -> bool:
    """Return whether two matrices are equal, packed or not."""
    if isinstance(weight, tuple) or isinstance(other_weight, tuple):
        raise TypeError("experts are not compared")
    if isinstance(weight, Tensor):
        if isinstance(other_weight, Tensor):
            is_alike = weight.dtype is other_weight.dtype
            return is_alike and torch.equal(weight, other_weight)
        return other_weight.equals(weight)
    if isinstance(other_weight, Tensor):
        return weight.equals(other_weight)
    is_alike = weight.shape == other_weight.shape
    return is_alike and torch.equal(weight.numbers, other_weight.numbers)
