"""A worker as seen from outside: started, called, found dead, ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.measure.machine import LoadMeter, describe_load, describe_machine

PACKAGE = Path(__file__).resolve().parent
PROCESSES = Path("/proc")
GRACE_SECONDS = 10.0
REASON_LENGTH = 300  # characters of a log's last line that a table has room for


class PeerError(Exception):
    """A peer that cannot be installed, does not start, has died, or refuses a call."""


class Worker:
    """One peer in a process group of its own; its log is kept."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        settings: Mapping[str, Any],
        log: Path,
        *,
        threads: int,
        timeout: float,
    ) -> None:
        """Start it: the command, with the settings as one more word; raise PeerError."""
        self.name, self.log, self._timeout = name, log, timeout
        environment = {
            **os.environ, "PYTHONPATH": str(PACKAGE.parent), "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",  # so that the log ends with what was said last
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
        }  # fmt: skip
        log.parent.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*map(str, command), json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self._unread = b""
        try:
            self.about: dict[str, Any] = self._read_answer()
        except BaseException:
            self.end()
            raise
        self.about["start_seconds"] = round(time.perf_counter() - began, 3)

    @property
    def group(self) -> int:
        """The number of its process group."""
        return self._process.pid

    def call(self, name: str, **settings: Any) -> dict[str, Any]:
        """Return the answer; raise PeerError."""
        assert self._process.stdin is not None
        line = json.dumps({"call": name, "settings": settings}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            raise self._describe_death() from None
        return self._read_answer()

    def end(self) -> None:
        """End the process and all it has started."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()  # it reads the end of its calls
            except OSError:
                pass
        try:
            self._process.wait(GRACE_SECONDS if self._process.poll() is None else None)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.group, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read_answer(self) -> dict[str, Any]:
        message = json.loads(self._read_line())
        if "error" in message:
            raise PeerError(str(message["error"])[:REASON_LENGTH])
        answer: dict[str, Any] = message["answer"]
        return answer

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + self._timeout
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise PeerError(f"no answer within {self._timeout:.0f} s")
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise self._describe_death()
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _describe_death(self) -> PeerError:
        try:
            status: object = self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            status = "unknown"
        return PeerError(f"ended with status {status}: {read_last_line(self.log)}")


def read_last_line(log: Path) -> str:
    """The last line of a log that says anything, cut to what a table has room for."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")[:REASON_LENGTH]


def run_logged(command: Sequence[str | Path], log: Path, what: str, **options: Any) -> None:
    """Run a command with its output appended to a log; raise PeerError with the log's last line."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        try:
            done = subprocess.run(
                [str(word) for word in command], stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, check=False, **options,
            )  # fmt: skip
        except OSError as error:
            raise PeerError(f"{what}: {error}") from None
    if done.returncode:
        raise PeerError(f"{what}, status {done.returncode}: {read_last_line(log)}")


class Conditions:
    """Return the head of a report: the machine and the commit, and the load by others meanwhile."""

    def __init__(self) -> None:
        """Look at the machine, best before anything is started, and `watch`."""
        self._head = describe_machine() | {"commit": read_commit()}
        self.watch()

    def watch(self, groups: Sequence[int] = ()) -> None:
        """Count others' load from now on. groups: of processes whose load is our own."""
        self._meter, self._began, self._groups = LoadMeter(), time.monotonic(), groups
        self._own = count_group_seconds(groups)

    def describe(self) -> dict[str, Any]:
        """The head, the processors that others used since, and what is doubtful for it."""
        others = self._meter.measure()
        if others is not None and self._groups:
            own = (count_group_seconds(self._groups) - self._own) / (time.monotonic() - self._began)
            others = round(max(0.0, others - own), 2)
        load = {"processors_used_by_others": others, "warnings": describe_load(others)}
        return {**self._head, **load}


def read_commit() -> str | None:
    """The commit of this checkout, with a mark where files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=PACKAGE, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or None


def count_group_seconds(groups: Iterable[int]) -> float:
    """Processor seconds that all processes of some groups have used, ended children included."""
    wanted = set(groups)
    ticks = 0
    for path in PROCESSES.glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):  # it has ended meanwhile
            continue
        if int(fields[2]) in wanted:
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")
