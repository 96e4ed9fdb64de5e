"""Greedy text against a reference's: one rule for specdec verify and specdec audit.

Two programs, or two batch sizes, sum in another order, so that their logits differ in the last
bits. Where the reference's logits of two tokens lie within a bound of one another, either may be
written: that is a near-tie. Any other difference is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# Kinds of differences: within the bound, beyond it, without a margin, the end of one text.
NEAR_TIE, DIFFERS, UNKNOWN, LENGTH = "near-tie", "differs", "unknown", "length"
EXACT, NEAR_TIES = "exact", "near-ties"  # verdicts, alongside DIFFERS and UNKNOWN


def find_difference(tokens: Sequence[Any], reference: Sequence[Any]) -> int | None:
    """Find the first position where two sequences differ, or the shorter's end; None if equal."""
    pairs = enumerate(zip(tokens, reference, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(reference)))
    return None if position == len(tokens) == len(reference) else position


def judge_margin(margin: float | None, bound: float, *, is_least: bool = False) -> str:
    """Tell a near-tie from a fault.

    margin: how much higher the reference's logit of its own token is than that of the other token;
    is_least: it is at least so much; None: it is not known.
    """
    if margin is None or (is_least and margin <= bound):
        return UNKNOWN
    return NEAR_TIE if abs(margin) <= bound else DIFFERS


def find_verdict(differences: Iterable[str]) -> str:
    """Return the verdict on texts with these differences: that of the gravest one."""
    kinds = set(differences)
    if kinds & {DIFFERS, LENGTH}:
        return DIFFERS
    return UNKNOWN if UNKNOWN in kinds else NEAR_TIES if kinds else EXACT


def name_token(token: int, text: str | None) -> str:
    """Return a token's number, with its text where that is known."""
    return str(token) if text is None else f"{token} {text!r}"
