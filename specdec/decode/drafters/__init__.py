"""Drafting methods at run time: one file each, under the method's name."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specdec.command.settings import list_given, name_flag
from specdec.engine.layout import EngineConfig
from specdec.errors import UsageError
from specdec.methods import METHODS, Method, find_mode
from specdec.methods.draft_target import adapts_drafts

from .base import DraftContext, EngineHandle, PlainProposer, Proposer
from .switch import adapt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """Who is to draft, and how.

    options: by method, what `Method.read` made of the settings. flags: by method, the first of its
    flags that was given. pauses: draft only while that pays. tokenizer: as in `DraftContext`.
    """

    options: Mapping[str, Any]
    flags: Mapping[str, str]
    pauses: bool
    tokenizer: Any = None

    @property
    def target_devices(self) -> tuple[int, ...] | None:
        """The devices that a method's options name for the target."""
        named = (getattr(options, "target_devices", None) for options in self.options.values())
        return next((devices for devices in named if devices is not None), None)


def read_drafting(settings: Any, tokenizer: Any) -> Drafting:
    """Read all methods' options; raise UsageError for what is written wrong.

    settings: of a command that decodes, with the options that `list_options("draft")` names.
    """
    found = {name: method.read(settings) for name, method in METHODS.items()}
    given = {
        name: list_given(settings, method.options["draft"])
        for name, method in METHODS.items()
        if "draft" in method.options
    }
    return Drafting(
        options={name: options for name, options in found.items() if options is not None},
        flags={name: name_flag(flags[0]) for name, flags in given.items() if flags},
        pauses=adapts_drafts(settings),
        tokenizer=tokenizer,
    )


def choose_method(config: EngineConfig, drafting: Drafting | None) -> Method | None:
    """Return the method that drafts for an engine; raise UsageError for options without effect.

    drafting: None lets an engine with a drafter in its checkpoint use that, and no other draft.
    """
    own = config.checkpoint.method
    if drafting is None:
        return own
    asked = [m for m in METHODS.values() if m.source != "checkpoint" and m.name in drafting.options]
    if len(asked) > 1:
        flags = [drafting.flags[method.name] for method in asked]
        raise UsageError(f"{' and '.join(flags)} are both given", "let one or the other draft")
    chosen = asked[0] if asked else own or find_mode(config.build.speculative_decoding_mode)
    refuse_others(drafting, chosen)
    return chosen


def refuse_others(drafting: Drafting, chosen: Method | None, *, speculates: bool = True) -> None:
    """Raise UsageError for options of methods that do not draft."""
    name = chosen.name if chosen is not None else "plain"
    for other in drafting.options:
        if other != name:
            raise UsageError(
                f"{drafting.flags[other]} has no effect with an engine that runs {name}",
                "leave it out",
            )
    if drafting.pauses and (chosen is None or not chosen.can_pause):
        titles = [method.title for method in METHODS.values() if method.can_pause]
        raise UsageError(
            f"--draft-len auto has no effect with"
            f" {f'{name} decoding' if speculates else '--no-speculation'}",
            f"leave it out; it is for {', '.join(titles[:-1])} and {titles[-1]}",
        )


def load_module(method: Method) -> Any:
    """Return the module of a method's drafter."""
    return importlib.import_module(f"{__name__}.{method.name}")


def make_proposer(
    engine: EngineHandle,
    method: Method | None,
    weights: Mapping[str, Tensor],
    drafting: Drafting | None,
) -> Proposer:
    """Return what drafts for an engine: the one place where proposers of engines are made."""
    if method is None:
        return PlainProposer()
    proposer: Proposer = load_module(method).make_proposer(
        DraftContext(
            decoder=engine.decoder,
            params=engine.config.checkpoint.drafter,
            weights=weights,
            options=drafting.options.get(method.name) if drafting is not None else None,
            engine=engine,
            tokenizer=drafting.tokenizer if drafting is not None else None,
        )
    )
    return adapt(proposer) if drafting is not None and drafting.pauses else proposer
