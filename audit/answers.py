"""What servers answer, in one form: OpenAI's, with vLLM's and llama-server's additions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.decode.requests import RequestStats

AnyPrompt = str | list[int] | list[dict[str, Any]]  # a text, token ids or a conversation
INCOMPLETE = "\ufffd"
TOKEN_ID = re.compile(r"token_id:(\d+)")  # how vLLM writes a token whose id was asked for


class BadAnswer(Exception):
    """An answer is not what such servers send."""


@dataclasses.dataclass(frozen=True)
class Token:
    """A token as far as it is known. top: the likeliest ones at its place."""

    id: int | None
    text: str | None
    logprob: float | None
    top: tuple[Token, ...] = ()


@dataclasses.dataclass(frozen=True)
class Counts:
    """What speculation did. drafts: None where it is not told; per_position: accepted ones."""

    drafts: int | None
    drafted: int
    accepted: int
    per_position: tuple[int, ...] | None = None

    def __add__(self, other: Counts) -> Counts:
        return self._join(other, 1)

    def __sub__(self, other: Counts) -> Counts:
        return self._join(other, -1)

    def _join(self, other: Counts, sign: int) -> Counts:
        drafts = positions = None
        if self.drafts is not None and other.drafts is not None:
            drafts = self.drafts + sign * other.drafts
        # A counter by position may come into being with the first token that is accepted.
        ours, theirs = (c.per_position or (() if c.accepted == 0 else None) for c in (self, other))
        if ours is not None and theirs is not None:
            pairs = itertools.zip_longest(ours, theirs, fillvalue=0)
            positions = tuple(a + sign * b for a, b in pairs) or None
        drafted = self.drafted + sign * other.drafted
        return Counts(drafts, drafted, self.accepted + sign * other.accepted, positions)


def add_counts(counts: Sequence[Counts]) -> Counts:
    """The sum of at least one."""
    return functools.reduce(operator.add, counts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One choice. ids and tokens: None where the server does not tell.

    tokens: of its log-probabilities, or of the reference. ends: by token, how many characters of
    the text there are with it. max_tokens: what was asked for. counts: of this request alone.
    """

    prompt: AnyPrompt
    text: str
    max_tokens: int
    ids: list[int] | None = None
    tokens: list[Token] | None = None
    ends: list[int] | None = None
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    prompt_ids: list[int] | None = None
    counts: Counts | None = None

    @property
    def num_tokens(self) -> int | None:
        """Tokens that are told of, one by one."""
        told = self.ids if self.ids is not None else self.tokens
        return None if told is None else len(told)

    @property
    def completion_tokens(self) -> int | None:
        """Tokens by the server's own count."""
        count = (self.usage or {}).get("completion_tokens")
        return count if isinstance(count, int) else None


def read_answer(document: Any, prompt: AnyPrompt, max_tokens: int) -> Answer:
    """Read a whole answer, not a stream's; BadAnswer where it is none."""
    try:
        (choice,) = document["choices"]
        return _make_answer([choice], document, [document], prompt, max_tokens)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"{type(error).__name__}: {error}") from None


def join_events(
    events: Sequence[Mapping[str, Any]], prompt: AnyPrompt, max_tokens: int
) -> Answer:  # fmt: skip
    """The answer that a stream's chunks add up to; BadAnswer where they do not."""
    try:
        choices = [choice for event in events for choice in event.get("choices", [])]
        usages: list[Any] = [event for event in events if event.get("usage")]
        return _make_answer(choices, usages[-1] if usages else {}, events, prompt, max_tokens)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"{type(error).__name__}: {error}") from None


def _make_answer(
    choices: Sequence[Mapping[str, Any]], whole: Mapping[str, Any],
    documents: Sequence[Mapping[str, Any]], prompt: AnyPrompt, max_tokens: int,
) -> Answer:  # fmt: skip
    text = "".join(read_text(choice) for choice in choices)
    ids: list[int] | None = None
    tokens: list[Token] | None = None
    prompt_ids = whole.get("prompt_token_ids")
    reason = None
    for choice in choices:
        if choice.get("token_ids") is not None:
            ids = [*(ids or []), *choice["token_ids"]]
        if (told := read_tokens(choice.get("logprobs"))) is not None:
            tokens = [*(tokens or []), *told]
        prompt_ids = choice.get("prompt_token_ids") or prompt_ids
        reason = choice.get("finish_reason") or reason
    if ids is None and tokens is not None and all(token.id is not None for token in tokens):
        ids = [token.id for token in tokens if token.id is not None]
    counted = [counts for document in documents if (counts := read_counts(document)) is not None]
    return Answer(
        prompt=prompt, text=text, max_tokens=max_tokens, ids=ids, tokens=tokens,
        ends=None if tokens is None else find_ends(text, tokens), finish_reason=reason,
        usage=whole.get("usage"), prompt_ids=prompt_ids, counts=counted[-1] if counted else None,
    )  # fmt: skip


def read_text(choice: Mapping[str, Any]) -> str:
    """The text of a choice, of either endpoint, whole or a chunk's."""
    if "text" in choice:
        return choice["text"] or ""
    part = choice["message"] if "message" in choice else choice["delta"]
    text: str = part.get("content") or ""
    return text


def read_tokens(logprobs: Any) -> list[Token] | None:
    """The tokens of a choice's log-probabilities, in either endpoint's form."""
    if not logprobs:
        return None
    if "content" in logprobs:  # llama-server has this form everywhere
        return [_read_token(token) for token in logprobs["content"] or []]
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    tokens = []
    for text, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True
    ):
        others = tuple(Token(_find_id(t), t, value) for t, value in (top or {}).items())
        tokens.append(Token(_find_id(text), text, logprob, others))
    return tokens


def _read_token(token: Mapping[str, Any]) -> Token:
    top = tuple(_read_token(other) for other in token.get("top_logprobs") or ())
    return Token(token.get("id"), token["token"], token.get("logprob"), top)


def _find_id(text: str) -> int | None:
    found = TOKEN_ID.fullmatch(text)
    return int(found[1]) if found else None


def find_ends(text: str, tokens: Sequence[Token]) -> list[int] | None:
    """Where each token's text ends in a text; None where the tokens' texts do not add up to it."""
    joined, ends = "", []
    for token in tokens:
        joined += token.text or ""
        ends.append(min(len(joined), len(text)))
    return ends if joined.startswith(text) else None


def count_drafts(stats: RequestStats) -> Counts:
    """What an engine of ours counts."""
    positions = _count_positions(stats.accepted_histogram)
    return Counts(stats.num_verify_steps, stats.num_draft_tokens, stats.num_accepted, positions)


def _count_positions(histogram: Sequence[int]) -> tuple[int, ...]:
    """By position, drafts that had it accepted. histogram: drafts by what they had accepted."""
    return tuple(sum(histogram[at:]) for at in range(1, len(histogram)))


def read_counts(document: Mapping[str, Any]) -> Counts | None:
    """What a response tells of its own speculation: vLLM's fields, llama-server's, OpenAI's."""
    metrics = document.get("metrics") or {}
    if told := metrics.get("speculative_decoding"):
        histogram = told.get("acceptance_histogram")
        positions = _count_positions(histogram) if histogram else None
        drafts, drafted = told["num_spec_steps"], told["num_draft_tokens"]
        return Counts(drafts, drafted, told["num_accepted_draft_tokens"], positions)
    timings = document.get("timings") or {}
    if "draft_n" in timings:
        return Counts(None, timings["draft_n"], timings["draft_n_accepted"])
    details = (document.get("usage") or {}).get("completion_tokens_details") or {}
    accepted = details.get("accepted_prediction_tokens") or 0
    drafted = accepted + (details.get("rejected_prediction_tokens") or 0)
    return Counts(None, drafted, accepted) if drafted else None  # OpenAI tells zeros
