"""The folder of engines that `specdec generate` keeps, shared by any number of processes."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from specdec.files.staging import stage_folder
from specdec.system import logs

logger = logs.get_logger(__name__)

FULL_DISK_HINT = "free some space, or name another cache with SPECDEC_CACHE_DIR, and run it again"
LOCK_SUFFIX = ".lock"


class EngineCache:
    """Folders that appear whole or not at all; a folder in use is not removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

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
                    with stage_folder(path, force=force, full_disk_hint=FULL_DISK_HINT) as partial:
                        make(partial)
                    is_wanted = False
                relock(fcntl.LOCK_SH)
            yield path

    def clear(self) -> tuple[int, int, int]:
        """Remove what is not in use; return (folders removed, their bytes, folders in use)."""
        num_removed = num_bytes = num_used = 0
        locks = self.folder.glob(f"[!.]*{LOCK_SUFFIX}")
        for name in sorted(lock.name.removesuffix(LOCK_SUFFIX) for lock in locks):
            path = self.folder / name
            try:
                with self._lock(name, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    num_removed += path.is_dir()
                    num_bytes += measure_folder(path)
                    for folder in (path, *self.folder.glob(f".{name}.*")):
                        shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:
                num_used += 1
        return num_removed, num_bytes, num_used

    @contextlib.contextmanager
    def _lock(self, name: str, operation: int) -> Iterator[Callable[[int], None]]:
        """Hold a lock file; yield a function that changes the lock's kind.

        The files stay: they are empty.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}{LOCK_SUFFIX}").open("w") as file:

            def relock(operation: int) -> None:
                try:
                    fcntl.flock(file, operation | fcntl.LOCK_NB)
                except BlockingIOError:
                    if operation & fcntl.LOCK_NB:
                        raise
                    logger.info("waiting for another process that uses or makes %s", name)
                    fcntl.flock(file, operation)

            relock(operation)
            yield relock


def measure_folder(folder: Path) -> int:
    """Return the bytes of the files in a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
