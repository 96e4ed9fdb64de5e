"""The user's folder of files that can be made again, and which of its folders are in use."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

_locks: dict[Path, int] = {}  # descriptors of the folders that this process uses, until it ends


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


# Folders of the cache -> what they hold.
PARTS = {
    "generate": "engines",
    "kernels": "compiled kernels",
    "models": "downloads",
    "gguf": "tokenizers of GGUF files",
    "costs": "cost tables",
    "checked": "records of compared files",
}


def use_folder(folder: Path) -> bool:
    """Keep a folder from being cleared while this process lives; return False if it is gone."""
    lock = _locks.get(folder)
    if lock is not None and _is_at(lock, folder):
        return True
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_SH)
    if not _is_at(lock, folder):
        os.close(lock)
        return False
    if (earlier_lock := _locks.pop(folder, None)) is not None:
        os.close(earlier_lock)
    _locks[folder] = lock
    return True


def clear_folder(folder: Path) -> bool:
    """Remove a folder; return False where a process uses it."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        remove_renamed(folder)
    finally:
        os.close(lock)
    return True


def remove_renamed(folder: Path) -> None:
    """Remove a folder, which loses its name first: half of one is never taken for a whole."""
    removed = folder.with_name(f".{folder.name.removeprefix('.')}.removed")
    shutil.rmtree(removed, ignore_errors=True)  # of a process that was killed
    with contextlib.suppress(FileNotFoundError):
        folder.replace(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _is_at(descriptor: int, folder: Path) -> bool:
    """Return whether a folder that was opened still has its name."""
    return folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())
