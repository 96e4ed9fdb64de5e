"""Steps of two texts over a layer with a state, ragged, with drafts that are not kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.engine.linear_states import LinearStates

Array = npt.NDArray[Any]
# Tokens of each text, how many of them are certain, and how many are committed.
STEPS = (((1, 4), (1, 4), (1, 4)), ((4, 3), (1, 1), (1, 3)), ((5, 5), (1, 1), (3, 5)),
         ((1, 2), (1, 2), (1, 2)), ((2, 1), (0, 0), (2, 1)))  # fmt: skip


def mix_in_steps(net: Any, states: LinearStates, products: Array, wrong: Array) -> list[Array]:
    """Return a layer's outputs of the kept tokens of each text, [T, D].

    products, wrong: [2, T, W], of the texts and of drafts that are not kept. The texts lie in rows
    0 and 2.
    """
    rows, past = np.array([0, 2]), np.zeros(2, np.int64)
    outputs: tuple[list[Array], list[Array]] = [], []
    for counts, certain, kept in STEPS:
        size = max(counts)
        step = np.full((2, size, products.shape[-1]), 7.0)
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
    return [np.concatenate(texts) for texts in outputs]
