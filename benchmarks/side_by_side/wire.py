"""How a worker is spoken to: one JSON object a line, a call in, its answer out; and its servers.

The standard library only: this module also runs inside other peers' environments.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

Calls = Mapping[str, Callable[..., dict[str, Any]]]


def serve(start: Callable[..., tuple[dict[str, Any], Calls]]) -> None:
    """Start with the settings in argv[1], tell what `start` returns, then answer calls.

    start: loads the peer; returns what to tell about it, and its calls by name. A call that fails
    is answered with its error, and the next one is waited for.
    """
    answers = take_stdout()
    about, calls = start(**json.loads(sys.argv[1]))
    write_line(answers, {"answer": about})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            message: dict[str, Any] = {"answer": calls[request["call"]](**request["settings"])}
        except Exception as error:  # noqa: BLE001  (told to the caller, whatever it is)
            traceback.print_exc()
            message = {"error": f"{type(error).__name__}: {error}"}
        write_line(answers, message)


def take_stdout() -> TextIO:
    """Return standard output for answers alone: what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def write_line(file: TextIO, message: dict[str, Any]) -> None:
    """Write one object, and let it go."""
    file.write(json.dumps(message) + "\n")
    file.flush()


def cut_at_end(tokens: list[int], end_id: int) -> list[int]:
    """Tokens before the one that ends the text: peers differ in whether they return it."""
    return tokens[: tokens.index(end_id)] if end_id in tokens else tokens


def describe_texts(
    texts: Sequence[list[int]], steps: int, seconds: float, end_id: int
) -> dict[str, Any]:
    """A worker's answer. steps: those that yielded all tokens but each text's first; 0: untold."""
    num_tokens = sum(map(len, texts))
    return {
        "seconds": seconds,
        "num_tokens": num_tokens,
        "texts": [cut_at_end(text, end_id) for text in texts],
        "acceptance_length": (num_tokens - len(texts)) / steps if steps > 0 else None,
    }


class Server:
    """A server in a process of its own, on a free port, that tells at /health when it is ready."""

    def __init__(self, words: Sequence[str], patience: float, **options: Any) -> None:
        """Start it and wait for it; RuntimeError where it ends or is not ready in that time, s."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.address = f"http://127.0.0.1:{port}"
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [*words, "--port", port], stdin=subprocess.DEVNULL, **options
        )  # fmt: skip
        try:
            while not self._is_ready():
                if (status := self.process.poll()) is not None:
                    raise RuntimeError(f"ended with status {status}")
                if time.perf_counter() - began > patience:
                    raise RuntimeError(f"was not ready after {patience:.0f} s")
                time.sleep(0.01)
        except BaseException:
            self.end()
            raise
        self.load_seconds = time.perf_counter() - began

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):  # not listening yet, or still loading
            return False

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
