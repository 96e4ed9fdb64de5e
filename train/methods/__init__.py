"""Trainable methods: one module each, imported only when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import TrainingMethod


def load_method(name: str) -> TrainingMethod:
    """Import the module of a method and return its entry."""
    method: TrainingMethod = importlib.import_module(f".{name}", __name__).METHOD
    return method
