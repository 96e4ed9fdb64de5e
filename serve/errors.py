"""Errors as HTTP answers, each in the form of the protocol whose endpoint was called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from specdec import SpecDecError

from . import messages, ollama
from .protocol import BadRequest, describe_error

# Forms of errors by the beginnings of paths; OpenAI's for all others.
FORMS: Mapping[str, Callable[[BadRequest], dict[str, Any]]] = {
    "/v1/messages": messages.describe_error, "/api/": ollama.describe_error,
}  # fmt: skip


class FailedRequest(Exception):
    """Request that the engine ended, for `cause`, which its thread has logged."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def explain(error: Exception) -> BadRequest:
    """Return the error that a client reads, of any that ended its request."""
    if isinstance(error, FailedRequest):
        error = error.cause
    if isinstance(error, BadRequest):
        return error
    if isinstance(error, SpecDecError):
        return BadRequest(error.message, status=500)
    return BadRequest("a step of the engine failed, which ended this request", status=500)


def make_error(path: str, error: BadRequest) -> Response:
    """Return an error as the answer to a request for a path."""
    form = next((form for prefix, form in FORMS.items() if path.startswith(prefix)), describe_error)
    return JSONResponse(form(error), error.status, error.headers)


async def answer_error(http: Request, error: Exception) -> Response:
    """Answer a request that an error ended."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    return make_error(http.url.path, explain(error))


async def answer_http(http: Request, error: Any) -> Response:
    """Answer a request for a path or by a method that there is not."""
    message, path = str(error.detail), http.url.path
    if error.status_code == 404:
        message = f"there is no {path[:100]}"
    elif error.status_code == 405:
        allowed = error.headers["Allow"]
        message = f"{path[:100]} does not take {http.method[:20]}, only {allowed}"
    return make_error(path, BadRequest(message, status=error.status_code, headers=error.headers))
