"""HTTP on one connection: uvicorn's, but clients that stall are left, and errors are JSON."""

from __future__ import annotations

import asyncio
import re
import sys
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import make_error

HEAD_SECONDS = 30.0  # in which the headers of a request must have come
STALL_SECONDS = 60.0  # after which a client is left that takes nothing of its answer
# A whole request for /health, as monitors send it, and what it would have to be read closely for.
HEALTH = re.compile(rb"GET /health HTTP/1\.1\r\n(?:[A-Za-z-]+: [!-~](?:[ -~]*[!-~])?\r\n)+\r\n")
UNUSUAL = re.compile(
    rb"\r\n(?:content-length|transfer-encoding|expect|upgrade|connection: (?!keep-alive\r))", re.I
)
HOST = re.compile(rb"\r\nhost: ([^\r]*)", re.I)


class Connection(H11Protocol):
    """A connection that ends where its client neither asks nor listens."""

    _ending: asyncio.TimerHandle | None = None
    # The last request, if it was one for /health that was read closely; who it named, and when its
    # like came last, by the loop's clock. Its answer, and the two of which that was made.
    _asked = _named = b""
    _asked_at = 0.0
    _answer = b""
    _made_of: tuple[object, object] = (None, None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end_in(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET /health ") and self._answer_health(data):
            return
        self._asked = b""
        super().data_received(data)
        if self._is_answering:
            self._end_in(None)
        elif self._ending is None:
            self._end_in(HEAD_SECONDS)

    def pause_writing(self) -> None:
        """What is sent piles up."""
        super().pause_writing()
        self._end_in(STALL_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_in(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_in(None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer to what is not HTTP; called where the error is handled."""
        if self._is_answering and self.cycle.response_started:
            self.transport.close()
            return
        status = HTTPStatus(getattr(sys.exc_info()[1], "error_status_hint", 400))
        told = {400: "this is not a valid HTTP request", 431: "the headers are too large"}
        answer = make_error(told.get(status, status.phrase), status)
        headers = [*answer.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=status.phrase.encode()),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # it began with the headers: its answer comes too late
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return False  # there are no WebSockets, and uvicorn would log how to install them

    def timeout_keep_alive_handler(self) -> None:
        """Leave a client that has asked for nothing for a while."""
        left = self._asked_at + self.timeout_keep_alive - self.loop.time()
        if left > 0 and self._asked:
            self.timeout_keep_alive_task = self.loop.call_later(
                left, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def _answer_health(self, data: bytes) -> bool:
        """Answer a request that may come often; the way through h11 takes several times as long.

        False leaves it to that: where anything of it is unusual, or the answer is not that all is
        well. The same request once more is only compared: its timer runs already.
        """
        is_again = data == self._asked
        if self.flow.write_paused or not (is_again or self._reads_health(data)):
            return False
        body = self.app.tell_health(self._named)
        if body is None:
            return False
        headers = self.server_state.default_headers  # made anew for every second
        if self._made_of[0] is not headers or self._made_of[1] is not body:
            self._made_of = headers, body
            lines = [b"%s: %s\r\n" % pair for pair in headers]
            self._answer = (
                b"HTTP/1.1 200 OK\r\n%scontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (b"".join(lines), len(body), body)
            )
        self.transport.write(self._answer)
        self._asked_at = self.loop.time()
        if not is_again:
            self._asked = data
            self._end_in(None)
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_handler()
        return True

    def _reads_health(self, data: bytes) -> bool:
        """Whether it is a usual request for /health, and the connection ready for one."""
        is_idle = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if not is_idle or self._is_answering or not HEALTH.fullmatch(data):
            return False
        hosts = HOST.findall(data)
        if len(hosts) != 1 or UNUSUAL.search(data) is not None:
            return False
        (self._named,) = hosts
        return True

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_in(self, seconds: float | None) -> None:
        """End the connection after so many seconds, instead of what was said before."""
        if self._ending is not None:
            self._ending.cancel()
        self._ending = None
        if seconds is not None:
            self._ending = self.loop.call_later(seconds, self.transport.abort)
