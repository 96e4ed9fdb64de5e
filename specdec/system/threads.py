"""Threads that end with the work they are for, and do not take turns that others need."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from specdec.system import logs

K = TypeVar("K")
V = TypeVar("V")

SPIN_COUNT = 1000  # what libgomp itself takes when it has started more threads than there are cores


def calm_threads() -> None:
    """Let OpenMP's threads, which share torch's loops, sleep soon; called before torch is loaded.

    By itself libgomp lets threads spin for milliseconds. Where other programs need the cores, or a
    server's own other threads, a spinning thread burns the turn that the thread it waits for is
    waiting for. The kernels' own threads see to that by themselves (docs/kernels.md). What the
    environment says already stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def count_usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Pool(ThreadPoolExecutor):
    """Ends soon where its body fails: what has not begun is dropped, `is_ending` tells the rest.

    So Ctrl-C is not kept waiting for work that nobody asks for any more.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.is_ending = threading.Event()

    def gather(self, calls: Mapping[K, Callable[[threading.Event], V]], label: str) -> dict[K, V]:
        """Return what the calls return, which are handed `is_ending`; show how many are done."""
        tasks = {key: self.submit(call, self.is_ending) for key, call in calls.items()}
        finished_tasks = logs.show_progress(tasks.values(), label=label, total=len(tasks))
        return {key: task.result() for key, task in zip(tasks, finished_tasks, strict=True)}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if kind is not None:
            self.is_ending.set()
            self.shutdown(wait=False, cancel_futures=True)
        return super().__exit__(kind, error, trace)
