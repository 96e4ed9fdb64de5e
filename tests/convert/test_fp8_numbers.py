"""float8 e4m3 in numpy against torch: every pattern, ties, the ends of the range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.convert.quantize.float8 import Requantizer, decode, encode, find_amax
from specdec.files.tensor_file import DTYPES


def by_torch(values: torch.Tensor) -> np.ndarray:
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def list_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit type."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_rounds_as_torch_rounds(dtype: torch.dtype) -> None:
    values = list_patterns(dtype).float()
    ours, theirs = encode(values.numpy()), by_torch(values)
    within = (values.abs() <= 464) | values.isnan()
    assert int(within.sum()) > 20000
    np.testing.assert_array_equal(ours[within], theirs[within])
    beyond = values[~within]
    np.testing.assert_array_equal(ours[~within], np.where(beyond > 0, 0x7E, 0xFE))


def test_float32_rounds_as_torch_rounds() -> None:
    """Random numbers of every magnitude, and the numbers next to and in the middle of float8s."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(200_000, generator=generator)
    scales = torch.exp2(torch.randint(-30, 8, noise.shape, generator=generator).float())
    finite = decode(np.arange(0x7F, dtype=np.uint8))
    middles = (finite[1:] + finite[:-1]) / 2
    around = np.concatenate([finite, middles])
    edges = np.concatenate(
        [around, np.nextafter(around, np.float32(0)), np.nextafter(around, np.float32(500))]
    )
    values = np.concatenate([(noise * scales).clamp(-464, 464).numpy(), edges, -edges])
    np.testing.assert_array_equal(encode(values), by_torch(torch.from_numpy(values)))


def test_every_byte_has_torchs_value_and_returns() -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(decode(codes), theirs)
    np.testing.assert_array_equal(encode(decode(codes)), codes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_requantizing_is_torchs_division(dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = (torch.randn(64, 33, generator=generator) * 0.02).to(getattr(torch, dtype))
    raw = whole.view(torch.uint8).numpy().view(DTYPES[dtype][1])
    scale = np.float32(whole.float().abs().max() / 448)
    assert find_amax(raw, dtype) == whole.float().abs().max().item()
    ours = Requantizer(dtype, scale)(raw)
    np.testing.assert_array_equal(ours, by_torch(whole.float() / torch.tensor(scale)))
    factor = np.float32(0.37)
    ours = Requantizer(dtype, scale, factor)(raw)
    product = whole.float() * torch.tensor(factor)
    np.testing.assert_array_equal(ours, by_torch(product / torch.tensor(scale)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_largest_magnitude_shows_nan_and_infinity(dtype: str) -> None:
    for special in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        tensor = torch.tensor([1.0, -2.0, special, 3.0]).to(getattr(torch, dtype))
        raw = tensor.view(torch.uint8).numpy().view(DTYPES[dtype][1])
        found = find_amax(raw, dtype)
        assert np.isnan(found) if special != special else np.isinf(found)
    assert find_amax(np.zeros((0, 4), DTYPES[dtype][1]), dtype) == 0
