"""Standard output, reserved for a command's own text."""

from __future__ import annotations

import fcntl
import io
import os
import sys
from typing import Any

STDOUT = "standard output"  # file name of its errors
STDOUT_HINT = "check where it leads, and its free space; output files are whole or absent"


class StandardOutput(io.FileIO):
    """Raw stream of a command's own text, whose errors name it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = STDOUT
            raise


def name_stdout() -> None:
    """Let errors of `sys.stdout` name it; nothing changes where it is closed or replaced."""
    stream = sys.stdout
    if find_stdout() == 1 and isinstance(stream, io.TextIOWrapper):
        stream.flush()
        sys.stdout = _open_text(1, stream, closefd=False)


def claim_stdout() -> None:
    """Reserve standard output for `sys.stdout`; descriptor 1 leads to stderr from now on.

    Libraries write to descriptor 1 from C++, some of them while the process ends, so this is never
    undone. Nothing changes where sys.stdout is closed, or replaced by a test.
    """
    stream = sys.stdout
    if find_stdout() != 1 or not isinstance(stream, io.TextIOWrapper):
        return
    stream.flush()
    sys.stdout = _open_text(fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3), stream)
    try:
        os.dup2(2, 1)
    except OSError:  # stderr is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _open_text(
    descriptor: int, stream: io.TextIOWrapper, *, closefd: bool = True
) -> io.TextIOWrapper:
    """Return a text stream of a descriptor that writes as `stream` does."""
    raw = StandardOutput(descriptor, "wb", closefd=closefd)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def find_stdout() -> int | None:
    """Return the descriptor of `sys.stdout`, for a child process with our output; None for none."""
    try:
        return sys.stdout.fileno() if sys.stdout is not None else None
    except (OSError, ValueError):
        return None
