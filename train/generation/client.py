"""The client of an OpenAI-compatible server: one request, tried until it is answered or hopeless.

Only what every such server knows is asked for: `chat/completions` and `completions` with model,
max_tokens, temperature, top_p and seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from specdec.chat import Message
from specdec.errors import SpecDecError, UsageError, shorten
from specdec.logs import get_logger

from .rows import RowError
from .settings import DataSettings

FIRST_WAIT = 1.0  # seconds before the second try; doubled for each further one
MAX_WAIT = 60.0
MAX_RETRY_AFTER = 3600.0  # longest wait that a server may ask for
KEY_VARIABLE = "OPENAI_API_KEY"
PASSING_STATUSES = (408, 409, 425, 429)  # and all from 500 on
FATAL_STATUSES = (401, 402, 403, 404, 405)  # the next row would fare no better

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the target wrote, and whether it was cut at the limit."""

    text: str
    is_truncated: bool


class _Passing(Exception):
    """A try failed in a way in which the next one need not."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected request would carry the key to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def check_url(url: str) -> None:
    """Raise UsageError for what cannot be a server's base."""
    hint = "give the base of the server's paths, such as http://127.0.0.1:8000/v1"
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or parts.query or parts.fragment:
        raise UsageError(f"--base-url is {url!r}", hint)
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            "--base-url holds a user name or a password", f"a key is taken from {KEY_VARIABLE} only"
        )


class Client:
    """Asks one server. Threads may share it."""

    def __init__(self, settings: DataSettings) -> None:
        assert settings.base_url is not None
        self.settings = settings
        kind = "completions" if settings.completion else "chat/completions"
        self.url = f"{settings.base_url.rstrip('/')}/{kind}"
        self._key = os.environ.get(KEY_VARIABLE) or None
        self._opener = urllib.request.build_opener(_NoRedirects())
        self._was_reached = threading.Event()
        self.num_retries = 0
        self._lock = threading.Lock()

    def ask(self, context: str | list[Message], seed: int | None) -> Answer:
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
                with self._lock:
                    self.num_retries += 1
                logger.debug("%s; again in %.1f s", failure.reason, wait)
                time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _make_body(self, context: str | list[Message], seed: int | None) -> dict[str, Any]:
        settings = self.settings
        body: dict[str, Any] = {
            "model": settings.model,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "stream": False,
        }
        if settings.top_p < 1:
            body["top_p"] = settings.top_p
        if seed is not None:
            body["seed"] = seed
        body["prompt" if isinstance(context, str) else "messages"] = context
        return body

    def _try(self, body: bytes) -> Answer:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=self.settings.timeout) as response:
                self._was_reached.set()
                data = response.read()
        except urllib.error.HTTPError as error:
            self._was_reached.set()
            raise self._explain_status(error) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._explain_loss(error) from None
        try:
            return self._read_answer(json.loads(data))
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            raise _Passing(f"the answer is not what such servers send: {error}") from None

    def _read_answer(self, document: Any) -> Answer:
        choice = document["choices"][0]
        if self.settings.completion:
            text = choice["text"]
        else:
            message = choice["message"]
            text = message["content"]
            if message.get("reasoning_content") or message.get("reasoning"):
                raise RowError(
                    "the server splits the reasoning from the answer, which would be lost:"
                    " start it without a reasoning parser"
                )
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length", "eos", "eos_token", None):
            raise RowError(f"the answer ended with finish_reason {shorten(reason)}")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"the text is a {type(text).__name__}")
        if not text:
            raise RowError("the answer is empty")
        text.encode()  # half of a surrogate pair is no text
        return Answer(text, is_truncated=reason == "length")

    def _explain_status(self, error: urllib.error.HTTPError) -> Exception:
        status, message = error.code, f"HTTP {error.code}"
        detail = b""
        with contextlib.suppress(OSError, http.client.HTTPException):
            detail = error.read(10_000)
        if text := self._hide_key(_find_message(detail)):
            message += f", {shorten(text, 300)}"
        if status in PASSING_STATUSES or status >= 500:
            return _Passing(message, _read_wait(error.headers.get("Retry-After")))
        if status in FATAL_STATUSES or status < 400:
            hints = {
                401: f"put the key into {KEY_VARIABLE}",
                403: f"put a key that may do so into {KEY_VARIABLE}",
                404: "check --base-url (does it end in /v1?) and --model",
            }
            return SpecDecError(
                f"{self.url} refuses every request: {message}",
                hints.get(status, "check --base-url and the server"),
            )
        return RowError(message)

    def _explain_loss(self, error: Exception) -> Exception:
        reason = getattr(error, "reason", None) or error
        text = self._hide_key(str(reason)) or type(reason).__name__
        if isinstance(reason, TimeoutError):
            return _Passing(f"no answer within {self.settings.timeout:g} s")
        is_connecting = isinstance(error, urllib.error.URLError)
        if is_connecting and not self._was_reached.is_set():
            return SpecDecError(
                f"no server answers at {self.url}: {text}", "start it, or check --base-url"
            )
        return _Passing(f"the connection failed: {text}")

    def _hide_key(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


def _find_message(data: bytes) -> str:
    """The text of an error's body: OpenAI's form, FastAPI's, or as it is."""
    text = data.decode("utf-8", errors="replace").strip()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(document, dict):
        found = document.get("error", document.get("message", document.get("detail")))
        if isinstance(found, dict):
            found = found.get("message")
        if isinstance(found, str):
            return found
    return text


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
