"""Matrices in GGML's block types, compared with the gguf package's weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as dequantize_by_gguf

from specdec.engine.blocks import BlockMatrix
from specdec.engine.native import NativeKernels
from specdec.errors import SpecDecError
from specdec.model import blocks
from specdec.model.blocks import TYPES
from tests.blocks import make_rows
from tests.engine.kernels import in_every_form, needs_compiler
from tests.engines import round_inputs

NUMBERS = list(TYPES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_matrix(parts: dict[int, int], depth: int, seed: int = 0) -> BlockMatrix:
    """Rows of several types, below each other."""
    rows = [make_rows(kind, count, depth, seed + kind) for kind, count in parts.items()]
    types = np.repeat(np.array(list(parts), np.uint8), list(parts.values()))
    return BlockMatrix(
        torch.from_numpy(np.concatenate(blocks.widen_rows(rows))), torch.from_numpy(types)
    )


def compute_exactly(x: torch.Tensor, matrix: BlockMatrix) -> torch.Tensor:
    """Inputs rounded by the groups of each row's type, times the library's weights."""
    products = []
    for kind, start, stop in matrix.list_parts():
        rows = matrix.rows[start:stop, : TYPES[kind].count_bytes(matrix.depth)].numpy()
        weight = torch.from_numpy(dequantize_by_gguf(rows, GGMLQuantizationType(kind)))
        inputs = round_inputs(x, 16 if TYPES[kind].name in ("Q2_K", "Q3_K", "Q6_K") else 32)
        products.append(inputs.double() @ weight.double().T)
    return torch.cat(products, 1)


@pytest.mark.parametrize("kind", NUMBERS)
def test_weights_have_the_bits_of_the_gguf_package(kind: int) -> None:
    rows = make_rows(kind, 33, 512)
    expected = dequantize_by_gguf(rows, GGMLQuantizationType(kind))
    weights = blocks.dequantize(rows, np.full(33, kind, np.uint8), 512)
    assert np.array_equal(weights.view(np.uint32), expected.view(np.uint32))


def test_rows_of_several_types() -> None:
    """Rows in any order, of which some take fewer bytes; whole, looked up, and cut."""
    matrix = make_matrix({12: 5, 14: 4, 8: 3}, 256)
    assert matrix.shape == (12, 256)
    whole = matrix.widen(0, 12)
    for kind, start, stop in matrix.list_parts():
        rows = matrix.rows[start:stop, : TYPES[kind].count_bytes(256)].numpy()
        expected = dequantize_by_gguf(rows, GGMLQuantizationType(kind))
        assert torch.equal(whole[start:stop], torch.from_numpy(expected))
    indices = torch.tensor([[11, 0, 6], [6, 9, 4]])
    assert torch.equal(matrix.look_up(indices), whole[indices])
    assert torch.equal(matrix.widen_all(torch.bfloat16), whole.bfloat16())
    cut = matrix.take_rows(8, 8)
    assert torch.equal(cut.widen(0, 8), torch.nn.functional.pad(whole[8:], (0, 0, 0, 4)))
    assert cut.shape == (8, 256)


@in_every_form
def test_rows_are_widened_to_the_bits_of_the_gguf_package(library: Path) -> None:
    kernels = NativeKernels(library, torch.float32)
    matrix = make_matrix(dict.fromkeys(NUMBERS, 9), 512)
    indices = torch.randperm(len(matrix.rows)).view(9, -1)
    widened, expected = matrix.look_up(indices, kernels), matrix.look_up(indices)
    assert torch.equal(widened.view(torch.int32), expected.view(torch.int32))
    for wrong in (-1, len(matrix.rows)):
        with pytest.raises(ValueError, match=f"row {wrong} of .117, 544. is not there"):
            matrix.look_up(torch.tensor([0, wrong, 7]), kernels)
    assert matrix.types[3] == 2
    for kind, depth in ((99, 512), (2, 512 + 16), (8, 1024)):
        matrix.types[3] = kind
        with pytest.raises(ValueError, match="row 3 of .117, 544. is not there, or no blocks"):
            kernels.widen_blocks(matrix.rows, matrix.types, torch.tensor([[3]]), depth)


@in_every_form
@pytest.mark.parametrize(
    "kinds", [*([kind] for kind in NUMBERS), [12, 14], [2, 8, 3, 14], [11, 13, 39]], ids=str
)
def test_products(library: Path, kinds: list[int]) -> None:
    """Any number of rows among others has its bits; whatever types are below each other."""
    dtype = DTYPES[len(kinds) % 3]
    kernels, generator = NativeKernels(library, dtype), torch.Generator().manual_seed(1)
    for depth in (256, 768):
        matrix = make_matrix({kind: 70 - 37 * i % 60 for i, kind in enumerate(kinds)}, depth)
        num_outputs = matrix.num_outputs
        packed = matrix.pack(kernels)
        assert len(packed) == matrix.measure(kernels)
        x = torch.randn(27, depth, generator=generator).to(dtype)
        x[3] = 0
        bias = torch.randn(num_outputs, generator=generator).to(dtype)
        whole = kernels.multiply(x, packed, bias, num_outputs)
        exact = compute_exactly(x, matrix) + bias.double()
        error = (whole.double() - exact).abs().max() / exact.abs().max()
        assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
        for count in (1, 2, 3, 5, 6, 8, 11, 12, 13, 26):
            part = kernels.multiply(x[27 - count :], packed, bias, num_outputs)
            assert torch.equal(part, whole[27 - count :]), (depth, count)


@needs_compiler
def test_packed_matrices_take_about_the_bytes_of_the_file(library: Path) -> None:
    kernels = NativeKernels(library, torch.float32)
    for kind in NUMBERS:
        matrix = make_matrix({kind: 256}, 768)
        assert matrix.rows.nbytes <= matrix.measure(kernels) <= 1.06 * matrix.rows.nbytes, kind


@needs_compiler
def test_inputs_that_are_no_numbers(library: Path) -> None:
    kernels = NativeKernels(library, torch.float32)
    matrix = make_matrix({3: 8, 14: 8}, 256)
    x = torch.ones(3, 256)
    x[1, 70] = float("nan")
    x[2, 5] = float("inf")
    y = kernels.multiply(x, matrix.pack(kernels), None, 16)
    assert y[0].isfinite().all()
    assert y[1:].isnan().all()


def test_damaged_rows_are_refused() -> None:
    rows, types = make_rows(8, 4, 64), np.full(4, 8, np.uint8)
    blocks.check_blocks("m", rows, types, 64)
    rows[2, 34:36] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(SpecDecError, match="m.weight has NaN or infinite scales in rows 0 to 3"):
        blocks.check_blocks("m", rows, types, 64)
    exponents, many = make_rows(39, 4, 64), np.full(4, 39, np.uint8)
    exponents[:, 0] = 252
    blocks.check_blocks("m", exponents, many, 64)
    exponents[3, 17] = 253  # 12 times half of it is infinite
    with pytest.raises(SpecDecError, match="m.weight has NaN or infinite scales in rows 0 to 3"):
        blocks.check_blocks("m", exponents, many, 64)
    types[1] = 9
    with pytest.raises(SpecDecError, match="m.ggml_types: type 9"):
        blocks.check_blocks("m", make_rows(8, 4, 64), types, 64)
