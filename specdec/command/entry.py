"""Where every command begins: a Ctrl-C while Python still imports ends it without a traceback."""

from __future__ import annotations

import functools
import os
import signal
import sys


def main(stage: str = "") -> None:
    """Entry point of `specdec`, or of `specdec-STAGE`."""
    end_by_sigint()
    open_streams()
    from specdec.command.stages import group, load_command, run_command

    if not stage and len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        run_command(load_command(stage) if stage else group)
    finally:
        end_by_sigint()  # while Python ends there is nothing to tidy up either


convert, build, run, serve, train, verify, bench, export = (
    functools.partial(main, stage)
    for stage in ("convert", "build", "run", "serve", "train", "verify", "bench", "export")
)


def open_streams() -> None:
    """Put the null device where standard input, output or error is closed.

    Or a file that is opened later would get its number, and what others print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def end_by_sigint() -> None:
    """Let SIGINT end this process at once, unless it is ignored, as behind `nohup` and `&`."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
