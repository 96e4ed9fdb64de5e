"""Output folders: what they may replace, what failures and kills leave, who may write one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.files import staging
from specdec.files.engine_cache import EngineCache
from specdec.files.manifest import write_manifest
from specdec.files.staging import (
    check_free_space,
    check_output_dir,
    check_output_file,
    place_file,
    stage_folder,
)
from specdec.files.unfinished import JOURNAL_NAME, get_partial


@contextlib.contextmanager
def refused(match: str, hint: str = "") -> Iterator[None]:
    with pytest.raises(SpecDecError, match=match) as caught:
        yield
    assert hint in caught.value.hint


def write_own(folder: Path, text: str, name: str = "x") -> None:
    """Write an output with a manifest, as specdec's are."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    write_manifest(folder, kind="toy", settings={}, sources=[])


def list_tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_everything_is_on_the_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    synced = []

    def note(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.relative_to(tmp_path).as_posix(), out.exists()))

    if not Path("/proc/self/fd").exists():
        pytest.skip("tells the name of an open file on Linux alone")
    with stage_folder(out, force=False) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "x").write_text("new")
        (partial / JOURNAL_NAME).write_text("")
        monkeypatch.setattr(os, "fsync", note)
    assert sorted(synced[:-1]) == [
        (".out.partial", False), (".out.partial/sub", False), (".out.partial/sub/x", False),
    ]  # fmt: skip
    assert synced[-1] == (".", True)
    assert list_tree(out) == ["sub", "sub/x"]


def test_resume_finds_and_keeps_what_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def fail() -> None:
        with stage_folder(out, force=False, resume=True) as partial:
            (partial / "x").write_text("half")
            raise SpecDecError("no", "yes")

    with pytest.raises(SpecDecError):
        fail()
    assert list_tree(tmp_path) == [".out.partial", ".out.partial/x"]
    with stage_folder(out, force=False, resume=True) as partial:
        assert list_tree(partial) == ["x"]
    assert list_tree(tmp_path) == ["out", "out/x"]


@pytest.mark.parametrize("error", [SpecDecError("no", "yes"), KeyboardInterrupt(), OSError(5, "x")])
def test_failure_leaves_the_old_output(tmp_path: Path, error: BaseException) -> None:
    out = tmp_path / "out"
    write_own(out, "old")

    def work() -> None:
        with stage_folder(out, force=True) as partial:
            (partial / "x").write_text("half")
            raise error

    with pytest.raises(type(error)):
        work()
    assert list_tree(tmp_path) == ["out", "out/manifest.json", "out/x"]
    assert (out / "x").read_text() == "old"


def test_force_replaces_everything(tmp_path: Path) -> None:
    """An empty folder needs none, and a file is never replaced."""
    out = tmp_path / "out"
    out.mkdir()
    with stage_folder(out, force=True) as partial:
        write_own(partial, "old", "stale")
    with refused("exists and is not empty", "--force"), stage_folder(out, force=False):
        pytest.fail("entered")
    with stage_folder(out, force=True) as partial:
        (partial / "x").write_text("new")
        assert list_tree(out) == ["manifest.json", "stale"]
    assert list_tree(tmp_path) == ["out", "out/x"]
    with refused("x is a file"):
        check_output_dir(out / "x", force=True)


@pytest.mark.parametrize("check", [check_output_dir, check_output_file])
def test_a_name_that_is_too_long_is_told_before_the_work(
    check: Callable[..., None], tmp_path: Path
) -> None:
    """It was told when the output was written."""
    check(tmp_path / ("é" * 123), force=False)
    with refused("has a name of 257 bytes while it is written, its disk allows 255", "shorter"):
        check(tmp_path / "new" / ("é" * 124), force=False)


def test_an_output_that_no_rename_can_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume of a container, a folder after a file, a disk that is read-only."""
    (tmp_path / "file").touch()
    with refused("cannot be written: .*/file is a file"):
        check_output_dir(tmp_path / "file" / "out", force=True)
    with refused("/proc is a mount point", "name a folder in it, such as /proc/output"):
        check_output_dir(Path("/proc"), force=True)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with refused(f"cannot be written: {tmp_path} is read-only"):
        check_output_dir(tmp_path / "new" / "out", force=False)


def test_inputs_and_current_folder_are_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "models" / "llama"
    model.mkdir(parents=True)
    for out in (model, tmp_path / "models", tmp_path / "x" / ".." / "models"):
        with refused("which it would replace"):
            check_output_dir(out, force=True, inputs=[model])
    check_output_dir(model / "engine", force=True, inputs=[model])
    monkeypatch.chdir(model)
    for out in (Path("."), Path("..")):
        with refused("which it would replace"):
            check_output_dir(out, force=True)


def test_an_input_is_protected_under_another_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bind mount of a folder above it, or another case of its name on a disk that has one."""
    monkeypatch.setattr(Path, "resolve", lambda path, **_: path)
    write_own(tmp_path / "checkpoint", "x")
    (tmp_path / "mounted").symlink_to(tmp_path)
    with refused("mounted/checkpoint is or holds .*/checkpoint, which it would replace"):
        check_output_dir(
            tmp_path / "mounted" / "checkpoint", force=True, inputs=[tmp_path / "checkpoint"]
        )


def test_an_input_file_is_never_replaced(tmp_path: Path) -> None:
    prompts, link = tmp_path / "prompts.txt", tmp_path / "link"
    prompts.touch()
    link.symlink_to(prompts)
    for path in (prompts, link):
        with refused(f"{path.name} is read as well, and would be replaced"):
            check_output_file(path, force=True, inputs=[tmp_path / "absent", prompts])
    check_output_file(tmp_path / "absent", force=True, inputs=[tmp_path / "absent", prompts])
    check_output_file(Path("/dev/null"), force=True, inputs=[Path("/dev/null")])


def test_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with stage_folder(tmp_path / "out", force=False) as partial:
        (partial / "x").write_text("new")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "x").read_text() == "new"


def test_second_writer_is_refused(tmp_path: Path) -> None:
    """Until what is to be done beside the finished output is done, too."""
    out = tmp_path / "out"

    def finish() -> None:
        assert (out / "x").is_file()
        with refused("another process is writing"), stage_folder(out, force=True):
            pytest.fail("entered")

    with stage_folder(out, force=False, finish=finish) as partial:
        write_own(partial, "first")
        with refused("another process is writing"), stage_folder(out, force=True):
            pytest.fail("entered")
    assert (out / "x").read_text() == "first"
    with stage_folder(out, force=True) as partial:
        (partial / "x").write_text("second")
    assert (out / "x").read_text() == "second"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre is mounted by default: outputs and engines come about all the same."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with stage_folder(tmp_path / "out", force=False) as partial:
        (partial / "x").write_text("new")
    cache = EngineCache(tmp_path / "cache")
    with cache.hold("a", lambda folder: (folder / "engine").touch(), force=False) as entry:
        assert (entry / "engine").is_file()
    assert [each.name for each in cache.clear()[0]] == ["a"]
    assert list_tree(tmp_path) == ["cache", "cache/a.lock", "out", "out/x"]


def test_finished_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may finish the same output until we hold the lock."""
    out = tmp_path / "out"
    original = staging.hold_lock

    def finish_first(path: Path) -> Any:
        out.mkdir()
        (out / "x").write_text("theirs")
        return original(path)

    monkeypatch.setattr(staging, "hold_lock", finish_first)
    with refused("exists and is not empty"), stage_folder(out, force=False):
        pytest.fail("entered")
    assert (out / "x").read_text() == "theirs"


def make_newcomer(out: Path, is_folder: bool) -> None:
    if is_folder:
        out.mkdir()
    (out / "x" if is_folder else out).write_text("theirs")


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("moment", ["amid the work", "before the renaming"])
@pytest.mark.parametrize("resume", [True, False])
def test_what_appears_meanwhile_stays(
    moment: str, is_folder: bool, resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    kept = out / "x" if is_folder else out
    if moment == "before the renaming":
        monkeypatch.setattr(staging, "_sync_tree", lambda folder: make_newcomer(out, is_folder))

    def work(*, force: bool) -> None:
        with stage_folder(out, force=force, resume=resume) as partial:
            (partial / "y").write_text("ours")
            (partial / JOURNAL_NAME).write_text("")
            if moment == "amid the work":
                make_newcomer(out, is_folder)

    with pytest.raises(SpecDecError, match="it has been made since"):
        work(force=False)
    assert kept.read_text() == "theirs"
    assert (tmp_path / ".out.partial" / "y").exists() == resume
    if resume and moment == "amid the work":
        assert (tmp_path / ".out.partial" / JOURNAL_NAME).exists(), "can be gone on with"
    if is_folder:
        shutil.rmtree(out)
        work(force=True)
        assert list_tree(tmp_path) == ["out", "out/y"]
    else:
        out.unlink()
        with pytest.raises(SpecDecError, match="it has been made since"):
            work(force=True)
        assert kept.read_text() == "theirs"


def test_a_file_takes_its_name_from_none_but_with_force(tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / "partial"
    partial.write_text("ours")
    place_file(partial, out, force=False)
    assert out.read_text() == "ours"
    partial.write_text("later")
    with pytest.raises(SpecDecError, match="it has been made since"):
        place_file(partial, out, force=False)
    assert (out.read_text(), partial.read_text()) == ("ours", "later")
    place_file(partial, out, force=True)
    assert out.read_text() == "later"
    assert list_tree(tmp_path) == ["out"]


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "model-00001-of-00002.safetensors", "x.gguf", ".git"]
)
def test_force_replaces_no_model_and_no_work_tree(name: str, force: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).touch()
    (out / "manifest.json").write_text('{"outputs": [{"path": "x", "bytes": 3}]}')  # not specdec's
    fact = f"out is not replaced: it holds {name} and no manifest.json of specdec"
    expected = refused(fact, "move away what is there") if force else (
        refused("out exists and is not empty", "choose another folder"))  # fmt: skip
    with expected, stage_folder(out, force=force):
        pytest.fail("entered")
    assert {path.name for path in out.iterdir()} == {name, "manifest.json"}


def test_force_replaces_what_was_put_into_an_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_own(out, "old")
    (out / "model.safetensors").touch()
    with stage_folder(out, force=True) as partial:
        write_own(partial, "new")
        (out / "notes.txt").touch()
    assert list_tree(tmp_path) == ["out", "out/manifest.json", "out/x"]


@pytest.mark.parametrize("left", [".out.old", ".out.old.rm"])
def test_what_is_left_of_a_replaced_output_goes(left: str, tmp_path: Path) -> None:
    """A kill between the placing of the new one and the end of the old one's removal."""
    out = tmp_path / "out"
    write_own(out, "new")
    write_own(tmp_path / left, "old")
    (tmp_path / ".out.lock").touch()
    with stage_folder(out, force=True) as partial:
        write_own(partial, "newer")
        assert not (tmp_path / left).exists()
    assert list_tree(tmp_path) == ["out", "out/manifest.json", "out/x"]


def test_an_old_output_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user's, in a folder that both may write; the new one is placed all the same."""
    out = tmp_path / "out"
    real = shutil.rmtree

    def remove(path: Path, **options: Any) -> None:
        if not (path / "x").is_file() or (path / "x").read_text() != "theirs":
            real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", remove)
    write_own(out, "theirs")
    for text in ("first", "second"):
        with stage_folder(out, force=True) as partial:
            write_own(partial, text)
        assert (out / "x").read_text() == text
    assert ".out.old.rm cannot be removed" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.old.rm", "out"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_backup_that_is_not_ours_stays(is_there: bool, tmp_path: Path) -> None:
    """Such as ~/.config.old, beside the output ~/config: no process of ours was killed."""
    if is_there:
        write_own(tmp_path / "config", "ours")
    (tmp_path / ".config.old").mkdir()
    (tmp_path / ".config.old" / "settings").write_text("theirs")
    before = list_tree(tmp_path)
    with refused(".config.old has the name that .*/config gets while", "move it away"):
        with stage_folder(tmp_path / "config", force=True):
            pytest.fail("entered")
    assert list_tree(tmp_path) == before


def die_while_writing(out: Path) -> None:
    with stage_folder(out, force=True) as partial:
        (partial / "junk").write_text("half")
        os._exit(9)


def die_between_renames(out: Path) -> None:
    with stage_folder(out, force=True) as partial:
        (partial / "x").write_text("new")
        out.rename(out.parent / ".out.old")
        os._exit(9)


@pytest.mark.thorough
@pytest.mark.parametrize("die", [die_while_writing, die_between_renames])
def test_what_a_killed_process_left(die: Callable[[Path], None], tmp_path: Path) -> None:
    """Half of an output is removed; what was there before comes back."""
    out = tmp_path / "out"
    if die is die_between_renames:
        write_own(out, "old")
        (out / "notes.txt").touch()  # of the user, which makes it no other's
    process = multiprocessing.get_context("spawn").Process(target=die, args=(out,))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert not out.exists()
    assert any("partial" in name for name in list_tree(tmp_path))
    if die is die_between_renames:
        with refused("exists and is not empty"), stage_folder(out, force=False):
            pytest.fail("entered")
        assert (out / "x").read_text() == "old"
        assert list_tree(tmp_path) == ["out", "out/manifest.json", "out/notes.txt", "out/x"]
    else:
        with stage_folder(out, force=False) as partial:
            (partial / "x").write_text("new")
        assert list_tree(tmp_path) == ["out", "out/x"]


def test_ctrl_c_between_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    write_own(out, "old")
    real = Path.rename

    def interrupt(path: Path, target: Path) -> Path:
        if path.name == ".out.partial":
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt), stage_folder(out, force=True) as partial:
        write_own(partial, "new")
    assert (out / "x").read_text() == "old"
    assert list_tree(tmp_path) == ["out", "out/manifest.json", "out/x"]


def test_a_full_disk_is_named_by_a_folder_of_the_user(tmp_path: Path) -> None:
    """Not by a hidden one, in which specdec generate lets other stages write."""
    inner = get_partial(tmp_path / "out") / "checkpoint"
    inner.parent.mkdir()
    with refused(f"a checkpoint takes [0-9.]+ MB, {tmp_path} has", "free some space"):
        check_free_space(inner, 10**30, "a checkpoint takes")
