"""The trainable methods: one module each, imported only when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import TrainingMethod

# The methods, with what they take for settings that have no common default.
TRAINABLE: dict[str, Mapping[str, Any]] = {
    "redrafter": {"learning_rate": 1e-3, "self_distillation": 0.0},
    "medusa": {"learning_rate": 1e-3, "self_distillation": 0.0},
    "eagle": {"learning_rate": 1e-4, "self_distillation": 1.0},
}


def load_method(name: str) -> TrainingMethod:
    """Import the module of a method and return its description."""
    method: TrainingMethod = importlib.import_module(f".{name}", __name__).METHOD
    return method
