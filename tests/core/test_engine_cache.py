"""The cache of engines: what is removed beyond its limit, and what is in use and stays."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.errors import SpecDecError
from specdec.files.engine_cache import EngineCache, EngineUse, read_limit
from tests.conftest import ROOT

USER = (
    "import pathlib, sys; from specdec.files.engine_cache import EngineUse;"
    " use = EngineUse(pathlib.Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineCache:
    """Entries a, b and c of 10 bytes each, of which a was used first."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("SPECDEC_MAX_CACHE_GB", raising=False)
    cache = EngineCache(tmp_path / "generate")
    for age, name in enumerate("cba"):
        use(cache, name)
        os.utime(cache.folder / f"{name}.lock", (1000 - age, 1000 - age))
    return cache


def use(cache: EngineCache, name: str) -> None:
    def make(folder: Path) -> None:
        (folder / "engine").mkdir()
        (folder / "engine" / "weights").write_bytes(b"0123456789")

    with cache.hold(name, make, force=False):
        pass


@contextlib.contextmanager
def run_elsewhere(cache: EngineCache, name: str) -> Iterator[None]:
    """Let another process use an engine."""
    process = subprocess.Popen(
        [sys.executable, "-c", USER, str(cache.folder / name / "engine")], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def list_names(cache: EngineCache) -> list[str]:
    return [entry.name for entry in cache.list_entries()]


def test_the_least_recently_used_go_first(cache: EngineCache) -> None:
    assert list_names(cache) == ["a", "b", "c"]
    assert cache.trim(30) == ([], 30)
    use(cache, "a")
    removed_entries, num_left = cache.trim(25)
    assert [(entry.name, entry.num_bytes) for entry in removed_entries] == [("b", 10)]
    assert num_left == 20
    assert list_names(cache) == ["c", "a"]
    assert [entry.name for entry in cache.trim(9)[0]] == ["c", "a"]
    assert not [path for path in cache.folder.iterdir() if path.is_dir()]


def test_what_another_process_uses_stays(cache: EngineCache) -> None:
    """Whatever command it is, and also where it was killed: then nobody uses it."""
    with run_elsewhere(cache, "b"):
        assert list_names(cache) == ["a", "c", "b"], "its use is the newest"
        os.utime(cache.folder / "b.lock", (1, 1))
        removed_entries, num_left = cache.trim(10)
        assert [entry.name for entry in removed_entries] == ["a", "c"]
        assert num_left == 10
        assert cache.trim(0) == ([], 10)
        assert cache.clear() == ([], 1)
        assert (cache.folder / "b" / "engine" / "weights").is_file()
    assert [entry.name for entry in cache.trim(0)[0]] == ["b"]


def test_an_engine_of_the_users_own_has_no_lock(cache: EngineCache, tmp_path: Path) -> None:
    use = EngineUse(tmp_path / "elsewhere" / "engine")
    use.close()
    assert not list(tmp_path.glob("*.lock"))
    use = EngineUse(cache.folder / "a" / "engine")
    assert [entry.name for entry in cache.trim(10)[0]] == ["b", "c"], "a's use is the newest"
    assert cache.trim(0) == ([], 10)
    use.close()
    use.close()
    cache.trim(0)
    assert not list_names(cache)


def test_processes_that_remove_at_once_remove_no_more_than_needed(cache: EngineCache) -> None:
    code = (
        "import pathlib, sys; from specdec.files.engine_cache import EngineCache;"
        " removed, _ = EngineCache(pathlib.Path(sys.argv[1])).trim(15); print(len(removed))"
    )
    command = [sys.executable, "-c", code, str(cache.folder)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert sum(int(process.communicate()[0]) for process in processes) == 2
    assert list_names(cache) == ["c"]


def test_what_a_killed_process_left_counts(cache: EngineCache) -> None:
    left = cache.folder / ".d.partial"
    left.mkdir()
    (left / "half").write_bytes(b"0" * 50)
    (cache.folder / "d.lock").touch()
    os.utime(cache.folder / "d.lock", (1, 1))
    removed_entries, num_left = cache.trim(30)
    assert [(entry.name, entry.num_bytes) for entry in removed_entries] == [("d", 50)]
    assert num_left == 30
    assert not left.exists()


def test_an_entry_is_never_half_there(cache: EngineCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever removes it may be killed in the middle: the next one makes it again."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        for _ in range(2):
            cache.trim(25)
            assert not cache.has("a")
            assert [each.name for each in cache.folder.glob(".a.*")] == [".a.rm"]
    assert [entry.name for entry in cache.clear()[0]] == ["a", "b", "c"]
    assert not [path for path in cache.folder.iterdir() if path.is_dir()]


def test_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_MAX_CACHE_GB", raising=False)
    assert read_limit(tmp_path / "absent") >= 20e9
    monkeypatch.setenv("SPECDEC_MAX_CACHE_GB", "0.5")
    assert read_limit(tmp_path) == 5e8
    for text in ("much", "-1", "nan"):
        monkeypatch.setenv("SPECDEC_MAX_CACHE_GB", text)
        with pytest.raises(SpecDecError, match=f"SPECDEC_MAX_CACHE_GB is '{text}'"):
            read_limit(tmp_path)
