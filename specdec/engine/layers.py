"""Building blocks of the decoder: norms, activations, attention.

Legend: B rows, T tokens, N heads, H head size, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from specdec.engine.rotary import RotaryTable
from specdec.model.config import ModelConfig


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """Return the root-mean-square norm (https://arxiv.org/abs/1910.07467) in float32, of x's type.

    offset: number that is added to the stored weight; with one, the result is rounded once.
    """
    if offset:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
        return (x32 * scale * (weight.float() + offset)).to(x.dtype)
    if x.is_cuda:  # one kernel instead of eight; in half precision rounded once, not twice
        return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)
    x32 = x.float()
    scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Return the layer norm (https://arxiv.org/abs/1607.06450)."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, epsilon)


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm's weights; without a bias it is the root-mean-square one, see `rms_norm`."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float
    offset: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.epsilon, self.offset)
        return layer_norm(x, self.weight, self.bias, self.epsilon)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention of a layer, beside its products.

    scale: of the scores. cap: a score s becomes cap tanh(s / cap), None where it stays. window:
    positions that a token sees, itself included, None for all. rotary: None where positions are
    learned. q_norm, k_norm: of each query and each key [H], before they are rotated, or None.
    sinks: [N], see `attend`.
    v_norm: of each value. heads: a rank's K/V heads and their size, None for those of the stack.
    """

    scale: float
    cap: float | None
    window: int | None
    rotary: RotaryTable | None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: Tensor | None = None
    v_norm: Norm | None = None
    heads: tuple[int, int] | None = None


def cap(x: Tensor, limit: float) -> Tensor:
    """Return limit tanh(x / limit): close to x near 0, within the limit everywhere."""
    return limit * torch.tanh(x / limit)


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


# Activations by the values of `hidden_act`: TensorRT-LLM's names, and transformers' where kept.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "swiglu": torch.nn.functional.silu,
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}

# Activations of a gated MLP that have a kernel, by that kernel's name.
GATES = {
    "silu": "silu", "swiglu": "silu", "gelu_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CutGate:
    """Gate of an MLP, g sigmoid(slope g) (u + 1) with g at most `limit`, u within it on both sides.

    g and u are the outputs of the two matrices side by side.
    """

    limit: float
    slope: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        cut_gate = gate.float().clamp(max=self.limit)
        cut_up = up.float().clamp(-self.limit, self.limit)
        return (cut_gate * torch.sigmoid(self.slope * cut_gate) * (cut_up + 1)).to(up.dtype)


def name_activation(model: ModelConfig) -> str:
    """Return the key of ACTIVATIONS that a model's `hidden_act` means."""
    is_tanh = model.hidden_act == "gelu" and not model.arithmetic.exact_gelu
    return "gelu_tanh" if is_tanh else model.hidden_act


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float | None = None,
    limit: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute grouped-query attention over a cache.

    q: [B, T, N, H]; keys, values: [B, N_kv, S, H]; mask: [B, 1, T, S], true = visible, or what is
    added to the scores; [B, 1, N / N_kv * T, S] where it was repeated for a group's queries before.
    scale: of the scores, 1 / sqrt(H) if None; limit: what they are capped by, None where they are
    not. sinks: [N], a score of each head that takes its part of the softmax and has no value
    (https://arxiv.org/abs/2309.17453), or None. Returns [B, T, N * H]. The queries of a group share
    one pass over their keys.
    """
    batch, num_tokens, num_heads, head_size = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    # [B, N_kv, group * T, H]: the query heads of one K/V head side by side.
    q = q.view(batch, num_tokens, num_kv_heads, group, head_size).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, num_kv_heads, group * num_tokens, head_size)
    if group > 1 and mask.shape[2] == num_tokens:
        mask = mask.repeat(1, 1, group, 1)
    if limit is None and sinks is None:
        outputs = torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=scale
        )
    else:
        scores = (q @ keys.transpose(2, 3)).float() * (scale or head_size**-0.5)
        scores = scores if limit is None else cap(scores, limit)
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        else:
            scores = scores + mask
        if sinks is not None:
            columns = sinks.float().view(1, num_kv_heads, group, 1)
            columns = columns.expand(batch, -1, -1, num_tokens).reshape(*scores.shape[:3], 1)
            scores = torch.cat((scores, columns), dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[2]]
        outputs = weights.to(values.dtype) @ values
    outputs = outputs.view(batch, num_kv_heads, group, num_tokens, head_size).permute(0, 3, 1, 2, 4)
    return outputs.reshape(batch, num_tokens, num_heads * head_size)
