"""Comparison of texts: the first difference, and a verdict on near-ties."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from specdec.text.comparison import LENGTH, find_difference, judge_margin, name_token

from .answers import Completion, Token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """First difference of a server's text from the reference's.

    position: index of the output token, or of the character where tokens are unknown. margin: the
    reference's logit of its own token less its logit of the server's token; None where it is
    unknown, a lower bound with is_least. cause: "near-tie" within the
    bound, "differs" beyond it, "unknown" without a margin, "length" where one text has ended.
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
        qualifier = "at least " if self.is_least else ""
        margin = "not known" if self.margin is None else f"{qualifier}{self.margin:.3g}"
        return (
            f"prompt {self.prompt}, {self.unit} {self.position}: {self.server} for"
            f" {self.reference}; margin {margin}, bound {self.bound:g}: {self.cause}"
        )


def compare(
    answer: Completion, reference: Completion, *, prompt: int, bound: float
) -> Difference | None:
    """Return the first difference of an answer from the reference's; None where there is none.

    Token ids are compared where both have them, then characters. The reference may be longer only
    by tokens without text: an end token, which some servers list and others do not.
    """
    if answer.ids is not None and reference.ids is not None:
        index = find_difference(answer.ids, reference.ids)
        if index is not None and index < min(len(answer.ids), len(reference.ids)):
            return _describe_token(answer, reference, index, prompt, bound)
        num_extra = abs(len(answer.ids) - len(reference.ids))
        if num_extra > (answer.finish_reason != "length"):
            return Difference(
                prompt=prompt, position=min(len(answer.ids), len(reference.ids)), unit="token",
                bound=bound, server=f"{len(answer.ids)} tokens ({answer.finish_reason})",
                reference=f"{len(reference.ids)} ({reference.finish_reason})", cause=LENGTH,
            )  # fmt: skip
    index = find_difference(answer.text, reference.text)
    return None if index is None else _describe_character(answer, reference, index, prompt, bound)


def _describe_token(
    answer: Completion, reference: Completion, index: int, prompt: int, bound: float
) -> Difference:
    """Describe a difference in the ids at an output token."""
    assert answer.ids is not None
    assert reference.ids is not None
    server_id, reference_id = answer.ids[index], reference.ids[index]
    reference_token, server_token = _find_by_id(answer, reference, index, server_id)
    return Difference(
        prompt=prompt, position=index, unit="token", bound=bound,
        server=name_token(server_id, server_token.text if server_token else None),
        server_token=server_id,
        reference=name_token(reference_id, reference_token.text if reference_token else None),
        reference_token=reference_id, **_measure(reference_token, server_token, bound),
    )  # fmt: skip


def _describe_character(
    answer: Completion, reference: Completion, index: int, prompt: int, bound: float
) -> Difference:
    """Describe a difference in the texts at a character."""
    measures: dict[str, Any] = {"cause": LENGTH}
    has_same_ids = answer.ids is not None and answer.ids == reference.ids
    if index < min(len(answer.text), len(reference.text)) and not has_same_ids:
        measures = _measure(*_find_by_character(answer, reference, index), bound)
    return Difference(
        prompt=prompt, position=index, unit="character", bound=bound,
        server=repr(answer.text[index : index + 20]),
        reference=repr(reference.text[index : index + 20]), **measures,
    )  # fmt: skip


def _find_by_id(
    answer: Completion, reference: Completion, index: int, token_id: int
) -> tuple[Token | None, Token | None]:
    """Return the reference's token at an index, and its entry of the answer's token.

    The answer's token is found among the reference's likeliest ones by its id; by its text where
    the answer has no ids, and by the answer's text where it has no tokens either. Both are None
    where none of these is known: then the margin is unknown.
    """
    token = None if reference.tokens is None else reference.tokens[index]
    if token is None:
        return None, None
    if any(candidate.id is not None for candidate in token.top):
        return token, next((c for c in token.top if c.id == token_id), None)
    if answer.tokens is not None:
        text = answer.tokens[index].text
        return token, next((c for c in token.top if c.text == text), None)
    return _find_by_text(answer, reference, index)


def _find_by_character(
    answer: Completion, reference: Completion, character: int
) -> tuple[Token | None, Token | None]:
    """Return the reference's token at a character, and the likeliest that fits the answer there."""
    if reference.ends is None:
        return None, None
    index = next(i for i, end in enumerate(reference.ends) if end > character)
    return _find_by_text(answer, reference, index)


def _find_by_text(
    answer: Completion, reference: Completion, index: int
) -> tuple[Token | None, Token | None]:
    """Return the reference's token at an index, and the likeliest that fits the answer there."""
    if reference.tokens is None or reference.ends is None:
        return None, None
    token = reference.tokens[index]
    text = answer.text[reference.ends[index - 1] if index else 0 :]
    candidates = [c for c in token.top if c.text != token.text]
    matches = [c for c in candidates if c.text and text.startswith(c.text)]
    return token, max(matches, key=_rate, default=None)


def _rate(token: Token) -> float:
    return -math.inf if token.logprob is None else token.logprob


def _measure(
    reference_token: Token | None, server_token: Token | None, bound: float
) -> dict[str, Any]:
    """Return the margin in logits of the reference's token over the server's.

    The margin is a lower bound where the reference does not list the server's token.
    """
    margin, is_least = None, False
    if reference_token is not None and reference_token.logprob is not None:
        logprobs = [token.logprob for token in reference_token.top if token.logprob is not None]
        if server_token is not None and server_token.logprob is not None:
            margin = reference_token.logprob - server_token.logprob
        elif logprobs:
            margin, is_least = reference_token.logprob - min(logprobs), True
    cause = judge_margin(margin, bound, is_least=is_least)
    return {"margin": margin, "is_least": is_least, "cause": cause}
