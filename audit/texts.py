"""Texts side by side: the first difference, and whether it is a near-tie."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from .answers import Answer, Token

NEAR_TIE, DIFFERS, UNKNOWN, LENGTH = "near-tie", "differs", "unknown", "length"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where a text is not the reference's.

    position: of the output token, or, where tokens are not known, of the character. margin: how
    much higher the reference's logit of its own token is than that of the server's; is_least: at
    least so much, None: not known. cause: "near-tie" within the bound, "differs" beyond it,
    "unknown" without a margin, "length" where one text has ended.
    """

    prompt: int
    position: int
    unit: str  # "token" or "character"
    server: str
    reference: str
    server_token: int | None = None
    reference_token: int | None = None
    margin: float | None = None
    is_least: bool = False
    bound: float
    cause: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        least = "at least " if self.is_least else ""
        margin = "not known" if self.margin is None else f"{least}{self.margin:.3g}"
        return (
            f"prompt {self.prompt}, {self.unit} {self.position}: {self.server} for"
            f" {self.reference}; margin {margin}, bound {self.bound:g}: {self.cause}"
        )


def compare(answer: Answer, reference: Answer, *, prompt: int, bound: float) -> Difference | None:
    """The first difference of an answer from the reference's, None where there is none.

    By token ids where both have them, else by characters. The reference may be longer only by
    tokens that are no text: an end token, which some servers tell of and some do not.
    """
    if answer.ids is not None and reference.ids is not None:
        return _compare_ids(answer, reference, prompt, bound) or _compare_characters(
            answer, reference, prompt, bound
        )
    return _compare_characters(answer, reference, prompt, bound)


def _compare_ids(
    answer: Answer, reference: Answer, prompt: int, bound: float
) -> Difference | None:  # fmt: skip
    own, theirs = answer.ids or [], reference.ids or []
    at = _find_difference(own, theirs)
    if at < min(len(own), len(theirs)):
        token = reference.tokens[at] if reference.tokens is not None else None
        found = None
        if token is not None:
            text = answer.tokens[at].text if answer.tokens is not None else None
            found = next((other for other in token.top if _is(other, own[at], text)), None)
        margin, is_least = _measure(token, found)
        return Difference(
            prompt=prompt, position=at, unit="token", server=_name(own[at], found),
            reference=_name(theirs[at], token), server_token=own[at], reference_token=theirs[at],
            margin=margin, is_least=is_least, bound=bound, cause=_judge(margin, is_least, bound),
        )  # fmt: skip
    if abs(len(own) - len(theirs)) <= (answer.finish_reason != "length"):
        return None
    return Difference(
        prompt=prompt, position=at, unit="token", bound=bound, cause=LENGTH,
        server=f"{len(own)} tokens ({answer.finish_reason})",
        reference=f"{len(theirs)} ({reference.finish_reason})",
    )  # fmt: skip


def _compare_characters(
    answer: Answer, reference: Answer, prompt: int, bound: float
) -> Difference | None:  # fmt: skip
    own, theirs = answer.text, reference.text
    if own == theirs:
        return None
    at = _find_difference(own, theirs)
    shown: dict[str, Any] = {
        "server": repr(own[at : at + 20]),
        "reference": repr(theirs[at : at + 20]),
    }
    same_ids = answer.ids is not None and answer.ids == reference.ids
    if at == min(len(own), len(theirs)) or same_ids:
        return Difference(
            prompt=prompt, position=at, unit="character", bound=bound, cause=LENGTH, **shown
        )
    margin, is_least = None, False
    if reference.tokens is not None and reference.ends is not None:
        place = next(i for i, end in enumerate(reference.ends) if end > at)
        token = reference.tokens[place]
        rest = own[reference.ends[place - 1] if place else 0 :]
        fitting = [
            other for other in token.top
            if other.text and other.text != token.text and rest.startswith(other.text)
        ]  # fmt: skip
        best = max(fitting, key=lambda other: other.logprob or -math.inf, default=None)
        margin, is_least = _measure(token, best)
    return Difference(
        prompt=prompt, position=at, unit="character", margin=margin, is_least=is_least,
        bound=bound, cause=_judge(margin, is_least, bound), **shown,
    )  # fmt: skip


def _is(token: Token, number: int, text: str | None) -> bool:
    """Whether a likely token is that of an id; by its text where its id is not told."""
    return token.text == text if token.id is None else token.id == number


def _find_difference(own: Sequence[Any], theirs: Sequence[Any]) -> int:
    """The first place where two sequences differ, or the shorter one's length."""
    pairs = enumerate(zip(own, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(own), len(theirs)))


def _measure(token: Token | None, other: Token | None) -> tuple[float | None, bool]:
    """How much likelier, in logits, a token is than another; of one that is not told, at least."""
    if token is None or token.logprob is None:
        return None, False
    if other is not None and other.logprob is not None:
        return token.logprob - other.logprob, False
    told = [one.logprob for one in token.top if one.logprob is not None]
    return (token.logprob - min(told), True) if told else (None, False)


def _judge(margin: float | None, is_least: bool, bound: float) -> str:
    if margin is None or (is_least and margin <= bound):
        return UNKNOWN
    return NEAR_TIE if margin <= bound else DIFFERS


def _name(token: int, told: Token | None) -> str:
    return str(token) if told is None or told.text is None else f"{token} {told.text!r}"
