"""Errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse


def make_error(
    message: str, status: int, param: str | None = None, code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:  # fmt: skip
    """The answer that tells of an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = "rate_limit_error" if status == 429 else kind
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, headers)
