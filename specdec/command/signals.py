"""Signals that end a command: Ctrl-C, SIGTERM and SIGHUP as exceptions."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

AGAIN_SECONDS = 0.01  # until an interrupt is raised again that Python ignored


class Terminated(KeyboardInterrupt):
    """Interrupt by SIGTERM, which ends the work as Ctrl-C does."""


class HungUp(KeyboardInterrupt):
    """Interrupt by SIGHUP, which a terminal sends that is closed."""


def raise_at_sigint() -> None:
    """Undo `end_by_sigint` of entry.py: from here on Ctrl-C is an exception."""
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = raise_again
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, make_handler(KeyboardInterrupt))


def make_handler(kind: type[KeyboardInterrupt]) -> Callable[..., None]:
    """Return a signal's handler that raises `kind`, once torch is imported if that has begun.

    An exception within the import of torch's C++ may abort the process. The handler waits for two
    seconds at most.
    """
    delays = iter([0.05] * 40)

    def handle(*_: object) -> None:
        spec = getattr(sys.modules.get("torch"), "__spec__", None)
        delay = next(delays, 0.0) if getattr(spec, "_initializing", False) else 0.0
        # A timer, not a thread, which could wait for a lock of this thread.
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, delay)
        if not delay:
            raise kind

    return handle


def raise_again(ignored: Any) -> None:
    """Raise an interrupt again that Python ignores where it came, as in an object's `__del__`."""
    if not isinstance(ignored.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    signal.signal(signal.SIGALRM, make_handler(type(ignored.exc_value)))
    signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)


@contextlib.contextmanager
def take_ending_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the body as Ctrl-C does, so that nothing half-written is left."""
    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        yield
        return
    earlier_handlers: dict[int, Any] = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, make_handler(Terminated))
    }
    hangup = getattr(signal, "SIGHUP", None)  # which Windows has not
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_DFL:  # nohup ignores it
        earlier_handlers[hangup] = signal.signal(hangup, _make_hangup_handler())
    try:
        yield
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)


def _make_hangup_handler() -> Callable[..., None]:
    """Return the handler of SIGHUP; shell and kernel both send it, and one must end the work."""
    handle = make_handler(HungUp)

    def handle_first(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        handle(number, frame)

    return handle_first
