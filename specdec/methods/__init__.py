"""The drafting methods: the one list. A record each, in a module of the method's name."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

from specdec.errors import SpecDecError, UsageError
from specdec.options import get_flags, name_flag

from . import (
    dflash,
    draft_target,
    eagle,
    lookahead,
    medusa,
    mtp,
    mtp_assistant,
    ngram,
    prompt_lookup,
    redrafter,
    suffix,
)
from .base import DrafterParams, Method
from .budget import BudgetDraft
from .chain import ChainDraft

__all__ = [
    "CHAIN_MEMBERS",
    "LONE_MEMBERS",
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

# fmt: off
METHODS: dict[str, Method] = {
    module.METHOD.name: module.METHOD
    for module in (
        redrafter, medusa, eagle, dflash, mtp, mtp_assistant, draft_target, prompt_lookup, suffix,
        ngram, lookahead,
    )
}
# fmt: on
CHAIN_MEMBERS = tuple(name for name, method in METHODS.items() if method.joins_chains)
LONE_MEMBERS = tuple(name for name, method in METHODS.items() if method.starter is None)


def list_options(*uses: str) -> tuple[type, ...]:
    """List the settings classes of all methods for these uses, as in `Method.options`.

    What says how methods draft together, and how much, is with those of every command that decodes.
    """
    shared_options = (ChainDraft, BudgetDraft) if "draft" in uses else ()
    return shared_options + tuple(
        method.options[use] for method in METHODS.values() for use in uses if use in method.options
    )


def name_options(*uses: str) -> list[str]:
    """List the names of the settings of all methods for these uses."""
    return [name for kind in list_options(*uses) for name in get_flags(kind)]


def place_drafter(settings: S, folder: Path | None = None) -> S:
    """Return settings in which the drafter is named by the option of its own method.

    settings: a dataclass with every method's `folder`. `--drafter-model-dir`, which is ReDrafter's
    own too, may be any drafter, told by what it holds; and a whole model where the settings have a
    place for one that drafts. folder: where it lies if it is named by a Hub id.
    """
    from specdec.files.folders import MODEL, NAMES, recognize_drafter  # which imports numpy

    general = METHODS["redrafter"].folder
    assert general is not None
    flag, name = name_flag(general), getattr(settings, general)
    folder = Path(name) if name is not None and folder is None else folder
    if folder is None or not folder.is_dir() or _names_drafter(settings, general):
        return settings
    kind = recognize_drafter(folder, flag)
    option = "draft_model_dir" if kind == MODEL else METHODS[kind].folder
    if option == general:
        return settings
    if option is None or not hasattr(settings, option):
        raise SpecDecError(
            f"{flag} {name} is {NAMES[MODEL]}, which drafts from an engine of its own",
            "convert and build it by itself as --model-dir, and give specdec-run that engine as"
            " --draft-engine-dir; or specdec generate --draft-model-dir does all of it",
        )
    _refuse_redrafter_options(settings, f"{flag} {name} is {NAMES[kind]}")
    changed: Any = dataclasses.replace(  # type: ignore[type-var]
        settings, **{general: None, option: name}
    )
    return changed  # type: ignore[no-any-return]


def _names_drafter(settings: object, general: str) -> bool:
    """Return whether a method's own option, other than the general one, names a drafter."""
    options = {method.folder for method in METHODS.values() if method.folder} - {general}
    return any(getattr(settings, option) for option in options)


def _refuse_redrafter_options(settings: object, fact: str) -> None:
    """Raise UsageError for an option of ReDrafter's, where the drafter is another one."""
    method = METHODS["redrafter"]
    for name in get_flags(method.options["convert"]):
        if name != method.folder and getattr(settings, name, None):
            raise UsageError(f"{name_flag(name)} has no effect: {fact}", "leave it out")


def list_modes() -> tuple[str, ...]:
    """List every `--speculative-decoding-mode`, each once."""
    return tuple(dict.fromkeys(method.mode for method in METHODS.values()))


def list_starters(mode: str, names: Container[str] | None = None) -> list[str]:
    """List the flags by which methods begin to draft for engines of a mode.

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
