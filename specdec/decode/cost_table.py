"""Seconds of steps and of drafts on one machine, by their sizes: measured once, then only read.

`cost_measuring` measures a table, `cost_keeping` keeps it; while texts are written nothing in it
changes. `drafters/drift.py` tells how far steps have drifted from it, where memory sets their time.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec.engine.transfers import Array
from specdec.model.bounds import MAX_SIZE

TIMED_SECONDS = 0.002  # of a plain step whose weights no cache of a processor holds, at least
SLOW_SECONDS = 0.01  # of a plain step that reads so much that it leaves nothing in caches


@dataclasses.dataclass(frozen=True)
class Curve:
    """Seconds by size, neither of which falls.

    Between two sizes costs lie on a line, beyond the largest on the one through it and the largest
    size of at most half of it, since two that are near each other differ by chance; below the
    smallest they are the smallest's.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    @functools.cached_property
    def slope(self) -> float:
        """Seconds of one more beyond the largest size."""
        first_index = max(0, bisect.bisect_right(self.sizes, self.sizes[-1] / 2) - 1)
        rise = self.sizes[-1] - self.sizes[first_index]
        return (self.seconds[-1] - self.seconds[first_index]) / rise if rise else 0.0

    def estimate(self, sizes: Array) -> Array:
        """Return the seconds of each of some sizes."""
        seconds = np.interp(sizes, self.sizes, self.seconds)
        return np.asarray(seconds + self.slope * np.maximum(0, sizes - self.sizes[-1]))

    def estimate_one(self, size: float) -> float:
        """Return the seconds of one size, in a tenth of the time that `estimate` takes for it."""
        sizes, seconds = self.sizes, self.seconds
        above = bisect.bisect_right(sizes, size)
        if not above:
            return seconds[0]
        if above == len(sizes):
            return seconds[-1] + self.slope * (size - sizes[-1])
        rise = (seconds[above] - seconds[above - 1]) / (sizes[above] - sizes[above - 1])
        return seconds[above - 1] + rise * (size - sizes[above - 1])


def smooth(measured: Mapping[int, float]) -> Curve:
    """Make a curve of measurements in which a size costs at most as much as a larger one.

    Other programs only ever delay a measurement.
    """
    sizes = sorted(measured)
    falling = itertools.accumulate((measured[size] for size in reversed(sizes)), min)
    return Curve(tuple(sizes), (*reversed([*falling]),))


@dataclasses.dataclass(frozen=True)
class Grid:
    """Seconds by requests, and by the size that each request has.

    Between two numbers of requests costs lie on a line; those of more requests than the most are
    as many times as high as the requests are more.
    """

    curves: tuple[tuple[int, Curve], ...]  # by requests, fewest first

    def estimate(self, num_rows: float, sizes: Array) -> Array:
        """Return the seconds of each of some sizes."""
        weighted = [weight * curve.estimate(sizes) for weight, curve in self._weigh(num_rows)]
        return np.asarray(sum(weighted))

    def estimate_one(self, num_rows: float, size: float) -> float:
        """Return the seconds of one size."""
        return sum(weight * curve.estimate_one(size) for weight, curve in self._weigh(num_rows))

    def _weigh(self, num_rows: float) -> list[tuple[float, Curve]]:
        """Return the curves that tell of so many requests, each with its weight."""
        above = bisect.bisect_left(self.curves, num_rows, key=lambda curve: curve[0])
        if above == len(self.curves):
            max_rows, curve = self.curves[-1]
            return [(num_rows / max_rows, curve)]
        upper, curve = self.curves[above]
        if not above or upper <= num_rows:
            return [(1.0, curve)]
        lower, curve_below = self.curves[above - 1]
        share = (num_rows - lower) / (upper - lower)
        return [(share, curve), (1 - share, curve_below)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostTable:
    """Seconds that one engine's steps and its drafters' drafts take.

    steps: of the target, whatever it takes beside the drafts, by the nodes of a request's tree.
    drafts: of each drafter of a chain, or the one, by its levels. reading: of a prompt's token that
    the drafters read. prompts: of a pass over nothing but prompts, by its tokens. context: of a
    position in the cache, for each request of a step, by the nodes of its tree.
    """

    steps: Grid
    drafts: tuple[Grid, ...] = ()
    reading: float = 0.0
    prompts: Curve | None = None
    context: Curve = Curve((1,), (0.0,))

    def estimate_steps(self, num_rows: int, sizes: Array, num_prompt_tokens: int = 0) -> Array:
        """Return the seconds of steps that verify so many nodes a row, without their prompts' part.

        Prompts would be read anyway, in another step: they pay what a token more costs here, and
        what a step costs at least, such as reading the weights, is left to its own tokens.
        """
        max_rows = self.steps.curves[-1][0]  # more requests cost what as many tokens of these do
        num_measured, factor = min(num_rows, max_rows), max(1.0, num_rows / max_rows)
        seconds = self.steps.estimate(num_measured, factor * (sizes + num_prompt_tokens / num_rows))
        if num_prompt_tokens:
            tokens = num_rows * sizes
            price = (seconds[-1] - seconds[0]) / max(1, tokens[-1] - tokens[0])
            price = min(price, seconds[0] / (tokens[0] + num_prompt_tokens))
            seconds = seconds - num_prompt_tokens * price
        return seconds

    def estimate_pass(self, sizes: Array) -> Array:
        """Return the seconds of passes over so many tokens, most of them prompts'."""
        seconds = self.steps.estimate(1, sizes)
        return seconds if self.prompts is None else np.asarray(self.prompts.estimate(sizes))

    def estimate_draft(self, num_rows: float, num_levels: float, drafter: int = 0) -> float:
        """Return the seconds of a draft of so many levels for so many requests."""
        return self.drafts[drafter].estimate_one(num_rows, num_levels)

    def write(self) -> dict[str, Any]:
        """Return the table as JSON has it."""
        return dataclasses.asdict(self)


def read_table(document: Mapping[str, Any], num_drafters: int) -> CostTable:
    """Read what `write` wrote; raise ValueError, KeyError or TypeError for anything else.

    num_drafters: how many there are to draft, each of which has costs in the table.
    """
    steps, prompts = _read_grid(document["steps"]), document["prompts"]
    if not all(curve.seconds[0] > 0 for _, curve in steps.curves):
        raise ValueError("steps that take no time")
    if len(document["drafts"]) != num_drafters:
        raise ValueError("costs of other drafters")
    return CostTable(
        steps=steps,
        drafts=tuple(map(_read_grid, document["drafts"])),
        reading=_read_seconds([document["reading"]])[0],
        prompts=None if prompts is None else _read_curve(prompts),
        context=_read_curve(document["context"]),
    )


def _read_grid(document: Mapping[str, Any]) -> Grid:
    curves = tuple((rows, _read_curve(curve)) for rows, curve in document["curves"])
    _check_rising([rows for rows, _ in curves])
    return Grid(curves)


def _read_curve(document: Mapping[str, Any]) -> Curve:
    sizes, seconds = tuple(document["sizes"]), _read_seconds(document["seconds"])
    _check_rising(sizes)
    if len(sizes) != len(seconds) or [*seconds] != sorted(seconds):
        raise ValueError("costs that fall")
    return Curve(sizes, seconds)


def _check_rising(sizes: Sequence[int]) -> None:
    if not sizes or any(type(size) is not int or not 1 <= size <= MAX_SIZE for size in sizes):
        raise ValueError("sizes that are no numbers")
    if any(a >= b for a, b in itertools.pairwise(sizes)):
        raise ValueError("sizes that do not rise")


def _read_seconds(values: Iterable[Any]) -> tuple[float, ...]:
    seconds = tuple(float(value) for value in values)
    if not all(0 <= value < 1e6 for value in seconds):
        raise ValueError("times that are none")
    return seconds
