"""Drafting methods at conversion: one converter each, a module under the method's name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specdec.methods import METHODS, Method

from .base import DrafterConverter

if TYPE_CHECKING:
    from ..settings import ConvertSettings

# Option that names a drafter's folder -> the method.
FOLDERS = {method.folder: method for method in METHODS.values() if method.folder is not None}


def load_converter(method: Method) -> type[DrafterConverter]:
    """Return the class that converts a method's drafters."""
    module: Any = importlib.import_module(f"{__name__}.{method.name}")
    converter: type[DrafterConverter] = module.CONVERTER
    return converter


def find_folder(settings: ConvertSettings) -> str | None:
    """Return the option, a key of FOLDERS, by which a drafter is given; None where none is."""
    return next((option for option in FOLDERS if getattr(settings, option) is not None), None)
