"""Speculative methods at conversion: one converter each, a module under the method's name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specdec.errors import UsageError
from specdec.methods import METHODS

from .base import DrafterConverter

if TYPE_CHECKING:
    from ..settings import ConvertSettings


def _load(name: str) -> DrafterConverter:
    module: Any = importlib.import_module(f"{__name__}.{name}")
    converter: DrafterConverter = module
    return converter


CONVERTERS: dict[str, DrafterConverter] = {name: _load(name) for name in METHODS}


def name_flag(setting: str) -> str:
    """Return a setting's name on the command line."""
    return "--" + setting.replace("_", "-")


def list_drafter_flags() -> list[str]:
    """The flags that name a drafter's folder."""
    return [name_flag(converter.FOLDER) for converter in CONVERTERS.values()]


def find_converter(settings: ConvertSettings) -> DrafterConverter | None:
    """Return the converter of the drafter that is given, or None for a plain conversion.

    Raises UsageError for more than one drafter, and for a method's option without its drafter.
    """
    given = [c for c in CONVERTERS.values() if getattr(settings, c.FOLDER) is not None]
    if len(given) > 1:
        raise UsageError(
            f"{' and '.join(name_flag(c.FOLDER) for c in given)} are both given",
            "a checkpoint holds one drafter: give one of them",
        )
    for converter in CONVERTERS.values():
        if converter in given:
            continue
        for option in converter.OPTIONS:
            if getattr(settings, option) not in (None, False):
                raise UsageError(
                    f"{name_flag(option)} has no effect without {name_flag(converter.FOLDER)}",
                    "give the drafter's folder, or leave the option out",
                )
    return given[0] if given else None
