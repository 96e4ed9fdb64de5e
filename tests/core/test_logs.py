"""Waiting is told: in a line that counts on a terminal, elsewhere in lines now and then."""

from __future__ import annotations

import io
import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from specdec.system import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [False, True])
def test_waiting_is_told(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(logs, "SECONDS_TO_A_LINE", 0.01)
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


@pytest.mark.parametrize("of_bytes", [False, True])
def test_progress_is_told_in_lines(of_bytes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one in some seconds, and none of what ends sooner; the end has a line of its own."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    clock = iter([0.0, 4.0, 12.0, 13.0, 30.0])
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    logs.set_up()
    unit = 10**9 if of_bytes else 1
    with logs.track("prompts", total=1500 * unit, of_bytes=of_bytes) as advance:
        for count in (100, 200, 10, 1190):
            advance(count * unit)
    lines = stream.getvalue().splitlines()
    if of_bytes:
        assert lines == ["prompts: 300.0 of 1500.0 GB, 25000 MB/s, about 1 min left"]
    else:
        assert lines == ["prompts: 300 of 1500 in 12 s, 25.00/s, about 1 min left"]


def test_a_long_wait_is_told_in_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine minutes are five lines, not thirty-six."""
    stream = io.StringIO()
    pauses: list[float] = []
    monkeypatch.setattr("sys.stderr", stream)

    class Patience:
        def wait(self, seconds: float) -> bool:
            pauses.append(seconds)
            return sum(pauses) > 540

        def set(self) -> None:
            pass

    fake = SimpleNamespace(Event=Patience, Thread=threading.Thread)
    monkeypatch.setattr(logs, "threading", fake)
    logs.set_up()
    with logs.show_waiting("measuring", logs.get_logger("specdec.test")):
        pass
    assert pauses == [15.0, 30.0, 60.0, 120.0, 240.0, 480.0]
    assert stream.getvalue().count("measuring ...") == 1 + 5
