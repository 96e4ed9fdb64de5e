"""The layout of four-bit matrices against numbers worked out by hand, and its faults."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.errors import SpecDecError
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo
from specdec.model import int4
from tests.four_bits import read_weight


class Memory:
    """Arrays by name, as a file has them."""

    def __init__(self, **arrays: Array) -> None:
        self.arrays = {f"m.{kind}": array for kind, array in arrays.items()}
        self.tensors = {n: TensorInfo(str(a.dtype), a.shape) for n, a in self.arrays.items()}

    def read(self, name: str) -> Array:
        return self.arrays[name]

    def read_block(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Array:
        return self.arrays[name][start:stop]


def test_nibbles_are_signed_and_pairs_of_rows() -> None:
    # Rows 0 and 1: codes 8 (0) and 15 (+7); 0 (-8) and 7 (-1).
    packed = int4.pack(np.array([[8, 15], [0, 7]], np.uint8))
    assert packed.dtype == np.int8
    assert packed.view(np.uint8).tolist() == [[0x80, 0xF7]]
    assert int4.unpack(packed).tolist() == [[8, 15], [0, 7]]


def test_every_byte_survives() -> None:
    packed = np.arange(256, dtype=np.uint8).view(np.int8).reshape(4, 64)
    assert np.array_equal(int4.pack(int4.unpack(packed)), packed)


def test_matrix_reads_blocks_in_the_inputs_order() -> None:
    codes = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 0]], np.uint8)
    source = Memory(
        weight=int4.pack(codes),
        weights_scaling_factor=np.array([[1, 10], [2, 20], [3, 30], [4, 40]], np.float16),
        weights_zero_point=np.array([[0, 1], [2, 3], [4, 5], [6, 16]], np.uint8),
        input_permutation=np.array([2, 0, 3, 1], np.int32),
        prequant_scaling_factor=np.array([1, 2, 3, 4], np.float16),
    )
    matrix = int4.Int4Matrix(source, "m")
    assert (matrix.shape, matrix.group_size, matrix.has_zeros) == ((4, 4), 2, True)
    assert (
        int4.read_codes(matrix.source, f"{matrix.module}.weight", 1, 3).tolist()
        == codes[1:3].tolist()
    )
    # Row 1: stored ((5, 6) - 2) * 2, ((7, 8) - 3) * 20 are of inputs 2, 0, 3, 1.
    assert read_weight(matrix, 1, 2).tolist() == [[8, 100, 6, 80]]
    assert read_weight(matrix, 3, 4).tolist() == [[32, -640, 28, -40]]
    input_scale = matrix.read_input_scale()
    assert input_scale is not None
    assert input_scale.tolist() == [1, 2, 3, 4]
    assert int4.is_int4("m", source.tensors)
    assert int4.describe_int4("m", (4, 4), source.tensors) == source.tensors
    assert int4.find_damage(matrix) == []


def test_symmetric_zero_is_eight() -> None:
    source = Memory(
        weight=int4.pack(np.array([[8, 0], [15, 7]], np.uint8)),
        weights_scaling_factor=np.array([[0.5], [2]], np.float32),
    )
    matrix = int4.Int4Matrix(source, "m")
    assert read_weight(matrix, 0, 2).tolist() == [[0, -4], [14, -2]]
    assert matrix.read_zeros(0, 2) is None
    assert matrix.read_permutation() is None


def test_damage_is_named() -> None:
    source = Memory(
        weight=np.zeros((1, 2), np.int8),
        weights_scaling_factor=np.array([[np.nan], [1]], np.float32),
        weights_zero_point=np.array([[17], [0]], np.uint8),
        input_permutation=np.array([1, 1], np.int32),
        prequant_scaling_factor=np.array([np.inf, 1], np.float32),
    )
    damage = int4.find_damage(int4.Int4Matrix(source, "m"))
    assert [text.split()[0] for text in damage] == [
        "m.weights_scaling_factor", "m.weights_zero_point", "m.prequant_scaling_factor",
        "m.input_permutation",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "scales", "message"),
    [
        ((4, 6), TensorInfo("float16", (4, 4)), "columns a multiple"),
        ((3, 4), TensorInfo("float16", (3, 2)), "rows must be even"),
        ((4, 4), TensorInfo("int32", (4, 2)), "is int32"),
    ],
)
def test_impossible_scales_are_refused(
    shape: tuple[int, int], scales: TensorInfo, message: str
) -> None:
    with pytest.raises(SpecDecError, match=message):
        int4.describe_int4("m", shape, {"m.weights_scaling_factor": scales})
