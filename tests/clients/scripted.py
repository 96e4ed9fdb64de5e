"""A server whose model is held to a reference text: the turns of an agent, in their order.

It stands between an agent and a server of ours, and adds to each request the grammar of the one
text that the model then writes: token by token, read as calls and content as any other answer.
"""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
TITLE = "A title"  # for requests without tools, by which agents name a conversation


def find_results(body: Body) -> list[str]:
    """The results of tools that a request of chats, responses or messages has."""
    results = []
    for item in body.get("messages") or body.get("input") or []:
        if not isinstance(item, dict):
            continue
        if item.get("type") == "function_call_output":
            results.append(json.dumps(item["output"]))
        elif item.get("role") == "tool":
            results.append(json.dumps(item["content"]))
    return results


def write_call(name: str, **arguments: Any) -> str:
    """A call as the chat template beside this file has them."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Script:
    """Turns of an agent: functions that make the text of an answer of its request.

    bodies, statuses, answers: the requests that had tools, and what came back.
    """

    def __init__(self, url: str, turns: Sequence[Callable[[Body], str]]) -> None:
        self.url, self.turns = url, turns
        self.bodies: list[Body] = []
        self.statuses: list[int] = []
        self.answers: list[str] = []

    def hold(self, body: Body) -> Body:
        """A request with the grammar of its answer."""
        text = TITLE
        if body.get("tools"):
            number = min(len(find_results(body)), len(self.turns) - 1)
            text = self.turns[number](body)
        return body | {"grammar": f"start: {json.dumps(text)}"}


@contextlib.contextmanager
def serve_script(script: Script) -> Iterator[str]:
    """Serve a script; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # the end of a connection ends a stream

        def do_GET(self) -> None:
            self.forward(None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.forward(body)

        def forward(self, body: Body | None) -> None:
            held = body if body is None else script.hold(body)
            data = None if held is None else json.dumps(held).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(script.url + self.path, data, headers)  # noqa: S310
            try:
                with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
                    self.copy(body, answer.status, answer)
            except urllib.error.HTTPError as error:
                self.copy(body, error.code, error)

        def copy(self, body: Body | None, status: int, answer: Any) -> None:
            self.send_response(status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            lines = []
            for line in answer:
                lines.append(line)
                with contextlib.suppress(OSError):
                    self.wfile.write(line)
                    self.wfile.flush()
            if body is not None and body.get("tools"):
                script.bodies.append(body)
                script.statuses.append(status)
                script.answers.append(b"".join(lines).decode())

        def log_message(self, *_: Any) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
