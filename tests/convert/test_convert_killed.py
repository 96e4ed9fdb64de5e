"""A conversion that dies leaves nothing that looks finished, and the next one succeeds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.convert import journal as journal_module
from specdec.convert import pipeline, stream
from specdec.convert import plan as plan_module
from specdec.errors import SpecDecError
from specdec.files.reading import hash_file
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


def test_output_that_appears_meanwhile_stays(
    source: Source, convert: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pipeline.write_manifest

    def write(*args: Any, **kwargs: Any) -> None:
        convert.output.mkdir()
        (convert.output / "precious").write_text("theirs")
        real(*args, **kwargs)

    monkeypatch.setattr(pipeline, "write_manifest", write)
    with pytest.raises(SpecDecError, match="out was not there at the start"):
        convert(model_dir=source("llama_gqa"))
    assert [path.name for path in convert.output.iterdir()] == ["precious"]
    assert list(convert.output.parent.iterdir()) == [convert.output]


def test_full_disk(source: Source, convert: Converter, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's writer fails: the error comes out, the other ranks' files go."""
    real = stream._Stream._write_rank

    def fail(self: Any, rank: int) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return real(self, rank)

    monkeypatch.setattr(stream._Stream, "_write_rank", fail)
    error = convert.fail(model_dir=source("llama_gqa"), tp_size=2)
    assert "No space left on device" in error.message
    assert list(convert.output.parent.iterdir()) == []


# The command in a process of its own with more jobs waiting than writers, when something ends it.
CROWDED = """
import errno, os, sys, threading, time
from specdec.command import stages as command
from specdec.convert import cli, journal, plan, stream

for module in (plan, stream, journal):
    module.CHUNK_BYTES = 2000
stream.SYNC_BYTES = 4000
how, model, output = sys.argv[1:]
lock, num_begun = threading.Lock(), 0
real = stream._Stream._write_job

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

stream._Stream._write_job = write
command.run_command(cli.command, ["--model-dir", model, "--output-dir", output, "--workers", "2"])
"""


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        (signal.SIGINT, 130, "error: interrupted"),
        (signal.SIGTERM, 143, "error: ended by SIGTERM"),
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


# The conversion in a process of its own that is killed as it starts a certain job.
MORTAL = """
import os, signal, sys, threading
from pathlib import Path
from specdec.convert import journal, pipeline, plan, stream
from specdec.convert.settings import ConvertSettings

for module in (plan, stream, journal):
    module.CHUNK_BYTES = 2000
stream.MARK_BYTES, stream.SYNC_BYTES, stream.JOBS_AHEAD = 6000, 10000, 3
moment, model, output, dtype = sys.argv[1:]
left = int(moment)
lock = threading.Lock()
real = stream._Stream._write_job

def die_or_work(self, job, descriptor):
    global left
    with lock:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    real(self, job, descriptor)

stream._Stream._write_job = die_or_work
pipeline.convert_model(ConvertSettings(
    model_dir=model, output_dir=Path(output), tp_size=2, dtype=dtype, resume=True))
print(left)
"""


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_killed_again_and_again_and_resumed(
    dtype: str, source: Source, convert: Converter, tmp_path: Path
) -> None:
    """What comes out is what an undisturbed conversion writes, and less is done every time."""
    model, output, expected = source("llama_gqa"), convert.output, tmp_path / "expected"

    def run(moment: int, output: Path) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", MORTAL, str(moment), str(model), str(output), dtype],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == (-signal.SIGKILL if moment else 0), done.stderr
        return done

    num_jobs = -int(run(0, expected).stdout)
    journal = tmp_path / ".out.partial" / ".journal"
    sizes = []
    for moment in (2, 23, 31, 0):  # the last is never killed
        done = run(moment, output)
        if moment:
            assert not output.exists()
            sizes.append(len(journal.read_bytes().splitlines()))
    assert sizes[2] > sizes[1] > sizes[0]
    assert 0 < -int(done.stdout) < num_jobs - 20
    for path in expected.iterdir():
        if path.name != "manifest.json":
            assert (output / path.name).read_bytes() == path.read_bytes(), path.name
    theirs, ours = (json.loads((x / "manifest.json").read_text()) for x in (expected, output))
    assert (theirs["outputs"], theirs["sources"]) == (ours["outputs"], ours["sources"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out"]


@pytest.fixture
def broken_off(
    source: Source, convert: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Converter:
    """A conversion of a copy of a model that failed after its rank files, with --resume."""
    shutil.copytree(source("llama_gqa"), tmp_path / "model")
    monkeypatch.setattr(stream, "MARK_BYTES", 10_000)
    for module in (plan_module, stream, journal_module):
        monkeypatch.setattr(module, "CHUNK_BYTES", 5_000)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "write_manifest", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(model_dir=tmp_path / "model", tp_size=2, resume=True)
    assert (tmp_path / ".out.partial" / "rank1.safetensors").exists()
    return convert


def test_finished_work_is_not_done_again(
    broken_off: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(stream._Stream, "_write_job", lambda *args: 1 / 0)
    with log.at_level("INFO", "specdec"):
        output = broken_off(model_dir=tmp_path / "model", tp_size=2, resume=True)
    assert "resuming after 0.2 MB" in log.text
    assert sorted(path.name for path in output.iterdir()) == [
        "config.json", "manifest.json", "rank0.safetensors", "rank1.safetensors",
    ]  # fmt: skip


def test_damage_done_meanwhile_is_mended(
    broken_off: Converter, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / ".out.partial" / "rank0.safetensors"
    data = bytearray(path.read_bytes())
    data[40_000] ^= 1
    path.write_bytes(data)
    journal = tmp_path / ".out.partial" / ".journal"
    journal.write_bytes(journal.read_bytes() + b'{"file": "rank1.safetens')  # a torn last line
    output = broken_off(model_dir=tmp_path / "model", tp_size=2, resume=True)
    assert "rank0.safetensors: damaged after byte 3" in log.text
    data[40_000] ^= 1
    assert (output / "rank0.safetensors").read_bytes() == data
    manifest = json.loads((output / "manifest.json").read_text())
    hashes = {entry["path"]: entry["sha256"] for entry in manifest["outputs"]}
    assert hashes["rank0.safetensors"] == hash_file(output / "rank0.safetensors")


def test_resuming_something_else_is_refused(broken_off: Converter, tmp_path: Path) -> None:
    def fail(**flags: Any) -> SpecDecError:
        with pytest.raises(SpecDecError) as caught:
            broken_off(model_dir=tmp_path / "model", resume=True, **flags)
        assert caught.value.hint == "run it again without --resume, which starts over"
        return caught.value

    assert "was started with other settings" in fail(tp_size=1).message
    assert "was started with other settings" in fail(tp_size=2, dtype="float16").message
    config = tmp_path / "model" / "config.json"
    os.utime(config, ns=(1, 1))
    assert f"new or changed since: {config}" in fail(tp_size=2).message
    assert (tmp_path / ".out.partial" / "rank1.safetensors").exists()
    broken_off(model_dir=tmp_path / "model", tp_size=1)  # without --resume
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_nothing_to_resume(
    source: Source, convert: Converter, log: pytest.LogCaptureFixture
) -> None:
    with log.at_level("INFO", "specdec"):
        convert(model_dir=source("llama_gqa"), resume=True)
    assert "nothing to resume: converting from the start" in log.text


def test_too_little_space_is_seen_beforehand(
    source: Source, convert: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(convert.output.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    error = convert.fail(model_dir=source("llama_gqa"))
    assert "the checkpoint takes 0.2 MB" in error.message
    assert "has 0.0 MB free" in error.message
