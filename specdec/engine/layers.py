"""Building blocks of the decoder: linears laid out for the machine, norms, activations, attention.

Legend: B rows, T tokens, N heads, H head size, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.model.config import ModelConfig

if TYPE_CHECKING:
    from specdec.engine.native import NativeKernels


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

    On a CPU the weight is kept in a layout that reads at the speed of memory for one token and
    shares that read between the tokens of a verify step: that of the native kernels where the
    engine has them, else oneDNN's.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        prepack: bool,
        kernels: NativeKernels | None = None,
    ) -> None:
        self.bias = bias
        self.num_outputs = weight.shape[0]
        self.kernels = kernels
        self.packed: Tensor | None = None
        self.weight: Tensor | None = None
        if kernels is not None:
            self.packed = kernels.pack_matrix(weight)
        elif prepack:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        else:
            self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            assert self.weight is not None
            return torch.nn.functional.linear(x, self.weight, self.bias)
        if self.kernels is not None:
            return self.kernels.multiply(x, self.packed, self.bias, self.num_outputs)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm (https://arxiv.org/abs/1910.07467) in float32, result in x's type."""
    if x.is_cuda:  # one kernel instead of eight; in half precision rounded once, not twice
        return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)
    x32 = x.float()
    scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Layer norm (https://arxiv.org/abs/1607.06450)."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, epsilon)


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm's weights; without a bias it is the root-mean-square one."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.epsilon)
        return layer_norm(x, self.weight, self.bias, self.epsilon)


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


# What `hidden_act` may be: TensorRT-LLM's names, and transformers' where those are kept.
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


def name_activation(model: ModelConfig) -> str:
    """The key of ACTIVATIONS that a model's `hidden_act` means."""
    is_tanh = model.hidden_act == "gelu" and not model.arithmetic.exact_gelu
    return "gelu_tanh" if is_tanh else model.hidden_act


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention over a cache.

    q: [B, T, N, H]; keys, values: [B, N_kv, S, H]; mask: [B, 1, T, S], true = visible, or what is
    added to the scores; [B, 1, N / N_kv * T, S] where it was repeated for a group's queries before.
    Returns [B, T, N * H]. The queries of a group share one pass over their keys.
    """
    batch, num_tokens, num_heads, head_size = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    # [B, N_kv, group * T, H]: the query heads of one K/V head side by side.
    q = q.view(batch, num_tokens, num_kv_heads, group, head_size).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, num_kv_heads, group * num_tokens, head_size)
    if group > 1 and mask.shape[2] == num_tokens:
        mask = mask.repeat(1, 1, group, 1)
    out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    out = out.view(batch, num_kv_heads, group, num_tokens, head_size).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, num_tokens, num_heads * head_size)
