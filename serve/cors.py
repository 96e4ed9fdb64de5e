"""Pages of other sites: the origins that may read answers, by the headers that browsers go by."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specdec.errors import UsageError, shorten

from .protocol import BadRequest

Headers = list[tuple[bytes, bytes]]
ANY = "*"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
DEFAULT_PORTS = {"http": 80, "https": 443}  # which browsers leave out
MAX_PORT = 65535
HEADER_NAMES = re.compile(rb"[\w!#$%&'*+.^`|~, -]{0,1000}")  # that a preflight request asks for
EXPOSED = b"x-request-id, request-id, retry-after"
MAX_AGE = b"600"  # seconds that a browser remembers a preflight's answer


class Cors:
    """Origins of other sites whose pages may call the server; none where there are no names."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origin.lower().encode() for origin in origins)

    def list_headers(self, request_headers: dict[bytes, bytes]) -> Headers:
        """List the headers of any answer to a request."""
        if not self._origins:
            return []
        return [*self._allow(request_headers.get(b"origin")), (b"vary", b"Origin")]

    def _allow(self, origin: bytes | None) -> Headers:
        """Return the headers that let a page read an answer, none where it may not.

        The wildcard allows no credentials, as cookies of a reverse proxy are; a named origin does.
        """
        exposed = (b"access-control-expose-headers", EXPOSED)
        if origin is None:
            return []
        if ANY.encode() in self._origins:
            return [(b"access-control-allow-origin", b"*"), exposed]
        if origin.lower() not in self._origins:
            return []
        allowed = (b"access-control-allow-credentials", b"true")
        return [(b"access-control-allow-origin", origin), allowed, exposed]

    def answer_preflight(
        self, method: str, request_headers: dict[bytes, bytes]
    ) -> Headers | BadRequest | None:
        """Return the headers of a preflight request's answer, or its refusal.

        None where the request is no preflight, or no origins are allowed at all.
        """
        origin = request_headers.get(b"origin")
        is_preflight = method == "OPTIONS" and b"access-control-request-method" in request_headers
        if not self._origins or not is_preflight or origin is None:
            return None
        if not (allowed := self._allow(origin)):
            name = shorten(origin.decode("latin-1"))
            return BadRequest(f"pages of {name} may not call this server", status=403)
        names = request_headers.get(b"access-control-request-headers", b"")
        names = names if HEADER_NAMES.fullmatch(names) else b""
        private = b"access-control-request-private-network" in request_headers
        return [
            *allowed, (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", names or b"authorization, content-type"),
            (b"access-control-max-age", MAX_AGE),
            *([(b"access-control-allow-private-network", b"true")] if private else []),
        ]  # fmt: skip


def read_origins(origins: Sequence[str], *, has_key: bool, is_anonymous: bool) -> list[str]:
    """Return checked origins; UsageError for what is none, or lets every site in.

    is_anonymous: whether --allow-anonymous lets everybody use the server.
    """
    for origin in origins:
        if origin != ANY:
            _check_origin(origin)
    if ANY not in origins:
        return list(origins)
    if len(origins) > 1:
        raise UsageError(
            f"--cors-origin * beside {next(o for o in origins if o != ANY)}",
            "leave one out: * are all origins, without credentials such as cookies",
        )
    if not has_key and not is_anonymous:
        raise UsageError(
            "--cors-origin * without a key: every page that is open on this machine could use the"
            " server",
            "name the origins, give --api-key-file, or --allow-anonymous if all may use it",
        )
    return [ANY]


def _check_origin(origin: str) -> None:
    """Raise UsageError for what no browser sends as an origin."""
    match = ORIGIN.fullmatch(origin.lower())
    if match is None:
        raise UsageError(
            f"--cors-origin {shorten(origin)} is no origin",
            "give scheme, host and port as a browser sends them, such as http://localhost:3000,"
            " without a path",
        )
    if match[2] is None:
        return
    address, port = origin[: match.start(2) - 1], int(match[2])
    if not 1 <= port <= MAX_PORT:
        raise UsageError(
            f"--cors-origin {origin} has the port {port}, ports are 1 to {MAX_PORT}",
            "give the page's port",
        )
    if port == DEFAULT_PORTS.get(address.lower().partition(":")[0]):
        raise UsageError(
            f"--cors-origin {origin} is never sent: browsers leave :{port} out", f"give {address}"
        )
    if match[2] != str(port):
        raise UsageError(
            f"--cors-origin {origin} is never sent: browsers write the port as {port}",
            f"give {address}:{port}",
        )
