"""Answers of servers, parsed: OpenAI's form with vLLM's and llama-server's additions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from specdec.decode.requests import RequestStats

AnyPrompt = str | list[int] | list[dict[str, Any]]  # a text, token ids or a conversation
INCOMPLETE = "\ufffd"
TOKEN_ID = re.compile(r"token_id:(\d+)")  # vLLM's text of a token, by its id
T = TypeVar("T")


class BadAnswer(Exception):
    """Error of an answer that is not in OpenAI's form."""


@dataclasses.dataclass(frozen=True)
class Token:
    """Token with the server's facts about it. top: the likeliest tokens at its position."""

    id: int | None
    text: str | None
    logprob: float | None
    top: tuple[Token, ...] = ()


@dataclasses.dataclass(frozen=True)
class Counts:
    """Numbers of drafts, of drafted and of accepted tokens.

    drafts: None where the source does not count them. per_position: accepted tokens by their
    position in the draft; None where the source does not list positions.
    """

    drafts: int | None
    drafted: int
    accepted: int
    per_position: tuple[int, ...] | None = None

    def __add__(self, counts: Counts) -> Counts:
        return self._add_multiple(counts, 1)

    def __sub__(self, counts: Counts) -> Counts:
        return self._add_multiple(counts, -1)

    def _add_multiple(self, counts: Counts, sign: int) -> Counts:
        drafts = positions = None
        if self.drafts is not None and counts.drafts is not None:
            drafts = self.drafts + sign * counts.drafts
        # A position's counter may appear with the first token that is accepted there.
        lists = [c.per_position or (() if c.accepted == 0 else None) for c in (self, counts)]
        if lists[0] is not None and lists[1] is not None:
            pairs = itertools.zip_longest(lists[0], lists[1], fillvalue=0)
            positions = tuple(a + sign * b for a, b in pairs) or None
        drafted = self.drafted + sign * counts.drafted
        return Counts(drafts, drafted, self.accepted + sign * counts.accepted, positions)


def add_counts(counts: Sequence[Counts]) -> Counts:
    """Return the sum of at least one set of counts."""
    return functools.reduce(operator.add, counts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """Choice of a response. ids, tokens: None where the server does not send them.

    tokens: tokens of the log-probabilities, or of the reference. ends: by token, the length of the
    text up to its end, in characters. max_tokens: the limit of the request. counts: speculation
    of this request alone.
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
        """Number of tokens that the answer lists one by one."""
        tokens = self.ids if self.ids is not None else self.tokens
        return None if tokens is None else len(tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of the prompt's tokens by the server's own count; 0 where it tells none."""
        count = (self.usage or {}).get("prompt_tokens")
        return count if isinstance(count, int) else 0

    @property
    def completion_tokens(self) -> int | None:
        """Number of tokens by the server's own count."""
        count = (self.usage or {}).get("completion_tokens")
        return count if isinstance(count, int) else None


def read_answer(document: Any, prompt: AnyPrompt, max_tokens: int) -> Completion:
    """Parse a whole answer, not a stream's; raise BadAnswer for anything else."""
    try:
        (choice,) = document["choices"]
        return _make_answer([choice], document, [document], prompt, max_tokens)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"{type(error).__name__}: {error}") from None


def join_events(
    events: Sequence[Mapping[str, Any]], prompt: AnyPrompt, max_tokens: int
) -> Completion:  # fmt: skip
    """Join a stream's chunks to an answer; raise BadAnswer where that fails."""
    try:
        choices = [choice for event in events for choice in event.get("choices", [])]
        usages: list[Any] = [event for event in events if event.get("usage")]
        return _make_answer(choices, usages[-1] if usages else {}, events, prompt, max_tokens)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"{type(error).__name__}: {error}") from None


def _make_answer(
    choices: Sequence[Mapping[str, Any]], summary: Mapping[str, Any],
    documents: Sequence[Mapping[str, Any]], prompt: AnyPrompt, max_tokens: int,
) -> Completion:  # fmt: skip
    """Join the choices of a response's documents. summary: the document with the usage."""
    text = "".join(read_text(choice) for choice in choices)
    tokens = _concatenate(read_tokens(choice.get("logprobs")) for choice in choices)
    ids = _concatenate(choice.get("token_ids") for choice in choices)
    counts = [count for document in documents if (count := read_counts(document)) is not None]
    return Completion(
        prompt=prompt, text=text, max_tokens=max_tokens, tokens=tokens,
        ids=_list_ids(tokens) if ids is None else ids,
        ends=None if tokens is None else find_ends(text, tokens),
        finish_reason=_find_last(choices, "finish_reason"), usage=summary.get("usage"),
        prompt_ids=_find_last(choices, "prompt_token_ids") or summary.get("prompt_token_ids"),
        counts=counts[-1] if counts else None,
    )  # fmt: skip


def _concatenate(lists: Iterable[list[T] | None]) -> list[T] | None:
    """Return the items of the lists that are not None; None where all are."""
    present_lists = [items for items in lists if items is not None]
    return [item for items in present_lists for item in items] if present_lists else None


def _find_last(choices: Sequence[Mapping[str, Any]], key: str) -> Any:
    """Return the last value of a key that is not null; None where all are."""
    return next((value for choice in reversed(choices) if (value := choice.get(key))), None)


def _list_ids(tokens: Sequence[Token] | None) -> list[int] | None:
    """Return the ids of tokens; None where one of them has none."""
    ids = [token.id for token in tokens or () if token.id is not None]
    return ids if tokens is not None and len(ids) == len(tokens) else None


def read_text(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice of either endpoint, or of a chunk's choice."""
    if "text" in choice:
        return choice["text"] or ""
    message = choice["message"] if "message" in choice else choice["delta"]
    text: str = message.get("content") or ""
    return text


def read_tokens(logprobs: Any) -> list[Token] | None:
    """Return the tokens of a choice's log-probabilities, in either endpoint's form."""
    if not logprobs:
        return None
    if "content" in logprobs:  # llama-server has this form at both endpoints
        return [_read_written(token) for token in logprobs["content"] or []]
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    tokens = []
    for text, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True
    ):
        likeliest = tuple(Token(_find_id(t), t, value) for t, value in (top or {}).items())
        tokens.append(Token(_find_id(text), text, logprob, likeliest))
    return tokens


def _read_token(token: Mapping[str, Any]) -> Token:
    top = tuple(_read_token(candidate) for candidate in token.get("top_logprobs") or ())
    return Token(token.get("id"), token["token"], token.get("logprob"), top)


def _read_written(token: Mapping[str, Any]) -> Token:
    """Read a token of an answer, whose log-probability may not be told.

    llama-server tells none of a step that drafted: it writes 0, and lists no likeliest tokens.
    """
    read = _read_token(token)
    return dataclasses.replace(read, logprob=None) if read.logprob == 0 and not read.top else read


def _find_id(text: str) -> int | None:
    match = TOKEN_ID.fullmatch(text)
    return int(match[1]) if match else None


def find_ends(text: str, tokens: Sequence[Token]) -> list[int] | None:
    """Return the end of each token in a text; None where the tokens do not make up the text."""
    token_text, ends = "", []
    for token in tokens:
        token_text += token.text or ""
        ends.append(min(len(token_text), len(text)))
    return ends if token_text.startswith(text) else None


def count_drafts(stats: RequestStats) -> Counts:
    """Return the counts of a request in an engine of ours."""
    positions = _count_positions(stats.accepted_histogram)
    return Counts(stats.num_verify_steps, stats.num_draft_tokens, stats.num_accepted, positions)


def _count_positions(histogram: Sequence[int]) -> tuple[int, ...]:
    """Return the number of drafts with an accepted token at each position.

    histogram: number of drafts by the number of their accepted tokens.
    """
    return tuple(sum(histogram[length:]) for length in range(1, len(histogram)))


def read_counts(document: Mapping[str, Any]) -> Counts | None:
    """Return a response's counts of speculation: vLLM's, llama-server's or OpenAI's fields."""
    metrics = document.get("metrics") or {}
    if speculation := metrics.get("speculative_decoding"):
        histogram = speculation.get("acceptance_histogram")
        positions = _count_positions(histogram) if histogram else None
        drafts, drafted = speculation["num_spec_steps"], speculation["num_draft_tokens"]
        return Counts(drafts, drafted, speculation["num_accepted_draft_tokens"], positions)
    timings = document.get("timings") or {}
    if "draft_n" in timings:
        return Counts(None, timings["draft_n"], timings["draft_n_accepted"])
    details = (document.get("usage") or {}).get("completion_tokens_details") or {}
    accepted = details.get("accepted_prediction_tokens") or 0
    drafted = accepted + (details.get("rejected_prediction_tokens") or 0)
    # OpenAI's API sends zeros without speculation.
    return Counts(None, drafted, accepted) if drafted else None
