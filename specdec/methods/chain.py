"""`--draft-chain`: methods draft for one engine, by turns or in one tree, or its drafter alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

from specdec.errors import UsageError
from specdec.options import as_options, no_speculation, refuse_contradictions, setting

FORM = (
    "suffix,redrafter: one or the other, whichever promises more; suffix+redrafter: one tree;"
    " or the engine's drafter, as redrafter: that one alone"
)

# Groups of methods by name: those of a group draft into one tree, one group drafts at a time.
Chain = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainDraft:
    """Options of every command that decodes."""

    draft_chain: str | None = setting(
        metavar="A,B|A+B|A",
        help="Let these methods draft. suffix,redrafter: for each request and step the one that"
        " promises more tokens for its time; suffix+redrafter: both, in one tree; redrafter: the"
        " engine's drafter alone. By default suffixes,"
        " n-grams where specdec has a table for the tokenizer, and the drafter take turns.",
        group="Drafting",
        rare=True,
    )


def _split_chain(text: str) -> Chain:
    return tuple(tuple(name.strip() for name in group.split("+")) for group in text.split(","))


def read_chain(
    settings: Any, names: Container[str], lone_names: Container[str] = ()
) -> Chain | None:
    """Return the chain of a run, None of any other; raise UsageError.

    names: the methods that can be in one. lone_names: those that no other option lets draft alone.
    """
    text = as_options(settings, ChainDraft).draft_chain
    if text is None:
        return None
    refuse_contradictions(settings, [no_speculation("draft_chain")])
    chain = _split_chain(text)
    members = [name for group in chain for name in group]
    unknown_names = [name for name in members if name not in names]
    is_short = len(members) < 2 and members[0] not in lone_names
    if unknown_names or is_short:
        facts = [f": {name!r} is no method that can be in a chain" for name in unknown_names]
        raise UsageError(
            f"--draft-chain is {text!r}{''.join(facts[:1])}",
            f"name two or more methods, as {FORM}",
        )
    if len(set(members)) < len(members):
        raise UsageError(f"--draft-chain is {text!r}, with a method twice", "name each once")
    return chain
