"""The client of an OpenAI-compatible server: one request, tried until it is answered or hopeless.

Only what every such server knows is asked for: `chat/completions` and `completions` with model,
max_tokens, temperature, top_p and seed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import email.utils
import json
import os
import random
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any

from specdec.chat import Message
from specdec.errors import SpecDecError, UsageError, name_extra, shorten
from specdec.logs import get_logger

from .dialogues import RowError
from .settings import DataSettings

if TYPE_CHECKING:
    import httpx

FIRST_WAIT = 1.0  # seconds before the second try; doubled for each further one
MAX_WAIT = 60.0
MAX_RETRY_AFTER = 3600.0  # longest wait that a server may ask for
# Most bytes of an answer: so much for a token, and so much for all the rest.
BYTES_PER_TOKEN = 256
OTHER_BYTES = 2**20
ERROR_BYTES = 10_000  # read of an error's body; the rest is dropped
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


def check_url(url: str) -> None:
    """Raise UsageError for what cannot be a server's base, SpecDecError where httpx is missing."""
    try:
        import httpx
    except ImportError:
        raise SpecDecError("--base-url: httpx is not installed", name_extra("train")) from None
    hint = "give the base of the server's paths, such as http://127.0.0.1:8000/v1"
    try:
        parts = httpx.URL(url)
        parts.host.encode("idna")  # what the resolver does with it
    except (httpx.InvalidURL, ValueError):
        raise UsageError(f"--base-url is {url!r}", hint) from None
    is_good = parts.scheme in ("http", "https") and bool(parts.host) and parts.port != 0
    if not is_good or parts.query or parts.fragment:
        raise UsageError(f"--base-url is {url!r}", hint)
    if parts.userinfo:
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
        self._key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise SpecDecError(
                f"{KEY_VARIABLE} holds characters that no HTTP header can carry",
                "copy the key again: it is one line of ASCII",
            )
        # The system's certificates, as other programs of this machine use; httpx has its own list.
        self._tls = ssl.create_default_context()
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
        import httpx

        try:
            response, data = asyncio.run(self._exchange(body))
        except (httpx.HTTPError, asyncio.TimeoutError) as error:
            raise self._explain_loss(error) from None
        if not response.is_success:
            raise self._explain_status(response, data)
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

    async def _exchange(self, body: bytes) -> tuple[httpx.Response, bytes]:
        """Send a request; return the response and its body, cut where it is longer than allowed.

        httpx alone waits anew for every byte: here the whole exchange has `timeout` seconds.
        """
        import httpx

        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # what is counted is what is kept
            "Connection": "close",
        }
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        deadline = time.monotonic() + self.settings.timeout
        # Redirects are not followed, which would carry the key to another host.
        async with httpx.AsyncClient(verify=self._tls, timeout=None) as client:
            request = client.build_request("POST", self.url, content=body, headers=headers)
            sending = client.send(request, stream=True)
            response = await asyncio.wait_for(sending, self.settings.timeout)
            self._was_reached.set()
            limit = self._max_bytes if response.is_success else ERROR_BYTES
            reading = _read_body(response, limit)
            try:
                data = await asyncio.wait_for(reading, max(0, deadline - time.monotonic()))
            except (httpx.HTTPError, asyncio.TimeoutError):
                if response.is_success:
                    raise
                data = b""  # the status tells enough
        return response, data

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

    def _explain_status(self, response: httpx.Response, detail: bytes) -> Exception:
        status, message = response.status_code, f"HTTP {response.status_code}"
        if text := self._hide_key(_find_message(detail)):
            message += f", {shorten(text, 300)}"
        if status in PASSING_STATUSES or status >= 500:
            return _Passing(message, _read_wait(response.headers.get("Retry-After")))
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
        import httpx

        cause = _find_cause(error)
        if isinstance(error, asyncio.TimeoutError) or isinstance(cause, TimeoutError):
            return _Passing(f"no answer within {self.settings.timeout:g} s")
        errno = cause.errno if isinstance(cause, ConnectionError) else None
        text = os.strerror(errno) if errno else self._hide_key(str(cause)) or type(cause).__name__
        is_connecting = isinstance(error, (httpx.ConnectError, httpx.ProxyError))
        if is_connecting and not self._was_reached.is_set():
            return SpecDecError(
                f"no server answers at {self.url}: {text}", "start it, or check --base-url"
            )
        return _Passing(f"the connection failed: {text}")

    def _hide_key(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


async def _read_body(response: httpx.Response, limit: int) -> bytes:
    """Read a body as it was sent; stop, with more than `limit` bytes, where it is longer."""
    data = bytearray()
    async for chunk in response.aiter_raw():
        data += chunk
        if len(data) > limit:
            break
    await response.aclose()
    return bytes(data)


def _find_cause(error: BaseException) -> BaseException:
    """The system's own error, where httpx and the libraries below it wrapped one; else `error`."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError):
            error = inner
        several = getattr(inner, "exceptions", None)  # of the attempts at several addresses
        inner = several[0] if several else inner.__cause__ or inner.__context__
    return error


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
