"""Greedy text against a reference's: one rule for specdec verify and specdec audit.

Two programs, or two batch sizes, sum in another order, so that their logits differ in the last
bits. Where the reference's logits of two tokens lie within a bound of one another, either may be
written: that is a near-tie. Any other difference is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# What a difference is: within the bound, beyond it, without a margin, the end of one text.
NEAR_TIE, DIFFERS, UNKNOWN, LENGTH = "near-tie", "differs", "unknown", "length"
EXACT, NEAR_TIES = "exact", "near-ties"  # verdicts, alongside DIFFERS and UNKNOWN


def find_difference(own: Sequence[Any], reference: Sequence[Any]) -> int | None:
    """The first place where two sequences differ, or the end of the shorter one; None if equal."""
    pairs = enumerate(zip(own, reference, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(own), len(reference)))
    return None if at == len(own) == len(reference) else at


def judge_margin(margin: float | None, bound: float, *, is_least: bool = False) -> str:
    """Tell a near-tie from a fault.

    margin: how much higher the reference's logit of its own token is than that of the other token;
    is_least: it is at least so much; None: it is not known.
    """
    if margin is None or (is_least and margin <= bound):
        return UNKNOWN
    return NEAR_TIE if abs(margin) <= bound else DIFFERS


def find_verdict(differences: Iterable[str]) -> str:
    """The verdict on texts with these differences: the gravest one's."""
    found = set(differences)
    if found & {DIFFERS, LENGTH}:
        return DIFFERS
    return UNKNOWN if UNKNOWN in found else NEAR_TIES if found else EXACT


def name_token(token: int, text: str | None) -> str:
    """A token's number, with its text where that is known."""
    return str(token) if text is None else f"{token} {text!r}"
