"""How a worker is spoken to: one JSON object a line, a call in, its answer out.

The standard library only: this module also runs inside other peers' environments.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
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
