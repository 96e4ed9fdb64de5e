"""Logs and progress: always on stderr, as bars on a terminal, elsewhere as lines."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from specdec.errors import SpecDecError
from specdec.system.mpi import find_launch, find_world

T = TypeVar("T")
SECONDS_BETWEEN_REPORTS = 10.0  # where progress is
SECONDS_TO_A_LINE = 15.0  # where a wait is told in lines, each after twice the time of the last


def get_launched_rank() -> int | None:
    """Return this process's rank where a launcher such as torchrun started it, else None.

    Raises SpecDecError where what the launcher says cannot be.
    """
    launch = find_launch()
    return launch.rank if launch is not None else None


def set_up(*, debug: bool = False) -> None:
    """Send log lines to stderr; ranks other than 0 show warnings only, with their number."""
    rank = 0
    with contextlib.suppress(SpecDecError):  # told by the stages that have ranks
        world = find_world()
        rank = get_launched_rank() or (world.rank if world else 0)
    level = logging.DEBUG if debug else logging.INFO if rank == 0 else logging.WARNING
    prefix = f"[rank {rank}] " if rank else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    root = logging.getLogger("specdec")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


def get_logger(name: str) -> logging.Logger:
    """Return a module's logger, under `specdec` wherever the stage's folder lies."""
    return logging.getLogger(name if name.startswith("specdec") else f"specdec.{name}")


def show_progress(items: Iterable[T], *, label: str, total: int) -> Iterator[T]:
    """Yield `items`, and tell on stderr how many are done; see `track`."""
    with track(label, total=total) as advance:
        for item in items:
            yield item
            advance(1)


@contextlib.contextmanager
def hush(name: str, level: int = logging.WARNING) -> Iterator[None]:
    """Let a logger and those below it write nothing below a level meanwhile."""
    logger = logging.getLogger(name)
    earlier_level = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(earlier_level)


@contextlib.contextmanager
def show_waiting(label: str, logger: logging.Logger) -> Iterator[Callable[[str], None]]:
    """Say what is being waited for, and for how long.

    A terminal shows one line that counts; elsewhere lines come ever more seldom. Yields a function
    that tells how far the work is.
    """
    is_terminal = sys.stderr.isatty() and logger.isEnabledFor(logging.INFO)
    is_done = threading.Event()
    start_time = time.monotonic()
    progress_text = ""

    def tell(now: str) -> None:
        nonlocal progress_text
        progress_text = f", {now}"

    def count() -> None:
        pause = 1.0 if is_terminal else SECONDS_TO_A_LINE
        while not is_done.wait(pause):
            show()
            pause *= 1 if is_terminal else 2

    def show() -> None:
        text = f"{label} ... {time.monotonic() - start_time:.0f} s{progress_text}"
        if is_terminal:  # cut, as a line that wraps would not be written over
            width = shutil.get_terminal_size().columns - 1
            line = text if len(text) <= width else f"...{text[3 - width :]}"
            sys.stderr.write(f"\r{line:<{width}}")
            sys.stderr.flush()
        else:
            logger.info("%s", text)

    if is_terminal:
        show()
    else:
        logger.info("%s ...", label)
    counter = threading.Thread(target=count, daemon=True)
    counter.start()
    try:
        yield tell
    finally:
        is_done.set()
        counter.join()
        if is_terminal:
            show()
            sys.stderr.write("\n")


@contextlib.contextmanager
def track(label: str, *, total: int, of_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Yield a function that moves a progress bar on.

    Elsewhere than on a terminal it logs a line now and then, which says how much is done and when
    it will all be. Any thread may call it. The bar also tells how many per second, and for bytes
    how many they are.
    """
    if not sys.stderr.isatty():
        yield _LineProgress(label, total, of_bytes).advance
        return
    if total <= 1:
        yield lambda count: None
        return
    import click

    start_time = time.monotonic()
    num_done = 0
    lock = threading.Lock()

    def describe(_item: object) -> str:
        rate = num_done / max(1e-6, time.monotonic() - start_time)
        if not of_bytes:
            return f"{rate:.2f}/s"
        return f"{num_done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e6:.0f} MB/s"

    def advance(count: int) -> None:
        nonlocal num_done
        with lock:
            num_done += count
            bar.update(count)

    with click.progressbar(
        length=total, label=label, file=sys.stderr,
        item_show_func=describe,
        update_min_steps=max(1, total // 1000) if of_bytes else 1,
    ) as bar:  # fmt: skip
        yield advance


class _LineProgress:
    """Progress of some work as lines of the log, at most one in `SECONDS_BETWEEN_REPORTS`."""

    def __init__(self, label: str, total: int, of_bytes: bool) -> None:
        self._label, self._total, self._of_bytes = label, total, of_bytes
        self._start_time = self._reported = time.monotonic()
        self._num_done = 0
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        with self._lock:
            self._num_done += count
            now = time.monotonic()
            if now - self._reported < SECONDS_BETWEEN_REPORTS or self._num_done >= self._total:
                return
            self._reported = now
            get_logger(__name__).info("%s", self._describe(now - self._start_time))

    def _describe(self, seconds: float) -> str:
        num_done, total, rate = self._num_done, self._total, self._num_done / max(1e-6, seconds)
        if self._of_bytes:
            text = (
                f"{self._label}: {num_done / 1e9:.1f} of {total / 1e9:.1f} GB,"
                f" {rate / 1e6:.0f} MB/s"
            )
        else:
            text = f"{self._label}: {num_done} of {total} in {seconds:.0f} s, {rate:.2f}/s"
        if not num_done:
            return text
        minutes = round((total - num_done) / rate / 60)
        if not minutes:
            return f"{text}, less than a minute left"
        if minutes < 60:
            return f"{text}, about {minutes} min left"
        return f"{text}, about {minutes // 60}:{minutes % 60:02d} hours left"
