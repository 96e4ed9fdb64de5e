"""Optimizers of a training: AdamW for all weights, or Muon for the matrices and AdamW for the rest.

Muon (https://kellerjordan.github.io/posts/muon/) steps by the momentum made orthogonal. Its steps
are scaled to the size of AdamW's (https://arxiv.org/abs/2502.16982), so that one learning rate fits
both. Embeddings, output layers, norms and biases are AdamW's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecDecError

from .methods.base import TrainableDrafter
from .settings import TrainSettings

# Entries of a weight's state by the key under which a checkpoint holds the optimizer.
STATE_NAMES = {
    "optimizer": frozenset({"exp_avg", "exp_avg_sq", "step"}),
    "muon": frozenset({"momentum_buffer"}),
}


def check_optimizer(settings: TrainSettings) -> None:
    """Raise SpecDecError where the installed torch has no such optimizer."""
    if settings.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        raise SpecDecError(
            f"--optimizer muon: torch {torch.__version__} has no Muon",
            "install torch 2.9 or later, or train with --optimizer adamw",
        )


def list_matrices(drafter: TrainableDrafter) -> list[str]:
    """List the weights that Muon trains, by name."""
    tables = {
        f"{name}.weight"
        for name, module in drafter.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }
    return [
        name
        for name, weight in drafter.named_parameters()
        if weight.dim() == 2
        and min(weight.shape) > 1
        and name not in tables
        and name not in drafter.output_layers
    ]


def make_optimizers(
    settings: TrainSettings, drafter: TrainableDrafter
) -> dict[str, torch.optim.Optimizer]:
    """Make the optimizers by their keys in a checkpoint; learning rates are set at every step."""
    options: dict[str, Any] = {
        "lr": settings.learning_rate, "weight_decay": settings.weight_decay,
    }  # fmt: skip
    if settings.optimizer == "adamw":
        return {"optimizer": torch.optim.AdamW(drafter.parameters(), **options)}
    names = set(list_matrices(drafter))
    weights = dict(drafter.named_parameters())
    matrices = [weight for name, weight in weights.items() if name in names]
    others = [weight for name, weight in weights.items() if name not in names]
    if not matrices:
        raise SpecDecError(
            "--optimizer muon: the drafter has no matrices but embeddings and output layers",
            "train with --optimizer adamw, or give the drafter layers",
        )
    muon: type[torch.optim.Muon] = torch.optim.Muon
    if drafter.is_sharded:
        from .sharding import ShardedMuon as muon
    return {
        "optimizer": torch.optim.AdamW(others, **options),
        "muon": muon(matrices, **options, adjust_lr_fn="match_rms_adamw"),
    }


def compute_learning_rate(
    settings: TrainSettings, step: int, num_steps: int, key: str = "optimizer"
) -> float:
    """Return a step's learning rate: linear warm-up, then half a cosine to zero; step: from 0.

    key: of the optimizer, as in `make_optimizers`.
    """
    highest_rate = settings.learning_rate
    if key == "muon" and settings.muon_learning_rate is not None:
        highest_rate = settings.muon_learning_rate
    num_warmup = round(settings.warmup_ratio * num_steps)
    if step < num_warmup:
        return highest_rate * (step + 1) / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    return highest_rate * 0.5 * (1 + math.cos(math.pi * progress))


def list_weights(optimizer: Any) -> list[Tensor]:
    """List an optimizer's weights in the order in which its state numbers them."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def check_states(checkpoint: Mapping[str, Any], optimizers: Mapping[str, Any]) -> None:
    """Raise ValueError where a checkpoint's states are not of these optimizers' weights."""
    for key in STATE_NAMES:
        if (key in checkpoint) != (key in optimizers):
            raise ValueError("the weights were trained by another optimizer")
    for key, optimizer in optimizers.items():
        _check_state(checkpoint[key]["state"], list_weights(optimizer), STATE_NAMES[key])


def _check_state(
    state: Mapping[Any, Any], weights: Sequence[Tensor], entry_names: frozenset[str]
) -> None:
    """Raise ValueError where a state is not of these weights.

    torch's optimizers take tensors of any shape, and fail, or broadcast them, at the next step.
    """
    for index, entry in state.items():
        is_weight = type(index) is int and 0 <= index < len(weights)
        if not is_weight or entry.keys() != entry_names:
            raise ValueError("the optimizer is of another drafter")
        for name, tensor in entry.items():
            shape = torch.Size(()) if name == "step" else weights[index].shape
            if not isinstance(tensor, Tensor) or tensor.shape != shape:
                raise ValueError(f"{name} of the optimizer is not {list(shape)}")
