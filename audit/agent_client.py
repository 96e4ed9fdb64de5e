"""Requests of an audit as an agent: asked, asked again without a cache, scored, and replayed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdec.text.comparison import NEAR_TIE, UNKNOWN, name_token

from .answers import AnyPrompt, BadAnswer, Completion, Token
from .server import LateAnswer, Refused, ServerClient
from .texts import compare

SALT = "Session 10000"  # in each prompt: another number makes it a text that no cache has
MAX_TRIALS = 24  # replays of request sequences, to find a short one
MAX_REPLAYED = 4  # times the session's own texts that all replays together may send
LEAST_TEXT = 64  # characters that a text of a short sequence keeps, of the salt and after it
NUM_TOP = 5
# Fields by which servers leave their cache aside, and do not draft: the first that are taken.
FRESH_FIELDS: tuple[Mapping[str, Any], ...] = (
    {"prompt_logprobs": 0, "speculation": False},  # specdec
    {"prompt_logprobs": 0},  # vLLM
    {"cache_prompt": False},  # llama.cpp
)
# Fields by which a server draws from the model's whole distribution, which its log-probabilities
# tell: without them llama-server cuts it by top_k 40, top_p 0.95 and min_p 0.05, vLLM by the
# model's generation_config.json. The first that are taken.
UNCUT_FIELDS: tuple[Mapping[str, Any], ...] = (
    {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    {"top_p": 1.0, "top_k": -1},
    {"top_p": 1.0},
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

    def truncate(self, size: int) -> AgentRequest:
        """Return the request with `size` characters of each of its texts at most."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return dataclasses.replace(self, prompt=prompt[:size])
        messages: list[dict[str, Any]] = json.loads(json.dumps(prompt))
        for message in messages:
            message["content"] = message["content"][:size]
        return dataclasses.replace(self, prompt=messages)

    @property
    def size(self) -> int:
        """Characters of the prompt, with what JSON puts around them."""
        return len(json.dumps(self.prompt))

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


class Unjudged(Doubt):
    """Answer that nothing could be compared with: that request was refused, or took too long."""

    __slots__ = ()


class Failure(str):
    """Failure of the server where it was asked again: no replay tells more of it."""

    __slots__ = ()


class Score(NamedTuple):
    """Log-probability of a token in a prompt, and that of the likeliest token there."""

    logprob: float
    highest: float


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
        self.uncut_fields = next(
            (fields for fields in UNCUT_FIELDS if self._takes(self.make_prompt("The"), fields)), {}
        )
        self.num_scored = 0  # answers whose log-probabilities were computed again
        self._late_size: int | None = None  # of the shortest prompt that was not judged in time
        self._num_trials = self._num_replayed = 0

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
        """Ask for a step of the session; one that the server refuses is none."""
        answer = self._ask(self.server, step, {}, len(self.steps))
        self.steps.append(step)
        return answer

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
        name, size = f"request {answer.number}", answer.step.size
        if self._late_size is not None and size >= self._late_size:
            return Unjudged(f"{name}: not compared, since a shorter one took too long")
        try:
            fault = self._compare_with_fresh(answer)
        except LateAnswer as late:
            self._late_size = size
            return Unjudged(f"{name}: not compared: {late.message}; {late.hint}")
        except Refused as refusal:
            if refusal.is_fault:
                return Failure(f"{name}: the server failed when it was asked again: {refusal}")
            return Unjudged(f"{name}: not compared: {refusal}")
        except BadAnswer as error:
            return Unjudged(f"{name}: not compared: {error}")
        return None if fault is None else type(fault)(f"{name}: {fault}")

    def _compare_with_fresh(self, answer: StepAnswer) -> str | None:
        """Return an answer's difference from a reference, from its scores, or from a fresh answer.

        A fresh answer is asked for only where the scores do not tell which tokens should be there:
        it costs as much as they do, all of the prompt.
        """
        reference = self.reference if answer.step.is_greedy else None
        fault = None if reference is None else self._compare_with(answer, reference, {})
        scores = self._score(answer) if fault is None else None
        if scores is not None:
            fault = self._find_score_fault(answer, scores)
        fields = self.fresh_fields if reference is None else None
        if fault is None and fields is not None and _needs_fresh(answer, has_scores=bool(scores)):
            fault = self._compare_with(answer, self.server, fields)
        return fault

    def _find_score_fault(self, answer: StepAnswer, scores: Sequence[Score | None]) -> str | None:
        """Return the first token whose score is not the one it was told with, nor the highest."""
        completion, step = answer.completion, answer.step
        values = [None if score is None else score.logprob for score in scores]
        tokens = completion.tokens or ()
        fault = _find_drift(tokens, values, self.bound, may_rise=step.is_constrained)
        if fault is not None:
            return f"other log-probabilities than its text has in a prompt: {fault}"
        if step.is_greedy and not step.is_constrained:
            return _find_unlikely(completion, scores, self.bound)
        return None

    def _compare_with(
        self, answer: StepAnswer, server: ServerClient, fields: Mapping[str, Any]
    ) -> str | None:
        """Return an answer's difference from another one to its request."""
        fault = self.compare(answer, self._ask(server, answer.step, fields, answer.number))
        if fault is None:
            return None
        return type(fault)(f"another answer than without a cache and drafts: {fault}")

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

    def _score(self, answer: StepAnswer) -> list[Score | None] | None:
        """Return the scores of an answer's tokens as part of a prompt, if told."""
        completion = answer.completion
        if self.server.offer.is_chat or not completion.ids or not completion.prompt_ids:
            return None
        if self.fresh_fields is None or "prompt_logprobs" not in self.fresh_fields:
            return None
        ids = [*completion.prompt_ids, *completion.ids]
        fields = {**self.fresh_fields, "prompt_logprobs": 1}
        try:
            _, document = self.server.ask(ids, {"max_tokens": 1, "temperature": 0.0, **fields})
            scores = _read_prompt_logprobs(document, ids)
        except (Refused, LookupError, TypeError, AttributeError):
            return None  # such as a text that is as long as the server takes
        self.num_scored += 1
        return scores[len(completion.prompt_ids) :]

    def shorten(self, answer: StepAnswer) -> list[AgentRequest] | None:
        """Find few requests, of short texts, that make an answer faulty again; None where none do.

        Each try has a text of its own, so that what an earlier one has spoilt has no part in it.
        The last requests are tried first, twice as many each time: all of a long session's are sent
        again only where fewer do not do.
        """
        earlier_steps, count = self.steps[: answer.number], 0
        while not self._fails(earlier_steps[len(earlier_steps) - count :], answer.step):
            if count == len(earlier_steps):
                return None
            count = min(max(1, 2 * count), len(earlier_steps))
        steps = earlier_steps[len(earlier_steps) - count :]
        size = len(steps) // 2
        while size >= 1:
            start = 0
            while start < len(steps):
                fewer_steps = steps[:start] + steps[start + size :]
                if self._fails(fewer_steps, answer.step):
                    steps = fewer_steps
                else:
                    start += size
            size //= 2
        return self._truncate([*steps, answer.step])

    def _truncate(self, steps: list[AgentRequest]) -> list[AgentRequest]:
        """Return a sequence with texts half as long, again and again, as long as it fails."""
        size = max(step.size for step in steps)
        while (size := size // 2) >= LEAST_TEXT:
            shorter_steps = [step.truncate(size) for step in steps]
            if shorter_steps == steps:
                continue
            if not self._fails(shorter_steps[:-1], shorter_steps[-1]):
                break
            steps = shorter_steps
        return steps

    def _fails(self, steps: Sequence[AgentRequest], step: AgentRequest) -> bool:
        """Return whether a step after others is faulty; False where nothing more may be sent."""
        self._num_replayed += sum(earlier.size for earlier in steps) + 2 * step.size
        limit = MAX_REPLAYED * sum(earlier.size for earlier in self.steps)
        if self._num_trials >= MAX_TRIALS or self._num_replayed > limit:
            return False
        self._num_trials += 1
        number = self._num_trials
        try:
            for earlier_step in steps:
                self._ask(self.server, earlier_step.change_salt(number), {}, number)
            answer = self._ask(self.server, step.change_salt(number), {}, number)
        except LateAnswer:
            return False
        except (Refused, BadAnswer):
            return True
        fault = self.find_fault(answer)
        return fault is not None and not isinstance(fault, Doubt)


def _needs_fresh(answer: StepAnswer, *, has_scores: bool) -> bool:
    """Return whether only a fresh answer tells if this one is right.

    Scores tell it of all that was drawn, and of greedy text without a grammar; not why an answer
    ended early.
    """
    step = answer.step
    is_told = has_scores and answer.completion.num_tokens == step.max_tokens
    if is_told and not (step.is_greedy and step.is_constrained):
        return False
    return step.is_greedy or "seed" in step.fields


def _find_drift(
    tokens: Sequence[Token], values: Sequence[float | None], bound: float, *, may_rise: bool = False
) -> str | None:
    """Return the first token whose log-probability is not the expected one.

    may_rise: a higher one is right, too: some servers tell it after the grammar, which takes
    tokens away and lets the others rise.
    """
    for index, (token, value) in enumerate(zip(tokens, values, strict=False)):
        if value is None or token.logprob is None:
            continue
        rise = token.logprob - value
        if abs(rise) > bound and not (may_rise and rise > 0):
            return f"token {index} has {token.logprob:.4g} for {value:.4g}, bound {bound:g}"
    return None


def _find_unlikely(
    completion: Completion, scores: Sequence[Score | None], bound: float
) -> str | None:
    """Return the first token of a greedy answer that is not the likeliest one by its scores."""
    for index, (token_id, score) in enumerate(zip(completion.ids or (), scores, strict=False)):
        if score is not None and score.highest - score.logprob > bound:
            margin = score.highest - score.logprob
            text = completion.tokens[index].text if completion.tokens else None
            return (
                f"token {index} is {name_token(token_id, text)}, where without a cache and drafts"
                f" another one is {margin:.3g} likelier, bound {bound:g}"
            )
    return None


def _read_prompt_logprobs(document: Mapping[str, Any], ids: Sequence[int]) -> list[Score | None]:
    """Return the score of each token of a prompt, from vLLM's form."""
    (choice,) = document["choices"]
    entries = choice.get("prompt_logprobs") or document["prompt_logprobs"]
    scores: list[Score | None] = []
    for token_id, entry in zip(ids, entries, strict=True):
        if entry is None:
            scores.append(None)
            continue
        values = [float(value["logprob"]) for value in entry.values()]
        scores.append(Score(float(entry[str(token_id)]["logprob"]), max(values)))
    return scores
