"""A server as a client sees it: what it offers, its answers, and its counters."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import SpecDecError, shorten
from specdec.system.http_client import HttpClient, NoAnswer, Response
from specdec.system.logs import get_logger

from .answers import Answer, AnyPrompt, BadAnswer, Counts, join_events, read_answer
from .events import Fault, find_faults, read_events

MAX_BYTES = 64 * 2**20  # of an answer
NUM_TOP = 5  # likeliest tokens to ask for: what every server gives
SETTLING = 0.1  # seconds between two looks at counters that may still grow
MAX_LOOKS = 20
COUNTER = re.compile(
    r"^\w+:spec_decode_(num_drafts|num_draft_tokens|num_accepted_tokens(?:_per_pos)?)(?:_total)?"
    r"(?:\{(.*)\})?\s+(\S+)",
    re.MULTILINE,
)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

logger = get_logger(__name__)


class Refused(Exception):
    """The server answered with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}" + (f", {shorten(message, 300)}" if message else ""))
        self.status = status

    @property
    def is_fault(self) -> bool:
        """Whether it is the server's own."""
        return self.status >= 500


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a server can tell: what a body must hold for it, empty where it does not tell.

    is_chat: it has chat/completions only. told: all of it, ids and log-probabilities.
    """

    is_chat: bool
    ids: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    told: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Server:
    """One model of one server. `open` it first."""

    def __init__(
        self, url: str, model: str, key: str | None, timeout: float, flags: Sequence[str]
    ) -> None:
        """url: with or without /v1. flags: those of the URL, the model and the key."""
        self.root = url.rstrip("/").removesuffix("/v1")
        self.base = self.name = f"{self.root}/v1"
        self.model, self.flags = model, flags
        self.http = HttpClient(key, timeout)
        self.answers: list[Answer] = []  # all that came
        self.facts: dict[str, Any] = {"base_url": self.base, "model": model}
        self.offer = Offer(False)

    def open(self) -> None:
        """Find out what the server offers; SpecDecError where it has no such model."""
        self._find_model()
        for is_chat in (False, True):
            self.offer = Offer(is_chat)
            try:
                first = self.complete("The", max_tokens=1)
                break
            except Refused as refusal:
                if is_chat or refusal.status not in (404, 405, 501):
                    raise self._explain(refusal) from None
        ids: dict[str, Any] = {"return_token_ids": True}
        logprobs: dict[str, Any] = {"logprobs": NUM_TOP}
        if self.offer.is_chat:
            logprobs = {"logprobs": True, "top_logprobs": NUM_TOP}
        told = self._try(ids)
        has_ids = told is not None and told.ids is not None
        listed = self._try(logprobs)
        has_logprobs = listed is not None and listed.tokens is not None
        ids = ids if has_ids else {}
        self.offer = Offer(self.offer.is_chat, ids, {**ids, **(logprobs if has_logprobs else {})})
        self.facts |= {
            "endpoint": "chat/completions" if self.offer.is_chat else "completions",
            "token_ids": has_ids or (listed is not None and listed.ids is not None),
            "logprobs": has_logprobs,
            "answers_count": first.counts is not None,
        }
        if version := self.get(f"{self.root}/version"):
            self.facts["version"] = _parse(version).get("version")

    def _find_model(self) -> None:
        response = self._exchange(f"{self.base}/models", None)
        if not response.is_success:
            refusal = Refused(response.status, self.http.find_message(response.data))
            if response.status in (401, 403) or refusal.is_fault:
                raise self._explain(refusal)
            return  # some have no such list
        listed = _parse(response.data).get("data")
        models = [m for m in listed or [] if isinstance(m, dict) and "id" in m]
        if models and self.model not in (m["id"] for m in models):
            names = ", ".join(shorten(m["id"]) for m in models[:10])
            raise SpecDecError(
                f"{self.base} has no model {self.model!r}; it has {names}",
                f"give one of these as {self.flags[1]}",
            )
        if models:
            self.facts["owned_by"] = models[0].get("owned_by")

    def _try(self, extra: Mapping[str, Any]) -> Answer | None:
        try:
            return self.complete("The", max_tokens=2, **extra)
        except (Refused, BadAnswer):
            return None

    def ask_told(self, prompt: AnyPrompt, *, max_tokens: int, **body: Any) -> Answer:
        """Ask for all that the server can tell of the tokens."""
        return self.complete(prompt, max_tokens=max_tokens, **self.offer.told, **body)

    def continue_all(self, prompts: Sequence[AnyPrompt], max_tokens: int) -> list[Answer]:
        """Continue prompts as a reference does, one after the other."""
        return [self.ask_told(prompt, max_tokens=max_tokens) for prompt in prompts]

    def complete(self, prompt: AnyPrompt, *, max_tokens: int, **body: Any) -> Answer:
        """Ask for one whole answer, greedily unless `body` says otherwise."""
        response = self._post(prompt, {"max_tokens": max_tokens, "temperature": 0.0, **body})
        answer = read_answer(_parse(response.data), prompt, max_tokens)
        self.answers.append(answer)
        return answer

    def stream(
        self, prompt: AnyPrompt, *, max_tokens: int, has_usage: bool = False, **body: Any
    ) -> tuple[Answer, list[dict[str, Any]], list[Fault]]:
        """Ask for a stream; return what it adds up to, its chunks, and what is wrong with it."""
        asked = {"max_tokens": max_tokens, "temperature": 0.0, "stream": True, **body}
        if has_usage:
            asked["stream_options"] = {"include_usage": True}
        response = self._post(prompt, asked)
        chunks, faults = read_events(response.data)
        is_chat = "messages" in self._name(prompt)
        answer = join_events(chunks, prompt, max_tokens)
        self.answers.append(answer)
        return answer, chunks, faults + find_faults(chunks, is_chat=is_chat, has_usage=has_usage)

    def _name(self, prompt: AnyPrompt) -> dict[str, Any]:
        """A prompt as a body has it: a text for chats becomes a user's message."""
        is_listed = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        if is_listed or not self.offer.is_chat:
            return {"messages" if is_listed else "prompt": prompt}
        is_text = isinstance(prompt, str)
        return {"messages": [{"role": "user", "content": prompt}] if is_text else prompt}

    def _post(self, prompt: AnyPrompt, body: Mapping[str, Any]) -> Response:
        asked = {"model": self.model, **body, **self._name(prompt)}
        path = "chat/completions" if "messages" in asked else "completions"
        response = self._exchange(f"{self.base}/{path}", json.dumps(asked).encode())
        if not response.is_success:
            refusal = Refused(response.status, self.http.find_message(response.data))
            if response.status in (401, 403, 429, 503):
                raise self._explain(refusal)
            raise refusal
        return response

    def _exchange(self, url: str, body: bytes | None) -> Response:
        try:
            response = self.http.exchange(url, body, MAX_BYTES)
        except NoAnswer as lost:
            if lost.was_never:
                raise lost.explain(url, self.flags[0]) from None
            if lost.is_late:
                raise SpecDecError(
                    f"{url}: {lost.reason}, after {len(self.answers)} answers",
                    "look at the server's log; a slow one needs a longer --timeout",
                ) from None
            raise BadAnswer(lost.reason) from None
        if len(response.data) > MAX_BYTES:
            raise BadAnswer(f"an answer is longer than {MAX_BYTES} bytes")
        return response

    def _explain(self, refusal: Refused) -> SpecDecError:
        hints = {
            401: f"give the server's key with {self.flags[2]}",
            403: f"give a key that may do so with {self.flags[2]}",
            404: f"check {self.flags[0]} and {self.flags[1]}",
            429: "audit the server while it has nothing else to do",
            503: "wait until the server is ready",
        }
        return SpecDecError(
            f"{self.base} refuses a request for model {self.model!r}: {refusal}",
            hints.get(refusal.status, "look at the server's log"),
        )

    def get(self, url: str) -> bytes | None:
        """What is at a URL; None where there is nothing."""
        response = self._exchange(url, None)
        return response.data if response.is_success else None

    def count_prompt_tokens(self, prompt: AnyPrompt) -> int | None:
        """The tokens of a prompt by /tokenize; None where that is not offered."""
        body = json.dumps({"model": self.model, **self._name(prompt)}).encode()
        response = self._exchange(f"{self.root}/tokenize", body)
        count = _parse(response.data).get("count") if response.is_success else None
        return count if isinstance(count, int) else None


def _parse(data: bytes) -> dict[str, Any]:
    """The JSON object of a body; BadAnswer where it is none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"it is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadAnswer(f"it is no JSON object: {shorten(document)}")
    return document


class Counters:
    """The counters of a server's metrics page."""

    def __init__(self, server: Server, url: str | None, key: str | None, timeout: float) -> None:
        """url: the page, where there must be something; None looks alongside the server's API.

        The key goes to no other host than the server's.
        """
        self._is_given, self._model = url is not None, server.model
        self._url = url or f"{server.root}/metrics"
        is_own = _find_origin(self._url) == _find_origin(server.root)
        self._http = HttpClient(key if is_own else None, timeout)

    def read(self) -> Counts | None:
        """The counts once they have settled; None where there are none of speculation."""
        before = self._look()
        for _ in range(MAX_LOOKS):
            if before is None:
                break
            time.sleep(SETTLING)
            now = self._look()
            if now == before:
                break
            before = now
        return before

    def _look(self) -> Counts | None:
        try:
            response = self._http.exchange(self._url, None, MAX_BYTES)
            if response.is_success:
                return read_counters(response.data.decode(errors="replace"), self._model)
            reason = f"HTTP {response.status}"
        except NoAnswer as lost:
            reason = lost.reason
        if self._is_given:
            raise SpecDecError(
                f"{self._url} has no metrics: {reason}", "check --metrics-url, or leave it out"
            )
        return None


def _find_origin(url: str) -> tuple[str, str, int | None]:
    import httpx

    parts = httpx.URL(url)
    return parts.scheme, parts.host, parts.port


def read_counters(page: str, model: str) -> Counts | None:
    """The counts of speculation on a page in Prometheus's form; None where there are none.

    vLLM's names behind any prefix, as vLLM, llama-server and specdec have them. A page that
    tells models apart, this model's.
    """
    found = [(m[1], dict(LABEL.findall(m[2] or "")), m[3]) for m in COUNTER.finditer(page)]
    if any(labels.get("model_name") == model for _, labels, _ in found):
        found = [one for one in found if one[1].get("model_name") == model]
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, value in found:
        try:
            count = int(float(value))
        except (ValueError, OverflowError):
            continue
        if name.endswith("per_pos"):
            place = int(labels.get("position", -1))
            positions[place] = positions.get(place, 0) + count
        else:
            sums[name] = sums.get(name, 0) + count
    if "num_draft_tokens" not in sums:
        return None
    per_position = tuple(positions.get(at, 0) for at in range(max(positions, default=-1) + 1))
    return Counts(
        sums.get("num_drafts"), sums["num_draft_tokens"], sums.get("num_accepted_tokens", 0),
        per_position if positions else None,
    )  # fmt: skip
