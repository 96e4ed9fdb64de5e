"""Compiled kernels are code: where they come from, what is refused; compilers that fail."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.engine import compiler, kernel_cache, native, native_library
from specdec.errors import SpecDecError
from specdec.system.cache import find_cache
from tests.engine.kernels import needs_compiler

INFO = {"cpu": "this one"}


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been told before, and the log is read whatever a command set up earlier."""
    monkeypatch.setattr(kernel_cache, "_logged_warnings", set())
    monkeypatch.setattr(logging.getLogger("specdec"), "propagate", True)
    caplog.set_level(logging.INFO)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that keeps a library, and lies in a folder of its own."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    kernel_cache.keep(b"code", INFO)
    yield tmp_path / "cache"
    for path in (tmp_path / "cache", tmp_path / "cache" / "kernels"):
        if path.is_dir():
            path.chmod(0o700)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def get_entry(cache: Path) -> Path:
    (entry,) = (cache / "kernels").iterdir()
    return entry


def write_compiler(folder: Path, script: str) -> Path:
    path = folder / "compiler"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return path


def test_what_is_kept_is_the_users_alone(cache: Path) -> None:
    entry = get_entry(cache)
    assert kernel_cache.find_kept(INFO) == entry
    assert kernel_cache.find_kept({"cpu": "another"}) is None
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (cache, cache / "kernels", entry)]
    assert modes == [0o700, 0o700, 0o600]


def put_folder(entry: Path) -> None:
    entry.unlink()
    entry.mkdir()


def put_pipe(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


def put_link(entry: Path) -> None:
    target = entry.parent.parent / "elsewhere"
    entry.rename(target)
    entry.symlink_to(target)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda entry: entry.write_bytes(b"cod"), "is damaged: its sum is not the one in its name"),
        (lambda entry: entry.chmod(0o660), "can be written by other users"),
        (put_folder, "is not a file"),
        (put_pipe, "is not a file"),
        (put_link, "is a link"),
    ],
)
def test_entries_that_are_refused(
    cache: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], object], fault: str
) -> None:
    entry = get_entry(cache)
    spoil(entry)
    for _ in range(2):
        assert kernel_cache.find_kept(INFO) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{entry} {fault}: it is not loaded"
    ]


def test_entries_of_other_users_are_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if os.getuid() == 0:
        os.chown(get_entry(cache), 54321, 54321)
        assert kernel_cache.find_kept(INFO) is None
        assert "belongs to another user (54321)" in caplog.text
        os.chown(cache / "kernels", 54321, 54321)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 54321)
    assert kernel_cache.find_kept(INFO) is None
    assert "kept kernels are not used: " in caplog.text
    kernel_cache.keep(b"code", INFO)
    assert "the compiled kernels cannot be kept in " in caplog.text


def test_others_lose_the_right_to_write_to_the_cache(cache: Path) -> None:
    entry = get_entry(cache)
    (cache / "kernels").chmod(0o777)
    cache.chmod(0o775)
    assert kernel_cache.find_kept(INFO) == entry
    assert stat.S_IMODE((cache / "kernels").stat().st_mode) == 0o755
    assert stat.S_IMODE(cache.stat().st_mode) == 0o755


@pytest.mark.parametrize("name", ["", "kernels"])
def test_a_link_or_file_in_place_of_the_cache(
    cache: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = cache / name
    place.rename(cache.parent / "moved")
    place.write_text("")
    assert kernel_cache.find_kept(INFO) is None
    kernel_cache.keep(b"code", INFO)
    assert "set SPECDEC_CACHE_DIR to a folder that you own" in caplog.text
    if name:
        place.unlink()
        place.symlink_to(cache.parent / "moved")
        assert kernel_cache.find_kept(INFO) is None
        assert f"{place} is not a folder" in caplog.text


def test_a_full_disk_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    entry = get_entry(cache)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        kernel_cache.keep(b"code", {"cpu": "another"})
    assert get_entry(cache) == entry
    assert f"cannot be kept in {cache}: No space left on device" in caplog.text


def test_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("SPECDEC_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 54321)
    assert find_cache() is None
    kernel_cache.keep(b"code", INFO)
    assert "cannot be kept in a home folder: there is none" in caplog.text


def test_a_folder_in_place_of_what_is_kept(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_folder(get_entry(cache))
    kernel_cache.keep(b"code", INFO)
    assert get_entry(cache).is_dir()
    assert f"cannot be kept in {cache}: Is a directory" in caplog.text


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 0", r"compiler ended with status 0 and wrote no kernels\.o$"),
        ("exit 1", r"compiler failed with status 1: it printed no message$"),
        ("kill -9 $$", r"compiler was ended by signal 9: it printed no message$"),
        ("printf 'no \\377 such' >&2; exit 1", "compiler failed with status 1: no \ufffd such$"),
        ("yes long | head -c 100000 | tr -d '\\n' >&2; exit 1", "status 1: (long){150}$"),
    ],
)
def test_compilers_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path, script)))
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(SpecDecError, match=message):
        native_library.compile_kernels(tmp_path)
    assert not (tmp_path / "cache").exists()


def test_a_compiler_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "compiler"
    path.write_bytes(b"\0\1\2")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    with pytest.raises(SpecDecError, match="compiler does not start: Exec format error"):
        native_library.compile_kernels(tmp_path)


@pytest.mark.parametrize(
    ("answers", "seconds"),
    [("nothing", 60), ("--version", 600), ("preprocessing", 60)],
)
def test_a_compiler_that_hangs_is_ended(
    answers: str, seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version or preprocessing may take a minute, a compilation ten."""
    hang = f"sleep 1000 & echo $! > {tmp_path}/child; wait"
    script = f'case "$1" in {answers}) echo 12 ;; *) {hang} ;; esac'
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path, script)))
    communicate = subprocess.Popen.communicate

    def time_out(process: subprocess.Popen[bytes], timeout: float) -> Any:
        if answers in process.args:  # type: ignore[operator]
            return communicate(process)
        wait_for(lambda: (tmp_path / "child").is_file() and (tmp_path / "child").read_text())
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", time_out)

    def compile_all() -> None:
        if answers == "preprocessing":
            compiler.describe_arithmetic(os.environ["CXX"])
        native_library.compile_kernels(tmp_path)

    with pytest.raises(SpecDecError, match=f"compiler .* took more than {seconds} s"):
        compile_all()
    state = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    wait_for(lambda: not state.exists() or state.read_text().split()[2] == "Z")


@pytest.mark.parametrize(
    ("cxx", "expected"),
    [
        ("sh", ["{sh}"]),
        ("sh -c 'a b'", ["{sh}", "-c", "a b"]),
        ("{folder}/a b/compiler", ["{folder}/a b/compiler"]),
        ("sh 'open", None),
        ("no-such-compiler", None),
        (" ", ...),
    ],
)
def test_arguments_in_cxx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cxx: str, expected: Any
) -> None:
    (tmp_path / "a b").mkdir()
    write_compiler(tmp_path / "a b", "exit 0")
    names = {"folder": tmp_path, "sh": shutil.which("sh")}
    monkeypatch.setenv("CXX", cxx.format(**names))
    found = compiler.find_compiler()
    if expected is ...:  # as if it were not set
        monkeypatch.delenv("CXX")
        assert found == compiler.find_compiler()
    elif expected is None:
        assert found is None
    else:
        assert found is not None
        assert shlex.split(found) == [word.format(**names) for word in expected]


SOURCE = 'extern "C" long specdec_abi_version() {{ return {answer}; }}\n'


@needs_compiler
def test_what_compiling_takes_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once with a cache; each time, and with what to do about it, without one."""
    source = tmp_path / "kernels.cpp"
    source.write_text(SOURCE.format(answer="ANSWER"))
    monkeypatch.setattr(native_library, "SOURCE", source)
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", f"{compiler.find_compiler()} -DANSWER=1")
    began = "compiling the native kernels for this CPU"
    with contextlib.suppress(SpecDecError):  # such a source is no kernels
        native.load_kernels({}, torch.float32)
    assert f"no kernels for this engine are kept in {tmp_path / 'cache'}" in caplog.text
    caplog.clear()
    shutil.rmtree(tmp_path / "cache")
    for count in (1, 1):
        info = native_library.compile_kernels(tmp_path)
        assert caplog.text.count(began) == count
    assert info["compiler"].endswith(" -DANSWER=1")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(source))
    assert "cannot be kept" not in caplog.text
    for count in (2, 3):
        native_library.compile_kernels(tmp_path)
        assert caplog.text.count(began) == count
    assert "they are compiled again each time an engine is built or loaded" in caplog.text


def test_kernels_that_are_cleared_before_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process: they are looked for again, or compiled, and no error tells of a file."""
    cleared, kept, tries = tmp_path / "cleared.so", tmp_path / "kept.so", [0, 1]

    @contextlib.contextmanager
    def provide(info: Any) -> Iterator[Path]:
        yield cleared if tries.pop() else kept

    def load(path: Path, dtype: torch.dtype) -> str:
        if not path.exists():
            raise SpecDecError("the compiled kernels do not load", "set CXX")
        return path.name

    kept.touch()
    monkeypatch.setattr(native, "provide_library", provide)
    monkeypatch.setattr(native, "NativeKernels", load)
    loaded: Any = native.load_kernels(INFO, torch.float32)
    assert loaded == "kept.so"
    monkeypatch.setattr(native_library, "find_kept", lambda info: cleared)
    assert not native_library._copy_kept(INFO, tmp_path / "copy.so")


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small source in the kernels' place, an empty cache, and the folder of the lock's file."""
    source, folder = tmp_path / "kernels.cpp", tmp_path / "temporary"
    source.write_text(SOURCE.format(answer=1))
    folder.mkdir()
    monkeypatch.setattr(native_library, "SOURCE", source)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@needs_compiler
@pytest.mark.parametrize("fails", [False, True])
def test_one_of_two_compiles(
    fails: bool, turns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Who comes later waits, and takes what was kept; or compiles where the first has failed."""
    outputs: list[Path] = []

    def call(command: list[str], *, output: Path | None = None) -> str:
        if output is not None and output.suffix == ".o":
            outputs.append(output)
            wait_for(lambda: "waiting for another process" in caplog.text or len(outputs) == 2)
            if fails and len(outputs) == 1:
                raise SpecDecError("the first fails", "try again")
        return compiler.call_compiler(command, output=output)

    monkeypatch.setattr(native_library, "call_compiler", call)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(native_library.compile_kernels, folder) for folder in folders]
    errors = [job.exception() for job in jobs]
    expected = [str(SpecDecError("the first fails", "try again"))] * fails
    libraries = [(folder / native_library.LIBRARY_NAME).exists() for folder in folders]
    assert (len(outputs), libraries.count(False)) == ((2, 1) if fails else (1, 0))
    assert [str(error) for error in errors if error is not None] == expected
    assert not list(turns.iterdir())


@needs_compiler
def test_a_lock_of_others_is_not_waited_for(turns: Path, tmp_path: Path) -> None:
    """A link in its place is not followed, and stays."""
    (tmp_path / "target").touch()
    info = {"cpu": "this one"}
    with kernel_cache.take_turn(info):
        (lock,) = turns.iterdir()
    lock.symlink_to(tmp_path / "target")
    with kernel_cache.take_turn(info):
        pass
    assert lock.is_symlink()
    native_library.compile_kernels(tmp_path)
    assert (tmp_path / native_library.LIBRARY_NAME).exists()


@needs_compiler
def test_kernels_follow_the_machine_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of another CPU, source or compiler has no effect but another library."""
    source = tmp_path / "kernels.cpp"
    source.write_text(SOURCE.format(answer=-5))
    monkeypatch.setattr(native_library, "SOURCE", source)
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "build").mkdir()
    info = native_library.compile_kernels(tmp_path / "build")
    wrong = "has kernel interface -5, this specdec needs"
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        with pytest.raises(SpecDecError, match=wrong):  # which tells that it was loaded
            native.load_kernels(info, torch.float32)
        for change in ({"cpu": "another"}, {"source_sha256": ""}, {"flags": "-O0"}):
            with pytest.raises(SpecDecError, match=r"no C\+\+ compiler"):
                native.load_kernels(info | change, torch.float32)
    for change in ({"cpu": "another"}, {"compiler": "another"}, {}):
        with pytest.raises(SpecDecError, match=wrong):
            native.load_kernels(info | change, torch.float32)
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 1


@needs_compiler
def test_what_does_not_load_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_compiler(tmp_path, 'for last; do :; done; [ $# = 1 ] || echo no > "$last"')
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(SpecDecError, match="the compiled kernels do not load"):
        native_library.compile_kernels(tmp_path)
    assert not (tmp_path / "cache").exists()
