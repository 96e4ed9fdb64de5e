"""Errors that are meant for the user: a fact with its numbers, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence


class SpecDecError(Exception):
    """The work could not be done; shown as `error:` and `hint:` lines, exit status 1."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SpecDecError):
    """The command line or recipe is wrong; exit status 2."""


def raise_problems(problems: Sequence[tuple[str, str]]) -> None:
    """Raise one error that lists every (fact, remedy) pair; do nothing for an empty list."""
    if not problems:
        return
    if len(problems) == 1:
        raise SpecDecError(*problems[0])
    facts = "; ".join(f"({i}) {fact}" for i, (fact, _) in enumerate(problems, 1))
    remedies = "; ".join(f"({i}) {remedy}" for i, (_, remedy) in enumerate(problems, 1))
    raise SpecDecError(f"{len(problems)} problems: {facts}", remedies)


def suggest(name: str, known: Sequence[str]) -> str:
    """Return ` (did you mean X?)` for the known name nearest to `name`, or an empty string."""
    import difflib

    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {matches[0]}?)" if matches else ""


def summarize(error: BaseException) -> str:
    """Return the first line of a foreign exception's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return cut_middle(lines[0], 400) if lines else type(error).__name__


def cut_middle(text: str, limit: int) -> str:
    """Return a text of at most about `limit` characters: its start and its end."""
    if len(text) <= limit:
        return text
    first = 2 * limit // 3
    last = limit - first
    return f"{text[:first]} ... [{len(text) - limit} characters] ... {text[-last:]}"


MAX_NAMES = 10  # in one message


def join_names(names: Sequence[str]) -> str:
    """Return the names as one text, the first few and how many more there are."""
    shown = ", ".join(names[:MAX_NAMES])
    return f"{shown} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else shown


def shorten(value: object, limit: int = 60) -> str:
    """Return the repr of a value out of a foreign file, cut where it is longer than a message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."
