"""Covering arrays: few rows of parameters in which every pair of values occurs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

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
    numbers: dict[Any, int] = {}
    combined = []
    for row in rows:
        values = key(row)
        found = itertools.combinations(enumerate(values), min(strength, len(values)))
        combined.append([numbers.setdefault(own, len(numbers)) for own in found])
    chosen: list[int] = []
    table, is_missing = np.array(combined), np.ones(len(numbers), np.bool_)
    while is_missing.any():
        chosen.append(int(is_missing[table].sum(1).argmax()))
        is_missing[table[chosen[-1]]] = False
    return [rows[at] for at in sorted(chosen)]
