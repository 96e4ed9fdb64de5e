"""Four-bit matrices as a checkpoint has them: names, shapes, order of nibbles, splitting, reading.

A matrix [out, in] is cut along `in` into groups of g columns, each with a scale of its own a row:

    weight[n, d] = (code[n, d] - zero[n, d // g]) * scale[n, d // g]        code: 0 to 15

Beside a module's bias there are, in every rank's file:

| name | type, shape | |
| --- | --- | --- |
| `weight` | int8 or uint8 [out / 2, in] | row r: rows 2r (low nibbles) and 2r + 1 (high) |
| `weights_scaling_factor` | a float type [out, in / g] | the scales, in the type they came in |
| `prequant_scaling_factor` | a float type [in] | AWQ: the input is multiplied with it first |
| `weights_zero_point` | uint8 [out, in / g] | the zeros, 0 to 16; without it all are 8 |
| `input_permutation` | int32 [in] | act-order: column i is of input permutation[i] |

A nibble is code - 8 in two's complement. The last three tensors are optional. Without the last two
this is ModelOpt's and TensorRT-LLM's W4A16_AWQ (W4A8_AWQ adds scales of its own); with one of them
the checkpoint is INT4_GROUPS, which only this project reads. `input_permutation` has every input
once; `prequant_scaling_factor` is in the inputs' own order.

Over ranks: a rank packs its rows by themselves, in pairs, so each rank has an even number of rows.
Where columns are divided, a rank has whole groups; of rows with one scale each, every rank has the
scales. A matrix with an `input_permutation` is never divided by columns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.casts import cast
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo
from specdec.model.quantization import INPUT_SCALE as INPUT_SCALE
from specdec.model.quantization import WEIGHT_SCALE

W4A16_AWQ = "W4A16_AWQ"
W4A8_AWQ = "W4A8_AWQ"
INT4_GROUPS = "INT4_GROUPS"
INT4_ALGORITHMS = (W4A16_AWQ, W4A8_AWQ, INT4_GROUPS)

ZERO_POINT = "weights_zero_point"
PERMUTATION = "input_permutation"
INT4_STORAGE = ("int8", "uint8")
SCALE_DTYPES = ("float16", "bfloat16", "float32")
SYMMETRIC_ZERO = 8
LARGEST_ZERO = 16
# Columns of a group that the embedded engine multiplies; also multiples of the largest, and a row.
ENGINE_GROUPS = (32, 64, 128)


class MatrixSource(Protocol):
    """Source of a matrix's tensors, such as a `TensorFile`."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Array: ...

    def read_block(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Array: ...


def pack(codes: Array) -> Array:
    """Pack codes uint8 [out, in], 0 to 15, as int8 [out / 2, in]."""
    signed = codes ^ np.uint8(8)  # code - 8, in the low four bits
    packed = signed[0::2] | signed[1::2] << np.uint8(4)
    return packed.view(np.int8)


def unpack(packed: Array) -> Array:
    """Return the codes uint8 [2 * rows, in] of packed int8 [rows, in]."""
    nibbles = packed.view(np.uint8) ^ np.uint8(0x88)
    codes = np.empty((2 * len(nibbles), *nibbles.shape[1:]), np.uint8)
    codes[0::2] = nibbles & np.uint8(15)
    codes[1::2] = nibbles >> np.uint8(4)
    return codes


def read_codes(source: MatrixSource, name: str, start: int, stop: int) -> Array:
    """Return the codes of rows [start, stop) of a packed matrix: uint8 [rows, in], 0 to 15."""
    first_pair, stop_pair = start // 2, -(-stop // 2)
    return unpack(source.read_block(name, first_pair, stop_pair))[
        start - 2 * first_pair : stop - 2 * first_pair
    ]


def dequantize(codes: Array, scales: Array, zeros: Array | None) -> Array:
    """Return float32 [rows, in] in the stored order of columns.

    codes: uint8 [rows, in]; scales: float32 [rows, groups]; zeros: uint8 [rows, groups] or None.
    """
    num_rows, num_groups = scales.shape
    grouped = codes.reshape(num_rows, num_groups, -1).astype(np.float32)
    grouped -= np.float32(SYMMETRIC_ZERO) if zeros is None else zeros[:, :, None]
    grouped *= scales[:, :, None]
    return grouped.reshape(codes.shape)


@dataclasses.dataclass(frozen=True)
class Int4Matrix:
    """One rank's part of a four-bit matrix, read in blocks of rows.

    source: holds `{module}.weight` and what belongs to it.
    """

    source: MatrixSource
    module: str

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        half, num_inputs = self.source.tensors[f"{self.module}.weight"].shape
        return 2 * half, num_inputs

    @property
    def num_groups(self) -> int:
        return self.source.tensors[f"{self.module}.{WEIGHT_SCALE}"].shape[1]

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.num_groups

    @property
    def has_zeros(self) -> bool:
        return self._has(ZERO_POINT)

    def read_scales(self, start: int, stop: int) -> Array:
        """Return the scales of rows [start, stop): float32 [rows, groups]."""
        name = f"{self.module}.{WEIGHT_SCALE}"
        scales = self.source.read_block(name, start, stop)
        return cast(scales, self.source.tensors[name].dtype, "float32")

    def read_zeros(self, start: int, stop: int) -> Array | None:
        """Return the zeros of rows [start, stop): uint8 [rows, groups]; None: every one is 8."""
        if not self.has_zeros:
            return None
        return self.source.read_block(f"{self.module}.{ZERO_POINT}", start, stop)

    def read_input_scale(self) -> Array | None:
        """Return what the input is multiplied with: float32 [in], in the inputs' own order."""
        name = f"{self.module}.{INPUT_SCALE}"
        if not self._has(INPUT_SCALE):
            return None
        scale = cast(self.source.read(name), self.source.tensors[name].dtype, "float32")
        return scale.reshape(-1)

    def read_permutation(self) -> Array | None:
        """Return the input of every stored column: int32 [in]; None: they are in order."""
        return self.source.read(f"{self.module}.{PERMUTATION}") if self._has(PERMUTATION) else None

    def _has(self, kind: str) -> bool:
        return f"{self.module}.{kind}" in self.source.tensors


def is_int4(module: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether a module's matrix is stored as four-bit numbers, with scales by group."""
    weight = tensors.get(f"{module}.weight")
    scales = tensors.get(f"{module}.{WEIGHT_SCALE}")
    return (
        weight is not None and weight.dtype in INT4_STORAGE
        and scales is not None and len(scales.shape) == 2 and scales.shape[0] == 2 * weight.shape[0]
    )  # fmt: skip


def describe_int4(
    module: str, shape: tuple[int, int], stored: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Return what a file must hold for a four-bit matrix of `shape` [out, in], by name.

    stored: what it does hold, which decides the number of groups, the types of scales, and which
    of the optional tensors there are. SpecDecError where those are impossible.
    """
    num_rows, num_inputs = shape
    scales = stored.get(f"{module}.{WEIGHT_SCALE}", TensorInfo("float32", (num_rows, 1)))
    num_groups = _count_groups(module, shape, scales)
    weight = stored.get(f"{module}.weight")
    dtype = weight.dtype if weight is not None and weight.dtype in INT4_STORAGE else "int8"
    expected = {
        "weight": TensorInfo(dtype, (num_rows // 2, num_inputs)),
        WEIGHT_SCALE: TensorInfo(scales.dtype, (num_rows, num_groups)),
    }
    input_scale = stored.get(f"{module}.{INPUT_SCALE}")
    if input_scale is not None:
        is_vector = math.prod(input_scale.shape) == num_inputs
        dtype = input_scale.dtype if input_scale.dtype in SCALE_DTYPES else "float32"
        expected[INPUT_SCALE] = TensorInfo(dtype, input_scale.shape if is_vector else (num_inputs,))
    if f"{module}.{ZERO_POINT}" in stored:
        expected[ZERO_POINT] = TensorInfo("uint8", (num_rows, num_groups))
    if f"{module}.{PERMUTATION}" in stored:
        expected[PERMUTATION] = TensorInfo("int32", (num_inputs,))
    return {f"{module}.{kind}": info for kind, info in expected.items()}


def _count_groups(module: str, shape: tuple[int, int], scales: TensorInfo) -> int:
    """Return the groups of a row by the scales of a matrix; SpecDecError for impossible ones."""
    num_rows, num_inputs = shape
    num_groups = scales.shape[1] if len(scales.shape) == 2 else 0
    if num_rows % 2 or num_groups < 1 or num_inputs % num_groups:
        raise SpecDecError(
            f"{module}: scales {list(scales.shape)} are not those of a four-bit matrix"
            f" {list(shape)}: the rows must be even in number, the columns a multiple of the"
            " groups",
            "convert the model again",
        )
    if scales.dtype not in SCALE_DTYPES:
        raise SpecDecError(
            f"{module}.{WEIGHT_SCALE} is {scales.dtype}, not one of {', '.join(SCALE_DTYPES)}",
            "convert the model again",
        )
    return num_groups


def find_damage(matrix: Int4Matrix) -> list[str]:
    """List what is wrong with a matrix's numbers other than its codes: scales, zeros, order."""
    (num_rows, num_inputs), module = matrix.shape, matrix.module
    scales, scale = matrix.read_scales(0, num_rows), matrix.read_input_scale()
    zeros, order = matrix.read_zeros(0, num_rows), matrix.read_permutation()
    largest_zero = 0 if zeros is None else int(zeros.max(initial=0))
    inputs = np.arange(num_inputs)
    rows = (
        (not np.isfinite(scales).all(), f"{WEIGHT_SCALE} has NaN or infinite numbers"),
        (largest_zero > LARGEST_ZERO, f"{ZERO_POINT} has {largest_zero}, above {LARGEST_ZERO}"),
        (scale is not None and not np.isfinite(scale).all(),
         f"{INPUT_SCALE} has NaN or infinite numbers"),
        (order is not None and not np.array_equal(np.sort(order), inputs),
         f"{PERMUTATION} does not have every input once"),
    )  # fmt: skip
    return [f"{module}.{fact}" for is_wrong, fact in rows if is_wrong]


def check_damage(matrix: Int4Matrix) -> None:
    """Raise SpecDecError for what `find_damage` lists."""
    if faults := find_damage(matrix):
        raise SpecDecError("; ".join(faults), "the file is damaged: make it again")
