"""Prepacked linears, activations and cache bookkeeping against independent references."""

from __future__ import annotations

import pytest
import torch

from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import rms_norm
from specdec.engine.linear import Linear, can_prepack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 7, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_prepacked_linear(dtype: torch.dtype, num_tokens: int, has_bias: bool) -> None:
    if not can_prepack(dtype, torch.device("cpu")):
        pytest.skip(f"oneDNN does not prepack {dtype} on this CPU")
    generator = torch.Generator().manual_seed(num_tokens)
    weight = torch.randn(48, 72, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(2, num_tokens, 72, generator=generator).to(dtype)
    packed = Linear(weight, bias, prepack=True)(x)
    plain = Linear(weight, bias, prepack=False)(x)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(packed, plain, rtol=tolerance, atol=tolerance * 10)


def test_commit_keeps_the_accepted_path_only() -> None:
    cache = KVCache(
        num_layers=2, num_rows=3, num_heads=1, num_positions=16, head_size=2,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    slots = torch.arange(16.0)
    cache.blocks[:] = slots[None, None, None, None, :, None]
    cache.past_lens[:] = [0, 4, 4]
    cache.commit(1, [0, 2, 5])
    assert cache.past_lens.tolist() == [0, 7, 4]
    kept = cache.blocks[1, 1, 1, 0, :7, 0].tolist()
    assert kept == [0, 1, 2, 3, 4, 6, 9], "node n of the step lay at position 4 + n"
    assert torch.equal(cache.blocks[0, 0, 2, 0, :, 0], slots), "another row was touched"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_cuda_devices(dtype: torch.dtype) -> None:
    """torch's own, which a CUDA device has as one kernel, is the same but for a rounding."""
    generator = torch.Generator().manual_seed(1)
    x = (3 * torch.randn(2, 5, 64, generator=generator)).to(dtype)
    weight = (1 + 0.1 * torch.randn(64, generator=generator)).to(dtype)
    fused = torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5)
    assert fused.dtype is dtype
    tolerance = 1e-6 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(fused, rms_norm(x, weight, 1e-5), rtol=tolerance, atol=tolerance)
