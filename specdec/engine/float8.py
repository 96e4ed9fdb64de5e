"""FP8 linears: float8 products on GPUs that have them, weights widened at load elsewhere.

A quantized weight is float8 e4m3 with a scale (two, one a half, where fc and gate are stacked and
were not quantized together), and the scale of its input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.engine.linear import Linear
from specdec.model.quantization import FLOAT8_MAX

# The matrix units take float8 in blocks of this many elements a side.
ALIGNMENT = 16
# Compute capability of the first GPUs with float8 matrix units (Ada, then Hopper).
FIRST_CAPABILITY = (8, 9)


def can_multiply(weight: Tensor, device: torch.device) -> bool:
    """Tell whether the device multiplies a float8 weight as it is."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        return False
    return weight.shape[0] % ALIGNMENT == 0 and weight.shape[1] % ALIGNMENT == 0


def widen(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight that a float8 one and its scales stand for, rounded to `dtype`."""
    widened_halves = [
        half.float() * scale for half, scale in zip(weight.chunk(len(scales)), scales, strict=True)
    ]
    return torch.cat(widened_halves).to(dtype)


def round_input(x: Tensor, scale: Tensor) -> Tensor:
    """Round activations to float8 by their static scale; what lies beyond 448 times it is cut."""
    return (x.float() / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)


class Float8Linear(Linear):
    """x W^T + b with input and weight in float8, summed in float32, result in x's type.

    weight: [out, in] float8; weight_scales: float32 [1], or [2] for two stacked halves;
    input_scale: float32 [1].
    """

    def __init__(
        self, weight: Tensor, weight_scales: Tensor, input_scale: Tensor, bias: Tensor | None
    ) -> None:
        self.bias = bias
        self.packed = None
        self.weight = weight
        # A copy of each scale: cuBLAS refuses one whose address is no multiple of 16.
        scales = [scale.clone() for scale in weight_scales]
        self.scaled_halves = list(zip(weight.chunk(len(scales)), scales, strict=True))
        self.input_scale = input_scale.reshape(())

    def __call__(self, x: Tensor) -> Tensor:
        rounded = round_input(x, self.input_scale).flatten(0, -2)
        multiply: Any = torch._scaled_mm
        products = [
            multiply(rounded, half.t(), scale_a=self.input_scale, scale_b=scale, out_dtype=x.dtype)
            for half, scale in self.scaled_halves
        ]
        y = torch.cat(products, -1) if len(products) > 1 else products[0]
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias
