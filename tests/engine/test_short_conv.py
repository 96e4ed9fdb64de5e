"""Gated short convolutions beside their formula in float64 (arXiv 2511.23404, section 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec.engine.linear_states import LinearStates
from specdec.engine.short_conv import ShortConv
from specdec.model.short_conv import ShortConvSizes

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
    rows, outputs = np.array([0, 2]), [[], []]  # type: tuple[Array, list[list[Array]]]
    past = np.zeros(2, np.int64)
    # Tokens of each text, how many of them are certain, and how many are committed.
    steps = (((1, 4), (1, 4), (1, 4)), ((4, 3), (1, 1), (1, 3)), ((5, 5), (1, 1), (3, 5)),
             ((1, 2), (1, 2), (1, 2)), ((2, 1), (0, 0), (2, 1)))  # fmt: skip
    for counts, certain, kept in steps:
        size = max(counts)
        step = np.full((2, size, 3 * CHANNELS), 7.0)
        for text in range(2):
            step[text, : counts[text]] = wrong[text, : counts[text]]
            step[text, : kept[text]] = products[text, past[text] : past[text] + kept[text]]
        runs = states.begin(
            rows, past[:, None] + np.arange(size), past, np.array(counts), np.array(certain)
        )
        product = torch.from_numpy(step).float()
        found = net.mix(product, product, states, runs).numpy()
        states.finish(runs)
        for text in range(2):
            outputs[text].append(found[text, : kept[text]])
            assert not found[text, counts[text] :].any(), "tokens of no run"
        past = past + kept
    for text in range(2):
        expected = compute(products[text, : past[text]], taps, bias)
        np.testing.assert_allclose(np.concatenate(outputs[text]), expected, rtol=1e-4, atol=1e-5)
    assert not states.window[0].any(), "another layer's state is its own"
    assert not states.window[1, 1].any(), "another row's state is its own"
