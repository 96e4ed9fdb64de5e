"""Rotary scaling, prepacked linears and cache bookkeeping against independent references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import Linear, can_prepack, compute_inverse_frequencies
from specdec.errors import SpecDecError

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 2}, LLAMA3],
)
def test_rotary_frequencies_equal_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_theta=500000.0, rope_scaling=scaling,
        max_position_embeddings=131072,
    )  # fmt: skip
    expected = LlamaRotaryEmbedding(config).inv_freq
    actual = compute_inverse_frequencies(64, 500000.0, scaling)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


def test_unknown_rotary_scaling_is_refused() -> None:
    with pytest.raises(SpecDecError, match="'dynamic' is not supported"):
        compute_inverse_frequencies(64, 10000.0, {"rope_type": "dynamic", "factor": 2.0})


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
