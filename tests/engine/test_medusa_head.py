"""Medusa heads against a direct reading of the paper in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec.engine.medusa import MedusaHeads
from specdec.methods.medusa import MedusaParams

HIDDEN, VOCAB, BATCH = 16, 90, 3


def make_heads(num_layers: int) -> tuple[MedusaHeads, dict[str, torch.Tensor]]:
    params = MedusaParams(num_heads=4, num_layers=num_layers, max_draft_len=63)
    model: Any = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB)
    generator = torch.Generator().manual_seed(num_layers)
    weights = {
        name: torch.randn(spec.shape, generator=generator) * 0.4
        for name, spec in params.list_tensors(model).items()
    }
    return MedusaHeads(params, weights), weights


def compute_slowly(
    weights: dict[str, torch.Tensor], head: int, num_layers: int, hidden: np.ndarray
) -> np.ndarray:
    """x + SiLU(W x + b) for every layer, then the head's own vocabulary projection; [V]."""
    x = hidden
    for layer in range(num_layers):
        linear = f"medusa_heads.{head}.medusa_layers.{layer}.linear."
        y = weights[linear + "weight"].double().numpy() @ x
        y = y + weights[linear + "bias"].double().numpy()
        x = x + y / (1 + np.exp(-y))
    logits: np.ndarray = weights[f"medusa_heads.{head}.lm_head.weight"].double().numpy() @ x
    return logits


@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_heads_equal_the_slow_reference(num_layers: int) -> None:
    heads, weights = make_heads(num_layers)
    hidden = torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
    widths = [5, 1, 3]  # the fourth head is not asked
    ranked, scores = heads.rank_tokens(hidden, widths)
    assert ranked.shape == scores.shape == (BATCH, 9)
    for row in range(BATCH):
        best: list[int] = []
        chances: list[float] = []
        for head in range(4):
            expected = compute_slowly(weights, head, num_layers, hidden[row].double().numpy())
            logits = heads.compute_logits(head, hidden)[row]
            np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-4, atol=1e-5)
            if head == 3:
                continue
            best += (order := np.argsort(-expected)[: widths[head]]).tolist()
            chances += (np.exp(expected[order]) / np.exp(expected).sum()).tolist()
        assert ranked[row].tolist() == best
        np.testing.assert_allclose(scores[row].exp().numpy(), chances, rtol=1e-4)


def test_unpacked_weights_rank_the_same() -> None:
    """As on a GPU, where no weight is laid out anew."""
    heads, weights = make_heads(1)
    plain = MedusaHeads(heads.params, weights, prepack=False)
    assert plain.lm_heads[0].weight is not None
    hidden = torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(2))
    widths = [4, 4, 4, 4]
    assert torch.equal(plain.rank_tokens(hidden, widths)[0], heads.rank_tokens(hidden, widths)[0])
