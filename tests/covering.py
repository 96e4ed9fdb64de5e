"""Covering arrays: few rows of parameters in which every pair of values occurs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Row = TypeVar("Row")
TAKES_ALL = bool(os.environ.get("SPECDEC_TEST_ALL"))


def cover(
    candidates: Iterable[Row],
    strength: int = 2,
    key: Callable[[Row], tuple[Any, ...]] = lambda row: row,  # type: ignore[assignment,return-value]
) -> list[Row]:
    """Choose rows in which all combinations of `strength` values occur that do in `candidates`.

    key: a row's values. The rows are the same ones every time, in the order of the candidates. With
    SPECDEC_TEST_ALL set in the environment they are all candidates.
    """
    rows = list(candidates)
    if TAKES_ALL:
        return rows
    missing = []
    for row in rows:
        values = key(row)
        combined = itertools.combinations(enumerate(values), min(strength, len(values)))
        missing.append(set(combined))
    chosen: list[int] = []
    while most := max(map(len, missing)):
        chosen.append(next(at for at, own in enumerate(missing) if len(own) == most))
        taken = set(missing[chosen[-1]])
        for own in missing:
            own -= taken
    return [rows[at] for at in sorted(chosen)]
