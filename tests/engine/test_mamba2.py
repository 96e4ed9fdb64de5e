"""Mamba-2 beside its formula, token by token in float64 (arXiv 2405.21060, section 7)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec.engine.layers import Norm
from specdec.engine.linear_states import LinearStates
from specdec.engine.mamba2 import Mamba2
from specdec.engine.native import NativeKernels
from specdec.model.mamba2 import Mamba2Sizes
from tests.engine.state_steps import mix_in_steps

Array = np.ndarray[Any, Any]
EPSILON = 1e-3


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def compute(product: Array, sizes: Mamba2Sizes, weights: dict[str, Array]) -> Array:
    """The outputs [T, V * J] of one text from its start, of C, B, x, z and rates."""
    groups, heads, width = sizes.num_key_heads, sizes.num_value_heads, sizes.sections[2]
    inputs, gate, rates = np.split(product, [sizes.num_channels, sizes.num_channels + width], -1)
    padded = np.concatenate([np.zeros((sizes.num_taps - 1, sizes.num_channels)), inputs])
    state, outputs = np.zeros((heads, sizes.key_size, sizes.value_size)), []
    for t in range(len(product)):
        window = padded[t : t + sizes.num_taps]
        mixed = silu((window * weights["taps"]).sum(0) + weights["conv_bias"])
        c, b, x = np.split(mixed, np.cumsum(sizes.sections)[:2])
        c, b = (part.reshape(groups, -1).repeat(heads // groups, 0) for part in (c, b))
        x = x.reshape(heads, -1)
        length = np.log1p(np.exp(rates[t] + weights["bias"]))
        fade = np.exp(weights["decay"] * length)
        state = fade[:, None, None] * state + b[:, :, None] * (length[:, None] * x)[:, None]
        y = np.einsum("vi,vij->vj", c, state) + weights["skip"][:, None] * x
        gated = (y.reshape(-1) * silu(gate[t])).reshape(groups, -1)
        scale = np.sqrt((gated**2).mean(-1, keepdims=True) + EPSILON)
        outputs.append((gated / scale).reshape(-1) * weights["norm"])
    return np.stack(outputs)


SHAPES = pytest.mark.parametrize(("groups", "heads", "num_taps"), [(1, 4, 4), (2, 6, 2)])


@SHAPES
def test_outputs_are_those_of_the_formula(groups: int, heads: int, num_taps: int) -> None:
    check_outputs(groups, heads, num_taps, None)


def check_outputs(groups: int, heads: int, num_taps: int, kernels: NativeKernels | None) -> None:
    """Two texts side by side: prompts, and drafts of which none, some or all are accepted.

    A rejected token leaves nothing behind, and other rows and layers keep their states.
    """
    sizes = Mamba2Sizes(
        num_key_heads=groups, num_value_heads=heads, key_size=7, value_size=35, num_taps=num_taps
    )
    dice = np.random.default_rng(num_taps)
    width = sizes.num_channels + sizes.sections[2] + heads
    weights = {
        "taps": dice.normal(size=(num_taps, sizes.num_channels)),
        "conv_bias": dice.normal(size=sizes.num_channels), "skip": dice.normal(size=heads),
        "decay": -np.exp(dice.normal(size=heads)), "bias": dice.normal(size=heads),
        "norm": dice.normal(size=sizes.sections[2]),
    }  # fmt: skip
    products, wrong = (dice.normal(size=(2, 20, width)) for _ in range(2))
    states = LinearStates(sizes, 2, 3, torch.float32, torch.device("cpu"))
    tensors: dict[str, Any] = {
        name: torch.from_numpy(value).float() for name, value in weights.items()
    }
    norm = Norm(tensors.pop("norm"), None, EPSILON)
    net = Mamba2(sizes=sizes, index=1, norm=norm, kernels=kernels, **tensors)
    outputs = mix_in_steps(net, states, products, wrong)
    for text, found in enumerate(outputs):
        expected = compute(products[text, : len(found)], sizes, weights)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not states.state[0].any(), "another layer's state is its own"
    assert not states.state[1, 1].any(), "another row's state is its own"
