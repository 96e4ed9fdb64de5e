"""Logs and progress: always on stderr, bars only on a terminal."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def set_up(*, debug: bool = False) -> None:
    """Send log lines to stderr; ranks other than 0 show warnings only, with their number."""
    rank = int(os.environ.get("RANK", "0"))
    level = logging.DEBUG if debug else logging.INFO if rank == 0 else logging.WARNING
    prefix = f"[rank {rank}] " if rank else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    root = logging.getLogger("specdec")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


def get_logger(name: str) -> logging.Logger:
    """Logger of a module, under `specdec` wherever the stage's folder lies."""
    return logging.getLogger(name if name.startswith("specdec") else f"specdec.{name}")


def show_progress(items: Iterable[T], *, label: str, total: int) -> Iterator[T]:
    """Yield `items`, with a progress bar on stderr where that is a terminal."""
    if not sys.stderr.isatty() or total <= 1:
        yield from items
        return
    import click

    with click.progressbar(items, length=total, label=label, file=sys.stderr) as bar:
        yield from bar
