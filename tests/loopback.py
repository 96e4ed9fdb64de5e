"""An HTTP server on this machine, for as long as a test's `with` lasts."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, TypeVar

AnyServer = TypeVar("AnyServer", bound="LoopbackServer")


class LoopbackServer:
    """Hands every request to `answer`, each on a thread of its own."""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Read a request and write its reply."""
        raise NotImplementedError

    def __enter__(self: AnyServer) -> AnyServer:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            do_HEAD = do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"


def read_json(handler: BaseHTTPRequestHandler) -> Any:
    """Read the JSON of a request's body."""
    return json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
