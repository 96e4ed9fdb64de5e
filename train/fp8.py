"""Hidden states in FP8: e4m3 (https://arxiv.org/abs/2209.05433) with a scale for each token.

A token's scale is its largest absolute value over 448, the largest e4m3 number; what is read is
number x scale, computed in float32 and rounded to the type of the computation. A value is off by at
most a sixteenth of itself, or, where it is less than 1 / 28,672 of the largest, by a
459,000th of the largest. Legend: N tokens, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = "float8_e4m3fn"
LARGEST = 448.0  # number of that type


def quantize_states(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers [N, D] in e4m3 and the scales [N] in float32 of states [N, D]."""
    values = states.float()
    scales = values.abs().amax(1) / LARGEST
    scales = torch.where(scales == 0, 1.0, scales.clamp_min(torch.finfo(torch.float32).tiny))
    numbers = (values / scales[:, None]).clamp(-LARGEST, LARGEST)
    return numbers.to(torch.float8_e4m3fn), scales


def restore_states(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the states [N, D] that are stored as these numbers and scales."""
    return (numbers.float() * scales[:, None]).to(dtype)
