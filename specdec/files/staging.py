"""Outputs: checked beforehand, written aside, renamed when they are whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from specdec.errors import SpecDecError
from specdec.files.unfinished import JOURNAL_NAME, get_backup, get_lock, get_partial, name_final
from specdec.system.cache import remove_renamed
from specdec.system.locks import lock_file

# How a disk, a quota or a limit of the shell says that no more can be written.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_DISK_HINT = (
    "free some space (df and ulimit -f tell of it), or choose another folder, and run it again;"
    " nothing half-written was left"
)
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")  # how numpy says it, without a number


def check_output_dir(
    output_dir: Path, *, force: bool, inputs: Sequence[Path] = (), is_own: bool = False
) -> None:
    """Raise SpecDecError when an output folder cannot be written or would be overwritten.

    `inputs` are folders and files that the work reads: the output may not take their place. With
    `force` it takes that of a folder that is no model's. is_own: nobody else writes there.
    """
    _check_name(output_dir)
    if output_dir.exists() and not output_dir.is_dir():
        raise SpecDecError(f"{output_dir} is a file", "name a folder for the output")
    _protect(output_dir, inputs)
    if os.path.ismount(output_dir.resolve()):
        raise SpecDecError(
            f"{output_dir} is a mount point, whose place no other folder can take",
            f"name a folder in it, such as {output_dir / 'output'}",
        )
    if not _is_free(output_dir):
        model = None if is_own else _find_model(output_dir)
        if not force:
            remedy = "choose another folder, or replace it with --force"
            if model is not None:
                remedy = "choose another folder"
            raise SpecDecError(f"{output_dir} exists and is not empty", remedy)
        if model is not None:
            raise SpecDecError(
                f"{output_dir} is not replaced: {model}",
                "choose another folder, or move away what is there; --force replaces no model and"
                " no work tree",
            )
    parent = find_existing(output_dir.resolve().parent)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        lack = "is read-only" if parent.is_dir() else "is a file"
        raise SpecDecError(
            f"{output_dir} cannot be written: {parent} {lack}",
            "choose another folder, or check the permissions",
        )


def _check_name(output: Path) -> None:
    """Raise SpecDecError where an output's name is too long for its disk while it is written."""
    num_bytes = len(os.fsencode(get_partial(output).name))
    limit = os.pathconf(find_existing(output.resolve().parent), "PC_NAME_MAX")
    if 0 < limit < num_bytes:  # a file system in user space may tell none
        fact = f"{output} has a name of {num_bytes} bytes while it is written"
        raise SpecDecError(f"{fact}, its disk allows {limit}", "choose a shorter name")


def _protect(output_dir: Path, inputs: Sequence[Path]) -> None:
    """Raise SpecDecError where an output would take the place of inputs, or of this folder."""
    output_dir = output_dir.resolve()
    if not output_dir.exists():
        return
    output = output_dir.stat()  # a folder may have several paths: bind mounts, names in any case
    for protected_path in (Path.cwd(), *(path.resolve() for path in inputs)):
        for path in (protected_path, *protected_path.parents):
            if path.exists() and os.path.samestat(path.stat(), output):
                fact = f"{output_dir} is or holds {protected_path}, which it would replace"
                raise SpecDecError(fact, "choose another folder for the output")


def _is_free(output_dir: Path) -> bool:
    """Return whether a folder can take this name: nothing has it, or an empty folder."""
    is_empty = output_dir.is_dir() and not any(output_dir.iterdir())
    return is_empty or not output_dir.exists()


def _find_model(folder: Path) -> str | None:
    from specdec.files.manifest import find_model  # imports numpy

    return find_model(folder)


def _protect_files(path: Path, inputs: Sequence[Path]) -> None:
    """Raise SpecDecError where an output file would take the place of an input."""
    if path.is_file() and any(each.exists() and path.samefile(each) for each in inputs):
        raise SpecDecError(f"{path} is read as well, and would be replaced", "name another file")


def check_output_file(path: Path, *, force: bool, inputs: Sequence[Path] = ()) -> None:
    """Raise SpecDecError where a file cannot be written, or is there already without `force`.

    It is called before the work whose result the file takes; its folder need not be there yet.
    Pipes and terminals may be there. inputs: files that the work reads, which it may not replace.
    """
    _check_name(path)
    _protect_files(path, inputs)
    if path.is_dir():
        raise SpecDecError(f"{path} is a folder", "name a file for the output")
    if path.is_file() and not force:
        raise SpecDecError(f"{path} exists", "name another file, or replace it with --force")
    existing = find_existing(path.absolute())
    if (existing != path.absolute() and not existing.is_dir()) or not os.access(existing, os.W_OK):
        lack = "is read-only" if existing.is_dir() or path.exists() else "is a file"
        raise SpecDecError(
            f"{path} cannot be written: {existing} {lack}", "check the path and its permissions"
        )


def write_whole(path: Path, text: str, *, force: bool, mode: int | None = None) -> None:
    """Write a file in one piece: where the disk is full, what was there before stays.

    Without `force`, SpecDecError is raised where the file has come about meanwhile.
    """
    if path.exists() and not path.is_file():  # a pipe or a terminal
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # what a link leads to, not the link
    partial = path.with_name(f"{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.write_text(text, encoding="utf-8")
        if mode is not None:
            partial.chmod(mode)
        place_file(partial, path, force=force)
    except OSError as error:
        error.filename = path  # a full disk's error names none
        raise
    finally:
        partial.unlink(missing_ok=True)


def measure_free_space(output_dir: Path) -> tuple[Path, int]:
    """Return the existing folder that an output will lie in, and the free bytes of its disk.

    Hidden folders that come about are left out: their names tell a user nothing.
    """
    folder = find_existing(output_dir.resolve())
    folder = next(path for path in (folder, *folder.parents) if name_final(path) == path)
    return folder, shutil.disk_usage(folder).free


def find_existing(path: Path) -> Path:
    """Return the path, or the nearest of its folders that is there."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def check_free_space(output_dir: Path, num_bytes: int, subject: str) -> None:
    """Raise SpecDecError where a disk cannot hold an output. subject: "the engine takes"."""
    folder, free_bytes = measure_free_space(output_dir)
    # Files that an interrupted run has written are gone on with, or removed first.
    partial = get_partial(output_dir)
    free_bytes += sum(path.stat().st_size for path in partial.rglob("*")) if partial.is_dir() else 0
    if free_bytes < num_bytes:
        raise SpecDecError(
            f"{subject} {num_bytes / 1e6:.1f} MB, {folder} has {free_bytes / 1e6:.1f} MB free",
            "free some space, or choose another folder",
        )


def list_local(*inputs: Path | str | None) -> list[Path]:
    """List those inputs that are files or folders here; hub ids and absent ones are not."""
    return [Path(path) for path in inputs if path is not None and Path(path).exists()]


@contextlib.contextmanager
def tell_full_disk(path: Path, remedy: str = FULL_DISK_HINT) -> Iterator[None]:
    """Raise SpecDecError that names `path` where the body finds no more space for it.

    Where it lies in another hidden folder, that one's stage tells it.
    """
    try:
        yield
    except OSError as error:
        is_short = error.errno is None and _SHORT_WRITE.search(str(error))
        if (error.errno not in NO_SPACE and not is_short) or name_final(path) != path:
            raise
        reason = "the disk took a part only" if is_short else error.strerror
        raise SpecDecError(f"{path} cannot be written: {reason}", remedy) from error


@contextlib.contextmanager
def stage_folder(
    output_dir: Path, *, force: bool, inputs: Sequence[Path] = (), resume: bool = False,
    is_own: bool = False, full_disk_hint: str = FULL_DISK_HINT,
    finish: Callable[[], None] = lambda: None,
) -> Iterator[Path]:  # fmt: skip
    """Yield a hidden folder alongside `output_dir`; it takes that name only if the body succeeds.

    A folder that has come under that name meanwhile stays, and SpecDecError is raised, but for one
    that `force` replaces, see `check_output_dir`. A second process that stages the same output is
    refused; what a killed one left is removed. With `resume` that is yielded instead, and kept when
    the work fails. full_disk_hint: for a disk that is full. finish: called when the output has its
    name, before another process may write it.
    """
    output_dir = output_dir.resolve()
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = get_partial(output_dir)
    with hold_lock(output_dir):
        try:
            check_output_dir(output_dir, force=force, inputs=inputs, is_own=is_own)
            if partial.exists() and not resume:
                shutil.rmtree(partial)
            partial.mkdir(exist_ok=True)
            with tell_full_disk(output_dir, full_disk_hint):
                yield partial
            _refuse_newcomers(output_dir, force=force, is_own=is_own)
            (partial / JOURNAL_NAME).unlink(missing_ok=True)
            _sync_tree(partial)
            _refuse_newcomers(output_dir, force=force, is_own=is_own)
            _place_folder(partial, output_dir)
            _sync(output_dir.parent)
            finish()
        finally:
            if not resume:
                shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def hold_lock(output_dir: Path) -> Iterator[None]:
    """Hold a lock file alongside `output_dir`, or raise SpecDecError when another process does.

    A file that is there already is of a process that was killed, whose renames are finished first.
    """
    path = get_lock(output_dir)
    was_killed = path.exists()
    with path.open("w") as lock:
        try:
            lock_file(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before us may have removed the file between our open and our lock; a third
            # process would then lock a new file of that name.
            if not (path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise SpecDecError(
                f"another process is writing {output_dir}", "wait for it, or choose another folder"
            ) from None
        try:
            _recover(output_dir, was_killed=was_killed)
            yield
        finally:
            path.unlink(missing_ok=True)


def _sync_tree(folder: Path) -> None:
    """Wait until everything in a folder is on the disk."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # of which some file systems can't
            raise
    finally:
        os.close(descriptor)


def _recover(output_dir: Path, *, was_killed: bool) -> None:
    """Finish what a process was killed amid: the old output comes back, or goes for the new one."""
    backup = get_backup(output_dir)
    if backup.exists() and not was_killed:
        raise SpecDecError(
            f"{backup} has the name that {output_dir} gets while it is replaced",
            "move it away, or choose another folder",
        )
    if backup.exists() and _is_free(output_dir):
        backup.rename(output_dir)
    remove_renamed(backup)


def _refuse_newcomers(output_dir: Path, *, force: bool, is_own: bool) -> None:
    """Raise SpecDecError where what has come under an output's name may not be replaced."""
    may_replace = force and output_dir.is_dir() and (is_own or _find_model(output_dir) is None)
    if not may_replace and not _is_free(output_dir):
        raise _refuse_newcomer(output_dir)


def _refuse_newcomer(output: Path) -> SpecDecError:
    return SpecDecError(
        f"{output} was not there at the start, but it has been made since",
        "move it away, or choose another name, and run this again",
    )


def _place_folder(partial: Path, output_dir: Path) -> None:
    backup = get_backup(output_dir)
    try:
        if not _is_free(output_dir):
            output_dir.rename(backup)
        partial.rename(output_dir)  # an empty folder gives way, nothing else does
    except BaseException as error:  # Ctrl-C as well
        if backup.exists() and not output_dir.exists():
            backup.rename(output_dir)
        newcomer_errors = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
        if isinstance(error, OSError) and error.errno in newcomer_errors:
            raise _refuse_newcomer(output_dir) from None
        raise
    remove_renamed(backup)


def place_file(partial: Path, output: Path, *, force: bool) -> None:
    """Give a finished file its name; without force, raise SpecDecError where that is taken."""
    if not force:
        try:  # a rename alone would take the name from another file
            os.close(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        except FileExistsError:
            raise _refuse_newcomer(output) from None
    partial.replace(output)
