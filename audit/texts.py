"""Texts side by side: the first difference, and whether it is a near-tie."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from specdec.text.comparison import LENGTH, find_difference, judge_margin, name_token

from .answers import Answer, Token


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

    def __str__(self) -> str:
        least = "at least " if self.is_least else ""
        margin = "not known" if self.margin is None else f"{least}{self.margin:.3g}"
        return (
            f"prompt {self.prompt}, {self.unit} {self.position}: {self.server} for"
            f" {self.reference}; margin {margin}, bound {self.bound:g}: {self.cause}"
        )


def compare(answer: Answer, reference: Answer, *, prompt: int, bound: float) -> Difference | None:
    """The first difference of an answer from the reference's, None where there is none.

    By token ids where both have them, then by characters. The reference may be longer only by
    tokens that are no text: an end token, which some servers tell of and some do not.
    """
    own, theirs = answer.ids, reference.ids
    at = None if own is None or theirs is None else find_difference(own, theirs)
    if own is not None and theirs is not None and at is not None:
        facts: dict[str, Any] = {"prompt": prompt, "position": at, "unit": "token", "bound": bound}
        if at < min(len(own), len(theirs)):
            token, other = _find_by_id(answer, reference, at, own[at])
            return Difference(
                **facts, **_measure(token, other, bound),
                server=name_token(own[at], other.text if other else None),
                server_token=own[at],
                reference=name_token(theirs[at], token.text if token else None),
                reference_token=theirs[at],
            )  # fmt: skip
        if abs(len(own) - len(theirs)) > (answer.finish_reason != "length"):
            return Difference(
                **facts, server=f"{len(own)} tokens ({answer.finish_reason})",
                reference=f"{len(theirs)} ({reference.finish_reason})", cause=LENGTH,
            )  # fmt: skip
    at = find_difference(answer.text, reference.text)
    if at is None:
        return None
    measured: dict[str, Any] = {"cause": LENGTH}
    same_ids = own is not None and own == theirs
    if at < min(len(answer.text), len(reference.text)) and not same_ids:
        measured = _measure(*_find_by_character(answer, reference, at), bound)
    return Difference(
        prompt=prompt, position=at, unit="character", bound=bound,
        server=repr(answer.text[at : at + 20]), reference=repr(reference.text[at : at + 20]),
        **measured,
    )  # fmt: skip


def _find_by_id(
    answer: Answer, reference: Answer, place: int, token_id: int
) -> tuple[Token | None, Token | None]:
    """Return the reference's token at a place, and of those that it tells of there the answer's.

    By its text where ids are not told, and by the answer's text where its tokens are not told
    either. Neither token where none of these is known: then the margin is not.
    """
    token = None if reference.tokens is None else reference.tokens[place]
    if token is None:
        return None, None
    if any(one.id is not None for one in token.top):
        return token, next((one for one in token.top if one.id == token_id), None)
    if answer.tokens is not None:
        text = answer.tokens[place].text
        return token, next((one for one in token.top if one.text == text), None)
    return _find_by_text(answer, reference, place)


def _find_by_character(
    answer: Answer, reference: Answer, at: int
) -> tuple[Token | None, Token | None]:
    """Return the reference's token at a character, and the likeliest that fits the answer there."""
    if reference.ends is None:
        return None, None
    return _find_by_text(
        answer, reference, next(i for i, end in enumerate(reference.ends) if end > at)
    )


def _find_by_text(
    answer: Answer, reference: Answer, place: int
) -> tuple[Token | None, Token | None]:
    """Return the reference's token at a place, and the likeliest that fits the answer there."""
    if reference.tokens is None or reference.ends is None:
        return None, None
    token = reference.tokens[place]
    rest = answer.text[reference.ends[place - 1] if place else 0 :]
    fitting = [t for t in token.top if t.text and t.text != token.text and rest.startswith(t.text)]
    return token, max(fitting, key=_rate, default=None)


def _rate(token: Token) -> float:
    return -math.inf if token.logprob is None else token.logprob


def _measure(token: Token | None, other: Token | None, bound: float) -> dict[str, Any]:
    """How much likelier, in logits, a token is than another; of one that is not told, at least."""
    margin, is_least = None, False
    if token is not None and token.logprob is not None:
        told = [one.logprob for one in token.top if one.logprob is not None]
        if other is not None and other.logprob is not None:
            margin = token.logprob - other.logprob
        elif told:
            margin, is_least = token.logprob - min(told), True
    cause = judge_margin(margin, bound, is_least=is_least)
    return {"margin": margin, "is_least": is_least, "cause": cause}
