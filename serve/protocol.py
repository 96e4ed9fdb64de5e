"""HTTP on one connection: uvicorn's protocol, with limits for stalled clients and JSON errors."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import h11
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.errors import ExcessLength

HEAD_SECONDS = 30.0  # time limit for receiving a request's headers
EVENTS = "specdec.events"  # key of a request's scope: whether its answer is a stream of events
EVENT_STREAM = "text/event-stream"
# Wait after a probe that shows whether a client that sends no more has left.
PROBE_SECONDS = 0.01
LAST_BODY_SECONDS = 1.0  # time limit for the rest of a body when the server ends
STALL_SECONDS = 60.0  # after which a client that reads nothing of its answer is dropped


class BadRequest(Exception):
    """Error that a client reads: its request cannot be served as it is, or not now.

    excess: the numbers of a prompt that is too long, None for other errors.
    """

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None,
        headers: Mapping[str, str] | None = None, excess: ExcessLength | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code
        self.headers, self.excess = headers, excess

    @property
    def named_message(self) -> str:
        """Message with the parameter's name, for forms of errors that have no place for it."""
        if self.param is None or self.param in self.message:
            return self.message
        return f"{self.param}: {self.message}"


def refuse(path: str, reason: str, **details: Any) -> BadRequest:
    """Return the error of a value; its path in the body is the sentence's subject."""
    return BadRequest(f"{path} {reason}", path.partition(".")[0], **details)


def describe_error(error: BadRequest) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = "rate_limit_error" if error.status == 429 else kind
    details = {"type": kind, "param": error.param, "code": error.code}
    return {"error": {"message": error.message, **details}}


class Connection(H11Protocol):
    """Connection that ends where its client neither asks nor listens."""

    _ending: asyncio.TimerHandle | None = None
    _sends_no_more = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end_in(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._end_in(None)
        elif self._ending is None:
            self._end_in(HEAD_SECONDS)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Find out whether a client that sends no more has left, or listens on for its answer.

        Which of the two shows only when something is written to it that clients pass over: before
        the answer 100 Continue, and between events a comment. Clients of HTTP before 1.1 count as
        having left. Returns whether the connection stays open for writing.
        """
        conn = self.conn
        if not self._is_answering or conn.their_state is h11.SEND_BODY:
            return False
        if conn.their_http_version != b"1.1":
            return False
        self._sends_no_more = True
        self._probe(PROBE_SECONDS)
        return True

    def on_response_complete(self) -> None:
        """Continue with the client's next request; else end a connection that sends no more."""
        super().on_response_complete()
        if self._sends_no_more and not self._is_answering:
            self.transport.close()

    def _probe(self, seconds: float) -> None:
        if self.transport.is_closing() or not self._is_answering:
            return
        if not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif self.cycle.scope.get(EVENTS):
            self.transport.write(self.conn.send(h11.Data(data=b":\n\n")) or b"")
        self.loop.call_later(seconds, self._probe, min(2 * seconds, 1.0))

    def pause_writing(self) -> None:
        """Give a client some time to take the answer that piles up."""
        super().pause_writing()
        self._end_in(STALL_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_in(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_in(None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer to bytes that are not HTTP; uvicorn calls this while it handles the error."""
        if self._is_answering and self.cycle.response_started:
            self.transport.close()
            return
        status = HTTPStatus(getattr(sys.exc_info()[1], "error_status_hint", 400))
        messages = {400: "this is not a valid HTTP request", 431: "the headers are too large"}
        self._answer_error(messages.get(status, status.phrase), status)

    def shutdown(self) -> None:
        """End the connection after its answer; a body that does not come soon gets none."""
        super().shutdown()
        if self._is_receiving:
            self.loop.call_later(LAST_BODY_SECONDS, self._end_body)

    def _end_body(self) -> None:
        if self._is_receiving and not self.transport.is_closing():
            self._answer_error("the server is about to end", HTTPStatus.SERVICE_UNAVAILABLE)

    def _answer_error(self, message: str, status: HTTPStatus) -> None:
        """Answer to a request that is not whole, and end the connection."""
        error = BadRequest(message, status=status)
        answer = JSONResponse(describe_error(error), status)
        headers = [*answer.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=status.phrase.encode()),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # its answer has begun: an error comes too late
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_receiving(self) -> bool:
        is_open = self._is_answering and not self.cycle.response_started
        return is_open and self.conn.their_state is h11.SEND_BODY

    def _end_in(self, seconds: float | None) -> None:
        """Set the seconds after which the connection ends; None cancels that end."""
        if self._ending is not None:
            self._ending.cancel()
        self._ending = None
        if seconds is not None:
            self._ending = self.loop.call_later(seconds, self.transport.abort)
