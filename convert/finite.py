"""Weights that are no finite numbers: NaN, infinities, and numbers that become one by a cast.

A float's bits, without the sign, are in the order of its magnitude, so one comparison with a limit
finds all three. A block is searched for its largest magnitude, which is quick; only where that
reaches the limit are the elements counted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from specdec.errors import SpecDecError, count, join_names
from specdec.files.casts import FLOATS, cast
from specdec.files.reading import Array
from specdec.files.tensor_file import DTYPES

# Magnitude bits of infinity; of the smallest NaN where a type has no infinity.
INFINITY = {
    "float64": 0x7FF0_0000_0000_0000,
    "float32": 0x7F80_0000,
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float8_e4m3fn": 0x7F,
}
UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SEARCH_ITEMS = 1 << 16  # at a time, in the processor's cache


@dataclasses.dataclass(frozen=True)
class Flaws:
    """How many elements of a tensor are no finite numbers, before or after its cast."""

    nan: int = 0
    inf: int = 0
    overflow: int = 0  # finite, but beyond the largest number of the type that is written

    def __add__(self, flaws: Flaws) -> Flaws:
        return Flaws(self.nan + flaws.nan, self.inf + flaws.inf, self.overflow + flaws.overflow)

    def __bool__(self) -> bool:
        return self != Flaws()

    def __str__(self) -> str:
        counts = [(self.nan, "NaN"), (self.inf, "infinite"), (self.overflow, "too large")]
        return ", ".join(f"{number} {kind}" for number, kind in counts if number)


class FlawCounter:
    """Counts the flaws of a tensor of one type that is written in some types."""

    def __init__(self, dtype: str, targets: Iterable[str]) -> None:
        self._unsigned = UNSIGNED[np.dtype(DTYPES[dtype][1]).itemsize]
        self._infinity = INFINITY.get(dtype)
        limits = [find_limit(dtype, target) for target in targets if target in FLOATS]
        self._limit = min(limits, default=self._infinity) if dtype in FLOATS else self._infinity
        self._has_infinity = dtype in FLOATS
        self._doubled = np.empty(SEARCH_ITEMS, self._unsigned)
        self.flaws = Flaws()

    def add(self, data: Array) -> None:
        """Count those of the next elements; data: contiguous, of any type of the same width."""
        if self._limit is None:  # a type of whole numbers
            return
        bits = data.reshape(-1).view(self._unsigned)
        limit = self._unsigned(self._limit * 2)
        for start in range(0, bits.size, SEARCH_ITEMS):
            block = bits[start : start + SEARCH_ITEMS]
            doubled = np.add(block, block, out=self._doubled[: block.size])  # drops the sign
            if doubled.max() >= limit:
                self.flaws += self._count(doubled)

    def _count(self, doubled: Array) -> Flaws:
        assert self._limit is not None
        assert self._infinity is not None
        infinity = self._unsigned(self._infinity * 2)
        beyond = int((doubled >= self._unsigned(self._limit * 2)).sum())
        infinite = int((doubled == infinity).sum()) if self._has_infinity else 0
        not_numbers = int((doubled >= infinity).sum()) - infinite
        return Flaws(not_numbers, infinite, beyond - infinite - not_numbers)


@functools.cache
def find_limit(dtype: str, target: str) -> int:
    """Return the smallest magnitude, as bits of `dtype`, that `target` cannot hold as a number."""
    storage = DTYPES[dtype][1]
    unsigned = UNSIGNED[np.dtype(storage).itemsize]

    def is_held(bits: int) -> bool:
        cast_value = cast(np.array([bits], unsigned).view(storage), dtype, target)
        pattern = int(cast_value.view(UNSIGNED[cast_value.itemsize])[0])
        return pattern < INFINITY[target]

    largest_held, smallest_lost = 0, INFINITY[dtype]
    while smallest_lost - largest_held > 1:
        middle = (largest_held + smallest_lost) // 2
        largest_held, smallest_lost = (
            (middle, smallest_lost) if is_held(middle) else (largest_held, middle)
        )
    return smallest_lost


def describe_flaws(flaws: Mapping[str, Flaws], dtypes: Iterable[str]) -> str:
    """Return the tensors, the first few of them by name, with their counts."""
    names = join_names([f"{name} ({flaw})" for name, flaw in flaws.items()])
    beyond = any(flaw.overflow for flaw in flaws.values())
    large = f"; too large means: for {' and '.join(sorted(dtypes))}" if beyond else ""
    return f"{count(len(flaws), 'tensor')} with weights that are no finite numbers: {names}{large}"


def refuse_flaws(flaws: Mapping[str, Flaws], dtypes: Iterable[str]) -> SpecDecError:
    """Return the error for weights that are no finite numbers."""
    beyond = any(flaw.overflow for flaw in flaws.values())
    wider = "choose a --dtype of wider range, " if beyond else "get the model again, "
    return SpecDecError(
        describe_flaws(flaws, dtypes), wider + "or let specdec-convert --allow-nonfinite write them"
    )
