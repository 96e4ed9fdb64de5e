"""Repetition in texts: repetitive texts are easy to draft, and flatter a drafter."""

from __future__ import annotations

from collections.abc import Sequence

NGRAM_SIZE = 4
LEAST_DISTINCT = 0.6


def measure_distinct(ids: Sequence[int]) -> float:
    """Return the share of a text's 4-grams that are distinct; 1 where it is shorter."""
    grams = [tuple(ids[i : i + NGRAM_SIZE]) for i in range(len(ids) - NGRAM_SIZE + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def is_looping(ids: Sequence[int]) -> bool:
    """Return whether less than 60 % of a text's 4-grams are distinct."""
    return measure_distinct(ids) < LEAST_DISTINCT
