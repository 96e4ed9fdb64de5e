"""Prepacked linears, activations and cache bookkeeping against independent references."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import rms_norm
from specdec.engine.linear import Linear, can_prepack
from specdec.engine.module_maker import ModuleMaker
from specdec.errors import SpecDecError
from specdec.model.layer_sizes import LayerSizes
from tests.engine.models import make_model


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


def test_modules_are_made_of_weights_by_name() -> None:
    """A bias of what is summed over ranks is the first rank's alone."""
    name, weights = "transformer.layers.0.attention.dense", dict[str, torch.Tensor]()
    weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.eye(4), torch.arange(4.0)
    weights["transformer.ln_f.weight"] = torch.full((4,), 2.0)
    maker = ModuleMaker(
        model=make_model(hidden_size=4), weights=weights, rank=1, tables=(None, None),
        prepack=False, kernels=None,
    )  # fmt: skip
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert maker.make_linear(name)(x).tolist() == [[1.0, 3.0, 5.0, 7.0]]
    assert maker.make_linear(name, is_summed=True)(x).tolist() == x.tolist()
    norm = maker.make_norm("transformer.ln_f")
    torch.testing.assert_close(norm(x), 2 * x / (x.square().mean() + 1e-5).sqrt())
    assert maker.make_layer_inputs() is None
    attention = maker.make_attention(0, "transformer.layers.0.attention.")
    assert (attention.window, attention.scale, attention.heads) == (None, 64**-0.5, None)


def test_sizes_of_layers_that_fit_and_that_do_not() -> None:
    types = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")
    sizes = LayerSizes(full_head_size=8, full_num_kv_heads=2, num_reusing=2, reusing_inner=12)
    assert not sizes.find_problems(types, num_heads=4, tp_size=2)
    for wrong, others, fact in (
        ({"full_head_size": 0}, {}, "layer_sizes.full_head_size"),
        ({"reusing_inner": 0}, {}, "layer_sizes.reusing_inner"),
        ({"num_reusing": 3}, {}, "the last 3 layers read keys of earlier ones"),
        ({"full_num_kv_heads": 3}, {}, "num_attention_heads=4 is no multiple"),
        ({}, {"tp_size": 5}, "do not split over tp_size=5"),
    ):
        problems = dataclasses.replace(sizes, **wrong).find_problems(
            types, **{"num_heads": 4, "tp_size": 1} | others
        )
        with pytest.raises(SpecDecError, match=fact):
            problems.raise_all()
