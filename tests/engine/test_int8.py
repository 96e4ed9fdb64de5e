"""Int8 matrices: rounding, packing, products; with kernels and without they are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.engine import int8, native
from specdec.errors import SpecDecError
from tests.engine.kernels import in_every_form, needs_compiler

# Relative to the largest value: roundings of the result, and of float32 sums.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}


def make_matrix(num_outputs: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An int8 matrix, -127 and 127 in it, and scales that differ by powers of ten."""
    generator = torch.Generator().manual_seed(depth)
    weight = torch.randn(num_outputs, depth, generator=generator)
    weight *= 10.0 ** torch.randint(-4, 2, (num_outputs, 1), generator=generator)
    return int8.quantize(weight, "w")


def multiply_exactly(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    y = x.double() @ (weight.double() * scales.double()[:, None]).T
    return y if bias is None else y + bias.double()


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Every output by its own column's size: scales differ."""
    bound = TOLERANCE[actual.dtype] * expected.abs().amax(0).clamp(min=1e-30)
    assert ((actual.double() - expected).abs() <= bound).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_outputs", "depth"), [(1, 1), (33, 7), (96, 40), (320, 322)])
@in_every_form
def test_native_products(library: Path, dtype: torch.dtype, num_outputs: int, depth: int) -> None:
    """Any number of rows; and a row's result is the same among others, to the last bit."""
    kernels = native.NativeKernels(library, dtype)
    weight, scales = make_matrix(num_outputs, depth)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(num_outputs, generator=generator).to(dtype) * 1e-2
    x = torch.randn(41, depth, generator=generator).to(dtype)
    packed = kernels.pack_int8(weight, scales)
    assert packed.dtype is torch.int8
    assert packed.numel() <= 128 * -(-num_outputs // 32) * (1 + -(-depth // 4))
    whole = kernels.multiply(x, packed, bias, num_outputs)
    assert whole.dtype is dtype
    assert_near(whole, multiply_exactly(x, weight, scales, bias))
    for count in range(1, 41):
        part = kernels.multiply(x[41 - count :], packed, bias, num_outputs)
        assert torch.equal(part, whole[41 - count :]), count
    unbiased = kernels.multiply(x[None], packed, None, num_outputs)
    assert unbiased.shape == (1, 41, num_outputs)
    assert_near(unbiased[0], multiply_exactly(x, weight, scales, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_widened_products(dtype: torch.dtype, has_bias: bool) -> None:
    """Without kernels the integers are exact: only result and bias are rounded."""
    weight, scales = make_matrix(64, 48)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(64, generator=generator).to(dtype) * 1e-2 if has_bias else None
    x = torch.randn(2, 5, 48, generator=generator).to(dtype)
    for prepack in (False, dtype is torch.float32):
        linear = int8.Int8Linear(
            weight, scales, bias, dtype=dtype, prepack=prepack, kernels=None
        )  # fmt: skip
        y = linear(x)
        assert (y.dtype, y.shape) == (dtype, (2, 5, 64))
        assert_near(y.flatten(0, 1), multiply_exactly(x.flatten(0, 1), weight, scales, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_widened_matrix_holds_is_exact(dtype: torch.dtype) -> None:
    weight, _ = make_matrix(5, 300)
    scales = torch.tensor([3e-9, 1.2e-4, 0.0078125, 0.99, 400.0])
    linear = int8.Int8Linear(weight, scales, None, dtype=dtype, prepack=False, kernels=None)
    held = linear._widened.weight
    assert held is not None
    assert held.dtype is dtype
    found = held.double() * linear._factors.double()[:, None]
    expected = weight.double() * scales.double()[:, None]
    assert torch.allclose(found, expected, rtol=1e-7, atol=0)


def test_rounding() -> None:
    weight = torch.tensor([[1.27, -0.634, 0.004, 0.016], [0.0, 0.0, 0.0, 0.0], [-2, 1.02, 0, 0.5]])
    scales = int8.make_scales(int8.find_largest(weight), "w")
    assert scales.tolist() == pytest.approx([0.01, 1.0, 2 / 127])
    assert int8.round_weight(weight, scales).tolist() == [
        [127, -63, 0, 2],
        [0, 0, 0, 0],
        [-127, 65, 0, 32],
    ]
    tiny = torch.tensor([[1e-44, -1e-44]])
    scales = int8.make_scales(int8.find_largest(tiny), "w")
    assert scales > 0
    assert int8.round_weight(tiny, scales).abs().max() <= 127


def test_no_integer_is_half_a_step_off() -> None:
    weight = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    integers, scales = int8.quantize(weight, "w")
    assert (integers.abs().amax(1) == 127).all()
    error = (integers.double() * scales.double()[:, None] - weight.double()).abs()
    assert (error <= scales.double()[:, None] * 0.50001).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_without_a_scale_are_refused(value: float) -> None:
    weight = torch.ones(4, 3)
    weight[2, 1] = value
    with pytest.raises(SpecDecError, match=r"m.weight has NaN or infinite .* 1 of 4 .* is 2"):
        int8.make_scales(int8.find_largest(weight), "m.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.5])
def test_scales_that_no_build_writes_are_refused(value: float) -> None:
    scales = torch.ones(4)
    int8.check_scales(scales, "s")
    scales[3] = value
    with pytest.raises(SpecDecError, match=r"s: 1 of 4 scales .* row 3"):
        int8.check_scales(scales, "s")
