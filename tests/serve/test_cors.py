"""Pages of other sites: which may call the server, as browsers find out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from specdec.errors import UsageError
from specdec.serve import app
from specdec.serve.access import AccessControl
from specdec.serve.cors import Cors, read_origins
from specdec.serve.protocol import BadRequest
from specdec.serve.server import serve
from specdec.serve.settings import ServeSettings

PAGE, OTHER = "http://localhost:3000", "https://evil.example"
ALLOW = "access-control-allow-origin"


async def answer(_: Request) -> JSONResponse:
    return JSONResponse({"ok": True})


def ask(
    method: str, origin: str | None, *origins: str, key: str | None = None, **headers: str
) -> httpx.Response:
    """The answer of a server with these origins to a page."""
    site = Starlette(routes=[Route("/v1/models", answer, methods=["GET", "POST"])])
    gate = AccessControl(site, key, frozenset({"localhost"}), Cors(origins))
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if origin is not None:
        sent["Origin"] = origin

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate)) as client:
            return await client.request(method, "http://localhost/v1/models", headers=sent)

    return asyncio.run(run())


PREFLIGHT: Any = {
    "access_control_request_method": "POST",
    "access_control_request_headers": "authorization, content-type, x-stainless-os",
}


def test_a_named_origin_may_call_and_read() -> None:
    asked = ask("OPTIONS", PAGE, PAGE, key="secret", **PREFLIGHT)
    assert (asked.status_code, asked.text) == (204, ""), "a preflight request has no key"
    assert asked.headers[ALLOW] == PAGE
    assert asked.headers["access-control-allow-credentials"] == "true"
    assert asked.headers["access-control-allow-headers"].endswith("x-stainless-os")
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "access-control-allow-private-network" not in asked.headers
    private = ask("OPTIONS", PAGE, PAGE, **PREFLIGHT, access_control_request_private_network="true")
    assert private.headers["access-control-allow-private-network"] == "true"
    for key, status in (("secret", 401), (None, 200)):
        done = ask("POST", PAGE, "https://a.example", PAGE, key=key)
        assert done.status_code == status, "an error can be read as well"
        assert done.headers[ALLOW] == PAGE
        assert done.headers["vary"] == "Origin"
        assert "x-request-id" in done.headers["access-control-expose-headers"]
        assert done.headers["x-request-id"] == done.headers["request-id"]


def test_others_may_not() -> None:
    refused = ask("OPTIONS", OTHER, PAGE, **PREFLIGHT)
    assert refused.status_code == 403
    assert f"pages of '{OTHER}' may not call" in refused.json()["error"]["message"]
    for origin in (OTHER, "null", f"{PAGE}.evil.example", "http://localhost:30000", None):
        done = ask("POST", origin, PAGE)
        assert done.status_code == 200
        assert ALLOW not in done.headers
        assert done.headers["vary"] == "Origin", "caches keep them apart"
    closed = ask("OPTIONS", PAGE, **PREFLIGHT)
    assert closed.status_code == 405, "without --cors-origin nothing changes"
    assert not {ALLOW, "vary"} & set(closed.headers)
    rebound = ask("OPTIONS", PAGE, PAGE, **PREFLIGHT, host="evil.example")
    assert rebound.status_code == 403
    assert "not called" in rebound.json()["error"]["message"]


def test_all_origins_go_without_credentials() -> None:
    for method, more in (("OPTIONS", PREFLIGHT), ("POST", {})):
        done = ask(method, OTHER, "*", **more)
        assert done.headers[ALLOW] == "*"
        assert "access-control-allow-credentials" not in done.headers


@pytest.mark.parametrize(
    ("origins", "message"),
    [
        (["localhost:3000"], "localhost:3000' is no origin"), (["null"], "'null' is no origin"),
        ([f"{PAGE}/"], "is no origin"), (["http://*.example"], "is no origin"),
        (["http://user@a.example"], "is no origin"), ([""], "is no origin"),
        (["https://a.example:443"], "browsers leave :443 out"),
        (["http://a.example:99999"], "the port 99999, ports are 1 to 65535"),
        (["http://a.example:0"], "the port 0"), (["http://a.example:08080"], "as 8080"),
        (["*"], "without a key"), (["*", PAGE], f"* beside {PAGE}"),
    ],
)  # fmt: skip
def test_origins_that_are_refused(origins: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_origins(origins, has_key=False, is_anonymous=False)
    assert message in caught.value.message


def test_origins_that_are_taken() -> None:
    origins = [PAGE, "https://A.example", "tauri://localhost", "http://[::1]:80800"[:-1]]
    assert read_origins(origins, has_key=False, is_anonymous=False) == origins
    assert ask("POST", "https://a.example", *origins).headers[ALLOW] == "https://a.example"
    for has_key, is_anonymous in ((True, False), (False, True)):
        assert read_origins(["*"], has_key=has_key, is_anonymous=is_anonymous) == ["*"]


def test_a_wrong_origin_is_told_before_the_engine_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without a key"):
        serve(ServeSettings(engine_dir=tmp_path, cors_origin=["*"]))


# Bodies that a browser sends for another site's page without a preflight request: a form, `fetch`
# with mode no-cors, sendBeacon; of a sandboxed frame or a file the origin is null.
SENT_BY_BROWSERS: list[dict[str, str]] = [
    {"origin": OTHER, "content-type": "text/plain;charset=UTF-8", "sec-fetch-site": "cross-site"},
    {"origin": OTHER, "content-type": "application/x-www-form-urlencoded"},
    {"origin": OTHER, "content-type": "multipart/form-data; boundary=x"},
    {"origin": OTHER},
    {"origin": "null", "content-type": "text/plain"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "content-type": "text/plain"},
]


def check_type(path: str, headers: dict[str, str], host: str = "localhost:8000") -> None:
    """Check the body's type of a request for a path."""
    pairs = [(name.encode(), value.encode()) for name, value in {"host": host, **headers}.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": pairs, "query_string": b""}
    app._check_type(Request(scope))


@pytest.mark.parametrize("path", ["/api/chat", "/api/show", "/v1/chat/completions"])
@pytest.mark.parametrize("headers", SENT_BY_BROWSERS)
def test_no_page_sends_a_body_without_asking_first(path: str, headers: dict[str, str]) -> None:
    with pytest.raises(BadRequest, match="not 'application/json'"):
        check_type(path, headers)
    # A browser sends this one after a preflight request alone, which names the origin.
    check_type(path, {**headers, "content-type": "application/json"})


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
def test_ollamas_clients_that_are_no_browsers_need_no_type(headers: dict[str, str]) -> None:
    check_type("/api/chat", headers)
    for host in ("localhost:8000", "localhost:80/api/"):
        with pytest.raises(BadRequest, match="not 'application/json'"):
            check_type("/v1/chat/completions", headers, host)
