"""The client of an OpenAI-compatible server: one request, tried until it is answered or hopeless.

Only what every such server knows is asked for: `chat/completions` and `completions` with model,
max_tokens, temperature, top_p and seed.
"""

from __future__ import annotations

import dataclasses
import email.utils
import json
import os
import random
import threading
import time
from typing import Any

from specdec import http_client
from specdec.chat import (
    OPTIONS,
    ChatError,
    Conversation,
    Message,
    convert_arguments,
    get_speaker,
    join_parts,
    wrap_calls,
)
from specdec.command.settings import need
from specdec.errors import SpecDecError, shorten
from specdec.http_client import HttpClient, NoAnswer, Response
from specdec.logs import get_logger

from .dialogues import RowError
from .settings import DataSettings

MESSAGE_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning")
FIRST_WAIT = 1.0  # seconds before the second try; doubled for each further one
MAX_WAIT = 60.0
MAX_RETRY_AFTER = 3600.0  # longest wait that a server may ask for
# Most bytes of an answer: so much for a token, and so much for all the rest.
BYTES_PER_TOKEN = 256
OTHER_BYTES = 2**20
KEY_VARIABLE = "OPENAI_API_KEY"
PASSING_STATUSES = (408, 409, 425, 429)  # and all from 500 on
# Another row would be refused too; as are redirects, which are not followed.
FATAL_HINTS = {
    401: f"put the key into {KEY_VARIABLE}",
    402: "check --base-url and the server",
    403: f"put a key that may do so into {KEY_VARIABLE}",
    404: "check --base-url (does it end in /v1?) and --model",
    405: "check --base-url and the server",
}

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The message that the target wrote, and whether it was cut at the limit."""

    message: Message
    is_truncated: bool


class _Passing(Exception):
    """A try failed in a way in which the next one need not."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait


def check_url(url: str) -> None:
    """Raise UsageError for what cannot be a server's base, SpecDecError where httpx is missing."""
    http_client.check_url(url, "--base-url", "train", KEY_VARIABLE)


class Client:
    """Asks one server. Threads may share it."""

    def __init__(self, settings: DataSettings) -> None:
        self.settings = settings
        kind = "completions" if settings.completion else "chat/completions"
        self.url = f"{need(settings.base_url).rstrip('/')}/{kind}"
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise SpecDecError(
                f"{KEY_VARIABLE} holds characters that no HTTP header can carry",
                "copy the key again: it is one line of ASCII",
            )
        self._http = HttpClient(key, settings.timeout)
        self._closed = threading.Event()

    def close(self) -> None:
        """End all waits for another try: no answers are needed any more."""
        self._closed.set()

    def ask(self, context: str | Conversation, seed: int | None) -> Answer:
        """Return the target's answer; RowError if there is none for this row.

        SpecDecError where no row can have one: wrong address, refused key, unknown model.
        """
        body = json.dumps(self._make_body(context, seed)).encode()
        tries = self.settings.max_retries + 1
        for number in range(tries):
            try:
                return self._try(body)
            except _Passing as failure:
                if number + 1 == tries:
                    count = f"{tries} tries" if tries > 1 else "1 try"
                    raise RowError(f"{failure.reason} (after {count})", is_passing=True) from None
                wait = min(MAX_WAIT, FIRST_WAIT * 2**number) * random.uniform(0.5, 1.5)
                wait = max(wait, failure.wait)
                self._pause(failure.reason, wait)
        raise AssertionError("the last try returns or raises")

    def _pause(self, reason: str, wait: float) -> None:
        """Wait for the next try; RowError where the client was closed."""
        logger.debug("%s; again in %.1f s", reason, wait)
        if self._closed.wait(wait):
            raise RowError(reason, is_passing=True)

    def _make_body(self, context: str | Conversation, seed: int | None) -> dict[str, Any]:
        settings = self.settings
        body: dict[str, Any] = {
            "model": settings.model,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "stream": False,
            **({"top_p": settings.top_p} if settings.top_p < 1 else {}),
            **({"seed": seed} if seed is not None else {}),
        }
        if isinstance(context, str):
            return {**body, "prompt": context}
        body["messages"] = write_messages(context.messages)
        for name, value in context.options.items():
            if name in OPTIONS:
                body[name] = value
            else:
                body.setdefault("chat_template_kwargs", {})[name] = value
        return body

    def _try(self, body: bytes) -> Answer:
        try:
            response = self._http.exchange(self.url, body, self._max_bytes)
        except NoAnswer as lost:
            if lost.was_never:
                raise lost.explain(self.url, "--base-url") from None
            raise _Passing(lost.reason) from None
        if not response.is_success:
            raise self._explain_status(response)
        data = response.data
        if len(data) > self._max_bytes:
            raise _Passing(
                f"the answer is longer than {self._max_bytes} bytes, too long for --max-tokens"
                f" {self.settings.max_tokens}"
            )
        try:
            return self._read_answer(json.loads(data))
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            raise _Passing(f"the answer is not what such servers send: {error}") from None

    @property
    def _max_bytes(self) -> int:
        return OTHER_BYTES + BYTES_PER_TOKEN * self.settings.max_tokens

    def _read_answer(self, document: Any) -> Answer:
        choice = document["choices"][0]
        answer: Message = {}
        if self.settings.completion:
            text = choice["text"]
        else:
            message = choice["message"]
            text = message["content"]
            if calls := message.get("tool_calls"):
                try:
                    answer["tool_calls"] = wrap_calls(calls, "tool_calls")
                except ChatError as error:
                    raise RowError(f"the answer's {error}") from None
            if message.get("reasoning_content") or message.get("reasoning"):
                raise RowError(
                    "the server splits the reasoning from the answer, which would be lost:"
                    " start it without a reasoning parser"
                )
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length", "eos", "eos_token", "tool_calls", None):
            raise RowError(f"the answer ended with finish_reason {shorten(reason)}")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"the text is a {type(text).__name__}")
        if not text and not answer:
            raise RowError("the answer is empty")
        answer = {"content": text or "", **answer}
        json.dumps(answer, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        return Answer(answer, is_truncated=reason == "length")

    def _explain_status(self, response: Response) -> Exception:
        status, message = response.status, f"HTTP {response.status}"
        if text := self._http.find_message(response.data):
            message += f", {shorten(text, 300)}"
        if status in PASSING_STATUSES or status >= 500:
            return _Passing(message, _read_wait(response.retry_after))
        if status >= 400 and status not in FATAL_HINTS:
            return RowError(message)
        hint = FATAL_HINTS.get(status, "check --base-url and the server")
        return SpecDecError(f"{self.url} refuses every request: {message}", hint)


def write_messages(messages: list[Message]) -> list[Message]:
    """Return messages as servers take them: the usual roles, and ids that join calls and results.

    Arguments of calls are texts there.
    """
    written: list[Message] = []
    waiting: list[str] = []  # ids of calls that have no result yet
    for number, message in enumerate(convert_arguments(messages, to_text=True)):
        message = {
            **{name: value for name, value in message.items() if name in MESSAGE_KEYS},
            "role": get_speaker(message), "content": join_parts(message["content"]),
        }  # fmt: skip
        if "tool_calls" in message:
            message["tool_calls"] = [
                {"id": f"call{number:03}{n:02}", "type": "function", **call}
                for n, call in enumerate(message["tool_calls"])
            ]
            waiting = [str(call["id"]) for call in message["tool_calls"]]
        elif message["role"] == "tool":
            known = message.setdefault(
                "tool_call_id", waiting[0] if waiting else f"call{number:05}"
            )
            waiting = [name for name in waiting if name != known]
        written.append(message)
    return written


def _read_wait(value: str | None) -> float:
    """Seconds that a Retry-After header asks for: a number, or a date."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return max(0.0, min(seconds, MAX_RETRY_AFTER)) if seconds == seconds else 0.0
