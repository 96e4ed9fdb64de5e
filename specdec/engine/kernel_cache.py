"""Cache of compiled kernels. They are code: nothing is taken that others can have written.

An entry's name is the sum of what it was compiled from, and its own; needs no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from specdec.system import logs
from specdec.system.cache import find_cache

logger = logs.get_logger(__name__)
LIBRARY = ".so"  # suffix of entries that are the CPU's kernels
FOLDER_NAME = "kernels"  # of the cache; an engine's copy, which only a user lets be loaded
_SUM_CHARACTERS = 32
_logged_warnings: set[str] = set()


def find_kept(info: Mapping[str, str], suffix: str = LIBRARY) -> Path | None:
    """Return the entry that was compiled as `info` says, if the cache has it whole and safe."""
    cache = find_cache()
    if cache is None or not os.path.lexists(cache / FOLDER_NAME):
        return None
    if fault := _find_folder_fault(cache):
        _warn(f"kept kernels are not used: {fault}")
        return None
    for path in list_entries(cache, info, suffix):
        if fault := find_fault(path):
            _warn(f"{path} {fault}: it is not loaded")
        else:
            return path
    return None


def list_entries(cache: Path, info: Mapping[str, str], suffix: str = LIBRARY) -> list[Path]:
    """List entries by their name alone, of a cache or of an engine folder, laid out alike."""
    try:
        names = os.listdir(cache / FOLDER_NAME)
    except OSError:
        return []
    key = _name_key(info)
    return [
        cache / FOLDER_NAME / name for name in sorted(names)
        if name.startswith(f"{key}-") and name.endswith(suffix)
    ]  # fmt: skip


def keep(content: bytes, info: Mapping[str, str], suffix: str = LIBRARY) -> Path | None:
    """Put compiled kernels into the cache and return their entry; warn where that cannot be."""
    cache = find_cache()
    try:
        if cache is None:
            raise OSError("there is none")
        cache.mkdir(parents=True, mode=0o700, exist_ok=True)
        (cache / FOLDER_NAME).mkdir(mode=0o700, exist_ok=True)
        if fault := _find_folder_fault(cache):
            raise OSError(fault)
        return write_entry(content, info, cache, suffix=suffix)
    except OSError as error:
        place_name = cache or "a home folder"
        _warn(
            f"the compiled kernels cannot be kept in {place_name}: {error.strerror or error}; they"
            " are compiled again each time an engine is built or loaded: set SPECDEC_CACHE_DIR to a"
            " folder that you own"
        )
    return None


@contextlib.contextmanager
def take_turn(info: Mapping[str, str]) -> Iterator[None]:
    """Let one process of a user at a time compile what `info` says; the cache then has it for all.

    The lock is a file among the temporary ones, so that a failure leaves nothing in the cache.
    Where it cannot be had, or is another user's, nobody waits.
    """
    descriptor = None
    key = _name_key({**info, "cache": str(find_cache())})
    path = Path(tempfile.gettempdir()) / f"specdec-{os.geteuid()}-{key}.lock"
    try:
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            if os.fstat(descriptor).st_uid == os.geteuid():
                _lock(descriptor)
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):  # another user's, or removed by who held it before
                path.unlink()
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("waiting for another process that compiles the native kernels")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def write_entry(
    content: bytes, info: Mapping[str, str], folder: Path, mode: int = 0o600,
    suffix: str = LIBRARY,
) -> Path:  # fmt: skip
    """Write an entry into `folder`/kernels, all of it or nothing; raise OSError."""
    entry = folder / FOLDER_NAME / f"{_name_key(info)}-{_make_sum(content)}{suffix}"
    descriptor, partial = tempfile.mkstemp(dir=folder / FOLDER_NAME, prefix=".partial-")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.chmod(partial, mode)
        os.replace(partial, entry)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    return entry


def find_fault(path: Path) -> str | None:
    """Say why an entry is not to be loaded: damaged, or not surely the user's own."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return "is a link" if path.is_symlink() else f"cannot be read: {error.strerror}"
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return "is not a file"
        if fault := _find_owner_fault(status):
            return fault
        with open(descriptor, "rb", closefd=False) as file:
            if _make_sum(file.read()) != path.stem.rpartition("-")[2]:
                return "is damaged: its sum is not the one in its name"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    finally:
        os.close(descriptor)
    return None


def _find_folder_fault(cache: Path) -> str | None:
    """Say why nothing in a cache is to be trusted; take others' right to write to our own away."""
    for folder in (cache, cache / FOLDER_NAME):
        try:
            status = folder.stat() if folder == cache else folder.lstat()
            if not stat.S_ISDIR(status.st_mode):
                return f"{folder} is not a folder"
            if status.st_uid == os.geteuid() and status.st_mode & 0o022:
                os.chmod(folder, stat.S_IMODE(status.st_mode) & ~0o022)
                continue
        except OSError as error:
            return f"{folder}: {error.strerror}"
        is_sticky = folder == cache and status.st_mode & stat.S_ISVTX  # /tmp: only ours is taken
        if not is_sticky and (fault := _find_owner_fault(status)):
            return f"{folder} {fault}"
    return None


def _find_owner_fault(status: os.stat_result) -> str | None:
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user ({status.st_uid})"
    return "can be written by other users" if status.st_mode & 0o022 else None


def _name_key(info: Mapping[str, str]) -> str:
    return _make_sum(json.dumps(dict(sorted(info.items()))).encode())


def _make_sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_SUM_CHARACTERS]


def _warn(message: str) -> None:
    if message not in _logged_warnings:  # once a process, however many engines it loads
        _logged_warnings.add(message)
        logger.warning("%s", message)
