"""A folder of session blocks: one file each, checked by its sum, the longest unused go first.

A file is a header (a line of JSON), its arrays, each from a multiple of `ALIGNMENT` on, and the
SHA-256 of all before. It is written under another name, then renamed. Its name is its key, the
number of blocks before it, and, of the end of a text, the block that it stands after; so the index
of a folder is made of names alone. No two processes use a folder at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, join_names, summarize
from specdec.files.reading import parse_json
from specdec.system import logs
from specdec.system.locks import lock_file

logger = logs.get_logger(__name__)
FORMAT, VERSION = "specdec session", 1
ALIGNMENT = 64
SUM_BYTES = hashlib.sha256().digest_size
MAX_HEADER_BYTES = 10_000
SUFFIX, PARTIAL_SUFFIX = ".block", ".partial"
LOCK_NAME = "lock"
Buffer = bytes | bytearray | memoryview


@dataclasses.dataclass(frozen=True)
class BlockName:
    """Name of a block's file.

    key: what its content is found by. depth: number of blocks before it. parent: of the end of a
    text, the key of the text before it; num_tail: its tokens after that.
    """

    key: str
    depth: int
    parent: str = ""
    num_tail: int = 0

    def to_file(self) -> str:
        """Return the name of the file."""
        end = f"-{self.parent}-{self.num_tail}" if self.parent else ""
        return f"{self.depth:06x}-{self.key}{end}{SUFFIX}"


def read_name(file_name: str) -> BlockName | None:
    """Return the block of a file name; None where it is another file's."""
    fields = file_name.removesuffix(SUFFIX).split("-")
    if not file_name.endswith(SUFFIX) or len(fields) not in (2, 4):
        return None
    with contextlib.suppress(ValueError):
        end = (fields[2], int(fields[3])) if len(fields) == 4 else ()
        name = BlockName(fields[1], int(fields[0], 16), *end)
        return name if name.to_file() == file_name else None
    return None


@dataclasses.dataclass
class _Entry:
    """A file of the folder; used_at: seconds of the newest request that used it."""

    name: BlockName
    num_bytes: int
    used_at: float


class SessionFolder:
    """Blocks of a folder, at most `max_bytes` of them; any thread may use it.

    num_failures: writes that failed. num_damaged: files that were not what was written.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Take the folder for this process, and index it; SpecDecError where it cannot be used."""
        self.folder, self.max_bytes = folder, max_bytes
        self.num_failures = self.num_damaged = 0
        self._mutex = threading.Lock()
        self._entries: dict[str, _Entry] = {}  # by key
        self._ends: dict[str, list[BlockName]] = {}  # by parent
        self._num_bytes = 0
        try:
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            _refuse_others(folder)
            self._lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SpecDecError(
                f"--session-dir {folder} cannot be used: {summarize(error)}",
                "give a folder that this user may write to",
            ) from None
        try:
            self._take_lock()
            self._index()
        except BaseException:
            os.close(self._lock)
            raise
        self._evict(0)

    def _take_lock(self) -> None:
        try:
            lock_file(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            process = os.pread(self._lock, 20, 0).decode(errors="replace")
            raise SpecDecError(
                f"--session-dir {self.folder} is used by another server, process {process}",
                "give each server a folder of its own",
            ) from None
        except OSError as error:
            raise SpecDecError(
                f"--session-dir {self.folder} cannot be locked: {summarize(error)}",
                "give a folder of a local disk with room on it",
            ) from None

    def _index(self) -> None:
        """List the blocks by their names and times; remove what a killed process left half."""
        try:
            with os.scandir(self.folder) as files:
                for file in files:
                    whole_name = file.name.removesuffix(PARTIAL_SUFFIX) + SUFFIX
                    if file.name.endswith(PARTIAL_SUFFIX) and read_name(whole_name) is not None:
                        os.unlink(file.path)
                    elif (name := read_name(file.name)) is not None and file.is_file():
                        status = file.stat()
                        self._add(_Entry(name, status.st_size, status.st_mtime))
        except OSError as error:
            raise SpecDecError(
                f"--session-dir {self.folder} cannot be read: {summarize(error)}",
                "check the folder's permissions",
            ) from None

    def _add(self, entry: _Entry) -> None:
        self._entries[entry.name.key] = entry
        self._num_bytes += entry.num_bytes
        if entry.name.parent:
            self._ends.setdefault(entry.name.parent, []).append(entry.name)

    def _remove(self, key: str) -> None:
        """Take a block out of the index, and remove its file; the caller holds the mutex."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._num_bytes -= entry.num_bytes
        if entry.name.parent:
            ends = self._ends[entry.name.parent]
            ends.remove(entry.name)
            if not ends:
                del self._ends[entry.name.parent]
        with contextlib.suppress(OSError):
            (self.folder / entry.name.to_file()).unlink()

    def _evict(self, num_new_bytes: int) -> None:
        """Remove the blocks unused for longest, of a text its last ones, until so many fit in."""
        excess = self._num_bytes + num_new_bytes - self.max_bytes
        if excess <= 0:
            return
        with self._mutex:
            # A little more than is needed, so that this order is not made for each block.
            excess += self.max_bytes // 50
            for entry in sorted(self._entries.values(), key=_rank_use):
                if excess <= 0:
                    break
                excess -= entry.num_bytes
                self._remove(entry.name.key)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self._num_bytes

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def list_ends(self, parent: str) -> Sequence[BlockName]:
        """Return the ends of texts after a block, the longest first."""
        with self._mutex:
            return sorted(self._ends.get(parent, ()), key=lambda name: -name.num_tail)

    def touch(self, keys: Iterable[str], used_at: float) -> None:
        """Note that blocks are used by a request of that time."""
        with self._mutex:
            entries = [self._entries[key] for key in keys if key in self._entries]
            for entry in entries:
                entry.used_at = max(entry.used_at, used_at)
        for entry in entries:
            with contextlib.suppress(OSError):
                os.utime(self.folder / entry.name.to_file(), (used_at, used_at))

    def write(
        self, name: BlockName, fields: Mapping[str, Any], arrays: Sequence[Buffer], used_at: float
    ) -> bool:
        """Write a block; return whether it is there. A failure is told once a minute at most."""
        if name.key in self._entries:
            return True
        header = {"format": FORMAT, "version": VERSION, "key": name.key, **fields}
        header["num_bytes"] = [len(array) for array in arrays]
        pieces: list[Buffer] = [_pad(json.dumps(header).encode() + b"\n")]
        for array in arrays:
            pieces += array, bytes(-len(array) % ALIGNMENT)
        checksum = hashlib.sha256()
        for piece in pieces:
            checksum.update(piece)
        pieces.append(checksum.digest())
        num_bytes = sum(map(len, pieces))
        if num_bytes > self.max_bytes:
            self._note_failure(f"a block has {num_bytes} bytes, more than --max-session-gb allows")
            return False
        self._evict(num_bytes)
        path = self.folder / name.to_file()
        partial_path = path.with_suffix(PARTIAL_SUFFIX)
        try:
            with open(partial_path, "wb", opener=_open_private) as file:
                for piece in pieces:
                    file.write(piece)
            os.utime(partial_path, (used_at, used_at))
            partial_path.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial_path.unlink()
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._note_failure("the disk is full" if is_full else summarize(error))
            return False
        with self._mutex:
            self._add(_Entry(name, num_bytes, used_at))
        return True

    _told_at = -60.0

    def _note_failure(self, fact: str) -> None:
        self.num_failures += 1
        if time.monotonic() - self._told_at >= 60:
            self._told_at = time.monotonic()
            logger.warning(
                "--session-dir: a block is not kept, %s; answers are unaffected, and after a"
                " restart its prompt is read again", fact,
            )  # fmt: skip

    def read(self, key: str) -> tuple[dict[str, Any], list[memoryview]]:
        """Return a block's header and its arrays; a file that is damaged is removed.

        Raises KeyError where there is no such block, or none that is whole.
        """
        entry = self._entries[key]
        try:
            with (self.folder / entry.name.to_file()).open("rb") as file:
                data = bytearray(entry.num_bytes)
                is_whole = file.readinto(data) == entry.num_bytes and not file.read(1)
        except OSError:
            data, is_whole = bytearray(), False
        block = _parse(data, key) if is_whole else None
        if block is None:
            raise self.refuse(key)
        return block

    def refuse(self, key: str) -> KeyError:
        """Remove a block that is not what was written, and return the error that says so."""
        self.num_damaged += 1
        logger.warning(
            "--session-dir: %s is not what was written; it is removed, and its part of the"
            " prompt is read again", self._entries[key].name.to_file(),
        )  # fmt: skip
        with self._mutex:
            self._remove(key)
        return KeyError(key)

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._lock)


def _refuse_others(folder: Path) -> None:
    """Raise SpecDecError for a folder with files that no server's sessions have been beside."""
    names = [entry.name for entry in folder.iterdir()]
    others = [
        name for name in sorted(names)
        if not name.startswith(".") and name != "lost+found" and read_name(name) is None
    ]  # fmt: skip
    if others and LOCK_NAME not in names:
        raise SpecDecError(
            f"--session-dir {folder} holds other files: {join_names(others)}",
            "give a folder of its own, which need not exist",
        )


def _rank_use(entry: _Entry) -> tuple[float, int]:
    return entry.used_at, -entry.name.depth


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _pad(header: bytes) -> bytes:
    """Fill a header's line with spaces, so that the arrays begin where they should."""
    return header[:-1] + b" " * (-len(header) % ALIGNMENT) + b"\n"


def _parse(data: bytearray, key: str) -> tuple[dict[str, Any], list[memoryview]] | None:
    """Return the header and the arrays of a file; None where it is not what was written."""
    view = memoryview(data)
    if hashlib.sha256(view[:-SUM_BYTES]).digest() != view[-SUM_BYTES:]:
        return None
    end = data.find(b"\n", 0, MAX_HEADER_BYTES) + 1
    try:
        header = parse_json(bytes(data[:end]))
        if [header[name] for name in ("format", "version", "key")] != [FORMAT, VERSION, key]:
            return None
        arrays = []
        for size in header["num_bytes"]:
            arrays.append(view[end : end + size])
            end += size + -size % ALIGNMENT
    except (SpecDecError, ValueError, RecursionError, LookupError, TypeError):
        return None
    return (header, arrays) if end == len(data) - SUM_BYTES else None
