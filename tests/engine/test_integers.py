"""Matrices of integers: packing and products, against sums of Python's own exact integers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.engine import integers, native
from specdec.engine.integers import IntegerLinear, IntegerMatrix
from specdec.model import int4
from tests.engine.kernels import in_every_form, needs_compiler
from tests.engines import round_inputs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the largest output of a column: a rounding of the result, and of float32 sums.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}


def make_matrix(
    bits: int, num_outputs: int, depth: int, num_groups: int, *, is_full: bool = False
) -> IntegerMatrix:
    """Random codes, all that there are, and scales that differ by powers of ten.

    is_full: with zeros from 0 to 16, scales for the inputs, and these in another order.
    """
    generator = torch.Generator().manual_seed(depth)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    scales = torch.rand(num_outputs, num_groups, generator=generator)
    scales *= 10.0 ** draw(-4, 2, num_outputs, 1)
    if bits == 8:
        return IntegerMatrix(8, draw(-127, 128, num_outputs, depth).to(torch.int8), scales)
    codes = draw(0, 16, num_outputs, depth).to(torch.uint8).numpy()
    matrix = IntegerMatrix(4, torch.from_numpy(int4.pack(codes)), scales)
    if not is_full:
        return matrix
    return dataclasses.replace(
        matrix,
        zeros=draw(0, 17, num_outputs, num_groups).to(torch.uint8),
        input_scales=torch.rand(depth, generator=generator) + 0.5,
        order=torch.randperm(depth, generator=generator).to(torch.int32),
    )


def multiply_exactly(
    x: torch.Tensor, matrix: IntegerMatrix, bias: torch.Tensor | None, *, is_rounded: bool = True
) -> torch.Tensor:
    """By numpy: inputs rounded in float32 as is written, integers summed exactly, in float64."""
    inputs = x.float().numpy()
    if matrix.input_scales is not None:
        inputs = inputs * matrix.input_scales.numpy()
    if matrix.order is not None:
        inputs = inputs[:, matrix.order.numpy()]
    depth, num_groups = inputs.shape[1], matrix.scales.shape[1]
    codes, zeros = matrix.codes.numpy().astype(np.int64), np.zeros(matrix.scales.shape, np.int64)
    if matrix.bits == 4:
        codes = int4.unpack(matrix.codes.numpy()).astype(np.int64)
        zeros += 8 if matrix.zeros is None else matrix.zeros.numpy()
    y = np.zeros((len(inputs), matrix.num_outputs))
    for start in range(0, depth, matrix.group):
        part = inputs[:, start : start + matrix.group]
        largest = np.abs(part).max(1, keepdims=True)
        rounded = np.rint(part * (np.float32(127) / largest)).astype(np.int64)
        scale = (largest / np.float32(127)).astype(np.float64)
        which = start * num_groups // depth
        integers = codes[:, start : start + matrix.group] - zeros[:, which, None]
        sums = rounded @ integers.T * scale if is_rounded else part.astype(np.float64) @ integers.T
        y += sums * matrix.scales[:, which].numpy()
    exact = torch.from_numpy(y)
    return exact if bias is None else exact + bias.double()


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Every output by its own column's size: scales differ."""
    bound = TOLERANCE[actual.dtype] * expected.abs().amax(0).clamp(min=1e-30)
    assert ((actual.double() - expected).abs() <= bound).all()


# bits, outputs, depth, groups, whether with zeros, input scales and an order.
MATRICES = [
    (8, 1, 1, 1, False), (8, 33, 7, 1, False), (8, 96, 322, 1, False), (8, 320, 640, 1, False),
    (4, 2, 32, 1, False), (4, 34, 96, 3, True), (4, 96, 192, 3, True), (4, 320, 640, 5, False),
    (4, 66, 200, 1, True), (4, 64, 512, 2, False),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", MATRICES, ids=str)
@in_every_form
def test_native_products(
    library: Path, dtype: torch.dtype, case: tuple[int, int, int, int, bool]
) -> None:
    """Any number of rows; and a row's result is the same among others, to the last bit."""
    *sizes, is_full = case
    num_outputs, depth = sizes[1:3]
    kernels = native.NativeKernels(library, dtype)
    matrix = make_matrix(*sizes, is_full=is_full)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(num_outputs, generator=generator).to(dtype) * 1e-2
    x = torch.randn(41, depth, generator=generator).to(dtype)
    packed = matrix.pack(kernels)
    whole = kernels.multiply(x, packed, bias, num_outputs)
    assert whole.dtype is dtype
    assert_near(whole, multiply_exactly(x, matrix, bias))
    for count in range(1, 41):
        part = kernels.multiply(x[41 - count :], packed, bias, num_outputs)
        assert torch.equal(part, whole[41 - count :]), count
    unbiased = kernels.multiply(x[None], packed, None, num_outputs)
    assert unbiased.shape == (1, 41, num_outputs)
    assert_near(unbiased[0], multiply_exactly(x, matrix, None))


@needs_compiler
@in_every_form
def test_every_form_sums_the_same_integers(library: Path) -> None:
    """Where every group has its own power of two, the float32 sums are exact in any form."""
    kernels = native.NativeKernels(library, torch.float32)
    matrix = make_matrix(4, 64, 512, 4)
    matrix = dataclasses.replace(matrix, scales=torch.full((64, 4), 0.5))
    x = torch.randint(-127, 128, (13, 512), generator=torch.Generator().manual_seed(3)).float()
    x[:, ::128] = 127.0  # each group's largest: inputs are their own roundings
    found = kernels.multiply(x, matrix.pack(kernels), None, 64)
    assert torch.equal(found.double(), multiply_exactly(x, matrix, None))


@needs_compiler
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("has_zeros", [False, True])
@in_every_form
def test_the_largest_sums(library: Path, group: int, has_zeros: bool) -> None:
    """All codes 0 or 15, inputs of +-127: two products more of each sum would overflow 16 bits."""
    kernels = native.NativeKernels(library, torch.float32)
    depth, num_outputs = 544, 64  # the last group of 64 or 128 is not whole
    num_groups = -(-depth // group)
    scales = torch.full((num_outputs, num_groups), 0.5)
    zeros = torch.zeros(scales.shape, dtype=torch.uint8) if has_zeros else None
    zero = 0 if has_zeros else 8
    for code in (0, 15):
        half = (code ^ 8) & 15  # in a file they are signed
        codes = torch.full((num_outputs // 2, depth), half | half << 4, dtype=torch.uint8)
        packed = kernels.pack_integers(
            codes.view(torch.int8), scales, zeros, bits=4, group=group
        )  # fmt: skip
        for sign in (127.0, -127.0):
            for rows in (1, 2, 3, 6, 7):
                found = kernels.multiply(torch.full((rows, depth), sign), packed, None, num_outputs)
                assert (found == (code - zero) * sign * depth * 0.5).all(), (code, sign, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [MATRICES[2], MATRICES[5], MATRICES[8]], ids=str)
def test_products_without_kernels(
    dtype: torch.dtype, case: tuple[int, int, int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integers, "BLOCK_ROWS", 25)
    *sizes, is_full = case
    matrix = make_matrix(*sizes, is_full=is_full)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(sizes[1], generator=generator).to(dtype) * 1e-2
    x = torch.randn(2, 5, sizes[2], generator=generator).to(dtype)
    for own in (bias, None):
        y = IntegerLinear(matrix, own, None)(x)
        assert (y.dtype, y.shape) == (dtype, (2, 5, sizes[1]))
        expected = multiply_exactly(x.flatten(0, 1), matrix, own, is_rounded=False)
        assert_near(y.flatten(0, 1), expected)


def test_rounding_of_inputs() -> None:
    x = torch.tensor([[127.0, 2.5, -3.5, 0.5, 254.0, 1.0, -253.0]])
    assert round_inputs(x, 4).tolist() == [[127.0, 2.0, -4.0, 0.0, 254.0, 0.0, -252.0]]
    tiny = torch.full((1, 4), 1e-31)
    assert round_inputs(tiny, 4).tolist() == [[0.0] * 4]


@needs_compiler
@in_every_form
def test_what_is_not_finite_or_tiny(library: Path) -> None:
    """A token's own outputs become NaN, and nobody else's; groups of tiny inputs are zeros."""
    kernels = native.NativeKernels(library, torch.float32)
    matrix = make_matrix(4, 32, 128, 2)
    linear = IntegerLinear(matrix, None, kernels)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    expected = linear(x)
    for value in (float("nan"), float("inf"), -float("inf")):
        damaged = x.clone()
        damaged[1, 70] = value
        found = linear(damaged)
        assert found[1].isnan().all()
        assert torch.equal(found[2:], expected[2:])
    x[2] = 1e-38
    assert (linear(x)[2] == 0).all()
