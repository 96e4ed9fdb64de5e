"""Logs and progress: always on stderr, bars only on a terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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


@contextlib.contextmanager
def track(label: str, *, total: int, of_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Yield a function that moves a progress bar on; there is one on a terminal only.

    Any thread may call it. A bar of bytes also tells how many they are, and how many a second.
    """
    if not sys.stderr.isatty() or total <= 1:
        yield lambda count: None
        return
    import click

    began = time.monotonic()
    num_done = 0
    lock = threading.Lock()

    def describe(_item: object) -> str:
        rate = num_done / max(1e-6, time.monotonic() - began)
        return f"{num_done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e6:.0f} MB/s"

    def advance(count: int) -> None:
        nonlocal num_done
        with lock:
            num_done += count
            bar.update(count)

    with click.progressbar(
        length=total, label=label, file=sys.stderr,
        item_show_func=describe if of_bytes else None,
        update_min_steps=max(1, total // 1000) if of_bytes else 1,
    ) as bar:  # fmt: skip
        yield advance
