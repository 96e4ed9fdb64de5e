"""Drift of the costs of steps from those of the table, where other programs share the memory.

Steps of a model that no cache holds take as long as its weights take to be read, and how fast
memory is changes within minutes on a machine that others share: by up to twice in a cloud. A table
of a slow minute makes drafts of eight tokens look as if they cost nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

BOUNDS = (1, 4, 6, 8, 12, 16)  # most nodes of a step's class; the last class has those above
MAX_WEIGHT = 10  # steps of a class among which the newest counts as one, at most
MAX_SHARE = 0.5  # of what is known, that comes from the first step of a class after many others
FIRST_PLAIN_STEP = 8  # drafted steps after which a plain one is timed at first, if there was none
PLAIN_STEPS = 128  # drafted steps after which a plain one is timed again, if there was none
KEPT_STEPS = 64  # timed steps after which a class of which none was is as one that was never timed
MAX_RATIO = 2.0  # that one step may show, either way
MAX_CHANGE = 1.25  # of what is known of a class, that one more step may show, either way


class Drift:
    """Seconds that steps take now over those of the table, by classes of a row's nodes.

    All steps have about as many requests: by others other limits set the time. A class of which no
    step was timed lately drifts as the nearest one below does, else the one above: so what may pay
    is tried, and tried again when memory may have become faster. No step is dearer than a larger
    one. needs_plain: whether so many drafted steps were timed since the last plain one that the
    next step should be plain.
    """

    def __init__(self) -> None:
        self._ratios: dict[int, float] = {}  # of the classes of which a step was timed
        self._counts: dict[int, int] = {}  # timed steps of a class
        self._newest: dict[int, int] = {}  # number of the newest timed step of a class
        self._num_timed = 0
        self._steps_to_plain = FIRST_PLAIN_STEP

    @property
    def needs_plain(self) -> bool:
        return self._steps_to_plain <= 0

    def record(self, num_nodes: int, table_seconds: float, seconds: float) -> None:
        """Take the seconds of a step of so many nodes a row, and what the table says of it."""
        self._forget()
        number = _find_class(num_nodes)
        known_ratio, count = self._find_ratio(number), self._counts.get(number, 0)
        ratio = min(max(seconds / table_seconds, 1 / MAX_RATIO), MAX_RATIO)
        if count:  # one step may have been delayed
            ratio = min(max(ratio, known_ratio / MAX_CHANGE), known_ratio * MAX_CHANGE)
        num_since = self._num_timed - self._newest.get(number, self._num_timed)
        old_share = (1 - 1 / MAX_WEIGHT) ** num_since
        share = max(1 / min(count + 2, MAX_WEIGHT), min(MAX_SHARE, 1 - old_share))
        self._ratios[number] = known_ratio + share * (ratio - known_ratio)
        self._counts[number], self._newest[number] = count + 1, self._num_timed
        self._steps_to_plain = PLAIN_STEPS if num_nodes == 1 else self._steps_to_plain - 1

    def _forget(self) -> None:
        """Begin a timed step; forget the classes of which none was timed for long, but plain ones.

        Plain steps have a turn of their own.
        """
        self._num_timed += 1
        oldest = self._num_timed - KEPT_STEPS
        for number in [n for n, newest in self._newest.items() if n and newest < oldest]:
            del self._ratios[number], self._counts[number], self._newest[number]

    def correct(self, node_counts: Sequence[int], seconds: Sequence[float]) -> list[float]:
        """Return the seconds that steps of rising numbers of nodes take, by the table's."""
        if not self._ratios:
            return [*seconds]
        pairs = zip(node_counts, seconds, strict=True)
        drifted = [value * self._find_ratio(_find_class(count)) for count, value in pairs]
        return [*itertools.accumulate(reversed(drifted), min)][::-1]

    def _find_ratio(self, number: int) -> float:
        below = [known for known in self._ratios if known <= number]
        nearest = max(below) if below else min(self._ratios, default=None)
        return 1.0 if nearest is None else self._ratios[nearest]


def _find_class(num_nodes: int) -> int:
    return next((n for n, bound in enumerate(BOUNDS) if num_nodes <= bound), len(BOUNDS))
