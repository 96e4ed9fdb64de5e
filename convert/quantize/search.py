"""Activation-aware scales: which inputs' weights are to be rounded the least.

AWQ (Lin et al. 2023, https://arxiv.org/abs/2306.00978): a linear's input i is divided by
s_i = m_i^a, its weights are multiplied with it, and a is the one of a grid whose rounded weights
change the linear's output the least; m is the mean magnitude of the input. Then each group of
weights may lose its largest magnitudes, where that is the lesser error. SmoothQuant (Xiao et al.
2022, https://arxiv.org/abs/2211.10438) has s_i = m_i^a / w_i^(1 - a), with the largest magnitudes m
of the input and w of its weights; the error of rounding the input counts, too.

An error D of the weights changes the outputs by sum(D C D^T), C = the mean of x x^T over the
calibration's tokens x. C is kept for pairs of inputs within a group of weights: errors of different
groups are independent. So memory depends neither on the number of tokens nor on that of rows.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.files.casts import cast
from specdec.files.reading import Array

from .formats import Format

if TYPE_CHECKING:
    from .calibration import Inputs
    from .rounded import RoundedMatrix

ALPHAS = tuple(i / 20 for i in range(21))
KEPT_SHARES = (1.0, 0.95, 0.9, 0.875, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
LARGEST_SCALE = 1e4  # and its inverse the least: both are numbers in float16
BLOCK_BYTES = 1 << 20  # of weights at a time: what is computed of them stays in a core's cache


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Result of a search: the error of the outputs, and the largest magnitudes after scaling."""

    error: float
    largest_input: np.float32
    largest_weight: np.float32


@np.errstate(invalid="ignore", over="ignore")
def search_inputs(
    members: Sequence[RoundedMatrix],
    inputs: Inputs,
    format_: Format,
    is_ending: threading.Event,
) -> SearchResult:
    """Find one scale an input of linears that have their input in common, and set it in each.

    Raise nothing where weights are NaN: the error is NaN then.
    """
    candidates = _list_candidates(members, inputs, format_)
    errors = np.zeros(len(candidates))
    for member in members:
        for start, stop in member.list_rows(BLOCK_BYTES):
            if is_ending.is_set():
                break
            values = member.read(start, stop)
            for i, scale in enumerate(candidates):
                errors[i] += _measure(member, values, scale, inputs, format_)
    best_index = int(np.argmin(errors))
    chosen_scale, largest_weight = candidates[best_index], np.float32(0)
    for member in members:
        member.input_scale = chosen_scale
        if format_.group_size is not None:
            member.kept_shares = np.ones((member.shape[0], len(inputs.moments)), np.float32)
        for start, stop in member.list_rows(BLOCK_BYTES):
            if is_ending.is_set():
                break
            values = member.read(start, stop)
            largest_weight = max(largest_weight, np.abs(values / chosen_scale).max())
            if member.kept_shares is not None:
                member.kept_shares[start:stop] = _clip(member, values, chosen_scale, inputs)
    return SearchResult(
        float(errors[best_index]), (inputs.largest * chosen_scale).max(), largest_weight
    )


def _list_candidates(
    members: Sequence[RoundedMatrix], inputs: Inputs, format_: Format
) -> list[Array]:
    """Return the scales to try, as the checkpoint's type has them: float32 [in] each."""
    magnitudes, weights = inputs.mean, None
    if format_.smooths == "largest":
        magnitudes = inputs.largest
        weights = np.zeros_like(magnitudes)
        for member in members:
            for start, stop in member.list_rows():
                np.maximum(weights, np.abs(member.read(start, stop)).max(0), out=weights)
    dtype = members[0].tensor.info.dtype
    is_alive = magnitudes > 0
    if weights is not None:
        is_alive &= weights > 0
    candidates = []
    for alpha in ALPHAS:
        scale = np.ones_like(magnitudes)
        np.power(magnitudes, np.float32(-alpha), out=scale, where=is_alive)
        if weights is not None:
            np.multiply(scale, weights ** np.float32(1 - alpha), out=scale, where=is_alive)
        if is_alive.any():
            alive = scale[is_alive]
            # Weights keep about their size, as AWQ does it; SmoothQuant's product needs no such.
            scale[is_alive] /= np.sqrt(alive.max() * alive.min())
        scale = scale.clip(1 / LARGEST_SCALE, LARGEST_SCALE)
        candidates.append(cast(cast(scale, "float32", dtype), dtype, "float32"))
    return candidates


def _measure(
    member: RoundedMatrix, values: Array, scale: Array, inputs: Inputs, format_: Format
) -> float:
    """Return the squared error of the outputs of some rows, a token."""
    codes, scales = member.rounding.round(values / scale, np.float32(1), None)
    restored = member.rounding.restore(codes, scales, np.float32(1))
    error = float(_weigh(restored * scale - values, inputs.moments).sum())
    if format_.smooths == "largest":  # an input's rounding error is spread evenly over a step
        assert format_.inputs is not None
        step = float((inputs.largest * scale).max()) / format_.inputs
        error += step**2 / 12 * float(np.square(restored, dtype=np.float64).sum())
    return error


def _weigh(error: Array, moments: Array) -> Array:
    """Return what errors [rows, in] of weights do to the outputs: squares [groups, rows]."""
    num_groups, size, _ = moments.shape
    grouped = error.reshape(len(error), num_groups, size).transpose(1, 0, 2)
    weighed: Array = (grouped @ moments * grouped).sum(2)
    return weighed


def _clip(member: RoundedMatrix, values: Array, scale: Array, inputs: Inputs) -> Array:
    """Return what part of each group's largest magnitude to represent: [rows, groups]."""
    scaled, whole_scale = values / scale, np.float32(1)
    best_shares = np.ones((len(values), len(inputs.moments)), np.float32)
    least_errors = np.full(best_shares.shape, np.inf, np.float32)
    for share in KEPT_SHARES:
        kept_shares = np.full(best_shares.shape, share, np.float32)
        restored = member.rounding.restore(
            *member.rounding.round(scaled, whole_scale, kept_shares), whole_scale
        )
        error = _weigh(restored * scale - values, inputs.moments).T
        is_better = error < least_errors
        least_errors = np.where(is_better, error, least_errors)
        best_shares[is_better] = share
    return best_shares
