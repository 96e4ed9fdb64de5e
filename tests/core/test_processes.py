"""How processes that we start are ended: with all that they started, stuck ones by force."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.system import processes
from specdec.system.threads import calm_threads
from tests.conftest import ROOT

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks into /proc")

# Ignores what asks it to end, and so does its child, which is stopped alongside.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
child.send_signal(signal.SIGSTOP)
with open(os.environ["PIDS"] + ".part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(os.environ["PIDS"] + ".part", os.environ["PIDS"])
time.sleep(600)
"""


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a stubborn process writes its number and its child's; a failed test leaves none."""
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setattr(processes, "END_SECONDS", 0.2)
    yield tmp_path / "pids"
    for pid in (tmp_path / "pids").read_text().split():
        with contextlib.suppress(OSError):
            if b"time.sleep(600)" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


def wait_for(path: Path) -> list[int]:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [int(pid) for pid in path.read_text().split()]


def interrupt_when(path: Path) -> None:
    """Press Ctrl-C once a file is there, and what wrote it is known to who started it."""
    main = threading.get_ident()

    def is_starting() -> bool:
        frames = traceback.extract_stack(sys._current_frames()[main])
        return any(frame.name == "_execute_child" for frame in frames)

    def run() -> None:
        wait_for(path)
        while is_starting():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=run, daemon=True).start()


def assert_ended(pids: Path) -> None:
    deadline = time.monotonic() + 300
    for pid in wait_for(pids):
        stat = Path(f"/proc/{pid}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"{pid} was left behind"
            time.sleep(0.02)


@needs_proc
def test_a_family_ends_with_its_stuck_members(pids: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", STUBBORN])
    assert wait_for(pids)[0] == child.pid
    processes.end_family(child)
    assert child.returncode == -signal.SIGKILL
    assert_ended(pids)


def test_what_ends_when_told_may_do_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more to say than a pipe holds."""
    monkeypatch.setattr(processes, "END_SECONDS", 300)
    ready = tmp_path / "ready"
    code = f"""
import sys, time
try:
    open({str(ready)!r}, "w").close()
    time.sleep(600)
except KeyboardInterrupt:
    sys.stdout.write("x" * 300_000)
    sys.exit(7)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    wait_for(ready)
    processes.end_family(child)
    assert child.returncode == 7


@needs_proc
def test_a_second_ctrl_c_ends_a_build_at_once(
    pids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While trtllm-build is given time to end after the first one."""
    from specdec.build.backends.tensorrt_llm import process

    monkeypatch.setattr(process, "END_SECONDS", 3600)
    asked = tmp_path / "asked"
    code = STUBBORN.replace(
        "signal.SIGINT, signal.SIG_IGN", f"signal.SIGINT, lambda *_: open({str(asked)!r}, 'w')"
    )
    interrupt_when(pids)
    interrupt_when(asked)
    with pytest.raises(KeyboardInterrupt):
        process.run_child([sys.executable, "-c", code], {}, tmp_path, tmp_path / "log")
    assert_ended(pids)


@needs_proc
def test_ctrl_c_ends_a_stage_that_is_stuck(
    pids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = tmp_path / "python"
    stage.write_text(f"#!{sys.executable}\n{STUBBORN}")
    stage.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stage))
    interrupt_when(pids)
    with pytest.raises(KeyboardInterrupt):
        processes.call_stage("run", ["--engine-dir", "e"])
    assert_ended(pids)


@needs_proc
def test_ctrl_c_ends_an_mpirun_that_is_stuck(
    pids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.run.backends.tensorrt_ranks import start_ranks
    from specdec.run.settings import RunSettings

    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!{sys.executable}\n{STUBBORN}")
    mpirun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    interrupt_when(pids)
    with pytest.raises(KeyboardInterrupt):
        start_ranks(RunSettings(engine_dir=tmp_path), 2)
    assert_ended(pids)


def test_waiting_threads_sleep_soon_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment of its own: nothing of this process's is changed."""
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    calm_threads()
    assert environment == {"GOMP_SPINCOUNT": "1000"}
    environment["GOMP_SPINCOUNT"] = "7"
    calm_threads()
    assert environment == {"GOMP_SPINCOUNT": "7"}
    environment.clear()
    environment["OMP_WAIT_POLICY"] = "active"
    calm_threads()
    assert environment == {"OMP_WAIT_POLICY": "active"}


def test_what_libraries_write_is_not_in_front_of_the_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Past Python, as torch's gloo does; also where a stream is closed."""
    print("before", flush=True)
    with processes.keep_stdout_clean():
        os.write(1, b"[Gloo] Rank 0 is connected\n")
    print("after", flush=True)
    assert tuple(capfd.readouterr()) == ("before\nafter\n", "[Gloo] Rank 0 is connected\n")
    closed = (
        "from specdec.system.processes import keep_stdout_clean\nwith keep_stdout_clean(): pass"
    )
    for descriptor in ("1", "2"):
        line = f'"{sys.executable}" -c "{closed}" {descriptor}>&-'
        done = subprocess.run(["sh", "-c", line], cwd=ROOT, check=False)
        assert done.returncode == 0
