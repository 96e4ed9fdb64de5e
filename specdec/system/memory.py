"""Python's search for garbage, which takes longer the more objects there are."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Search for no garbage meanwhile, if it is searched for at all."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


@functools.cache
def leave_out_objects() -> None:
    """Leave all objects of now out of later searches for garbage, unless some are left out already.

    A search among all that an engine's process has imported takes 0.1 s, in the middle of a step.
    To count those that are left out takes a third of that, so only the first call does it.
    """
    if not gc.get_freeze_count():
        gc.freeze()
