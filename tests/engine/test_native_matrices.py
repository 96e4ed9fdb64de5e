"""Packed matrices: their order by numpy, their sizes by hand, their rows and equality."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.engine.native import NativeKernels
from specdec.engine.native_border import ALIGNMENT, TILE
from specdec.engine.native_matrices import COMPARED_ROWS, KernelMatrix, MatrixKernels, are_equal
from specdec.model.blocks import TYPES
from tests.blocks import make_rows
from tests.engine.kernels import needs_compiler

pytestmark = needs_compiler
SINGLE, HALF = torch.float32, torch.float16
Q8_0, Q4_K = 8, 12  # GGML's numbers of two types


@pytest.fixture
def kernels(library: Path) -> MatrixKernels:
    return NativeKernels(library, SINGLE)


def draw(*shape: int, dtype: torch.dtype = SINGLE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


def hold(kernels: MatrixKernels, weight: Tensor) -> KernelMatrix:
    return KernelMatrix(kernels.pack_matrix(weight), (weight.shape[0], weight.shape[1]), kernels)


def test_a_matrix_lies_by_tiles_of_outputs(kernels: MatrixKernels, library: Path) -> None:
    """A tile holds its own rows in some order, zeros after the last; a router's is of float32."""
    weight = draw(TILE + 3, 5)
    packed = kernels.pack_matrix(weight)
    assert packed.shape[:2] == (2, 5)
    assert torch.equal(packed[0].flatten().sort()[0], weight[:TILE].flatten().sort()[0])
    padding = torch.zeros((TILE - 3) * 5)
    last = torch.cat((weight[TILE:].flatten(), padding)).sort()[0]
    assert torch.equal(packed[1].flatten().sort()[0], last)
    half_kernels = NativeKernels(library, HALF)
    assert torch.equal(half_kernels.pack_router(weight), packed)
    assert half_kernels.pack_matrix(weight.half()).shape == (2, 3, TILE, 2), "inputs in pairs"


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_rows_by_their_numbers(library: Path, dtype: torch.dtype) -> None:
    kernels, weight = NativeKernels(library, dtype), draw(70, 9, dtype=dtype)
    matrix = hold(kernels, weight)
    numbers = torch.tensor([[69, 0, 31], [32, 33, 0]])
    assert torch.equal(matrix.look_up(numbers), weight[numbers])
    assert torch.equal(matrix.look_up(numbers.T), weight[numbers.T]), "numbers of any layout"
    assert torch.equal(matrix.unpack(), weight)
    assert torch.equal(matrix.unpack(68), weight[68:])
    for number in (70, -1):
        with pytest.raises(ValueError, match=f"row {number} of 70"):
            matrix.look_up(torch.tensor([5, number]))


def test_integers_are_measured_and_have_no_rows(kernels: MatrixKernels) -> None:
    """The bytes that are measured are those that are packed: codes, scales and a head beside."""
    codes = torch.randint(-127, 128, (64, 96), dtype=torch.int8)
    scales = torch.rand(64, 1) + 0.5
    packed = kernels.pack_integers(codes, scales, bits=8, group=32)
    assert len(packed) == kernels.measure_integers([64, 96, 8, 32, 1, 0, 0, 0])
    assert codes.numel() + 4 * len(scales) < len(packed) < 1.2 * codes.numel() + 1024
    with pytest.raises(ValueError, match="rows of a packed matrix of integers"):
        kernels.unpack_rows(packed, (64, 96), torch.tensor([0]))
    x = torch.eye(96)[:5] * 127  # rounded by 127: integers, which are exact
    product = kernels.multiply(x, packed, None, 64)
    torch.testing.assert_close(product, (codes.float() * scales).T[:5] * 127)


def test_blocks_of_two_types(kernels: MatrixKernels) -> None:
    """Runs of rows are planned one after another; each but the last is aligned and skippable."""
    runs = [(Q8_0, 0, 3), (Q4_K, 3, 40)]
    headers, offsets = kernels.plan_blocks(runs, 256)
    assert [header[:5].tolist() for header in headers] == [
        [40, 256, 0, Q8_0, 3], [40, 256, 0, Q4_K, 37],
    ]  # fmt: skip
    assert headers[0][5] == offsets[1], "where the second begins"
    assert headers[1][5] == 0, "nothing follows"
    assert [offset % ALIGNMENT for offset in offsets] == [0, 0, 0]
    num_bytes = [TYPES[kind].count_bytes(256) for kind in (Q8_0, Q4_K)]
    rows = np.zeros((40, max(num_bytes)), np.uint8)
    rows[:3, : num_bytes[0]] = make_rows(Q8_0, 3, 256)
    rows[3:, : num_bytes[1]] = make_rows(Q4_K, 37, 256)
    matrix = torch.from_numpy(rows)
    packed = kernels.pack_blocks(matrix, runs, 256)
    assert len(packed) == offsets[-1]
    types = torch.tensor([Q8_0] * 3 + [Q4_K] * 37, dtype=torch.uint8)
    numbers = torch.tensor([39, 2, 3, 0])
    weights = kernels.widen_blocks(matrix, types, numbers, 256)
    assert torch.equal(kernels.unpack_rows(packed, (40, 256), numbers), weights)
    scale = rows[2, :2].view(np.float16)[0].astype(np.float32)  # of the first 32 weights of Q8_0
    codes = rows[2, 2:34].view(np.int8)
    assert np.array_equal(weights[1, :32].numpy(), scale * codes)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"runs": [(99, 0, 3)]}, r"rows of type 99 up to 3 of \[3, 272\]"),
        ({"depth": 250}, "rows of type 8 up to 3"),
        ({"runs": [(Q8_0, 0, 4)]}, "rows of type 8 up to 4"),
        ({"depth": 288}, "rows of 272 bytes for 288 weights of 8"),
    ],
)
def test_blocks_that_are_refused(
    kernels: MatrixKernels, changes: dict[str, object], fact: str
) -> None:
    values = {"rows": torch.from_numpy(make_rows(Q8_0, 3, 256)), "runs": [(Q8_0, 0, 3)]}
    with pytest.raises(ValueError, match=fact):
        kernels.pack_blocks(**{**values, "depth": 256, **changes})  # type: ignore[arg-type]


def test_the_best_outputs(kernels: MatrixKernels) -> None:
    """Log-probabilities of x W^T + bias by hand: exp of 3, 2, 1 and 0."""
    packed = kernels.pack_matrix(torch.tensor([[1.0, 0.0], [3.0, 1.0], [0.0, 0.0], [2.0, 5.0]]))
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0])
    tokens, scores = kernels.rank_outputs(torch.tensor([[1.0, 0.0]]), packed, bias, 4, 3)
    assert tokens.tolist() == [[1, 3, 0]]
    total = np.log(np.exp([3, 2, 1, 0]).sum())
    np.testing.assert_allclose(scores[0].numpy(), np.array([3, 2, 1]) - total, rtol=1e-6)
    bias[2] = 2.5
    tokens, _ = kernels.rank_outputs(torch.tensor([[1.0, 0.0]]), packed, bias, 4, 2)
    assert tokens.tolist() == [[1, 2]]


def test_matrices_are_equal_packed_or_not(kernels: MatrixKernels) -> None:
    """The last of many rows counts; so do the type and the shape."""
    weight = draw(COMPARED_ROWS + 2, 3)
    other = weight.clone()
    other[-1, -1] += 1
    packed, packed_other = hold(kernels, weight), hold(kernels, other)
    for first, second in ((weight, packed), (packed, weight), (packed, hold(kernels, weight))):
        assert are_equal(first, second)
    for first, second in ((other, packed), (packed, other), (packed, packed_other)):
        assert not are_equal(first, second)
    assert not packed.equals(weight[:-1])
    assert not are_equal(weight, weight.double())
    integers = KernelMatrix(torch.zeros(64, dtype=torch.uint8), (2, 3), kernels)
    assert not integers.equals(torch.zeros(2, 3)), "a matrix of integers is no tensor's equal"
    with pytest.raises(TypeError, match="experts are not compared"):
        are_equal(weight, (packed,))
