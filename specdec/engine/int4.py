"""Rounding weights to int4: codes from 0 to 15 and one float32 scale per group of a row's inputs.

weight[n, d] = scale[n, d // group] * (code[n, d] - 8), as specdec/model/int4.py stores them;
integers.py multiplies with them. The number of largest magnitude decides a group's scale: of those
that make it one of RATIOS times the scale, the one with the least squared error is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import SpecDecError

# Codes less 8 are -8 to 7. Beyond -8 the largest itself is cut, and all else is finer.
RATIOS = (-8.0, -8.7, -9.5, -7.2)
BLOCK_NUMBERS = 1 << 20  # rounded at a time


def choose_scales(weight: Tensor, group: int, name: str) -> Tensor:
    """Choose scales [N, D / group] of a matrix [N, D]; 1 for a group of zeros."""
    num_outputs, depth = weight.shape
    height = max(1, BLOCK_NUMBERS // depth)
    blocks = [weight[start : start + height] for start in range(0, num_outputs, height)]
    scales = torch.cat([_choose_block(block.float().reshape(-1, group)) for block in blocks])
    if not scales.isfinite().all():
        raise SpecDecError(
            f"{name} has NaN or infinite values: there are no scales for them",
            "leave --quantization out, or repair the model",
        )
    return scales.reshape(num_outputs, depth // group)


def _choose_block(numbers: Tensor) -> Tensor:
    """Choose scales [n] of groups [n, group]."""
    extreme_values = numbers.gather(1, numbers.abs().argmax(1, keepdim=True))
    best_scales, least_errors = (
        torch.ones_like(extreme_values),
        torch.full_like(extreme_values, torch.inf),
    )
    for ratio in RATIOS:
        scales = torch.where(extreme_values == 0, 1.0, extreme_values / ratio)
        error = (_round(numbers, scales).mul_(scales) - numbers).square_().sum(1, keepdim=True)
        best_scales = torch.where(error < least_errors, scales, best_scales)
        least_errors = torch.minimum(error, least_errors)
    return torch.where(extreme_values.isfinite(), best_scales, torch.nan)


def _round(numbers: Tensor, scales: Tensor) -> Tensor:
    return (numbers / scales).round_().clamp_(-8, 7)


def round_weight(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the codes nearest to 8 + weight / scale, ties to even: [N, D] uint8."""
    num_outputs, depth = weight.shape
    codes = torch.empty(num_outputs, depth, dtype=torch.uint8)
    height = max(1, BLOCK_NUMBERS // depth)
    for start in range(0, num_outputs, height):
        block_scales = scales[start : start + height, :, None]
        numbers = weight[start : start + height].float().reshape(*block_scales.shape[:2], -1)
        codes[start : start + height] = (_round(numbers, block_scales) + 8).reshape(-1, depth)
    return codes
