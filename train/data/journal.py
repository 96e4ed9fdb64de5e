"""Journal of answered rows, which survives a kill, and its output file.

The first line holds the facts that the rows depend on. Each further line holds one row, in the
order in which the rows ended: {"index", "row"} or {"index", "failure"}. A last line that was cut is
dropped.
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
from specdec.system.locks import lock_file

from .output import write_rows


class Journal:
    """Journal of one output file, open in one process at a time."""

    def __init__(
        self, output: Path, facts: Mapping[str, Any], *, resume: bool, force: bool
    ) -> None:
        self.output = output
        self.force = force
        self.path = output.parent / f".{output.name}.partial"
        self.facts = json.loads(json.dumps(facts))
        self.failures: dict[int, dict[str, Any]] = {}
        self.num_truncated = 0
        self._offsets: dict[int, int] = {}  # bytes before the line of each answered row
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
            if not self._read_lines():
                self._append_line({"facts": self.facts})
        except BaseException:
            if not exists:
                self.path.unlink(missing_ok=True)
            self._close_file()
            raise

    def __contains__(self, index: int) -> bool:
        return index in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def add_row(self, index: int, row: dict[str, Any]) -> None:
        """Record an answered row."""
        self._offsets[index] = self._append_line({"index": index, "row": row})
        self.num_truncated += bool(row.get("truncated"))

    def add_failure(self, index: int, failure: dict[str, Any]) -> None:
        """Record a row that failed; another run tries it again."""
        self.failures[index] = failure
        self._append_line({"index": index, "failure": failure})

    def write_output(self) -> None:
        """Write the rows in the input's order, under the output's name once all are written."""
        write_rows(self.output, map(self._read_row, sorted(self._offsets)), force=self.force)

    def _read_row(self, index: int) -> bytes:
        """Return a row's line of the output."""
        self._file.seek(self._offsets[index])
        row = json.loads(self._file.readline())["row"]
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"

    def close(self) -> None:
        """Close the file; remove it where it has no row or failure to resume from."""
        if not self._file.closed and not self._offsets and not self.failures:
            self.path.unlink(missing_ok=True)
            if self._made_folder:
                with contextlib.suppress(OSError):  # a foreign file may have replaced it
                    self.path.parent.rmdir()
        self._close_file()

    def _close_file(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, which `_append_line` has reported
            self._file.close()

    def remove(self) -> None:
        """Remove the file, after the output was written."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _lock(self) -> None:
        try:
            lock_file(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecDecError(
                f"another process is writing {self.output}", "wait for it, or name another output"
            ) from None

    def _append_line(self, entry: Mapping[str, Any]) -> int:
        """Write a line, which survives the end of this process; return its offset in the file."""
        offset = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise SpecDecError(
                f"{self.path} cannot be written: {error.strerror}",
                f"free some space{', and continue with --resume' * bool(self._offsets)}",
            ) from None
        return offset

    def _read_lines(self) -> bool:
        """Read the lines of an earlier run; return whether there are any."""
        self._file.seek(0)
        offset = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                self._file.truncate(offset)
                break
            entry = self._parse_line(line)
            if offset == 0:
                self._compare_facts(entry.get("facts"))
            elif "row" in entry:
                self._offsets[entry["index"]] = offset
                self.num_truncated += bool(entry["row"].get("truncated"))
            offset += len(line)
        return offset > 0

    def _parse_line(self, line: bytes) -> dict[str, Any]:
        try:
            entry = json.loads(line)
            if isinstance(entry, dict) and ("facts" in entry or type(entry["index"]) is int):
                return entry
        except (ValueError, LookupError):
            pass
        raise SpecDecError(
            f"{self.path} is damaged: one of its lines is not a row", "start over with --force"
        )

    def _compare_facts(self, facts: Any) -> None:
        journal_facts = facts if isinstance(facts, dict) else {}
        changed_names = sorted(k for k in journal_facts.keys() | self.facts.keys()
                           if journal_facts.get(k) != self.facts.get(k))  # fmt: skip
        if changed_names:
            changes = ", ".join(f"{k} was {journal_facts.get(k)!r}, is {self.facts.get(k)!r}"
                              for k in changed_names[:3])  # fmt: skip
            raise SpecDecError(
                f"{self.path} was made otherwise: {changes}",
                "resume with the same input and options, or start over with --force",
            )
