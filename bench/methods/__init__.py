"""Drafting methods in specdec tune: one module each, under the method's name."""

from __future__ import annotations

import importlib
from typing import Any

from specdec.methods import Method

from .base import Tuning


def load_tuning(method: Method) -> Tuning:
    """Return the module that tunes a method."""
    module: Any = importlib.import_module(f"{__name__}.{method.name}")
    tuning: Tuning = module
    return tuning
