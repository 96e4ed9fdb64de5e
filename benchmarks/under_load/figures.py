"""Figures of a server's replies: tokens per second, times to the first and between tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .client import Reply

BURST = 0.001  # seconds: what comes closer together was made by one step


def describe(replies: Sequence[Reply], seconds: float, tokenizer: Any) -> dict[str, Any]:
    """The figures of one run. Times are in milliseconds, each median and 99th percentile.

    itl: of every token but the first arrival's, by what its arrival was after the one before it,
    divided by the tokens that came together, as SGLang's benchmark has it: servers differ in
    whether a step's tokens come as one event. gap: between such arrivals, undivided.
    """
    first, between, gaps = [], [], []
    for reply in replies:
        arrivals = join_bursts(reply.arrivals)
        if not arrivals:
            continue
        first.append(arrivals[0][0] - reply.began)
        counts = count_tokens([text for _, text in arrivals], tokenizer)
        for (before, _), (now, _), count in zip(arrivals, arrivals[1:], counts[1:], strict=False):
            gaps.append(now - before)
            between += [(now - before) / max(1, count)] * max(1, count)
    return {
        "tokens_per_second": sum(reply.num_tokens for reply in replies) / seconds,
        "tokens": sum(reply.num_tokens for reply in replies), "seconds": seconds,
        "ttft": find_quantiles(first), "itl": find_quantiles(between), "gap": find_quantiles(gaps),
    }  # fmt: skip


def join_bursts(arrivals: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Arrivals that came within BURST of one another as one, at the time of the last."""
    joined: list[tuple[float, str]] = []
    for moment, text in arrivals:
        if joined and moment - joined[-1][0] < BURST:
            text = joined.pop()[1] + text
        joined.append((moment, text))
    return joined


def count_tokens(texts: Sequence[str], tokenizer: Any) -> list[int]:
    """Tokens of a text's pieces: of the whole text, those that end within each."""
    ends = [end for _, end in tokenizer.encode("".join(texts)).offsets]
    counts, at, length = [], 0, 0
    for text in texts:
        length += len(text)
        before = at
        while at < len(ends) and ends[at] <= length:
            at += 1
        counts.append(at - before)
    return counts


def find_quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds."""
    ranked = sorted(seconds) or [0.0]
    at = min(len(ranked) - 1, int(0.99 * len(ranked)))
    return {"median": 1000 * statistics.median(ranked), "p99": 1000 * ranked[at]}
