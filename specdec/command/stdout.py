"""Standard output, reserved for a command's own text."""

from __future__ import annotations

import fcntl
import io
import os
import sys


def claim_stdout() -> None:
    """Reserve standard output for `sys.stdout`; descriptor 1 leads to stderr from now on.

    Libraries write to descriptor 1 from C++, some of them while the process ends, so this is never
    undone. Nothing changes where sys.stdout is closed, or replaced by a test.
    """
    stream = sys.stdout
    if find_stdout() != 1 or not isinstance(stream, io.TextIOWrapper):
        return
    stream.flush()
    descriptor = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    sys.stdout = io.TextIOWrapper(
        open(descriptor, "wb", 0 if stream.write_through else -1),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    try:
        os.dup2(2, 1)
    except OSError:  # stderr is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def find_stdout() -> int | None:
    """Return the descriptor of `sys.stdout`, for a child process with our output; None for none."""
    try:
        return sys.stdout.fileno() if sys.stdout is not None else None
    except (OSError, ValueError):
        return None
