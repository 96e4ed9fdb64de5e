"""A conversion that dies leaves nothing that looks finished, and the next one succeeds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.convert.conftest import Converter, Source

# The conversion in a process of its own that stops for ever at one of its last steps.
PROGRAM = """
import sys, time
from specdec.convert import pipeline, stream
from specdec.convert.settings import ConvertSettings

def stop(*args, **kwargs):
    print("there", flush=True)
    time.sleep(600)

moment, model, output = sys.argv[1:]
if moment == "amid the rank files":
    real = stream._Stream._write_rank
    stream._Stream._write_rank = lambda self, rank: stop() if rank == 1 else real(self, rank)
elif moment == "before config.json":
    pipeline.write_json = stop
elif moment == "before manifest.json":
    pipeline.write_manifest = stop
from pathlib import Path
pipeline.convert_model(
    ConvertSettings(model_dir=model, output_dir=Path(output), tp_size=2, force=True))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "moment", ["amid the rank files", "before config.json", "before manifest.json"]
)
@pytest.mark.parametrize("is_there_an_old_one", [False, True])
def test_killed_conversion(
    moment: str, is_there_an_old_one: bool, source: Source, convert: Converter
) -> None:
    before: dict[str, bytes] = {}
    if is_there_an_old_one:
        convert(model_dir=source("llama_mqa"))
        before = {path.name: path.read_bytes() for path in convert.output.iterdir()}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, moment, str(source("llama_gqa")), str(convert.output)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=600)
    process.stdout.close()
    if is_there_an_old_one:
        after = {path.name: path.read_bytes() for path in convert.output.iterdir()}
        assert after == before
    else:
        assert not convert.output.exists()
    assert list(convert.output.parent.glob(".*.partial"))  # it really died amid the work
    convert(model_dir=source("llama_gqa"), tp_size=2, force=True)
    assert {path.name for path in convert.output.iterdir()} == {
        "config.json", "manifest.json", "rank0.safetensors", "rank1.safetensors",
    }  # fmt: skip
    assert not list(convert.output.parent.glob(".*"))


# The command in a process of its own with more jobs waiting than writers, when something ends it.
CROWDED = """
import errno, os, signal, sys, threading, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup runs the tests
from specdec.command import stages as command
from specdec.convert import cli, plan, stream

for module in (plan, stream):
    module.OUTPUT_BLOCK_BYTES = 2000
stream.SYNC_BYTES = 4000
how, model, output = sys.argv[1:]
lock, num_begun = threading.Lock(), 0
real = stream._Stream._write_blocks

def write(self, job, descriptor):
    global num_begun
    with lock:
        num_begun += 1
        number = num_begun
    if number > 20:  # the writers are at work until the stream is told to stop
        if number == 21:
            while num_begun < 22 or self.writers._work_queue.qsize() < 10:
                time.sleep(0.01)
            print("crowded", flush=True)
            if how == "full disk":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.is_stopping.wait()
    real(self, job, descriptor)

stream._Stream._write_blocks = write
command.run_command(cli.command, ["--model-dir", model, "--output-dir", output, "--workers", "2"])
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        (signal.SIGINT, 130, "error: interrupted"),
        (signal.SIGTERM, 143, "error: ended by SIGTERM"),
        (signal.SIGHUP, 129, "error: ended by SIGHUP"),
        ("full disk", 1, "No space left on device"),
    ],
)
def test_jobs_that_wait_for_a_writer_hold_nothing_up(
    how: signal.Signals | str, status: int, message: str, source: Source, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CROWDED, str(how), str(source("llama_gqa")), str(tmp_path / "out")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "crowded\n"
        if isinstance(how, signal.Signals):
            process.send_signal(how)
        _, stderr = process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, stderr
    assert message in stderr
    assert "hint: " in stderr
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_seen_beforehand(
    source: Source, convert: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(convert.output.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    error = convert.fail(model_dir=source("llama_gqa"))
    assert "the checkpoint takes 0.2 MB" in error.message
    assert "has 0.0 MB free" in error.message
