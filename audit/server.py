"""Client of the audited server: its offers, answers and counters."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import SpecDecError, shorten
from specdec.system.http_client import HttpClient, NoAnswer, Response
from specdec.system.logs import get_logger

from .answers import (
    AnyPrompt,
    BadAnswer,
    Completion,
    Counts,
    add_counts,
    join_events,
    read_answer,
)
from .events import StreamFault, find_faults, read_events

MAX_BYTES = 64 * 2**20  # most bytes of an answer
NUM_TOP = 5  # likeliest tokens to ask for; every server offers so many
SETTLING = 0.1  # seconds between two readings of counters that may still grow
MAX_LOOKS = 20  # readings of such counters
COUNTER = re.compile(
    r"^\w+:spec_decode_(num_drafts|num_draft_tokens|num_accepted_tokens(?:_per_pos)?)(?:_total)?"
    r"(?:\{(.*)\})?\s+(\S+)",
    re.MULTILINE,
)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

logger = get_logger(__name__)


class Refused(Exception):
    """Error of an answer with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}" + (f", {shorten(message, 300)}" if message else ""))
        self.status = status

    @property
    def is_fault(self) -> bool:
        """True for a fault of the server, False for one of the request."""
        return self.status >= 500


class LateAnswer(SpecDecError):
    """Error of an answer that does not come in time."""


@dataclasses.dataclass(frozen=True)
class Offer:
    """Fields of a body that ask a server for details; empty where it does not offer them.

    is_chat: whether the server has chat/completions only. id_fields: fields for token ids.
    detail_fields: fields for token ids and log-probabilities.
    """

    is_chat: bool
    id_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    detail_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class ServerClient:
    """Client of one model of a server; `open` comes first."""

    def __init__(
        self, url: str, model: str, key: str | None, timeout: float, flags: Sequence[str]
    ) -> None:
        """Set the client up. url: with or without /v1. flags: of URL, model and key."""
        self.root = url.rstrip("/").removesuffix("/v1")
        self.base = self.name = f"{self.root}/v1"
        self.model, self.flags = model, flags
        self.http = HttpClient(key, timeout)
        self.answers: list[Completion] = []  # all answers so far
        self.facts: dict[str, Any] = {"base_url": self.base, "model": model}
        self.offer = Offer(False)

    def open(self) -> None:
        """Probe the server's offers; raise SpecDecError where it lacks the model."""
        self._find_model()
        answer = self._choose_endpoint()
        id_fields: dict[str, Any] = {"return_token_ids": True}
        logprob_fields: dict[str, Any] = {"logprobs": NUM_TOP}
        if self.offer.is_chat:
            logprob_fields = {"logprobs": True, "top_logprobs": NUM_TOP}
        has_ids, _ = self._probe(id_fields)
        logprobs_have_ids, has_logprobs = self._probe(logprob_fields)
        id_fields = id_fields if has_ids else {}
        logprob_fields = logprob_fields if has_logprobs else {}
        self.offer = Offer(self.offer.is_chat, id_fields, {**id_fields, **logprob_fields})
        self.facts |= {
            "endpoint": "chat/completions" if self.offer.is_chat else "completions",
            "token_ids": has_ids or logprobs_have_ids,
            "logprobs": has_logprobs,
            "answers_count": answer.counts is not None,
        }
        if version := self.get(f"{self.root}/version"):
            self.facts["version"] = _parse(version).get("version")

    def _find_model(self) -> None:
        """Check that the server's list of models has the model; some servers have no list."""
        response = self._exchange(f"{self.base}/models", None)
        if not response.is_success:
            refusal = Refused(response.status, self.http.find_message(response.data))
            if response.status in (401, 403) or refusal.is_fault:
                raise self._explain(refusal)
            return
        entries = _parse(response.data).get("data") or []
        models = [m for m in entries if isinstance(m, dict) and "id" in m]
        if not models:
            return
        ids = [m["id"] for m in models]
        if self.model not in ids:
            names = ", ".join(map(shorten, ids[:10]))
            raise SpecDecError(
                f"{self.base} has no model {self.model!r}; it has {names}",
                f"give one of these as {self.flags[1]}",
            )
        self.facts["owned_by"] = models[0].get("owned_by")

    def _choose_endpoint(self) -> Completion:
        """Choose completions, or else chat/completions; return an answer of that endpoint."""
        try:
            return self.complete("The", max_tokens=1)
        except Refused as refusal:
            if refusal.status not in (404, 405, 501):
                raise self._explain(refusal) from None
        self.offer = Offer(True)
        try:
            return self.complete("The", max_tokens=1)
        except Refused as refusal:
            raise self._explain(refusal) from None

    def _probe(self, fields: Mapping[str, Any]) -> tuple[bool, bool]:
        """Return whether an answer to these fields has token ids, and whether it has tokens."""
        try:
            answer = self.complete("The", max_tokens=2, **fields)
        except (Refused, BadAnswer):
            return False, False
        return answer.ids is not None, answer.tokens is not None

    def complete_with_details(
        self, prompt: AnyPrompt, *, max_tokens: int, **body: Any
    ) -> Completion:  # fmt: skip
        """Ask for a whole answer with all details of its tokens that the server offers."""
        return self.complete(prompt, max_tokens=max_tokens, **self.offer.detail_fields, **body)

    def continue_all(self, prompts: Sequence[AnyPrompt], max_tokens: int) -> list[Completion]:
        """Continue prompts as a reference does, one after the other."""
        return [self.complete_with_details(prompt, max_tokens=max_tokens) for prompt in prompts]

    def complete(self, prompt: AnyPrompt, *, max_tokens: int, **body: Any) -> Completion:
        """Ask for one whole answer, greedily unless `body` says otherwise."""
        answer, _ = self.ask(prompt, {"max_tokens": max_tokens, "temperature": 0.0, **body})
        return answer

    def ask(self, prompt: AnyPrompt, body: Mapping[str, Any]) -> tuple[Completion, dict[str, Any]]:
        """Ask for one whole answer; return it with the document that it was read from."""
        document = _parse(self._post(prompt, body).data)
        answer = read_answer(document, prompt, body["max_tokens"])
        self.answers.append(answer)
        return answer, document

    def stream(
        self, prompt: AnyPrompt, *, max_tokens: int, has_usage: bool = False, **body: Any
    ) -> tuple[Completion, list[dict[str, Any]], list[StreamFault]]:
        """Ask for a stream; return its answer, its chunks and its faults."""
        fields = {"max_tokens": max_tokens, "temperature": 0.0, "stream": True, **body}
        if has_usage:
            fields["stream_options"] = {"include_usage": True}
        response = self._post(prompt, fields)
        chunks, faults = read_events(response.data)
        is_chat = "messages" in self._name(prompt)
        answer = join_events(chunks, prompt, max_tokens)
        self.answers.append(answer)
        return answer, chunks, faults + find_faults(chunks, is_chat=is_chat, has_usage=has_usage)

    def _name(self, prompt: AnyPrompt) -> dict[str, Any]:
        """Return the prompt's field of a body: a text for chats becomes a user's message."""
        is_listed = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        if is_listed or not self.offer.is_chat:
            return {"messages" if is_listed else "prompt": prompt}
        is_text = isinstance(prompt, str)
        return {"messages": [{"role": "user", "content": prompt}] if is_text else prompt}

    def _post(self, prompt: AnyPrompt, body: Mapping[str, Any]) -> Response:
        full_body = {"model": self.model, **body, **self._name(prompt)}
        path = "chat/completions" if "messages" in full_body else "completions"
        response = self._exchange(f"{self.base}/{path}", json.dumps(full_body).encode())
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
                raise LateAnswer(
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
        """Return the content at a URL; None where the server has no such page."""
        response = self._exchange(url, None)
        return response.data if response.is_success else None

    def count_prompt_tokens(self, prompt: AnyPrompt) -> int | None:
        """Return the number of a prompt's tokens by /tokenize; None for servers without it."""
        body = json.dumps({"model": self.model, **self._name(prompt)}).encode()
        response = self._exchange(f"{self.root}/tokenize", body)
        count = _parse(response.data).get("count") if response.is_success else None
        return count if isinstance(count, int) else None


def _parse(data: bytes) -> dict[str, Any]:
    """Parse the JSON object of a body; raise BadAnswer for anything else."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"it is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadAnswer(f"it is no JSON object: {shorten(document)}")
    return document


class Counters:
    """Reader of the counters on a server's metrics pages: one, or one for each replica."""

    def __init__(
        self, server: ServerClient, urls: Sequence[str], key: str | None, timeout: float
    ) -> None:
        """Set the reader up.

        urls: the pages, which must exist; none looks beside the server's API, where a page may be
        missing. The key goes to no other host than the server's.
        """
        self._is_required, self._model = bool(urls), server.model
        self._pages: dict[str, HttpClient] = {}
        for url in urls or [f"{server.root}/metrics"]:
            is_same_host = _find_origin(url) == _find_origin(server.root)
            self._pages[url] = HttpClient(key if is_same_host else None, timeout)

    def read(self) -> Counts | None:
        """Return the counts of speculation when they no longer grow; None for none."""
        counts = self._read_pages()
        for _ in range(MAX_LOOKS):
            if counts is None:
                break
            time.sleep(SETTLING)
            new_counts = self._read_pages()
            if new_counts == counts:
                break
            counts = new_counts
        return counts

    def _read_pages(self) -> Counts | None:
        """Return the sum of the pages' counts; None where none of them counts speculation."""
        page_counts = {url: self._read_page(url) for url in self._pages}
        terms = [counts for counts in page_counts.values() if counts is not None]
        if terms and len(terms) < len(page_counts):
            silent = next(url for url, counts in page_counts.items() if counts is None)
            raise SpecDecError(
                f"{silent} counts no drafts of model {self._model!r}, other pages do",
                "check that each replica speculates, and that --metrics-url names replicas only",
            )
        return add_counts(terms) if terms else None

    def _read_page(self, url: str) -> Counts | None:
        try:
            response = self._pages[url].exchange(url, None, MAX_BYTES)
            if response.is_success:
                return read_counters(response.data.decode(errors="replace"), self._model)
            reason = f"HTTP {response.status}"
        except NoAnswer as lost:
            reason = lost.reason
        if self._is_required:
            raise SpecDecError(
                f"{url} has no metrics: {reason}", "check --metrics-url, or leave it out"
            )
        return None


def _find_origin(url: str) -> tuple[str, str, int | None]:
    import httpx

    address = httpx.URL(url)
    return address.scheme, address.host, address.port


def read_counters(page: str, model: str) -> Counts | None:
    """Return the counts of speculation on a page of metrics; None where there are none.

    The page is in Prometheus's form, with vLLM's names after any prefix, as vLLM, llama-server
    and specdec have them. Where a page has labels of models, the counts are this model's.
    """
    sums: collections.Counter[str] = collections.Counter()
    positions: collections.Counter[int] = collections.Counter()
    for name, labels, value in _list_samples(page, model):
        try:
            count = int(float(value))
        except (ValueError, OverflowError):
            continue
        if name.endswith("per_pos"):
            positions[int(labels.get("position", -1))] += count
        else:
            sums[name] += count
    if "num_draft_tokens" not in sums:
        return None
    per_position = tuple(positions[index] for index in range(max(positions, default=-1) + 1))
    return Counts(
        sums.get("num_drafts"), sums["num_draft_tokens"], sums["num_accepted_tokens"],
        per_position if positions else None,
    )  # fmt: skip


def _list_samples(page: str, model: str) -> list[tuple[str, dict[str, str], str]]:
    """Return name, labels and value of a model's counters; all counters where it has none."""
    samples = [(m[1], dict(LABEL.findall(m[2] or "")), m[3]) for m in COUNTER.finditer(page)]
    model_samples = [sample for sample in samples if sample[1].get("model_name") == model]
    return model_samples or samples
