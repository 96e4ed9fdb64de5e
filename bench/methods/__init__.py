"""Drafting methods in specdec tune: one module each, under the method's name."""

from __future__ import annotations

import importlib
from typing import Any

from specdec.methods import Method

from .base import Tuning, take_checkpoint


def load_tuning(method: Method) -> Tuning:
    """How a method is tuned, by its module: `list_candidates`, and `prepare` if it needs one."""
    module: Any = importlib.import_module(f"{__name__}.{method.name}")
    return Tuning(module.list_candidates, getattr(module, "prepare", take_checkpoint))
