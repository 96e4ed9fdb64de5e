"""Requests to somebody's HTTP server: a deadline for the whole, a bound on its size, a hidden key.

For commands that ask an OpenAI-compatible server. httpx is imported where it is used.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import SpecDecError, UsageError, name_extra, summarize

if TYPE_CHECKING:
    import httpx

ERROR_BYTES = 10_000  # read of an error's body; the rest is dropped
SERVER_KEY_VARIABLE = "SPECDEC_API_KEY"
TRANSIENT_STATUSES = (408, 409, 425, 429)  # which another try may not meet, as all from 500 on
MAX_RETRY_AFTER = 3600.0  # seconds, the longest wait that a server may ask for
FIRST_WAIT = 1.0  # seconds before the second try; doubled for each further one
MAX_WAIT = 60.0  # seconds
MOST_DOUBLED = 10  # times that the wait is doubled, beyond which it is the longest anyway


@dataclasses.dataclass(frozen=True)
class Response:
    """A server's answer. retry_after: of its header. data: cut a little beyond the limit."""

    status: int
    data: bytes
    retry_after: str | None = None

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_transient(self) -> bool:
        """Return whether another try may get a better answer."""
        return self.status in TRANSIENT_STATUSES or self.status >= 500

    @property
    def wait(self) -> float:
        """Return the seconds that the server asks for before another try."""
        return _read_wait(self.retry_after)


class NoAnswer(Exception):
    """No answer came. was_never: nothing has ever answered there. is_late: the time is over."""

    def __init__(self, reason: str, *, was_never: bool = False, is_late: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.was_never, self.is_late = reason, was_never, is_late

    def explain(self, url: str, flag: str) -> SpecDecError:
        """Return the error for a URL, given by `flag`, at which nothing has ever answered."""
        return SpecDecError(
            f"no server answers at {url}: {self.reason}", f"start it, or check {flag}"
        )


def choose_wait(number: int) -> float:
    """Return the seconds before another try, after so many others; by chance, not all at once."""
    doubled = FIRST_WAIT * float(1 << min(number, MOST_DOUBLED))
    return min(MAX_WAIT, doubled) * random.uniform(0.5, 1.5)


def _read_wait(value: str | None) -> float:
    """Return the seconds of a Retry-After header, which holds a number or a date."""
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


def check_url(url: str, flag: str, extra_name: str, key_source: str) -> None:
    """Raise UsageError for what cannot be a server's base, SpecDecError where httpx is missing.

    flag: the option that gave the URL. extra_name: the extra that installs httpx for it.
    key_source: where a key is taken from, for users who write one into the URL.
    """
    try:
        import httpx
    except ImportError:
        raise SpecDecError(f"{flag}: httpx is not installed", name_extra(extra_name)) from None
    hint = "give the base of the server's paths, such as http://127.0.0.1:8000/v1"
    try:
        parsed_url = httpx.URL(url)
        parsed_url.host.encode("idna")  # what the resolver does with it
    except (httpx.InvalidURL, ValueError):
        raise UsageError(f"{flag} is {url!r}", hint) from None
    is_good = parsed_url.scheme in ("http", "https") and bool(parsed_url.host)
    is_port = parsed_url.port is None or 0 < parsed_url.port < 2**16
    if not (is_good and is_port) or parsed_url.query or parsed_url.fragment:
        raise UsageError(f"{flag} is {url!r}", hint)
    if parsed_url.userinfo:
        raise UsageError(
            f"{flag} holds a user name or a password", f"a key is taken from {key_source} only"
        )


def read_key(path: Path | None, flag: str = "--api-key-file") -> str | None:
    """Read a server's key from a file or SPECDEC_API_KEY; None where there is none.

    It must be one line of printable ASCII, as a header can hold.
    """
    key, source = os.environ.get(SERVER_KEY_VARIABLE), SERVER_KEY_VARIABLE
    if path is not None:
        source = f"{flag} {path}"
        try:
            key = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecDecError(
                f"{source} cannot be read: {summarize(error)}", "give a file that holds the key"
            ) from None
    if key is None:
        return None
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise SpecDecError(
            f"{source} holds no key", "write one word of ASCII characters, such as a random one"
        )
    return key


class HttpClient:
    """Asks one server. Threads may share it."""

    def __init__(self, key: str | None, timeout: float) -> None:
        """timeout: seconds that one exchange may take as a whole."""
        self.timeout = timeout
        self._key = key
        # The system's certificates, as other programs of this machine use; httpx has its own list.
        self._tls = ssl.create_default_context()
        self._was_reached = threading.Event()

    def exchange(self, url: str, body: bytes | None, max_bytes: int) -> Response:
        """POST a JSON body, or GET without one; raise NoAnswer where no answer comes in time.

        A body that is longer than max_bytes is returned with a little more than that.
        """
        import httpx

        try:
            return asyncio.run(self._exchange(url, body, max_bytes))
        except (httpx.HTTPError, asyncio.TimeoutError) as error:
            raise self._explain(error) from None

    async def _exchange(self, url: str, body: bytes | None, max_bytes: int) -> Response:
        # httpx's own timeout begins again with every byte: here it is for the whole exchange.
        import httpx

        asyncio.get_running_loop().set_exception_handler(_leave_interrupts)
        # Not compressed: what is counted is what is kept.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity",
                   "Connection": "close"}  # fmt: skip
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        deadline = time.monotonic() + self.timeout
        # Redirects are not followed, which would carry the key to another host.
        async with httpx.AsyncClient(verify=self._tls, timeout=None) as client:
            method = "GET" if body is None else "POST"
            request = client.build_request(method, url, content=body, headers=headers)
            sending = client.send(request, stream=True)
            response = await asyncio.wait_for(sending, self.timeout)
            self._was_reached.set()
            reading = _read_body(response, max_bytes if response.is_success else ERROR_BYTES)
            try:
                data = await asyncio.wait_for(reading, max(0, deadline - time.monotonic()))
            except (httpx.HTTPError, asyncio.TimeoutError):
                if response.is_success:
                    raise
                data = b""  # the status tells enough
        return Response(response.status_code, data, response.headers.get("Retry-After"))

    def _explain(self, error: Exception) -> NoAnswer:
        import httpx

        cause = _find_cause(error)
        if isinstance(error, asyncio.TimeoutError) or isinstance(cause, TimeoutError):
            return NoAnswer(f"no answer within {self.timeout:g} s", is_late=True)
        errno = cause.errno if isinstance(cause, ConnectionError) else None
        text = os.strerror(errno) if errno else self.hide_key(str(cause)) or type(cause).__name__
        is_connecting = isinstance(error, (httpx.ConnectError, httpx.ProxyError))
        if is_connecting and not self._was_reached.is_set():
            return NoAnswer(text, was_never=True)
        self._was_reached.set()  # it took the request, and was lost before it answered
        return NoAnswer(f"the connection failed: {text}")

    def find_message(self, data: bytes) -> str:
        """Return the message in an error's body, of OpenAI's or FastAPI's form, without the key."""
        return self.hide_key(_find_message(data))

    def hide_key(self, text: str) -> str:
        """Return the text without the key."""
        return text.replace(self._key, "[key]") if self._key else text


def _leave_interrupts(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle a loop's errors as ever, but for Ctrl-C in a task, which the command tells."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)


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
    """Return the system's own error where httpx or its libraries wrapped one, else `error`."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError):
            error = inner
        attempts = getattr(inner, "exceptions", None)  # of the attempts at several addresses
        inner = attempts[0] if attempts else inner.__cause__ or inner.__context__
    return error


def _find_message(data: bytes) -> str:
    text = data.decode("utf-8", errors="replace").strip()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(document, dict):
        message = document.get("error", document.get("message", document.get("detail")))
        if isinstance(message, dict):
            message = message.get("message")
        if isinstance(message, str):
            return message
    return text
