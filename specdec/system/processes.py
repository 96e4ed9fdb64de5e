"""Processes that we start: a stage called as its users call it, and how one is ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import specdec
from specdec.errors import SpecDecError

END_SECONDS = 5.0  # that a process has to end after it was told to


def read_memory(key: str) -> int | None:
    """Return an entry of /proc/meminfo in bytes."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value_text = line.partition(":")
            if name == key:
                return int(value_text.split()[0]) << 10
    return None


def call_stage(stage: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run `specdec STAGE --json ARGUMENTS`; return its object, or raise its error as our own."""
    child = subprocess.Popen(
        [sys.executable, "-m", "specdec", stage, "--json", *arguments], env=make_environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
    )  # fmt: skip
    try:
        output, err = child.communicate()
    except BaseException:
        end_family(child)
        raise
    if child.returncode == 0:
        report: dict[str, Any] = json.loads(output)
        return report
    lines = err.rstrip("\n").split("\n")
    error_parts = {
        label: line.removeprefix(label + ": ")
        for line in lines[-2:]
        for label in ("error", "hint")
        if line.startswith(label + ": ")
    }
    if len(error_parts) == 2:
        raise SpecDecError(error_parts["error"], error_parts["hint"])
    raise SpecDecError(
        f"specdec {stage} ended with status {child.returncode}: {lines[-1] or 'it said nothing'}",
        f"run it on its own: specdec {stage} {' '.join(arguments)}",
    )


def end_family(child: subprocess.Popen[Any], *, first_signal: int = signal.SIGINT) -> None:
    """End a process and all that it started: by a signal, and by force after END_SECONDS.

    Its output is read meanwhile and dropped. Where there is no /proc, what it started is its own
    matter.
    """
    family = _list_family(child.pid)
    try:
        child.send_signal(first_signal)
        child.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:  # a second Ctrl-C too
        family |= _list_family(child.pid)
        child.kill()
        for pid, started in family.items():
            if (stat := _read_stat(pid)) is not None and stat[1] == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        child.wait()


def _list_family(pid: int) -> dict[int, str]:
    """Map each process that descends from another one to the time when it was started."""
    stats = {int(path.name): _read_stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    family: dict[int, str] = {}
    parents = {pid}
    while parents:
        children = {
            child_pid: stat[1]
            for child_pid, stat in stats.items()
            if stat is not None and stat[0] in parents
        }
        family |= children
        parents = set(children)
    return family


def _read_stat(pid: int) -> tuple[int, str] | None:
    """Return a process's parent and its start time; None where it has ended."""
    fields = _read_fields(pid)
    return None if fields is None else (int(fields[1]), fields[19])


def _read_fields(pid: int) -> list[str] | None:
    """Read the fields of /proc after a process's name, from its state on; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()


@contextlib.contextmanager
def keep_stdout_clean() -> Iterator[None]:
    """Let what libraries write to standard output, past Python, go to standard error meanwhile.

    torch 2.9 writes there which ranks are connected, in front of `--json`'s object.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # one of the two is closed
            saved_stdout = os.dup(1)
            stack.callback(os.close, saved_stdout)
            if sys.stdout is not None:
                sys.stdout.flush()
            os.dup2(2, 1)
            stack.callback(os.dup2, saved_stdout, 1)
        yield


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped, as by SIGSTOP; False where there is no /proc."""
    fields = _read_fields(pid)
    return fields is not None and fields[0] in ("T", "t")


# Variables that launchers of several processes set in each one; a command started by one is none.
LAUNCHER_NAMES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_")


def make_environment() -> dict[str, str]:
    """Return an environment in which a child imports this package, and not the current folder."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }
    environment["PYTHONSAFEPATH"] = "1"
    root = Path(specdec.__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file():  # a checkout, which may not be installed
        python_path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{python_path}" if python_path else str(root)
    return environment
