"""Gated DeltaNet beside its formula, token by token in float64 (arXiv 2412.06464, equation 10)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec.engine.delta_net import DeltaNet
from specdec.engine.layers import Norm
from specdec.engine.linear_states import LinearStates
from specdec.model.linear_attention import LinearAttention

SIZES = LinearAttention(num_key_heads=2, num_value_heads=4, key_size=6, value_size=5, num_taps=3)
WIDTH = 4 * 5
Array = np.ndarray[Any, Any]


def make_net(seed: int) -> tuple[DeltaNet, dict[str, Array]]:
    dice = np.random.default_rng(seed)
    weights = {
        "taps": dice.normal(size=(3, SIZES.num_channels)), "decay": -dice.uniform(0.1, 2, 4),
        "bias": dice.normal(size=4), "norm": dice.uniform(0.5, 1.5, 5),
    }  # fmt: skip
    tensors = {name: torch.from_numpy(array).float() for name, array in weights.items()}
    unused: Any = None
    net = DeltaNet(
        sizes=SIZES, index=0, ba=unused, taps=tensors["taps"], decay=tensors["decay"],
        bias=tensors["bias"], norm=Norm(tensors["norm"], None, 1e-5),
    )  # fmt: skip
    return net, weights


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def compute(qkvz: Array, ba: Array, weights: dict[str, Array]) -> Array:
    """The outputs [T, V * J] of one text from its start, S of each value head as [I, J]."""
    states, outputs = np.zeros((4, 6, 5)), []
    inputs = np.concatenate([np.zeros((2, SIZES.num_channels)), qkvz[:, : SIZES.num_channels]])
    for t in range(len(qkvz)):
        mixed = silu(sum(inputs[t + tap] * weights["taps"][tap] for tap in range(3)))
        q, k = (mixed[start : start + 12].reshape(2, 6) for start in (0, 12))
        v, gate = mixed[24:].reshape(4, 5), qkvz[t, SIZES.num_channels :].reshape(4, 5)
        q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        strengths = 1 / (1 + np.exp(-ba[t, :4]))
        decays = np.exp(weights["decay"] * np.log1p(np.exp(ba[t, 4:] + weights["bias"])))
        for head in range(4):
            query, key = q[head // 2] / np.sqrt(6), k[head // 2]  # two value heads share a key head
            state = decays[head] * states[head]
            state = state + np.outer(key, strengths[head] * (v[head] - key @ state))
            states[head], output = state, query @ state
            output = output / np.sqrt((output**2).mean() + 1e-5) * weights["norm"]
            outputs.append(output * silu(gate[head]))
    return np.stack(outputs).reshape(len(qkvz), WIDTH)


@pytest.mark.parametrize("is_drafted", [False, True])
def test_outputs_are_those_of_the_formula(is_drafted: bool) -> None:
    """A text of 9 tokens: a prompt of 4, a step of one and two drafts, of which one is accepted.

    The rejected token leaves nothing behind, and the tokens behind it are those of the text.
    """
    net, weights = make_net(1)
    dice = np.random.default_rng(2)
    qkvz, ba = dice.normal(size=(9, SIZES.num_channels + WIDTH)), dice.normal(size=(9, 8))
    wrong = dice.normal(size=(1, SIZES.num_channels + WIDTH)), dice.normal(size=(1, 8))
    states = LinearStates(SIZES, 1, 2, torch.float32, torch.device("cpu"))
    outputs, past = [], 0
    # Tokens, how many of them are certain, how many are committed.
    for count, certain, kept in ((4, 4, 4), (3, 1, 2), (2, 2, 2)) if is_drafted else (
        (1, 1, 1), (3, 3, 3), (4, 4, 4)
    ):  # fmt: skip
        values, strengths = qkvz[past : past + count], ba[past : past + count]
        if kept < count:
            values = np.concatenate([values[:kept], wrong[0]])
            strengths = np.concatenate([strengths[:kept], wrong[1]])
        positions = past + np.arange(count)[None]
        runs = states.begin(np.array([1]), positions, np.array([past]), None, np.array([certain]))
        found = net.run(
            torch.from_numpy(values[None]).float(), torch.from_numpy(strengths[None]).float(),
            states, runs,
        )  # fmt: skip
        outputs.append(found[0, :kept].numpy())
        past += kept
        states.finish(runs)
    expected = compute(qkvz, ba, weights)[:past]
    np.testing.assert_allclose(np.concatenate(outputs), expected, rtol=2e-4, atol=2e-5)
    assert not states.state[0, 0].any(), "another row's state is its own"
