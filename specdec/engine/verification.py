"""Comparison of an engine's files with what was built, by a thread while the engine is loaded.

The manifest has a checksum of each block of each file. A large file that was found whole is not
read again until it changes: the user's cache remembers its state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from pathlib import Path

from specdec.errors import SpecDecError
from specdec.files.manifest import (
    BLOCK_BYTES,
    CHANGED_HINT,
    NAME,
    ManifestEntry,
    list_block_sums,
    read_manifest,
)
from specdec.system import logs
from specdec.system.cache import find_cache

logger = logs.get_logger(__name__)
FOLDER_NAME = "checked"  # of the cache
# Larger engines are not waited for when they are loaded, only before a text is complete.
LARGE_BYTES = 4 << 30
REMEMBERED_BYTES = 32 << 20  # smaller files are read every time, which takes milliseconds
# A file that was written so shortly before may be written to again without another time.
SETTLED_SECONDS = 2.0


class Verification:
    """The comparison of an engine folder with its manifest, begun when this is made."""

    def __init__(self, folder: Path, names: tuple[str, ...] = ("",)) -> None:
        """Begin to compare the files whose names end with one of `names`."""
        self._problem: SpecDecError | None = None
        self._is_ending = threading.Event()
        entries = _list_entries(folder)
        files = [(folder / e.path, e) for e in entries if e.path.endswith(names)]
        self._files = [(path, entry) for path, entry in files if not _is_remembered(path, entry)]
        # True where the comparison takes long enough to go on while the engine begins its work.
        self.is_long = sum(entry.num_bytes for _, entry in self._files) > LARGE_BYTES
        self._thread = threading.Thread(target=self._run, name="verification", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the comparison; raise SpecDecError where a file is not what was built."""
        if self.is_long and self._thread.is_alive():
            logger.info("waiting until the engine's files are compared with their checksums")
        self._thread.join()
        if self._problem is not None:
            raise self._problem

    def cancel(self) -> None:
        """Give the comparison up."""
        self._is_ending.set()

    def _run(self) -> None:
        for path, entry in self._files:
            try:
                self._compare(path, entry)
            except FileNotFoundError:  # what cannot be left out is missed by whoever opens it
                continue
            except OSError as error:
                self._problem = SpecDecError(
                    f"{path} cannot be read: {error.strerror}", "check the disk, or copy it again"
                )
            except SpecDecError as error:
                self._problem = error
            if self._problem is not None or self._is_ending.is_set():
                return

    def _compare(self, path: Path, entry: ManifestEntry) -> None:
        started, key = time.time(), _name_state(path, entry)
        size = path.stat().st_size
        if size != entry.num_bytes:
            raise SpecDecError(f"{path} has {size} bytes, not {entry.num_bytes}", CHANGED_HINT)
        for index, (file_sum, recorded_sum) in enumerate(
            zip(list_block_sums(path), entry.block_sums or (), strict=True)
        ):
            if self._is_ending.is_set():
                return
            if file_sum != recorded_sum:
                end = min(size, (index + 1) * BLOCK_BYTES)
                raise SpecDecError(
                    f"{path} is damaged: its bytes {index * BLOCK_BYTES} to {end} have another"
                    " checksum than when it was built",
                    CHANGED_HINT,
                )
        status = path.stat()
        is_settled = max(status.st_mtime, status.st_ctime) + SETTLED_SECONDS < started
        if size >= REMEMBERED_BYTES and is_settled and _name_state(path, entry) == key:
            _remember(key)


def _list_entries(folder: Path) -> list[ManifestEntry]:
    """List the files that can be compared; warn where an engine has none, as older ones."""
    outputs = read_manifest(folder, "engine").outputs if (folder / NAME).exists() else ()
    # What config.json says is checked, and people may change it, such as the kernels' compiler.
    entries = [e for e in outputs if e.block_sums is not None and e.path != "config.json"]
    if not entries:
        logger.warning(
            "%s has no checksums of blocks: damage in its files goes unnoticed; build it again, or"
            " compare it with `specdec doctor --engine-dir`",
            folder,
        )
    return entries


def _name_state(path: Path, entry: ManifestEntry) -> str:
    """Name the present state of a file with these sums, as the cache remembers it."""
    status = path.stat()
    state = [
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns,
        *(entry.block_sums or ()),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]


def _is_remembered(path: Path, entry: ManifestEntry) -> bool:
    cache = find_cache()
    if cache is None or entry.num_bytes < REMEMBERED_BYTES:
        return False
    try:
        return (cache / FOLDER_NAME / _name_state(path, entry)).exists()
    except OSError:
        return False


def _remember(key: str) -> None:
    """Put an empty file into the cache; where that cannot be, the next load compares again."""
    if (cache := find_cache()) is not None:
        with contextlib.suppress(OSError):
            (cache / FOLDER_NAME).mkdir(parents=True, mode=0o700, exist_ok=True)
            os.close(os.open(cache / FOLDER_NAME / key, os.O_CREAT | os.O_WRONLY, 0o600))
