"""Options that exclude one another: one table for each command, read by one function.

`convert/flags.py` is an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from specdec.errors import UsageError
from specdec.options import name_flag


class Contradiction(NamedTuple):
    """What a command refuses.

    find: from its settings to a false value where all is well. Whatever else it returns is
    `{found}` in the texts, in which an option's name stands for its value, too.
    """

    find: Callable[[Any], object]
    fact: str
    hint: str


def refuse_contradictions(settings: Any, table: Iterable[Contradiction]) -> None:
    """Raise UsageError for the first contradiction of a table that the settings hold."""
    for find, fact, hint in table:
        if found := find(settings):
            values = {**vars(settings), "found": found}
            raise UsageError(fact.format_map(values), hint.format_map(values))


def find_given(settings: Any, *names: str) -> str | None:
    """Return the first of these options that is neither None nor False, as a flag."""
    values = {name: getattr(settings, name) for name in names}
    return next((name_flag(n) for n, v in values.items() if v is not None and v is not False), None)


def no_speculation(*names: str) -> Contradiction:
    """What says that options have no effect with --no-speculation."""
    return Contradiction(
        lambda settings: settings.no_speculation and find_given(settings, *names),
        "{found} has no effect with --no-speculation",
        "leave one of them out",
    )
