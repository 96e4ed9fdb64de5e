"""How many tokens of prompts a step reads where other requests wait for it to end."""

from __future__ import annotations

import numpy as np

from specdec.decode.cost_table import CostTable

# Tokens of a step that reads prompts for each request that runs or waits, what the running ones
# verify included; at least and at most. LEAST_READ are prompts', whatever that takes.
CHUNK_SHARE, LEAST_CHUNK, MOST_CHUNK, LEAST_READ = 13, 64, 512, 16
MOST_TIMES = 6.0  # as long as a plain step, that a step with prompts may be
LEAST_TIMES = 2.0  # the same that it may be in any case


def choose_chunk(costs: CostTable | None, num_active: int, num_requests: int) -> int:
    """Return the tokens of a step that also reads prompts, those of running requests included.

    Where multiplying takes the time, as on a processor without AMX, it should not be many times
    as long as theirs are otherwise; where reading the weights does, more tokens cost next to
    nothing. num_requests: those that run and those that wait.
    """
    usual_size = min(max(LEAST_CHUNK, CHUNK_SHARE * num_requests), MOST_CHUNK)
    if costs is None or not num_active:
        return usual_size
    min_size = num_active + max(num_active, LEAST_READ)
    plain_seconds = float(costs.estimate_steps(num_active, np.array([1]))[0])
    seconds = costs.estimate_pass(np.arange(min_size + 1, MOST_CHUNK + 1))
    safe_size, max_size = (
        min_size + int(np.searchsorted(seconds, factor * plain_seconds, side="right"))
        for factor in (LEAST_TIMES, MOST_TIMES)
    )
    return min(max(usual_size, safe_size), max_size)
