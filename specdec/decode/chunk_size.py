"""How many tokens a step has that reads prompts for waiting requests, by what steps cost."""

from __future__ import annotations

import numpy as np

from specdec.decode.drafters.pacing import Costs, is_plain_due

# Tokens of such a step for each request that runs or waits, including what the running ones verify;
# at least and at most. At least LEAST_READ of them are of prompts.
CHUNK_SHARE, LEAST_CHUNK, MOST_CHUNK = 13, 64, 512
LEAST_READ = 16
# How many times as long as one without prompts it may be; and how long it may be in any case.
MOST_TIMES, LEAST_TIMES = 6.0, 2.0
EXACT, UNIT = 64, 16  # sizes up to EXACT are told apart, larger ones by so many tokens


class ChunkSize:
    """Learns what steps cost by their tokens, and bounds those that read prompts by it.

    Running requests wait for all of such a step, so it should not be many times as long as their
    steps without prompts. Where multiplying takes the time, as on a processor without AMX, a step
    of so many tokens would be. Where reading the weights takes it, more tokens cost next to
    nothing, and requests that wait for their first token have it sooner. Small steps are measured
    again now and then, also where every step reads prompts.
    """

    def __init__(self) -> None:
        self._costs = Costs()
        self._num_small = self._since_small = 0  # steps; and of others since the last of these

    def record(self, num_active: int, num_tokens: int, seconds: float) -> None:
        """Take what a step of so many requests has cost, without what drafters did."""
        size = num_tokens if num_tokens <= EXACT else -(-num_tokens // UNIT) * UNIT
        self._costs.record(size, seconds)
        self._since_small += 1
        if num_tokens <= _count_least(num_active):
            self._num_small += 1
            self._since_small = 0

    def choose(self, num_active: int, num_requests: int, *, is_reading: bool) -> int:
        """Tokens of a step that also reads prompts, those of the running requests included.

        num_requests: those that run, and those that wait. is_reading: whether there are prompts.
        """
        wanted = min(max(LEAST_CHUNK, CHUNK_SHARE * num_requests), MOST_CHUNK)
        least, largest = _count_least(num_active), self._costs.largest
        most = max(wanted, min(MOST_CHUNK, 2 * largest))
        plain = self._predict_plain(num_active)
        if plain is None or most <= least:
            return wanted
        if is_reading and is_plain_due(self._num_small, self._since_small):
            return least
        seconds = self._costs.predict(np.arange(least + 1, most + 1))  # rising
        fewest, longest = (
            least + int(np.searchsorted(seconds, times * plain, side="right"))
            for times in (LEAST_TIMES, MOST_TIMES)
        )
        return min(max(wanted, fewest), longest)

    def _predict_plain(self, num_active: int) -> float | None:
        """Seconds of a step of these requests without prompts, None where nothing was measured."""
        costs = self._costs
        smallest, largest = costs.smallest, costs.largest
        seconds, longest = costs.estimate(num_active), costs.estimate(largest)
        if seconds is None or longest is None:
            return None
        if num_active < smallest < largest:  # no step was so small: on the line of all that were
            seconds -= (longest - seconds) / (largest - smallest) * (smallest - num_active)
        return max(seconds, 0.0)


def _count_least(num_active: int) -> int:
    """Tokens of the smallest step of so many requests that reads prompts."""
    return num_active + max(num_active, LEAST_READ)
