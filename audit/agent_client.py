"""Requests of an audit as an agent: asked, asked again without a cache, scored, and replayed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.text.comparison import NEAR_TIE, UNKNOWN

from .answers import AnyPrompt, BadAnswer, Completion, Token
from .server import Refused, ServerClient
from .texts import compare

SALT = "Session 10000"  # in each prompt: another number makes it a text that no cache has
MAX_TRIALS = 24  # replays of request sequences, to find a short one
NUM_TOP = 5
# Fields by which servers leave their cache aside, and do not draft: the first that are taken.
FRESH_FIELDS: tuple[Mapping[str, Any], ...] = (
    {"prompt_logprobs": 0, "speculation": False},  # specdec
    {"prompt_logprobs": 0},  # vLLM
    {"cache_prompt": False},  # llama.cpp
)


@dataclasses.dataclass(frozen=True)
class AgentRequest:
    """A request: its prompt, a text or messages, and other fields of its body."""

    prompt: AnyPrompt
    max_tokens: int
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def change_salt(self, number: int) -> AgentRequest:
        """Return the request with another text at its prompt's beginning."""
        salt = f"{SALT.rstrip('0123456789')}{10000 + number}"
        prompt = json.loads(json.dumps(self.prompt).replace(SALT, salt))
        return dataclasses.replace(self, prompt=prompt)

    @property
    def is_constrained(self) -> bool:
        """Return whether a grammar says which tokens the answer may have."""
        return "response_format" in self.fields or self.fields.get("tool_choice") == "required"

    @property
    def is_greedy(self) -> bool:
        return not self.fields.get("temperature")

    def to_json(self) -> dict[str, Any]:
        """Return the request as evidence has it."""
        kind = "prompt" if isinstance(self.prompt, str) else "messages"
        return {kind: self.prompt, "max_tokens": self.max_tokens, **self.fields}


@dataclasses.dataclass(frozen=True)
class StepAnswer:
    """Answer to a request, and the whole document. number: of the request in the audit."""

    step: AgentRequest
    number: int
    completion: Completion
    document: Mapping[str, Any]


class Doubt(str):
    """Difference that rounding may explain: no log-probabilities tell its margin."""

    __slots__ = ()


class AgentClient:
    """Client that asks as an agent does, and judges each answer by itself.

    reference: another server, which never drafts; None where there is none.
    """

    def __init__(
        self, server: ServerClient, bound: float, reference: ServerClient | None = None
    ) -> None:
        self.server, self.bound, self.reference = server, bound, reference
        self.steps: list[AgentRequest] = []  # all requests of the session so far
        self.has_chat = self._takes([{"role": "user", "content": "The"}], {})
        self.fresh_fields = next(
            (fields for fields in FRESH_FIELDS if self._takes(self.make_prompt("The"), fields)),
            None,
        )
        self.num_scored = 0  # answers whose log-probabilities were computed again
        self._num_trials = 0

    def make_prompt(self, text: str) -> AnyPrompt:
        """Return a text as a prompt of the server's endpoint."""
        return [{"role": "user", "content": text}] if self.has_chat else text

    def _takes(self, prompt: AnyPrompt, fields: Mapping[str, Any]) -> bool:
        """Return whether the server takes these fields, and says nothing of ignoring them."""
        try:
            _, document = self.server.ask(prompt, {"max_tokens": 1, "temperature": 0.0, **fields})
        except (Refused, BadAnswer):
            return False
        ignored = (document.get("specdec") or {}).get("ignored") or []
        is_told = "prompt_logprobs" not in fields or "prompt_logprobs" in json.dumps(document)
        return is_told and not {*fields}.intersection(map(str, ignored))

    def ask(self, step: AgentRequest) -> StepAnswer:
        """Ask for a step of the session."""
        self.steps.append(step)
        return self._ask(self.server, step, {}, len(self.steps) - 1)

    def _ask(
        self, server: ServerClient, step: AgentRequest, fields: Mapping[str, Any], number: int
    ) -> StepAnswer:
        details: dict[str, Any] = {"return_token_ids": True} if server.offer.id_fields else {}
        if server.offer.detail_fields:
            is_chat = not isinstance(step.prompt, str)
            tops: dict[str, Any] = {"logprobs": True, "top_logprobs": NUM_TOP}
            details |= tops if is_chat else {"logprobs": NUM_TOP}
        details = {"max_tokens": step.max_tokens, "temperature": 0.0, **details}
        completion, document = server.ask(step.prompt, {**details, **step.fields, **fields})
        return StepAnswer(step, number, completion, document)

    def find_fault(self, answer: StepAnswer) -> str | None:
        """Return what is wrong with an answer, compared with what nothing cached has a part in."""
        step, name = answer.step, f"request {answer.number}"
        is_repeatable = step.is_greedy or "seed" in step.fields
        fresh = None
        if self.reference is not None and step.is_greedy:
            fresh = self._ask(self.reference, step, {}, answer.number)
        elif self.fresh_fields is not None and is_repeatable:
            fresh = self._ask(self.server, step, self.fresh_fields, answer.number)
        if fresh is not None:
            fault = self.compare(answer, fresh)
            if fault is not None:
                label = f"{name}: another answer than without a cache and drafts"
                return type(fault)(f"{label}: {fault}")
        logprobs = self._score(answer)
        if logprobs is not None and answer.completion.tokens is not None:
            fault = _find_drift(
                answer.completion.tokens, logprobs, self.bound, may_rise=step.is_constrained
            )
            if fault is not None:
                return f"{name}: other log-probabilities than its text has in a prompt: {fault}"
        return None

    def compare(self, answer: StepAnswer, expected: StepAnswer) -> str | None:
        """Return the first difference of two answers to one request, beyond near-ties."""
        first, second = answer.completion, expected.completion
        difference = compare(first, second, prompt=answer.number, bound=self.bound)
        if difference is not None:
            # A draw may fall otherwise where rounding does; that texts drift shows in the scores.
            is_excused = difference.cause == NEAR_TIE or not answer.step.is_greedy
            if is_excused:
                return None
            return Doubt(difference) if difference.cause == UNKNOWN else str(difference)
        values = [token.logprob for token in second.tokens or ()]
        return _find_drift(first.tokens or (), values, self.bound)

    def _score(self, answer: StepAnswer) -> list[float | None] | None:
        """Return the log-probabilities of an answer's tokens as part of a prompt, if told."""
        completion = answer.completion
        if self.server.offer.is_chat or not completion.ids or not completion.prompt_ids:
            return None
        if self.fresh_fields is None or "prompt_logprobs" not in self.fresh_fields:
            return None
        ids = [*completion.prompt_ids, *completion.ids]
        body = {"max_tokens": 1, "temperature": 0.0, **self.fresh_fields}
        try:
            _, document = self.server.ask(ids, body)
            values = _read_prompt_logprobs(document, ids)
        except (Refused, LookupError, TypeError, AttributeError):
            return None  # such as a text that is as long as the server takes
        self.num_scored += 1
        return values[len(completion.prompt_ids) :]

    def shorten(self, answer: StepAnswer) -> list[AgentRequest] | None:
        """Find few requests before a faulty one that make it faulty again; None where none do.

        Each try has a text of its own, so that what an earlier one has spoilt has no part in it.
        """
        steps = self.steps[: answer.number]
        if not self._fails(steps, answer.step):
            return None
        size = len(steps)
        while size >= 1:
            start = 0
            while start < len(steps):
                fewer_steps = steps[:start] + steps[start + size :]
                if self._fails(fewer_steps, answer.step):
                    steps = fewer_steps
                else:
                    start += size
            size //= 2
        return [*steps, answer.step]

    def _fails(self, steps: Sequence[AgentRequest], step: AgentRequest) -> bool:
        if self._num_trials >= MAX_TRIALS:
            return False
        self._num_trials += 1
        number = self._num_trials
        try:
            for earlier_step in steps:
                self._ask(self.server, earlier_step.change_salt(number), {}, number)
            answer = self._ask(self.server, step.change_salt(number), {}, number)
            return self.find_fault(answer) is not None
        except (Refused, BadAnswer):
            return True


def _find_drift(
    tokens: Sequence[Token], values: Sequence[float | None], bound: float, *, may_rise: bool = False
) -> str | None:
    """Return the first token whose log-probability is not the expected one.

    may_rise: a higher one is right, too: some servers tell it behind the grammar, which takes
    tokens away and lets the others rise.
    """
    for index, (token, value) in enumerate(zip(tokens, values, strict=False)):
        if value is None or token.logprob is None:
            continue
        rise = token.logprob - value
        if abs(rise) > bound and not (may_rise and rise > 0):
            return f"token {index} has {token.logprob:.4g} for {value:.4g}, bound {bound:g}"
    return None


def _read_prompt_logprobs(document: Mapping[str, Any], ids: Sequence[int]) -> list[float | None]:
    """Return the log-probability of each token of a prompt, in vLLM's form."""
    (choice,) = document["choices"]
    entries = choice.get("prompt_logprobs") or document["prompt_logprobs"]
    values: list[float | None] = []
    for token_id, entry in zip(ids, entries, strict=True):
        values.append(None if entry is None else float(entry[str(token_id)]["logprob"]))
    return values
