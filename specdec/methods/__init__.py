"""The drafting methods: the one list. A record each, in a module of the method's name."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

from specdec.command.settings import get_flags, name_flag

from . import dflash, draft_target, eagle, lookahead, medusa, prompt_lookup, redrafter, suffix
from .base import DrafterParams, Method
from .budget import BudgetDraft
from .chain import ChainDraft

__all__ = [
    "ANY_DRAFTER",
    "METHODS",
    "DrafterParams",
    "Method",
    "find_method",
    "find_mode",
    "list_modes",
    "list_options",
    "list_starters",
    "name_options",
    "place_drafter",
]

S = TypeVar("S")

# Of the commands where `--drafter-model-dir` names any drafter: other texts of its options' help.
ANY_DRAFTER = {"drafter_model_dir": "A drafter of any method: a folder; or ReDrafter's Hub id."}

# fmt: off
METHODS: dict[str, Method] = {
    module.METHOD.name: module.METHOD
    for module in (
        redrafter, medusa, eagle, dflash, draft_target, prompt_lookup, suffix, lookahead,
    )
}
# fmt: on


def list_options(*uses: str) -> tuple[type, ...]:
    """The settings classes of all methods for these uses, as in `Method.options`.

    What says how methods draft together, and how much, is with those of every command that decodes.
    """
    shared = (ChainDraft, BudgetDraft) if "draft" in uses else ()
    return shared + tuple(
        method.options[use] for method in METHODS.values() for use in uses if use in method.options
    )


def name_options(*uses: str) -> list[str]:
    """The names of all those settings."""
    return [name for kind in list_options(*uses) for name in get_flags(kind)]


def place_drafter(settings: S) -> S:
    """Return settings in which the drafter is named by the option of its own method.

    settings: a dataclass with every method's `folder`. `--drafter-model-dir`, which is ReDrafter's
    in specdec-convert, may be any drafter's local folder, told by what it holds.
    """
    from specdec.files.folders import identify_folder  # which imports numpy

    general = METHODS["redrafter"].folder
    assert general is not None
    folder = getattr(settings, general)
    method = METHODS.get(identify_folder(Path(folder)) or "") if folder is not None else None
    if method is None or method.folder is None:
        return settings
    changed: Any = dataclasses.replace(  # type: ignore[type-var]
        settings, **{general: None, method.folder: folder}
    )
    return changed  # type: ignore[no-any-return]


def list_modes() -> tuple[str, ...]:
    """Every `--speculative-decoding-mode`, each once."""
    return tuple(dict.fromkeys(method.mode for method in METHODS.values()))


def list_starters(mode: str, names: Container[str] | None = None) -> list[str]:
    """The flags by which methods begin to draft for engines of a mode.

    names: of the methods to choose from, all if not given.
    """
    return [
        name_flag(method.starter)
        for method in METHODS.values()
        if method.mode == mode and method.starter and (names is None or method.name in names)
    ]


def find_mode(mode: str | None) -> Method | None:
    """Return the first method whose engines are built with `--speculative-decoding-mode`."""
    return next((method for method in METHODS.values() if method.mode == mode), None)


def find_method(config: Mapping[str, Any]) -> Method | None:
    """Return the method whose weights a checkpoint's config.json tells of, or None."""
    architecture = config.get("architecture")
    for method in METHODS.values():
        if architecture in method.architectures:
            return method
    return None
