"""Threads that end with the work they are for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType


class Pool(ThreadPoolExecutor):
    """Ends soon where its body fails: what has not begun is dropped, `is_ending` tells the rest.

    So Ctrl-C is not kept waiting for work that nobody asks for any more.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.is_ending = threading.Event()

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
