"""Client of an OpenAI-compatible server: one request, and what its failure means.

Requests keep to parameters that every such server knows: `chat/completions` and `completions` with
model, max_tokens, temperature, top_p and seed.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from specdec.errors import SpecDecError, shorten
from specdec.system import http_client
from specdec.system.http_client import HttpClient, NoAnswer, Response
from specdec.text.chat import (
    OPTIONS,
    ChatError,
    Conversation,
    Message,
    get_speaker,
    join_parts,
    wrap_calls,
)
from specdec.text.tool_calls import convert_arguments

from .dialogues import RowError
from .settings import DataSettings

MESSAGE_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning")
BYTES_PER_TOKEN = 256  # most bytes of an answer for each of its tokens
OTHER_BYTES = 2**20  # most bytes of an answer beside its tokens
KEY_VARIABLE = "OPENAI_API_KEY"
# Statuses that refuse every row, with hints; redirects, which are not followed, do so too.
FATAL_HINTS = {
    401: f"put the key into {KEY_VARIABLE}",
    402: "check --base-url and the server",
    403: f"put a key that may do so into {KEY_VARIABLE}",
    404: "check --base-url (does it end in /v1?) and --model",
    405: "check --base-url and the server",
}


@dataclasses.dataclass(frozen=True)
class TargetAnswer:
    """Message that the target wrote; is_truncated: the token limit cut it."""

    message: Message
    is_truncated: bool


class TransientFailure(Exception):
    """Failure that a repeated request may not meet; wait: seconds that the server asks for."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait


def check_url(url: str) -> None:
    """Raise UsageError where a URL cannot be a server's, SpecDecError where httpx is missing."""
    http_client.check_url(url, "--base-url", "train", KEY_VARIABLE)


class Client:
    """Connection to one server, which threads may share."""

    def __init__(self, settings: DataSettings, base_url: str) -> None:
        self.settings = settings
        kind = "completions" if settings.completion else "chat/completions"
        self.url = f"{base_url.rstrip('/')}/{kind}"
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise SpecDecError(
                f"{KEY_VARIABLE} holds characters that no HTTP header can carry",
                "copy the key again: it is one line of ASCII",
            )
        self._http = HttpClient(key, settings.timeout)

    def ask(self, body: bytes) -> TargetAnswer:
        """Return the target's answer to a request's body.

        Raises TransientFailure where another try may get one, RowError where this row gets none,
        and SpecDecError where no row can get one: wrong address, refused key, unknown model.
        """
        try:
            response = self._http.exchange(self.url, body, self._max_bytes)
        except NoAnswer as lost:
            if lost.was_never:
                raise lost.explain(self.url, "--base-url") from None
            raise TransientFailure(lost.reason) from None
        if not response.is_success:
            raise self._explain_status(response)
        data = response.data
        if len(data) > self._max_bytes:
            raise TransientFailure(
                f"the answer is longer than {self._max_bytes} bytes, too long for --max-tokens"
                f" {self.settings.max_tokens}"
            )
        try:
            return self._read_answer(json.loads(data))
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            raise TransientFailure(f"the answer is not what such servers send: {error}") from None

    @property
    def _max_bytes(self) -> int:
        return OTHER_BYTES + BYTES_PER_TOKEN * self.settings.max_tokens

    def _read_answer(self, document: Any) -> TargetAnswer:
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
        json.dumps(answer, ensure_ascii=False).encode()  # raises for half of a surrogate pair
        return TargetAnswer(answer, is_truncated=reason == "length")

    def _explain_status(self, response: Response) -> Exception:
        status, message = response.status, f"HTTP {response.status}"
        if text := self._http.find_message(response.data):
            message += f", {shorten(text, 300)}"
        if response.is_transient:
            return TransientFailure(message, response.wait)
        if status >= 400 and status not in FATAL_HINTS:
            return RowError(message)
        hint = FATAL_HINTS.get(status, "check --base-url and the server")
        return SpecDecError(f"{self.url} refuses every request: {message}", hint)


def write_body(settings: DataSettings, context: str | Conversation, seed: int | None) -> bytes:
    """Write the request that asks for the answer to a prompt or a conversation."""
    body: dict[str, Any] = {
        "model": settings.model,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "stream": False,
        **({"top_p": settings.top_p} if settings.top_p < 1 else {}),
        **({"seed": seed} if seed is not None else {}),
    }
    if isinstance(context, str):
        return json.dumps({**body, "prompt": context}).encode()
    body["messages"] = write_messages(context.messages)
    for name, value in context.options.items():
        if name in OPTIONS:
            body[name] = value
        else:
            body.setdefault("chat_template_kwargs", {})[name] = value
    return json.dumps(body).encode()


def write_messages(messages: list[Message]) -> list[Message]:
    """Return a conversation's messages in the form that servers read.

    Roles are OpenAI's, arguments of calls are texts, and ids join calls to their results.
    """
    server_messages: list[Message] = []
    pending_call_ids: list[str] = []  # ids of calls that have no result yet
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
            pending_call_ids = [str(call["id"]) for call in message["tool_calls"]]
        elif message["role"] == "tool":
            call_id = message.setdefault(
                "tool_call_id", pending_call_ids[0] if pending_call_ids else f"call{number:05}"
            )
            pending_call_ids = [name for name in pending_call_ids if name != call_id]
        server_messages.append(message)
    return server_messages
