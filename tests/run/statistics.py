"""Chi-square tests against known distributions, with a stated false-alarm rate."""

from __future__ import annotations

import numpy as np
import torch

# Seeds are fixed, so a test passes always or never; with other seeds a right program would fail
# one test in this many.
FALSE_ALARM_RATE = 1e-4
MIN_EXPECTED = 5.0  # cells below are merged, as the chi-square approximation asks


def compute_p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Probability of counts at least this far from `probs`, were they drawn from it."""
    total = counts.sum()
    assert np.isclose(probs.sum(), 1), probs.sum()
    assert counts[probs == 0].sum() == 0, "an impossible outcome occurred"
    expected = probs * total
    order = np.argsort(expected)[::-1]
    large = order[expected[order] >= MIN_EXPECTED]
    small = order[expected[order] < MIN_EXPECTED]
    groups = [[i] for i in large]
    if len(small) and expected[small].sum() >= MIN_EXPECTED:
        groups.append(list(small))
    elif len(small):
        groups[-1] += list(small)
    observed = np.array([counts[g].sum() for g in groups])
    wanted = np.array([expected[g].sum() for g in groups])
    assert len(groups) > 2, "too few cells to tell anything"
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    half = torch.tensor([(len(groups) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
