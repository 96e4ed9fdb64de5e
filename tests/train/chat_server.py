"""An OpenAI-compatible server on this machine, which fails on demand."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.loopback import LoopbackServer, read_json

Reply = dict[str, Any]


def write_answer(context: str | list[dict[str, str]]) -> str:
    """What the target says: it depends on everything that it was shown."""
    if isinstance(context, str):
        return f" and then {len(context)}"
    shown = "|".join(f"{m['role'][0]}:{m['content']}" for m in context)
    return f"answer to <{shown}>"


class ChatServer(LoopbackServer):
    """Answers every request, unless `script` says otherwise.

    script: called with the request's number, from 0, and its body; None for the ordinary answer,
    or a dict with any of: status, headers, body (bytes), sleep (seconds before), cut (bytes of the
    body after which the connection is closed), finish_reason, message (added to the answer's), or
    of pieces (all that is sent, byte for byte) and pause (seconds before each of them).
    """

    def __init__(self, script: Callable[[int, Any], Reply | None] | None = None) -> None:
        self.script = script or (lambda number, body: None)
        self.bodies: list[Any] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.keys: set[str | None] = set()
        self.most_at_once = 0
        self._num_at_once = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = read_json(handler)
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.paths.append(handler.path)
            self.times.append(time.monotonic())
            self.keys.add(handler.headers.get("Authorization"))
            self._num_at_once += 1
            self.most_at_once = max(self.most_at_once, self._num_at_once)
        try:
            reply = self.script(number, body) or {}
        finally:  # before the reply: with it, the client may send its next request
            with self._lock:
                self._num_at_once -= 1
        with contextlib.suppress(OSError):  # the client has gone
            self._send(handler, body, reply)

    def _send(self, handler: BaseHTTPRequestHandler, body: Any, reply: Reply) -> None:
        if "sleep" in reply:
            time.sleep(reply["sleep"])
        text = reply.get("body", self._write_body(body, reply))
        if "pieces" in reply:
            handler.close_connection = True
            for piece in reply["pieces"](text):
                threading.Event().wait(reply["pause"])  # tests replace time.sleep
                handler.wfile.write(piece)
            return
        handler.send_response(reply.get("status", 200))
        for name, value in reply.get("headers", {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text[: reply.get("cut")])
        handler.wfile.flush()
        handler.close_connection = True

    def _write_body(self, body: Any, reply: Reply) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reply.get("finish_reason", "stop")}
        if "prompt" in body:
            choice["text"] = write_answer(body["prompt"])
        else:
            message = {"role": "assistant", "content": write_answer(body["messages"])}
            choice["message"] = message | reply.get("message", {})
        return json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
