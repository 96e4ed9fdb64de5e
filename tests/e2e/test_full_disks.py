"""A disk that gets full: each writing command names what it wrote, and leaves nothing half-written.

A limit on a file's size fails a write as a full disk does, at any byte.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specdec.errors import SpecDecError
from specdec.files.staging import stage_folder
from tests.conftest import make_llama, make_tokenizer, read_error_lines
from tests.engines import run_cli_here


@pytest.fixture(scope="module")
def model(lasting_dir: Path) -> Path:
    folder = make_llama(lasting_dir / "full-disks", hidden=128, layers=2)
    return make_tokenizer(folder)


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield before
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


COMMANDS = {
    "convert": ("convert", "--model-dir", "{model}", "--output-dir", "{out}"),
    "build": ("build", "--checkpoint-dir", "{checkpoint}", "--output-dir", "{out}"),
    "export": ("export", "--model-dir", "{model}", "--to", "hf", "--output-dir", "{out}"),
    "gguf": ("export", "--model-dir", "{model}", "--to", "gguf", "--gguf-type", "F32",
             "--dtype", "bfloat16", "--output-dir", "{out}"),
    "generate": ("generate", "--model-dir", "{model}", "--max-output-len", 2, "abc"),
    "train": ("train", "--model-dir", "{model}", "--method", "medusa", "--data", "{data}",
              "--output-dir", "{out}", "--max-steps", 1, "--model-max-length", 32,
              "--medusa-num-heads", 1),
}  # fmt: skip
LIMITS = (100, 2500, 300_000)


@pytest.mark.thorough
@pytest.mark.parametrize("num_bytes", LIMITS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_told(
    command: str, num_bytes: int, model: Path, tmp_path: Path, limits: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("CXX", "none")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "data.txt").write_text("once upon a time " * 40)
    places = {"model": model, "out": tmp_path / "out", "data": tmp_path / "data.txt"}
    if command == "build":
        places["checkpoint"] = tmp_path / "checkpoint"
        words = [str(word).format(**places | {"out": places["checkpoint"]})
                 for word in COMMANDS["convert"]]  # fmt: skip
        assert run_cli_here(*words).returncode == 0
    before = {path.name for path in tmp_path.iterdir()}
    words = [str(word).format(**places) for word in COMMANDS[command]]

    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    done = run_cli_here(*words)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.returncode == 1, done.stderr
    error, hint = read_error_lines(done.stderr)
    assert "cannot be written" in error
    assert "space" in hint or "make room" in hint
    place = "cache/generate/" if command == "generate" else "out"
    assert f"{tmp_path}/{place}" in error or command == "train"
    left = {path.name for path in tmp_path.iterdir()} - before
    assert left <= {"cache", ".out.training"}
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.stat().st_size]


@pytest.mark.parametrize("is_nested", [False, True])
def test_what_numpy_says_of_a_full_disk(
    is_nested: bool, tmp_path: Path, limits: tuple[int, int]
) -> None:
    """It raises an OSError without a number, and gguf's writer with it."""

    def write() -> None:
        with stage_folder(tmp_path / "out", force=False) as out:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
            if is_nested:
                with stage_folder(out / "inner", force=False) as inner:
                    np.zeros(1000).tofile(inner / "file")
            np.zeros(1000).tofile(out / "file")

    with pytest.raises(SpecDecError) as caught:
        write()
    assert caught.value.message.startswith(f"{tmp_path / 'out'} cannot be written: ")
    assert not list(tmp_path.iterdir())
