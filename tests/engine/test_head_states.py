"""Layers with a state for each head, by a toy kind of layer whose formula is one line of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.engine.head_states import HeadStateLayer
from specdec.engine.layers import Norm
from specdec.engine.linear_states import LinearStates
from specdec.model.linear_attention import LinearAttention

SIZES = LinearAttention(num_key_heads=2, num_value_heads=6, key_size=3, value_size=5, num_taps=3)
WIDTH, NUM_TOKENS = SIZES.sections[2], 40
Array = np.ndarray[Any, Any]


class ToyLayer(HeadStateLayer):
    """Layer that fades its state by half of a rate, and adds what its key does not yet yield."""

    def split_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.view_heads(mixed)

    def weigh(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        return rates, rates / 2

    def find_delta(self, key: Tensor, value: Tensor, faded: Tensor, strength: Tensor) -> Tensor:
        return strength * (value - (key[:, :, None] @ faded)[:, :, 0])

    def finish(self, outputs: Tensor, values: Tensor, gate: Tensor) -> Tensor:
        return outputs + gate


def compute(product: Array, rates: Array, taps: Array) -> Array:
    """The outputs [T, V * J] of one text from its start, in float64."""
    inputs, gate = product[:, : SIZES.num_channels], product[:, SIZES.num_channels :]
    padded = np.concatenate([np.zeros((2, SIZES.num_channels)), inputs])
    state, outputs = np.zeros((6, 3, 5)), []
    for t, rate in enumerate(rates):
        mixed = (padded[t : t + 3] * taps).sum(0)
        mixed = mixed / (1 + np.exp(-mixed))
        q, k = (mixed[start : start + 6].reshape(2, 3).repeat(3, axis=0) for start in (0, 6))
        v = mixed[12:].reshape(6, 5)
        state = rate[:, None, None] / 2 * state
        delta = rate[:, None] * (v - np.einsum("vi,vij->vj", k, state))
        state = state + np.einsum("vi,vj->vij", k, delta)
        outputs.append(np.einsum("vi,vij->vj", q, state).reshape(-1) + gate[t])
    return np.stack(outputs)


@pytest.mark.parametrize("seed", range(3))
def test_any_steps_give_the_formula_s_outputs(seed: int) -> None:
    """Three texts in steps of any sizes, certain beginnings and accepted drafts, drawn by seed.

    Rejected tokens, tokens of no run, other rows and other layers leave nothing in a state.
    """
    dice = np.random.default_rng(seed)
    taps = dice.normal(size=(3, SIZES.num_channels))
    products = dice.normal(size=(3, NUM_TOKENS, SIZES.num_channels + WIDTH))
    rates = dice.uniform(0.2, 1, size=(3, NUM_TOKENS, 6))
    unused: Any = torch.zeros(6)
    layer = ToyLayer(sizes=SIZES, index=1, taps=torch.from_numpy(taps).float(), decay=unused,
                     bias=unused, norm=Norm(unused, None, 1e-5))  # fmt: skip
    states = LinearStates(SIZES, 2, 5, torch.float32, torch.device("cpu"))
    past: Any = np.zeros(3, np.int64)
    outputs = [list[Array]() for _ in range(3)]
    while past.max() < NUM_TOKENS - 7:
        texts = np.flatnonzero(dice.random(3) < 0.7)
        if not len(texts):
            continue
        counts = dice.integers(1, 7, len(texts))
        certain = dice.integers(0, counts + 1)
        kept = dice.integers(certain, counts + 1)
        size = int(counts.max())
        step = dice.normal(size=(len(texts), size, products.shape[-1]))
        step_rates = dice.uniform(0.2, 1, size=(len(texts), size, 6))
        for number, text in enumerate(texts.tolist()):
            tokens = slice(past[text], past[text] + kept[number])
            step[number, : kept[number]] = products[text, tokens]
            step_rates[number, : kept[number]] = rates[text, tokens]
        positions = past[texts, None] + np.arange(size)
        runs = states.begin(texts + 1, positions, past[texts], counts, certain)
        found = layer.scan(
            torch.from_numpy(step).float(), torch.from_numpy(step_rates).float(), states, runs
        ).numpy()  # fmt: skip
        states.finish(runs)
        for number, text in enumerate(texts.tolist()):
            outputs[text].append(found[number, : kept[number]])
            assert not found[number, counts[number] :].any(), "tokens of no run have zeros"
        past[texts] += kept
    for text in range(3):
        expected = compute(products[text, : past[text]], rates[text, : past[text]], taps)
        np.testing.assert_allclose(np.concatenate(outputs[text]), expected, rtol=1e-4, atol=1e-4)
    assert not states.state[0].any()
    assert not states.state[1, [0, 4]].any()


def test_a_kind_of_layer_says_what_it_computes() -> None:
    """Without it nothing is computed, rather than something else."""
    unused: Any = torch.zeros(6)
    layer = HeadStateLayer(sizes=SIZES, index=0, taps=torch.zeros(3, SIZES.num_channels),
                           decay=unused, bias=unused, norm=Norm(unused, None, 1e-5))  # fmt: skip
    states = LinearStates(SIZES, 1, 1, torch.float32, torch.device("cpu"))
    runs = states.begin(np.array([0]), np.array([[0]]), np.array([0]), None, np.array([1]))
    product = torch.ones(1, 1, SIZES.num_channels + WIDTH)
    with pytest.raises(NotImplementedError):
        layer.scan(product, torch.ones(1, 1, 6), states, runs)
