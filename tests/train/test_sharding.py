"""Sharded drafters: what they compute otherwise than whole ones, and the bytes of both."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from specdec.train import sharding
from specdec.train.optimizer import make_optimizers
from specdec.train.settings import TrainSettings
from tests.train import test_drafter_losses as drafters

KINDS = ("redrafter", "medusa-soft", "eagle", "eagle3", "p-eagle", "dspark")


def compute_gradients(kind: str, length: int, *, is_sharded: bool) -> tuple[Any, ...]:
    """Return the loss, the gradients, and how often each module with a matrix was called."""
    drafter = drafters.make_drafter(kind)
    drafter.eval()
    drafter.is_sharded = is_sharded
    calls: collections.Counter[str] = collections.Counter()
    names = {module: name for name, module in drafter.named_modules()}
    for module in sharding.list_matrix_modules(drafter):
        module.register_forward_hook(lambda module, *_: calls.update([names[module]]))
    features, mask = drafters.make_batch(length=length)
    loss, _ = drafter(features, mask, drafter.count_labels(mask), True)
    loss.backward()
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in drafter.named_parameters()
    }
    return loss.detach(), gradients, calls


@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_calls_all_modules_equally_often(kind: str) -> None:
    """Else processes would wait for one another; and deferred gradients have the same bits."""
    all_calls = []
    for length in (2, 3, 8):
        loss, gradients, _ = compute_gradients(kind, length, is_sharded=False)
        sharded_loss, sharded_gradients, calls = compute_gradients(kind, length, is_sharded=True)
        assert torch.equal(sharded_loss, loss)
        for name, gradient in gradients.items():
            assert torch.equal(sharded_gradients[name], gradient), name
        all_calls.append(calls)
    assert all_calls[0] == all_calls[1] == all_calls[2]
    drafter = drafters.make_drafter(kind)
    assert len(all_calls[0]) == len(sharding.list_matrix_modules(drafter))


def test_bytes_of_a_process() -> None:
    """Of EAGLE-3 by hand: AdamW has two states for a weight, Muon one for a matrix of a layer."""
    drafter = drafters.make_drafter("eagle3")
    num_weights = sum(weight.numel() for weight in drafter.parameters())
    layers = ("fc", "self_attn.", "mlp.")
    num_matrices = sum(
        weight.numel()
        for name, weight in drafter.named_parameters()
        if any(layer in name for layer in layers)
    )
    largest = max(weight.numel() for weight in drafter.parameters())
    for optimizer, num_states in {
        "adamw": 2 * num_weights, "muon": 2 * num_weights - num_matrices,
    }.items():  # fmt: skip
        optimizers = make_optimizers(TrainSettings(optimizer=optimizer, learning_rate=0.1), drafter)
        sizes = sharding.estimate_bytes(drafter, optimizers)
        kept = 2 * num_weights + num_states
        assert sizes["whole"] == 4 * (kept + num_weights)
        gathered = 4 * sharding.GATHERED_COPIES * largest
        assert sizes["sharded"] == {str(n): 4 * (kept // n) + gathered for n in (2, 4, 8)}
