"""Prices of steps and of drafts: the seconds that they take here and now.

A cost table has those of a machine that does nothing else. How far steps and drafts have drifted
from it is measured while texts are written.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from specdec.decode.cost_table import CostTable
from specdec.decode.drafters.drift import Drift
from specdec.decode.drafters.promise import DrafterValue

MAX_DELAY = 0.5  # of a step's price, that one step counts as late or early
DraftCall = tuple[int, int, int]  # a drafter of the chain, its requests, and the draft's levels


class Prices:
    """Seconds of the steps that a plan chooses between, and of their drafts.

    num_rows: requests of the newest step. step_seconds: of a plain step, and of one that verifies
    each size, as the newest plan has them; zeros before the first.
    """

    def __init__(
        self, costs: CostTable, sizes: Sequence[int], drafters: Sequence[DrafterValue]
    ) -> None:
        """Begin with the table's seconds.

        sizes: drafted nodes of a row, to choose from; one where all of them are verified or none.
        """
        self._nodes, self._drafters = [1, *(size + 1 for size in sizes)], drafters
        nodes = np.array(self._nodes)
        self._estimate_steps = functools.lru_cache(maxsize=32)(
            lambda rows, num_prompt_tokens: costs.estimate_steps(rows, nodes, num_prompt_tokens)
        )
        self._context_seconds = costs.context.estimate(nodes)  # of a position in the cache
        self._estimate_draft = functools.lru_cache(maxsize=256)(costs.estimate_draft)
        self.num_rows, self.step_seconds = 0, [0.0] * len(nodes)
        self._table_seconds = self.step_seconds  # without the drift
        self._drifts = defaultdict[int, Drift](Drift)  # of steps of about as many requests

    @property
    def plain_seconds(self) -> float:
        """Return the seconds of a step without drafts."""
        return self.step_seconds[0]

    @property
    def drift(self) -> Drift:
        """Return the drift of steps of about as many requests as the newest step has."""
        return self._drifts[self.num_rows.bit_length()]

    def plan(self, num_prompt_tokens: int, num_positions: int) -> None:
        """Find the seconds of steps of the newest one's requests; arguments as in `Pace.plan`."""
        seconds = self._estimate_steps(self.num_rows, num_prompt_tokens)
        self._table_seconds = (seconds + num_positions * self._context_seconds).tolist()
        self.step_seconds = self.drift.correct(self._nodes, self._table_seconds)

    def price_step(self, size: int) -> float:
        """Return the seconds of a step whose largest tree has `size` nodes."""
        return self.step_seconds[self._find_place(size)]

    def _find_place(self, size: int) -> int:
        return -1 if size > 1 and len(self._nodes) == 2 else size - 1

    def price_drafts(self, left_out: frozenset[int], num_levels: float | None = None) -> float:
        """Return the seconds of a step's drafts, of so many levels or of as many as usual.

        In a chain, each drafter but the first counts by its share of the requests. left_out:
        drafters of the chain that do not draft.
        """
        total, numbers = 0.0, [n for n in range(len(self._drafters)) if n not in left_out]
        for number in numbers:
            drafter = self._drafters[number]
            levels = min(num_levels or drafter.num_levels, drafter.max_depth)
            rows = self.num_rows * (1.0 if number == numbers[0] else drafter.share)
            total += min(1.0, rows) * self.price_draft(number, max(1.0, rows), levels)
        return total

    def price_draft(self, drafter: int, num_rows: float, num_levels: float) -> float:
        """Return the seconds of a drafter's draft, and those by which it delays the step after it.

        By the table and by the drafts that came.
        """
        delay = self._drafters[drafter].delay
        return delay + self._price_draft_alone(drafter, num_rows, num_levels)

    def _price_draft_alone(self, drafter: int, num_rows: float, num_levels: float) -> float:
        ratio = self._drafters[drafter].price_ratio
        return float(ratio * self._estimate_draft(num_rows, num_levels, drafter))

    def price_calls(self, draft_calls: Sequence[DraftCall]) -> float:
        """Return the seconds of the drafts that a step has asked for."""
        return sum(self.price_draft(d, n, levels) for d, n, levels in draft_calls)

    def take_step(self, size: int, seconds: float, draft_calls: Sequence[DraftCall] = ()) -> None:
        """Take the seconds of the newest step without its drafts.

        size: of its largest tree. draft_calls: that were made for it.
        """
        table_seconds = self._table_seconds[self._find_place(size)]
        if not table_seconds:  # nothing was planned yet
            return
        price = self.price_step(size)
        delay = min(max(seconds - price, -MAX_DELAY * price), MAX_DELAY * price)
        asked = {drafter for drafter, _, _ in draft_calls}
        for number, drafter in enumerate(self._drafters):
            drafter.take_delay(delay, is_asked=number in asked)
        self.drift.record(size, table_seconds, seconds)

    def take_drafts(self, seconds: float, draft_calls: Sequence[DraftCall]) -> None:
        """Take the seconds of a step's drafts, for which no prompt was read.

        They are longer than in the table where caches are cold between steps.
        """
        expected_seconds = sum(
            self._price_draft_alone(d, n, levels) for d, n, levels in draft_calls
        )
        for drafter, _, _ in draft_calls if expected_seconds else ():
            self._drafters[drafter].price(seconds / expected_seconds)
