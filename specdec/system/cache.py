"""The user's folder of files that can be made again, and which of its entries are in use."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path

from specdec.system import logs

logger = logs.get_logger(__name__)

_locks: dict[Path, int] = {}  # descriptors of the entries that this process uses, until it ends


def find_cache() -> Path | None:
    """Return the user's cache folder: $SPECDEC_CACHE_DIR, or ~/.cache/specdec.

    None for a user without a home, as containers have them.
    """
    if folder := os.environ.get("SPECDEC_CACHE_DIR"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "specdec"
    try:
        return Path.home() / ".cache" / "specdec"
    except RuntimeError:
        return None


DOWNLOADS = "models"
# Folders of the cache -> what they hold.
PARTS = {
    "generate": "engines",
    "kernels": "compiled kernels",
    DOWNLOADS: "downloads",
    "gguf": "tokenizers of GGUF files",
    "costs": "cost tables",
    "checked": "records of compared files",
}


def use_entry(entry: Path) -> bool:
    """Keep a file or folder from being cleared while this process lives; False if it is gone."""
    lock = _locks.get(entry)
    if lock is not None and _is_at(lock, entry):
        return True
    try:
        lock = os.open(entry, os.O_RDONLY)
    except FileNotFoundError:
        return False
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_SH)
    if not _is_at(lock, entry):
        os.close(lock)
        return False
    if (earlier_lock := _locks.pop(entry, None)) is not None:
        os.close(earlier_lock)
    _locks[entry] = lock
    return True


def use_download(path: Path) -> None:
    """Keep what the cache has downloaded from being cleared while this process reads it."""
    cache = find_cache()
    if cache is None:
        return
    with contextlib.suppress(OSError, ValueError):  # unreadable, which its reader tells
        downloads, path = (Path(os.path.realpath(each)) for each in (cache / DOWNLOADS, path))
        if downloads in path.parents:
            use_entry(downloads / path.relative_to(downloads).parts[0])


def clear_entry(entry: Path) -> bool:
    """Remove a file or folder; return False where a process uses it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = os.open(entry, os.O_RDONLY | os.O_NONBLOCK)
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        if entry.is_dir() and not entry.is_symlink():
            remove_renamed(entry)
        else:
            entry.unlink(missing_ok=True)
    return True


def remove_renamed(folder: Path) -> None:
    """Remove a folder, which loses its name first: half of one is never taken for a whole."""
    removed = folder.with_name(f".{folder.name.removeprefix('.')}.rm")
    shutil.rmtree(removed, ignore_errors=True)  # of a process that was killed
    try:
        folder.replace(removed)
    except OSError as error:  # none is there, or another user's, which stays, has the other name
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise
    for path in (removed, folder):
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            logger.warning("%s cannot be removed: check its permissions", path)


def _is_at(descriptor: int, entry: Path) -> bool:
    """Return whether a file or folder that was opened still has its name."""
    return entry.exists() and os.path.samestat(os.fstat(descriptor), entry.stat())
