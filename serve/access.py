"""Access to the server: the key, the names that it answers to, and the ids of requests."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .cors import Cors, Headers
from .errors import make_error
from .protocol import BadRequest

OPEN_PATHS = ("/health", "/")  # need no key: the page is a file, and asks for it
MAX_HEADER_BYTES = 32 * 1024
REQUEST_ID = re.compile(rb"[!-~]{1,200}")  # ids of clients that are sent back


class AccessControl:
    """Gate that refuses requests without the key or, where none is set, of another Host name."""

    def __init__(
        self, app: ASGIApp, key: str | None, local_names: frozenset[str] | None, cors: Cors
    ) -> None:
        """local_names: host names for clients without a key; None allows any name."""
        self._app, self._local_names, self._cors = app, local_names, cors
        self._digest = None if key is None else hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error, answer = None, None
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            preflight = self._cors.answer_preflight(scope["method"], headers)
            error = self._refuse(scope, needs_key=preflight is None)
            if error is None and isinstance(preflight, BadRequest):
                error = preflight
            answer = None if error is None else make_error(scope["path"], error)
            added_headers = self._cors.list_headers(headers)
            if error is None and isinstance(preflight, list):
                answer, added_headers = (
                    Response(status_code=204),
                    [*preflight, (b"vary", b"Origin")],
                )
            send = _add_headers(send, [*_list_ids(headers), *added_headers])
        with contextlib.suppress(asyncio.CancelledError):  # a second signal cancels requests
            await (answer or self._app)(scope, receive, send)

    def _refuse(self, scope: Scope, *, needs_key: bool) -> BadRequest | None:
        """Return the refusal of a request; a preflight request has no key."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            message = f"the headers have more than {MAX_HEADER_BYTES} bytes"
            return BadRequest(message, status=431)
        headers = dict(scope["headers"])
        if needs_key and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            has_other = b"authorization" in headers or b"x-api-key" in headers
            reason = "the key is not this server's" if has_other else "a key is needed"
            return BadRequest(
                f"{reason}: Authorization: Bearer KEY, or x-api-key: KEY", status=401,
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        # DNS rebinding: a page of another site whose name resolves here would send that name.
        host = headers.get(b"host", b"localhost").decode("latin-1")
        name = host.lower()
        name = name[: name.rfind("]") + 1] if name.startswith("[") else name.split(":")[0]
        if self._local_names is not None and name not in self._local_names:
            return BadRequest(f"this server is not called {host[:100]!r}", status=403)
        return None

    def _has_key(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether the server's key is there, as OpenAI's clients send it or Anthropic's."""
        expected_digest = self._digest
        if expected_digest is None:
            return True
        kind, _, bearer_key = headers.get(b"authorization", b"").partition(b" ")
        keys = [bearer_key if kind.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"")]
        digests = [hashlib.sha256(key.strip()).digest() for key in keys]
        return any(hmac.compare_digest(digest, expected_digest) for digest in digests)


def _list_ids(request_headers: Mapping[bytes, bytes]) -> Headers:
    """Return the headers with the client's own x-request-id, or a new one."""
    request_id = request_headers.get(b"x-request-id", b"")
    if not REQUEST_ID.fullmatch(request_id):
        request_id = f"req_{secrets.token_hex(16)}".encode()
    return [
        (name, request_id) for name in (b"x-request-id", b"request-id")
    ]  # OpenAI's, Anthropic's


def _add_headers(send: Send, headers: Headers) -> Send:
    """Let an answer have more headers."""

    async def add(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *headers]
        await send(message)

    return add
