"""The rows that are done, in a file that a kill leaves whole, and the output made of it.

First line: what the rows depend on. Then one object a line, in the order in which rows came to
their end: {"index", "row"} or {"index", "failure"}. A last line that was cut is dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from specdec.errors import SpecDecError
from specdec.files.staging import place_file


class Journal:
    """Open for one output file, by one process at a time."""

    def __init__(
        self, output: Path, facts: Mapping[str, Any], *, resume: bool, force: bool
    ) -> None:
        self.output = output
        self.force = force
        self.path = output.parent / f".{output.name}.partial"
        self.facts = json.loads(json.dumps(facts))
        self.failures: dict[int, dict[str, Any]] = {}
        self.num_truncated = 0
        self._places: dict[int, int] = {}  # of the rows that are done
        exists = self.path.exists()
        if exists and not resume and not force:
            raise SpecDecError(
                f"{self.path} holds the rows of an unfinished run",
                "continue it with --resume, or start over with --force",
            )
        self._made_folder = not self.path.parent.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = self.path.open("a+b")
        try:
            self._lock()
            if force and not resume:
                self._file.truncate(0)
            if not self._read():
                self._append({"facts": self.facts})
        except BaseException:
            if not exists:
                self.path.unlink(missing_ok=True)
            self._end()
            raise

    def __contains__(self, index: int) -> bool:
        return index in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add_row(self, index: int, row: dict[str, Any]) -> None:
        """Record a row that is done."""
        self._places[index] = self._append({"index": index, "row": row})
        self.num_truncated += bool(row.get("truncated"))

    def add_failure(self, index: int, failure: dict[str, Any]) -> None:
        """Record a row that failed; another run tries it again."""
        self.failures[index] = failure
        self._append({"index": index, "failure": failure})

    def write_output(self) -> None:
        """Write the rows in the input's order, under the output's name only when all are there."""
        partial = self.path.with_name(self.path.name + ".output")
        try:
            with partial.open("wb") as file:
                for index in sorted(self._places):
                    self._file.seek(self._places[index])
                    row = json.loads(self._file.readline())["row"]
                    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            place_file(partial, self.output, force=self.force)
        finally:
            partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Let it go; a run that came to nothing leaves nothing to resume."""
        if not self._file.closed and not self._places and not self.failures:
            self.path.unlink(missing_ok=True)
            if self._made_folder:
                with contextlib.suppress(OSError):  # it holds something else by now
                    self.path.parent.rmdir()
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # of what a full disk did not take, which has been told
            self._file.close()

    def remove(self) -> None:
        """The work is done: forget it."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecDecError(
                f"another process is writing {self.output}", "wait for it, or name another output"
            ) from None

    def _append(self, entry: Mapping[str, Any]) -> int:
        """Write a line, which is then the system's to keep, whatever happens to this process."""
        place = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise SpecDecError(
                f"{self.path} cannot be written: {error.strerror}",
                f"free some space{', and continue with --resume' * bool(self._places)}",
            ) from None
        return place

    def _read(self) -> bool:
        """Read what is there; return whether there was anything."""
        self._file.seek(0)
        place = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                self._file.truncate(place)
                break
            entry = self._parse(line)
            if place == 0:
                self._compare(entry.get("facts"))
            elif "row" in entry:
                self._places[entry["index"]] = place
                self.num_truncated += bool(entry["row"].get("truncated"))
            place += len(line)
        return place > 0

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            entry = json.loads(line)
            if isinstance(entry, dict) and ("facts" in entry or type(entry["index"]) is int):
                return entry
        except (ValueError, LookupError):
            pass
        raise SpecDecError(
            f"{self.path} is damaged: one of its lines is not a row", "start over with --force"
        )

    def _compare(self, facts: Any) -> None:
        known = facts if isinstance(facts, dict) else {}
        different = sorted(k for k in known.keys() | self.facts.keys()
                           if known.get(k) != self.facts.get(k))  # fmt: skip
        if different:
            named = ", ".join(f"{k} was {known.get(k)!r}, is {self.facts.get(k)!r}"
                              for k in different[:3])  # fmt: skip
            raise SpecDecError(
                f"{self.path} was made otherwise: {named}",
                "resume with the same input and options, or start over with --force",
            )
