"""Entry point of every command, in which Ctrl-C ends the imports without a traceback."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys

NEW_OBJECTS = 10_000  # between two searches for garbage: imports alone make 200,000


def main(stage: str = "") -> None:
    """Run `specdec`, or `specdec-STAGE`."""
    gc.set_threshold(NEW_OBJECTS)
    end_by_sigint()
    open_streams()
    from specdec.command.stages import group, load_command, run_command

    if not stage and len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        run_command(load_command(stage) if stage else group)
    finally:
        end_by_sigint()  # nothing is left to tidy up while Python ends


convert, build, run, serve, train, verify, bench, export = (
    functools.partial(main, stage)
    for stage in ("convert", "build", "run", "serve", "train", "verify", "bench", "export")
)


def open_streams() -> None:
    """Put the null device where standard input, output or error is closed.

    Else a file that is opened later would get its descriptor, and the output of print. As with
    Python's streams, one that takes the place of `sys.stdout` does not close the descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def end_by_sigint() -> None:
    """Let SIGINT end this process at once, unless it is ignored, as behind `nohup` and `&`."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
