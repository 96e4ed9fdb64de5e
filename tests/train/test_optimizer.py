"""Optimizers: the weights of each, Muon's step, and a torch without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.train.optimizer import (
    check_states,
    compute_learning_rate,
    list_matrices,
    list_weights,
    make_optimizers,
)
from specdec.train.settings import TrainSettings
from tests.train import test_drafter_losses as drafters
from tests.train.test_train_methods import KINDS

MUON = TrainSettings(optimizer="muon", learning_rate=0.01, weight_decay=0.1, max_grad_norm=1.0)
ATTENTION = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
LAYER = [*ATTENTION, *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))]
MATRICES = {
    "redrafter": ["lm_head.0.linear.weight", "lm_head.1.linear.weight", "rnn_u.weight",
                  "rnn_w.weight"],
    "medusa": [f"{head}.0.linear.weight" for head in range(drafters.STEPS)],
    "eagle": ["fc.weight", *(f"layers.0.{name}" for name in LAYER)],
    "eagle3": ["fc.weight", *(f"layers.0.{name}" for name in LAYER)],
    "p-eagle": ["fc.weight", *(f"layers.0.{name}" for name in LAYER)],
    "dspark": ["fc.weight", *(f"layers.{i}.{name}" for i in range(2) for name in LAYER)],
}  # fmt: skip


@pytest.mark.parametrize("kind", MATRICES)
def test_muon_trains_the_matrices_of_the_layers_alone(kind: str) -> None:
    drafter = drafters.make_drafter(kind)
    assert sorted(list_matrices(drafter)) == sorted(MATRICES[kind])
    optimizers = make_optimizers(MUON, drafter)
    weights = dict(drafter.named_parameters())
    trained = {
        key: {id(w) for w in list_weights(optimizer)} for key, optimizer in optimizers.items()
    }
    assert trained["muon"] == {id(weights[name]) for name in MATRICES[kind]}
    assert trained["optimizer"] == {id(w) for w in weights.values()} - trained["muon"]


def test_muon_steps_by_the_orthogonal_momentum() -> None:
    """Singular values of about 1, scaled as AdamW's steps are, and decayed weights."""
    drafter = drafters.make_drafter("eagle3")
    optimizers = make_optimizers(MUON, drafter)
    weight = drafter.get_parameter("fc.weight")
    before = weight.detach().clone()
    torch.manual_seed(1)
    weight.grad = torch.randn_like(weight)
    optimizers["muon"].step()
    step = (before * (1 - 0.01 * 0.1) - weight.detach()) / (0.01 * 0.2 * max(weight.shape) ** 0.5)
    values = torch.linalg.svdvals(step)
    assert values.min() > 0.6
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(weight.grad, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(step.flatten(), (left @ right).flatten(), 0) > 0.95


def test_both_rates_follow_one_schedule() -> None:
    settings = TrainSettings(
        optimizer="muon", learning_rate=0.01, muon_learning_rate=0.1, warmup_ratio=0.2
    )
    for step in range(10):
        rates = [compute_learning_rate(settings, step, 10, key) for key in ("optimizer", "muon")]
        assert rates[1] == pytest.approx(10 * rates[0])
    assert compute_learning_rate(settings, 0, 10, "muon") == 0.05
    assert compute_learning_rate(MUON, 0, 10, "muon") == compute_learning_rate(MUON, 0, 10)


def test_a_state_of_other_weights_is_refused() -> None:
    drafter = drafters.make_drafter("eagle3")
    optimizers = make_optimizers(MUON, drafter)
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers.values():
        optimizer.step()
    checkpoint = {key: optimizer.state_dict() for key, optimizer in optimizers.items()}
    check_states(checkpoint, optimizers)
    edits: list[Callable[[dict[str, Any]], object]] = [
        lambda c: c.pop("muon"),
        lambda c: c["muon"]["state"][0].update(momentum_buffer=torch.ones(2)),
        lambda c: c["muon"]["state"][0].update(step=torch.ones(())),
        lambda c: c["muon"]["state"].update({99: c["muon"]["state"][0]}),
    ]
    for edit in edits:
        damaged = {
            key: {"state": {i: dict(entry) for i, entry in value["state"].items()}}
            for key, value in checkpoint.items()
        }
        edit(damaged)
        with pytest.raises(ValueError, match="optimizer"):
            check_states(damaged, optimizers)


def test_a_torch_without_muon_is_said_before_the_target_is_loaded(
    run_train: Any, target_dir: Path, data_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delattr(torch.optim, "Muon")
    done = run_train(
        "--model-dir", target_dir, "--data", data_file, *KINDS["eagle3-all"], "--output-dir",
        tmp_path / "out", "--optimizer", "muon", ends=1,
    )  # fmt: skip
    assert done.last_lines == [
        f"error: --optimizer muon: torch {torch.__version__} has no Muon",
        "hint: install torch 2.9 or later, or train with --optimizer adamw",
    ]
    assert not list(tmp_path.iterdir())


def test_a_drafter_without_matrices_is_refused(
    run_train: Any, target_dir: Path, data_file: Path, tmp_path: Path
) -> None:
    done = run_train(
        "--model-dir", target_dir, "--data", data_file, "--method", "medusa",
        "--medusa-num-layers", 0, "--eval-prompts", 0, "--max-steps", 2, "--output-dir",
        tmp_path / "out", "--optimizer", "muon", ends=1,
    )  # fmt: skip
    assert "the drafter has no matrices" in done.last_lines[0]
    assert not list(tmp_path.iterdir())
