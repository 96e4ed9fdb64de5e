"""Waiting is told: once in a log, with the seconds on a terminal."""

from __future__ import annotations

import io
import itertools
import time
from types import SimpleNamespace

import pytest

from specdec import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [False, True])
def test_waiting_is_told(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    clock = itertools.chain([5.0, 5.0], itertools.count(6.0))
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    logs.set_up()
    with logs.show_waiting("compiling", logs.get_logger("specdec.test")):
        deadline = time.monotonic() + 300
        while "compiling ... 1 s" not in stream.getvalue() and is_terminal:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert stream.getvalue().startswith("\rcompiling ... 0 s" if is_terminal else "compiling ")
    assert stream.getvalue().endswith("\n")
