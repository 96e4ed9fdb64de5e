"""The folder of engines that `specdec generate` keeps, shared by any number of processes.

An entry is a folder beside a lock file of its name. Who makes or removes it has the lock alone, who
uses it shares it; the time of the lock file is that of the newest use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from specdec.errors import SpecDecError
from specdec.files.staging import find_existing, stage_folder
from specdec.system import logs
from specdec.system.cache import find_cache, remove_renamed
from specdec.system.locks import lock_file

logger = logs.get_logger(__name__)

FOLDER_NAME = "generate"  # of the cache
FULL_DISK_HINT = "free some space, or name another cache with SPECDEC_CACHE_DIR, and run it again"
LOCK_SUFFIX = ".lock"
LIMIT_LOCK = ".limit.lock"  # held while entries are chosen that are beyond the limit
LIMIT_VARIABLE = "SPECDEC_MAX_CACHE_GB"
LEAST_LIMIT = 20e9  # bytes at least; a tenth of the disk where that is more
DISK_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """An entry of the cache: its name, the bytes of its files, and the time of its newest use."""

    name: str
    num_bytes: int
    last_use: float


class EngineCache:
    """Folders that appear whole or not at all; a folder in use is not removed.

    is_temporary: nothing in it is kept for another process.
    """

    def __init__(self, folder: Path, *, is_temporary: bool = False) -> None:
        self.folder = folder
        self.is_temporary = is_temporary

    def has(self, name: str) -> bool:
        """Return whether the folder of that name is there."""
        return (self.folder / name).is_dir()

    @contextlib.contextmanager
    def hold(self, name: str, make: Callable[[Path], None], *, force: bool) -> Iterator[Path]:
        """Yield the folder of that name, made by `make(folder)` if it is absent or with `force`.

        While another process makes it, this one waits. Nobody clears it before the body ends.
        """
        path = self.folder / name
        is_wanted = force
        with self._lock(name, fcntl.LOCK_SH) as relock:
            # Between one kind of lock and the other there is none: look again each time.
            while is_wanted or not path.is_dir():
                relock(fcntl.LOCK_EX)
                if is_wanted or not path.is_dir():
                    with stage_folder(
                        path, force=force, is_own=True, full_disk_hint=FULL_DISK_HINT
                    ) as partial:
                        make(partial)
                    is_wanted = False
                relock(fcntl.LOCK_SH)
            lock_path = self.folder / f"{name}{LOCK_SUFFIX}"
            note_use(lock_path)
            try:
                yield path
            finally:
                note_use(lock_path)

    def list_entries(self) -> list[CacheEntry]:
        """List the entries, the least recently used first, with what killed processes left."""
        entries = []
        for lock in self.folder.glob(f"[!.]*{LOCK_SUFFIX}"):
            name = lock.name.removesuffix(LOCK_SUFFIX)
            folders = [folder for folder in self._list_folders(name) if folder.is_dir()]
            if folders:
                num_bytes = sum(map(measure_folder, folders))
                entries.append(CacheEntry(name, num_bytes, lock.stat().st_mtime))
        return sorted(entries, key=lambda entry: (entry.last_use, entry.name))

    def clear(self) -> tuple[list[CacheEntry], int]:
        """Remove what is not in use; return what was removed, and the number of entries in use."""
        entries = self.list_entries()
        removed_entries = [entry for entry in entries if self._remove(entry.name)]
        return removed_entries, len(entries) - len(removed_entries)

    def trim(self, max_bytes: float) -> tuple[list[CacheEntry], int]:
        """Remove the least recently used entries that are beyond a limit and not in use.

        Returns what was removed, and the bytes that are left. Processes that do so at the same time
        wait for one another, so that each sees what the others have left.
        """
        with self._lock(LIMIT_LOCK.removesuffix(LOCK_SUFFIX), fcntl.LOCK_EX):
            entries = self.list_entries()
            num_left, removed_entries = sum(entry.num_bytes for entry in entries), []
            for entry in entries:
                if num_left > max_bytes and self._remove(entry.name):
                    num_left -= entry.num_bytes
                    removed_entries.append(entry)
        return removed_entries, num_left

    def _list_folders(self, name: str) -> list[Path]:
        """List the folder of an entry, and those in which it came about or was replaced."""
        return [self.folder / name, *self.folder.glob(f".{name}.*")]

    def _remove(self, name: str) -> bool:
        """Remove an entry; return False where it is in use."""
        try:
            with self._lock(name, fcntl.LOCK_EX | fcntl.LOCK_NB):
                remove_renamed(self.folder / name)
                for folder in self._list_folders(name):
                    shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            return False
        return True

    @contextlib.contextmanager
    def _lock(self, name: str, operation: int) -> Iterator[Callable[[int], None]]:
        """Hold a lock file; yield a function that changes the lock's kind.

        The files stay: they are empty.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}{LOCK_SUFFIX}").open("a") as file:

            def relock(operation: int) -> None:
                try:
                    lock_file(file, operation | fcntl.LOCK_NB)
                except BlockingIOError:
                    if operation & fcntl.LOCK_NB:
                        raise
                    logger.info("waiting for another process that uses or makes %s", name)
                    lock_file(file, operation)

            relock(operation)
            yield relock


class EngineUse:
    """Use of an engine folder: while it is open, nobody removes the folder from the cache.

    Engines in other folders are nobody's but the user's, and need no lock.
    """

    def __init__(self, engine_dir: Path) -> None:
        self._lock: int | None = None
        entry, cache = engine_dir.resolve().parent, find_cache()
        if cache is None or entry.parent != (cache / FOLDER_NAME).resolve():
            return
        self._path = entry.with_name(f"{entry.name}{LOCK_SUFFIX}")
        with contextlib.suppress(OSError):  # a cache that cannot be written, nor cleared
            self._lock = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            lock_file(self._lock, fcntl.LOCK_SH)
            note_use(self._path)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the use."""
        lock, self._lock = self._lock, None
        if lock is not None:
            note_use(self._path)
            os.close(lock)


def note_use(lock_path: Path) -> None:
    """Note that an entry is used now."""
    with contextlib.suppress(OSError):  # the lock is held all the same
        os.utime(lock_path)


def measure_folder(folder: Path) -> int:
    """Return the bytes of the files in a folder; 0 where there is none."""
    num_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if path.is_file():
                num_bytes += path.lstat().st_size
    return num_bytes


def read_limit(cache: Path) -> float:
    """Return the most bytes of engines in a cache: SPECDEC_MAX_CACHE_GB, or what its disk allows.

    Raises SpecDecError where the variable is no number.
    """
    text = os.environ.get(LIMIT_VARIABLE)
    if not text:
        return max(LEAST_LIMIT, DISK_SHARE * shutil.disk_usage(find_existing(cache)).total)
    try:
        num_bytes = float(text) * 1e9
    except ValueError:
        num_bytes = -1
    if not num_bytes >= 0:
        raise SpecDecError(
            f"{LIMIT_VARIABLE} is {text!r}",
            "give the most gigabytes of engines that are kept, such as 20, or leave it out",
        )
    return num_bytes
