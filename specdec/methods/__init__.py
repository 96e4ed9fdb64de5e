"""The drafting methods: the one list. A record each, in a module of the method's name."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from specdec.command.settings import name_flag

from . import draft_target, eagle, lookahead, medusa, prompt_lookup, redrafter, suffix
from .base import DrafterParams, Method
from .chain import ChainDraft

__all__ = [
    "METHODS",
    "DrafterParams",
    "Method",
    "find_method",
    "find_mode",
    "list_modes",
    "list_options",
    "list_starters",
]

METHODS: dict[str, Method] = {
    module.METHOD.name: module.METHOD
    for module in (redrafter, medusa, eagle, draft_target, prompt_lookup, suffix, lookahead)
}


def list_options(*uses: str) -> tuple[type, ...]:
    """The settings classes of all methods for these uses, as in `Method.options`.

    What says how methods draft together is with those of every command that decodes.
    """
    chain = (ChainDraft,) if "draft" in uses else ()
    return chain + tuple(
        method.options[use] for method in METHODS.values() for use in uses if use in method.options
    )


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
