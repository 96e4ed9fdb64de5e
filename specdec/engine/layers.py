"""Building blocks of the decoder: linears laid out for the machine, norms, rotary embedding.

Legend: B rows, T tokens, N heads, H head size, D hidden.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecDecError


def can_prepack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN takes weights of this type in its own blocked layout on this machine."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    ops: Any = torch.ops.mkldnn
    if dtype is torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class Linear:
    """x W^T + b. weight: [out, in].

    On a CPU the weight is kept in oneDNN's blocked layout, which reads at the speed of memory for
    one token and shares that read between the tokens of a verify step.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, prepack: bool) -> None:
        self.bias = bias
        self.packed: Tensor | None = None
        self.weight: Tensor | None = None
        if prepack:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        else:
            self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            assert self.weight is not None
            return torch.nn.functional.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm (https://arxiv.org/abs/1910.07467) in float32, result in x's type."""
    x32 = x.float()
    scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(x.dtype)


def compute_inverse_frequencies(
    head_size: int, base: float, scaling: dict[str, Any] | None
) -> Tensor:
    """Rotary frequencies [H / 2] in float32, with the scalings that do not depend on the length."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    inverse = 1.0 / (base**exponents)
    if scaling is None:
        return inverse
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inverse
    if kind == "linear":
        return inverse / float(scaling["factor"])
    if kind == "llama3":
        # "The Llama 3 Herd of Models" long-context scaling: low frequencies are divided by the
        # factor, high ones kept, those between interpolated.
        factor = float(scaling["factor"])
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        original = float(scaling["original_max_position_embeddings"])
        wavelength = 2 * math.pi / inverse
        smooth = (original / wavelength - low) / (high - low)
        blended = (1 - smooth) * inverse / factor + smooth * inverse
        scaled = torch.where(wavelength > original / low, inverse / factor, blended)
        return torch.where(wavelength < original / high, inverse, scaled)
    raise SpecDecError(
        f"rotary scaling {kind!r} is not supported by the torch backend",
        "the supported kinds are default, linear and llama3",
    )


class RotaryTable:
    """Cosines and sines of every position, [positions, H], in the model's type."""

    def __init__(
        self, inverse: Tensor, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(num_positions).float(), inverse)
        both = torch.cat((angles, angles), dim=-1)
        self.cos = both.cos().to(device, dtype)
        self.sin = both.sin().to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (https://arxiv.org/abs/2104.09864), halves paired. x: [B, T, N, H]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention over a cache.

    q: [B, T, N, H]; keys, values: [B, N_kv, S, H]; mask: [B, 1, T, S], true = visible.
    Returns [B, T, N * H]. The queries of a group share one pass over their keys.
    """
    batch, num_tokens, num_heads, head_size = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    # [B, N_kv, group * T, H]: the query heads of one K/V head side by side.
    q = q.view(batch, num_tokens, num_kv_heads, group, head_size).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, num_kv_heads, group * num_tokens, head_size)
    if group > 1:
        mask = mask.repeat(1, 1, group, 1)
    out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    out = out.view(batch, num_kv_heads, group, num_tokens, head_size).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, num_tokens, num_heads * head_size)
