"""A conversion that dies leaves nothing that looks finished, and the next one succeeds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.convert import pipeline
from tests.conftest import ROOT
from tests.convert.conftest import Converter, Source

# The conversion in a process of its own that stops for ever at one of its last steps.
PROGRAM = """
import sys, time
from specdec.convert import pipeline
from specdec.convert.settings import ConvertSettings

def stop(*args, **kwargs):
    print("there", flush=True)
    time.sleep(600)

moment, model, output = sys.argv[1:]
if moment == "amid the rank files":
    real = pipeline.write_rank
    pipeline.write_rank = lambda path, *rest: stop() if "rank1" in path.name else real(path, *rest)
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
    process.wait(timeout=30)
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


def test_full_disk(source: Source, convert: Converter, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's writer fails: the error comes out, the other ranks' files go."""
    real = pipeline.write_rank

    def fail(path: Path, *rest: Any) -> Any:
        if "rank1" in path.name:
            raise OSError(28, "No space left on device")
        return real(path, *rest)

    monkeypatch.setattr(pipeline, "write_rank", fail)
    with pytest.raises(OSError, match="No space left"):
        convert(model_dir=source("llama_gqa"), tp_size=2)
    assert list(convert.output.parent.iterdir()) == []


def test_too_little_space_is_seen_beforehand(
    source: Source, convert: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = pipeline.shutil.disk_usage(convert.output.parent)
    monkeypatch.setattr(pipeline.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    error = convert.fail(model_dir=source("llama_gqa"))
    assert "the checkpoint takes 0.2 MB" in error.message
    assert "has 0.0 MB free" in error.message
