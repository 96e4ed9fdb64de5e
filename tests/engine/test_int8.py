"""Rounding weights to int8; test_integers.py has the products."""

from __future__ import annotations

import pytest
import torch

from specdec.engine import int8
from specdec.errors import SpecDecError


def test_rounding() -> None:
    weight = torch.tensor([[1.27, -0.634, 0.004, 0.016], [0.0, 0.0, 0.0, 0.0], [-2, 1.02, 0, 0.5]])
    scales = int8.make_scales(int8.find_largest(weight), "w")
    assert scales.tolist() == pytest.approx([0.01, 1.0, 2 / 127])
    assert int8.round_weight(weight, scales).tolist() == [
        [127, -63, 0, 2],
        [0, 0, 0, 0],
        [-127, 65, 0, 32],
    ]
    tiny = torch.tensor([[1e-44, -1e-44]])
    scales = int8.make_scales(int8.find_largest(tiny), "w")
    assert scales > 0
    assert int8.round_weight(tiny, scales).abs().max() <= 127


def test_no_integer_is_half_a_step_off() -> None:
    weight = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    integers, scales = int8.quantize(weight, "w")
    assert (integers.abs().amax(1) == 127).all()
    error = (integers.double() * scales.double()[:, None] - weight.double()).abs()
    assert (error <= scales.double()[:, None] * 0.50001).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_without_a_scale_are_refused(value: float) -> None:
    weight = torch.ones(4, 3)
    weight[2, 1] = value
    with pytest.raises(SpecDecError, match=r"m.weight has NaN or infinite .* 1 of 4 .* is 2"):
        int8.make_scales(int8.find_largest(weight), "m.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.5])
def test_scales_that_no_build_writes_are_refused(value: float) -> None:
    scales = torch.ones(4)
    int8.check_scales(scales, "s")
    scales[3] = value
    with pytest.raises(SpecDecError, match=r"s: 1 of 4 scales .* row 3"):
        int8.check_scales(scales, "s")
