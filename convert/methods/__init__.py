"""Drafting methods at conversion: one converter each, a module under the method's name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specdec.errors import UsageError
from specdec.methods import METHODS, Method
from specdec.options import list_given, name_flag

from .base import DrafterConverter

if TYPE_CHECKING:
    from ..settings import ConvertSettings

# Option that names a drafter's folder -> the method.
FOLDERS = {method.folder: method for method in METHODS.values() if method.folder is not None}


def load_converter(method: Method) -> DrafterConverter:
    """Return the module that converts a method's drafters."""
    module: Any = importlib.import_module(f"{__name__}.{method.name}")
    converter: DrafterConverter = module
    return converter


def list_folder_flags() -> list[str]:
    """The flags that name a drafter's folder."""
    return [name_flag(option) for option in FOLDERS]


def find_folder(settings: ConvertSettings) -> str | None:
    """Return the option, a key of FOLDERS, by which a drafter is given; None where none is.

    Raises UsageError for more than one drafter, and for a method's option without its drafter.
    """
    given = [option for option in FOLDERS if getattr(settings, option) is not None]
    if len(given) > 1:
        raise UsageError(
            f"{' and '.join(map(name_flag, given))} are both given",
            "a checkpoint holds one drafter: give one of them",
        )
    for folder, method in FOLDERS.items():
        useless = [] if folder in given else list_given(settings, method.options["convert"])
        if useless:
            raise UsageError(
                f"{name_flag(useless[0])} has no effect without {name_flag(folder)}",
                "give the drafter's folder, or leave the option out",
            )
    return given[0] if given else None


def find_converter(settings: ConvertSettings) -> DrafterConverter | None:
    """Return the converter of the drafter that is given, or None for a plain conversion."""
    folder = find_folder(settings)
    return load_converter(FOLDERS[folder]) if folder is not None else None
