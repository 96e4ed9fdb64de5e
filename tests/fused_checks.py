"""The fused kernels compared with torch's operators: on a GPU, and in Triton's interpreter.

Legend: as in specdec/engine/fused.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.engine.layers import ACTIVATIONS, Attention, Norm
from specdec.engine.torch_layers import Stack, TorchLayers

# B, T and D; a norm's offset, the share of what is added, whether that is normed first.
NORM_CASES: list[tuple[Any, ...]] = [
    (1, 1, 2048, 0.0, None, False), (2, 3, 100, 1.0, None, False),
    (1, 1, 2048, 0.0, 1.0, False), (2, 3, 100, 0.0, 0.25, False), (3, 5, 1, 0.0, 1.0, False),
    (1, 8, 4096, 0.0, 1.0, False), (2, 2, 5000, 1.0, 1.0, True), (1, 7, 33, 0.0, 0.5, True),
]  # fmt: skip
# B, T, width of the gate and of what it is multiplied by.
GATE_CASES: list[tuple[Any, ...]] = [
    (size, name)
    for size in ((1, 1, 8192), (2, 3, 37), (1, 5, 1000), (3, 1, 1))
    for name in ("silu", "gelu_tanh")
]
# B, T, N, K, H and R, 0 for no rotation; whether there are norms; what follows a token's values.
TURN_CASES: list[tuple[Any, ...]] = [
    (1, 1, 32, 8, 64, 64, False, 0), (2, 3, 4, 2, 16, 8, False, 0), (3, 2, 6, 6, 80, 20, True, 0),
    (2, 5, 5, 1, 128, 128, True, 7), (1, 4, 4, 4, 96, 0, False, 0), (2, 2, 4, 2, 24, 0, True, 5),
]  # fmt: skip
# Grouped heads; norms of heads; norms of what is added; rotary tables by layer; heads rotated in
# part; learned positions and layer norms; a share of what is added.
MODELS = (
    "LlamaForCausalLM-llama3", "Qwen3ForCausalLM-plain", "Gemma2ForCausalLM-caps",
    "Gemma3ForCausalLM-windows", "PhiForCausalLM-gelu_new", "OPTForCausalLM-350m",
    "GraniteForCausalLM-multipliers",
)  # fmt: skip
# A unit in the last place relative to the value; in float32 many, for exp and tanh differ.
ULPS = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


class _Table:
    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin


def compare(case: object, found: Tensor, expected: Tensor, *, is_exact: bool = False) -> None:
    """A unit in the last place apart at most, and that seldom in half precision."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), f"{case}: shape or type"
    found32, expected32 = found.detach().float(), expected.detach().float()
    apart = (found32 - expected32).abs()
    ulp = ULPS[found.dtype]
    limit = torch.zeros_like(apart) if is_exact else ulp * (expected32.abs() + 1)
    told = f"{case}, {found.dtype}: the largest difference is {apart.max().item():.3g}"
    told += f" where {expected32.flatten()[apart.argmax()].item():.6g} is expected"
    assert bool((apart <= limit).all()), told
    if found.dtype is not torch.float32:
        share = (apart > 0).float().mean().item()
        assert share <= 0.03, f"{told}, and {share:.1%} of all differ"


def make_values(seed: int, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator)).to(dtype).to(device)


def norm_exactly(x: Tensor, norm: Norm) -> Tensor:
    """By torch's operator in float32, rounded once, as on a GPU."""
    weight = norm.weight.float() + norm.offset
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight, norm.epsilon).to(x.dtype)


def check_add_norm(case: tuple[Any, ...], dtype: torch.dtype, device: str) -> None:
    from specdec.engine.fused import add_norm

    batch, num_tokens, size, offset, share, is_own = case
    x, added = (
        make_values(seed, batch, num_tokens, size, dtype=dtype, device=device) for seed in (1, 2)
    )
    norm, own = (
        Norm(make_values(seed, size, dtype=dtype, device=device), None, 1e-5, offset)
        for seed in (3, 4)
    )
    if share is None:
        total, normed = add_norm(x, None, norm)
        assert total is x
    else:
        total, normed = add_norm(x, added, norm, own if is_own else None, share)
        part = norm_exactly(added, own) if is_own else added
        expected = torch.add(x, part, alpha=share)
        compare(("add_norm, the sum", *case), total, expected)
        assert torch.equal(total, expected) or is_own or share != 1
    compare(("add_norm", *case), normed, norm_exactly(total, norm))
    last, last_added = (part[-1:, -1:].clone() for part in (x, added))
    alone = add_norm(
        last, None if share is None else last_added, norm, own if is_own else None, share or 1.0
    )
    assert torch.equal(alone[1], normed[-1:, -1:]), f"{case}: a token's norm depends on others"


def check_gate(case: tuple[Any, ...], dtype: torch.dtype, device: str) -> None:
    from specdec.engine.fused import gate

    (batch, num_tokens, size), activation = case
    inner = make_values(5, batch, num_tokens, 2 * size, dtype=dtype, device=device)
    inner[0, 0, 0], inner[-1, -1, 0] = 90.0, -90.0
    first, second = inner.chunk(2, dim=-1)
    found = gate(inner, activation)
    compare(("gate", *case), found, ACTIVATIONS[activation](first) * second)
    assert torch.equal(gate(inner[-1:, -1:].clone(), activation), found[-1:, -1:]), (
        f"{case}: not alone"
    )


def check_turn(case: tuple[Any, ...], dtype: torch.dtype, device: str) -> None:
    from specdec.engine.fused import turn

    batch, num_tokens, num_heads, num_kv_heads, size, turned, has_norms, more = case

    def make(seed: int, *shape: int) -> Tensor:
        return make_values(seed, *shape, dtype=dtype, device=device)

    width = (num_heads + 2 * num_kv_heads) * size
    product = make(6, batch, num_tokens, width + more)
    # On a CPU torch's norm rounds twice in half precision, but with an offset.
    offset = 0.0 if device == "cuda" or dtype is torch.float32 else 1.0
    norms = [Norm(make(seed, size), None, 1e-5, offset) for seed in (7, 8)]
    angles = torch.rand(50, max(turned, 2) // 2, generator=torch.Generator().manual_seed(9)) * 6
    cos, sin = (
        torch.cat((half, half), 1).to(dtype).to(device) for half in (angles.cos(), angles.sin())
    )
    how: Any = Attention(
        scale=1.0, cap=None, window=None,
        rotary=_Table(cos, sin) if turned else None,  # type: ignore[arg-type]
        q_norm=norms[0] if has_norms else None, k_norm=norms[1] if has_norms else None,
    )  # fmt: skip
    rows = torch.arange(batch).flip(0).to(device)
    slots = (torch.arange(num_tokens) + 3 * torch.arange(batch)[:, None]).to(device)
    place = SimpleNamespace(rows=rows, slots=slots, lines=slots + 11, angles={})
    # Part of a larger cache, as a graph's is.
    whole = make(10, 2, batch + 1, num_kv_heads, 30, size)
    expected_whole = whole.clone()
    block, expected_block = (cache[:, :batch, :, :20] for cache in (whole, expected_whole))
    stack: Any = Stack(
        layers=[], final_norm=None, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_size=size, activation="silu", is_gated=True, group=None,
    )  # fmt: skip
    layer: Any = SimpleNamespace(attention=how)
    expected = TorchLayers(stack)._write(layer, product[..., :width], expected_block, place)
    queries = turn(product[..., :width], block, how, place, num_heads)
    compare(("turn, queries", *case), queries, expected, is_exact=not has_norms)
    compare(("turn, the cache", *case), whole, expected_whole, is_exact=not has_norms)
    place.rows, place.slots, place.lines = rows[-1:], slots[-1:, -1:], place.lines[-1:, -1:]
    alone = turn(product[-1:, -1:].clone()[..., :width], block.clone(), how, place, num_heads)
    assert torch.equal(alone, queries[-1:, -1:]), f"{case}: a token's query depends on others"


CHECKS = [
    pytest.param(check, case, id="-".join((check.__name__, *map(str, case))).replace(" ", ""))
    for check, cases in (
        (check_add_norm, NORM_CASES), (check_gate, GATE_CASES), (check_turn, TURN_CASES)
    )
    for case in cases
]  # fmt: skip
