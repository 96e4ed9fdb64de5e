"""specdec doctor and the user's cache: what it holds, its limit, and clearing it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec.doctor import cache as doctor_cache
from specdec.doctor.report import examine, format_report
from specdec.doctor.settings import DoctorSettings
from specdec.files.engine_cache import EngineUse
from specdec.system import cache as system_cache
from specdec.system.cache import use_download, use_entry
from tests.conftest import read_error_lines
from tests.engines import run_cli_here

FILES = {
    "generate/old-1/engine/weights": 3_000_000, "generate/new-2/engine/weights": 1_500_000,
    "kernels/key-sum.so": 400_000, "models/small.gguf": 2_000_000, "gguf/small-3/config.json": 10,
    "costs/key.json": 100, "checked/state": 0,
    "kernels/.partial-abc": 7, "notes.txt": 5,
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(folder))
    monkeypatch.setenv("SPECDEC_MAX_CACHE_GB", "7.5")
    for name, size in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"0" * size)
    for age, name in enumerate(("new-2", "old-1")):
        (folder / "generate" / f"{name}.lock").touch()
        os.utime(folder / "generate" / f"{name}.lock", (10_000 - age, 10_000 - age))
    return folder


def test_what_the_cache_holds(cache: Path) -> None:
    report = examine(DoctorSettings())
    assert report["cache"] == {
        "path": str(cache), "bytes": 6_900_110, "limit_bytes": 7_500_000_000,
        "oldest_use": doctor_cache._format_time(9_999),
        "parts": [
            {"name": "engines", "count": 2, "bytes": 4_500_000},
            {"name": "compiled kernels", "count": 1, "bytes": 400_000},
            {"name": "downloads", "count": 1, "bytes": 2_000_000},
            {"name": "tokenizers of GGUF files", "count": 1, "bytes": 10},
            {"name": "cost tables", "count": 1, "bytes": 100},
            {"name": "records of compared files", "count": 1, "bytes": 0},
        ],
    }  # fmt: skip
    lines = format_report(report).splitlines()
    assert f"  cache: 6.9 MB in {cache}" in lines
    (line,) = [line for line in lines if line.startswith("    engines: ")]
    assert line.startswith("    engines: 2, 4.5 MB of at most 7.5 GB (SPECDEC_MAX_CACHE_GB), the")
    assert "    downloads: 1, 2.0 MB" in lines


def test_a_limit_that_is_none_is_a_problem(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_MAX_CACHE_GB", "all")
    report = examine(DoctorSettings())
    assert report["cache"] is None
    assert "SPECDEC_MAX_CACHE_GB is 'all'" in report["problems"][-1]
    assert "problem: SPECDEC_MAX_CACHE_GB is 'all'" in format_report(report)


def test_an_empty_cache_is_not_made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(cache / "absent"))
    report = doctor_cache.describe_cache()
    assert (report["bytes"], report["oldest_use"]) == (0, None)
    assert doctor_cache.clear_cache()["removed"] == []
    assert not (cache / "absent").exists()
    monkeypatch.delenv("SPECDEC_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError()))
    assert doctor_cache.format_cache(doctor_cache.describe_cache())[0].startswith("  cache: none")


def test_clearing_says_what_was_removed(cache: Path) -> None:
    """What is in use or being written stays, and so does what is not the cache's."""
    use = EngineUse(cache / "generate" / "new-2" / "engine")
    done = run_cli_here("doctor", "--clear-cache", "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    names = {(entry["part"], entry["name"], entry["bytes"]) for entry in report["removed"]}
    assert names == {
        ("engines", "old-1", 3_000_000), ("compiled kernels", "key-sum.so", 400_000),
        ("downloads", "small.gguf", 2_000_000), ("tokenizers of GGUF files", "small-3", 10),
        ("cost tables", "key.json", 100), ("records of compared files", "state", 0),
    }  # fmt: skip
    assert report["removed_bytes"] == 5_400_110
    assert {entry["name"] for entry in report["left"]} == {"new-2", ".partial-abc"}
    files = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert {str(path.relative_to(cache)) for path in files} == {
        "generate/new-2/engine/weights", "kernels/.partial-abc", "notes.txt",
    }  # fmt: skip
    use.close()
    os.utime(cache / "kernels" / ".partial-abc", (1, 1))
    done = run_cli_here("doctor", "--clear-cache")
    lines = done.stdout.splitlines()
    assert lines[0] == f"removed from {cache}: 1.5 MB"
    assert "    new-2: 1.5 MB" in lines
    assert not any(line.startswith("left") for line in lines)
    assert [path.name for path in cache.rglob("*") if path.is_file()][-1:] != [".partial-abc"]


def test_a_tokenizer_in_use_is_not_cleared(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that was made again under the name of another that is in use."""
    locks: dict[Path, int] = {}
    monkeypatch.setattr(system_cache, "_locks", locks)
    folder = cache / "gguf" / "small-3"
    for _ in range(2):
        assert use_entry(folder)
        assert use_entry(folder)
        assert "small-3" in {entry["name"] for entry in doctor_cache.clear_cache()["left"]}
        assert (folder / "config.json").is_file()
        shutil.rmtree(folder)
        assert not use_entry(folder)
        folder.mkdir()
        (folder / "config.json").touch()
    assert use_entry(folder)
    os.close(locks.pop(folder))
    assert "small-3" in {entry["name"] for entry in doctor_cache.clear_cache()["removed"]}
    assert not list((cache / "gguf").iterdir())


def test_a_download_in_use_is_not_cleared(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is read, one in a folder, and one that a script has been writing for hours."""
    locks: dict[Path, int] = {}
    monkeypatch.setattr(system_cache, "_locks", locks)
    models = cache / "models"
    (models / "chat").mkdir()
    (models / "chat" / "config.json").touch()
    for path in (models / "small.gguf", models / "chat" / "config.json", cache / "notes.txt"):
        use_download(path)
    part = models / ".large.gguf.part"
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(part, (1, 1))
        report = doctor_cache.clear_cache()
        assert {path.name for path in models.iterdir()} == {"small.gguf", "chat", part.name}
        assert "left: 4 entries in use: " in doctor_cache.format_cleared(report)
    while locks:
        os.close(locks.popitem()[1])
    doctor_cache.clear_cache()
    assert not list(models.iterdir())


def test_an_engine_is_no_cache(cache: Path) -> None:
    (cache / "config.json").write_text("{}")
    done = run_cli_here("doctor", "--clear-cache")
    assert done.returncode == 1
    assert "which is an engine or a model and no cache" in read_error_lines(done.stderr)[0]
    assert (cache / "kernels" / "key-sum.so").is_file()


def test_a_link_leads_to_nothing_that_is_removed(cache: Path, tmp_path: Path) -> None:
    (cache / "costs").rename(tmp_path / "elsewhere")
    (cache / "costs").symlink_to(tmp_path / "elsewhere")
    doctor_cache.clear_cache()
    assert (tmp_path / "elsewhere" / "key.json").is_file()


def test_a_folder_is_never_half_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever removes it may be killed in the middle: half a tokenizer is not taken for one."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        doctor_cache.clear_cache()
    (left,) = (cache / "gguf").iterdir()
    assert left.name.startswith(".small-3.")
    os.utime(left, (1, 1))
    os.utime(left / "config.json", (1, 1))
    doctor_cache.clear_cache()
    assert not list((cache / "gguf").iterdir())
