"""Pearson's chi-square test, and its power."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

FALSE_ALARM_RATE = 0.001  # that a right engine fails, over all prompts of one call
POWER = 0.99
MIN_EXPECTED = 5.0  # smaller cells are merged: the chi-square approximation needs it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Test of counts against probabilities.

    p_value: probability of counts at least as far off, if the probabilities are right.
    """

    num_cells: int
    statistic: float
    p_value: float


def fit_counts(counts: Sequence[int], probs: Sequence[float]) -> Fit | None:
    """Test counts against probabilities that sum to 1; None where one cell holds everything."""
    total = sum(counts)
    groups: list[list[float]] = []  # [observed, expected]
    small = [0.0, 0.0]
    for count, prob in zip(counts, probs, strict=True):
        if prob * total >= MIN_EXPECTED:
            groups.append([count, prob * total])
        else:
            small = [small[0] + count, small[1] + prob * total]
    if small[1] >= MIN_EXPECTED or (not groups and small[1]):
        groups.append(small)
    elif small[1]:
        smallest_group = min(groups, key=lambda group: group[1])
        smallest_group[:] = [smallest_group[0] + small[0], smallest_group[1] + small[1]]
    if len(groups) < 2:
        return None
    statistic = sum(
        (observed_count - expected_count) ** 2 / expected_count
        for observed_count, expected_count in groups
    )
    return Fit(
        num_cells=len(groups),
        statistic=statistic,
        p_value=_compute_upper_tail(len(groups) - 1, statistic),
    )


def find_detectable_distance(num_cells: int, total: int, false_alarm_rate: float) -> float:
    """Return the total variation distance from which a test finds a wrong distribution with POWER.

    Chi-square's noncentrality is n sum (p - q)^2 / p, which Cauchy-Schwarz bounds from below by
    4 n d^2 for the distance d between p and q. So the test finds every q that is so far
    away at least as surely; it may find a nearer one.
    """
    freedom = num_cells - 1
    critical = _bisect(lambda x: _compute_upper_tail(freedom, x) - false_alarm_rate)
    noncentrality = _bisect(lambda x: POWER - _compute_power(freedom, x, critical))
    return min(1.0, math.sqrt(noncentrality / (4 * total)))


def _compute_upper_tail(freedom: int, statistic: float) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _compute_power(freedom: int, noncentrality: float, critical: float) -> float:
    """Return the upper tail of noncentral chi-square: a Poisson mixture of central ones."""
    mean = noncentrality / 2
    terms = torch.arange(int(mean + 12 * math.sqrt(mean + 1)) + 12, dtype=torch.float64)
    weights = torch.exp(terms * math.log(mean) - mean - torch.lgamma(terms + 1))
    half_critical = torch.full_like(terms, critical / 2)
    return float((weights * torch.special.gammaincc(freedom / 2 + terms, half_critical)).sum())


def _bisect(falling: Callable[[float], float]) -> float:
    """Find where a function that falls from above 0 to below crosses it."""
    low, high = 1e-9, 1e5
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high
