"""A matrix and how its rows are rounded; a rank's part of it; the scales that are measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from specdec.files.casts import cast
from specdec.files.reading import Array
from specdec.files.tensor_file import DTYPES, TensorInfo
from specdec.model.quantization import WEIGHT_SCALE_2
from specdec.model.sharding import Block

from ..plan import OUTPUT_BLOCK_BYTES, ComputedTensors, OutputBlock, PlannedTensor, SourceSlice
from .float8 import Requantizer
from .formats import Rounding

SCALE_INFO = TensorInfo("float32", (1,))


class Scales(ComputedTensors):
    """The scales of a checkpoint, known only after they were measured; a source of tensors."""

    def __init__(self, path: Path) -> None:
        self.path, self._values = path, dict[str, Array]()
        self.tensors: dict[str, TensorInfo] = {}
        self.compute = lambda name, start, stop, _: self._values[name][start:stop]

    def add(
        self,
        name: str,
        value: np.float32 | None = None,
        *,
        info: TensorInfo = SCALE_INFO,
        columns: tuple[int, int] | None = None,
    ) -> PlannedTensor:
        """Plan a scale, or some of them, of which the values may be told later."""
        self.tensors[name] = info
        if value is not None:
            self.set(name, value)
        block = Block(*(columns or (0, info.shape[0])))
        own_info = TensorInfo(info.dtype, (block.num_rows,))
        return PlannedTensor(own_info, (SourceSlice(self, name, block),))

    def set(self, name: str, value: np.float32 | Array) -> None:
        """Tell a scale's value, or several as they are stored."""
        self._values[name] = np.atleast_1d(value)

    def get(self, name: str) -> np.float32:
        """Return a scale that was measured."""
        return np.float32(self._values[name][0])

    def release(self) -> None:
        """Do nothing: scales are small."""


class RoundedMatrix:
    """A whole matrix [out, in], and how its rows are rounded.

    tensor: where its rows are. input_scale: float32 [in], what the inputs are multiplied with and
    the weights divided by; kept_shares: see `Rounding`. Both are found by a search, where there is
    one.
    """

    def __init__(
        self, module: str, tensor: PlannedTensor, rounding: Rounding, scales: Scales
    ) -> None:
        self.module, self.tensor, self.rounding, self.scales = module, tensor, rounding, scales
        self.input_scale: Array | None = None
        self.kept_shares: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        num_rows, num_inputs = self.tensor.info.shape
        return num_rows, num_inputs

    def list_rows(self, num_bytes: int = OUTPUT_BLOCK_BYTES) -> Iterator[tuple[int, int]]:
        """Yield ranges of an even number of rows that take about so many bytes as float32."""
        height = max(1, num_bytes // (8 * self.shape[1])) * 2
        for start in range(0, self.shape[0], height):
            yield start, min(start + height, self.shape[0])

    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) as float32 [rows, in]."""
        row_blocks, offset = [], 0
        for source_slice in self.tensor.slices:
            height = source_slice.block.num_rows
            first_row, last_row = max(start - offset, 0), min(stop - offset, height)
            if first_row < last_row:
                rows = Block(
                    source_slice.block.start + first_row, source_slice.block.start + last_row
                )
                row_blocks.append(source_slice.read(rows, self.tensor.info.dtype))
            offset += height
        return cast(np.concatenate(row_blocks), self.tensor.info.dtype, "float32")

    def round(self, start: int, stop: int) -> tuple[Array, Array]:
        """Return the codes and scales of rows, not packed."""
        values = self.read(start, stop)
        if self.input_scale is not None:
            values /= self.input_scale
        kept_shares = None if self.kept_shares is None else self.kept_shares[start:stop]
        return self.rounding.round(values, self._get_whole(), kept_shares)

    def restore(self, start: int, stop: int) -> Array:
        """Return what rows [start, stop) are after rounding, for unscaled inputs: float32."""
        restored = self.rounding.restore(*self.round(start, stop), self._get_whole())
        return restored if self.input_scale is None else restored * self.input_scale

    def _get_whole(self) -> np.float32:
        name = f"{self.module}.{WEIGHT_SCALE_2}"
        return self.scales.get(name) if name in self.scales.tensors else np.float32(1)


@dataclasses.dataclass(frozen=True)
class RowTensor(PlannedTensor):
    """One rank's part of a matrix's codes or of the scales of its rows or groups.

    slices: what is read of the sources; blocks: the part, of the whole matrix. Rows are rounded
    whole, so that their scales do not depend on the split.
    """

    matrix: RoundedMatrix
    blocks: tuple[Block, ...]
    is_weight: bool

    def list_output_blocks(self) -> Iterator[OutputBlock]:
        num_rows = sum(block.num_rows for block in self.blocks)
        for block in self.blocks:
            for start, stop in self.matrix.list_rows():
                first_row, last_row = max(start, block.start), min(stop, block.stop)
                if first_row < last_row:
                    num_bytes = self.info.num_bytes * (last_row - first_row) // num_rows
                    yield OutputBlock(
                        num_bytes, functools.partial(self._make, first_row, last_row, block.columns)
                    )

    def _make(self, start: int, stop: int, columns: tuple[int, int] | None) -> Array:
        codes, scales = self.matrix.round(start, stop)
        first_column, last_column = columns or (0, codes.shape[1])
        if self.is_weight:
            return self.matrix.rounding.pack(codes[:, first_column:last_column])
        if scales.ndim == 2:
            group_size = codes.shape[1] // scales.shape[1]
            scales = scales[:, first_column // group_size : last_column // group_size]
        return scales


@dataclasses.dataclass(frozen=True)
class Float8Tensor(PlannedTensor):
    """A tensor that is rounded to float8 as its chunks go by.

    dtype: of its numbers before that. find_scale: returns what they are divided by, which may be
    known only when they are read. factors: by source tensor, what they are multiplied with first;
    where that is the scale, they stay as they are.
    """

    dtype: str
    find_scale: Callable[[], np.float32]
    factors: Mapping[str, np.float32] = dataclasses.field(default_factory=dict)

    def list_output_blocks(self) -> Iterator[OutputBlock]:
        scale, itemsize = self.find_scale(), np.dtype(DTYPES[self.dtype][1]).itemsize
        for source_slice in self.slices:
            shape = (source_slice.block.num_rows, *self.info.shape[1:])
            alone = PlannedTensor(TensorInfo(self.dtype, shape), (source_slice,))
            factor = self.factors.get(source_slice.name)
            if factor == scale:
                yield from alone.list_output_blocks()
                continue
            requantize = Requantizer(self.dtype, scale, factor)
            for chunk in alone.list_output_blocks():
                yield OutputBlock(chunk.num_bytes // itemsize, requantize.follow(chunk.make))
