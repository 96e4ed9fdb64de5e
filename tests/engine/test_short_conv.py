"""Gated short convolutions beside their formula in float64 (arXiv 2511.23404, section 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec.engine.linear_states import LinearStates
from specdec.engine.short_conv import ShortConv
from specdec.model.short_conv import ShortConvSizes
from tests.engine.state_steps import mix_in_steps

CHANNELS = 5
Array = np.ndarray[Any, Any]


def compute(product: Array, taps: Array, bias: Array) -> Array:
    """The outputs [T, C] of one text from its start."""
    in_gate, out_gate, x = np.split(product, 3, axis=-1)
    before = len(taps) - 1
    gated = np.concatenate([np.zeros((before, CHANNELS)), in_gate * x])
    mixed = [(gated[t : t + len(taps)] * taps).sum(0) + bias for t in range(len(product))]
    return out_gate * np.stack(mixed)


@pytest.mark.parametrize("num_taps", [2, 3, 5])
def test_outputs_are_those_of_the_formula(num_taps: int) -> None:
    """Two texts side by side: prompts, and drafts of which none, some or all are accepted.

    A rejected token leaves nothing behind; the window is that of the text's last tokens.
    """
    sizes = ShortConvSizes(num_channels=CHANNELS, num_taps=num_taps, has_bias=True)
    dice = np.random.default_rng(num_taps)
    taps, bias = dice.normal(size=(num_taps, CHANNELS)), dice.normal(size=CHANNELS)
    products, wrong = (dice.normal(size=(2, 20, 3 * CHANNELS)) for _ in range(2))
    states = LinearStates(sizes, 2, 3, torch.float32, torch.device("cpu"))
    net = ShortConv(
        sizes=sizes, index=1, taps=torch.from_numpy(taps).float(),
        bias=torch.from_numpy(bias).float(),
    )  # fmt: skip
    outputs = mix_in_steps(net, states, products, wrong)
    for text, found in enumerate(outputs):
        expected = compute(products[text, : len(found)], taps, bias)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not states.window[0].any(), "another layer's state is its own"
    assert not states.window[1, 1].any(), "another row's state is its own"
