"""Products with a weight that is laid out for the machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.engine.native import NativeKernels


def can_prepack(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether oneDNN takes weights of this type in its own blocked layout on this machine."""
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
