"""Waiting is told: in a line that counts on a terminal, elsewhere in lines now and then."""

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
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(logs, "SECONDS_BETWEEN_LINES", 0.01)
    clock = itertools.chain([5.0, 5.0], itertools.count(6.0))
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    logs.set_up()
    told = stream.getvalue

    def wait_for(text: str) -> None:
        deadline = time.monotonic() + 300
        while text not in told():
            assert time.monotonic() < deadline, told()
            time.sleep(0.01)

    with logs.show_waiting("compiling", logs.get_logger("specdec.test")) as tell:
        assert told().startswith("\rcompiling ... 0 s" if is_terminal else "compiling ...\n")
        wait_for("compiling ... 1 s")
        tell("text 3 of 7")
        wait_for(" s, text 3 of 7")
    lines = told().replace("\r", "\n").split("\n")
    assert all(len(line) < 40 for line in lines), "a line that wraps is not written over"
    assert told().endswith("\n")
    assert ("\r" in told()) == is_terminal
