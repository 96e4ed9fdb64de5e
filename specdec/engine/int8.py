"""Rounding weights to int8: integers from -127 to 127 and one float32 scale per row, an output.

weight[n, d] = scale[n] * integer[n, d]. integers.py multiplies with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import SpecDecError

MAX_CODE = 127
# A scale below this would lose bits itself; such rows are zeros to any model.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def find_largest(weight: Tensor) -> Tensor:
    """Find the largest magnitude of each row, float32: [..., D] -> [...]."""
    return weight.float().abs().amax(-1)


def make_scales(largest_magnitudes: Tensor, name: str) -> Tensor:
    """Make scales [N] of rows by their largest magnitudes; a row of zeros has scale 1."""
    if not largest_magnitudes.isfinite().all():
        rows = (~largest_magnitudes.isfinite()).nonzero().flatten().tolist()
        raise SpecDecError(
            f"{name} has NaN or infinite values in {len(rows)} of"
            f" {len(largest_magnitudes)} rows, the first is {rows[0]}: there is no scale for them",
            "leave --quantization out, or repair the model",
        )
    scales = (largest_magnitudes / MAX_CODE).clamp(min=SMALLEST_SCALE)
    return torch.where(largest_magnitudes == 0, 1.0, scales)


def round_weight(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the integers nearest to weight / scale, ties to even: [..., D] int8."""
    rounded = (weight.float() / scales[..., None]).round()
    return rounded.clamp(-MAX_CODE, MAX_CODE).to(torch.int8)


def quantize(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return a whole matrix, or several, as integers [..., D] and scales [...]."""
    scales = make_scales(find_largest(weight), name)
    return round_weight(weight, scales), scales


def check_scales(scales: Tensor, name: str) -> None:
    """Raise SpecDecError for scales that no build writes: NaN, infinite, zero or negative."""
    is_wrong = ~(scales.isfinite() & (scales > 0))
    if is_wrong.any():
        rows = is_wrong.nonzero().flatten().tolist()
        raise SpecDecError(
            f"{name}: {len(rows)} of {len(scales)} scales are not finite and positive, the first"
            f" is that of row {rows[0]}: {float(scales[rows[0]]):g}",
            "the file is damaged: build the engine again",
        )
