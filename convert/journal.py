"""What a conversion has done so far, noted in its hidden folder, so that it can be resumed.

One JSON line each: first what is converted; then, as they come, how far a rank file is complete
with the sha256 up to there, and the sources that have been read to their end. A line may be lost
or torn by a kill; what it told is then done again. Nothing noted is believed of the output: its
bytes are read and hashed again before they count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec import __version__, logs
from specdec.errors import SpecDecError, join_names
from specdec.files.staging import JOURNAL_NAME

from .finite import Flaws
from .plan import CHUNK_BYTES, ConversionPlan

logger = logs.get_logger(__name__)

JOURNAL_FORMAT = 1
SCALE_BYTES = 64


class Journal:
    """The journal of a conversion into `folder`; with `resume`, of the one that began there."""

    def __init__(self, folder: Path, plan: ConversionPlan, *, resume: bool) -> None:
        self.path = folder / JOURNAL_NAME
        self.marks: dict[str, list[tuple[int, str]]] = {}  # file -> (bytes, their sha256), ...
        self.sources: dict[str, tuple[str, dict[str, Flaws]]] = {}  # path -> sha256, flaws
        lines = list(_read_lines(self.path)) if resume else []
        start = _describe_conversion(plan)
        if lines:
            _check_same(lines[0], start, folder)
            for line in lines[1:]:
                self._take(line)
            num_bytes = sum(marks[-1][0] for marks in self.marks.values())
            logger.info("resuming after %.1f MB of rank files", num_bytes / 1e6)
        else:
            if resume:
                logger.info("nothing to resume: converting from the start")
            for path in folder.iterdir():
                path.unlink()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o666)
        # A torn last line is closed, so that the next one stands alone.
        self._write(None if lines else start)

    def close(self) -> None:
        os.close(self._descriptor)

    def add_mark(self, file: str, num_bytes: int, sha256: str) -> None:
        """Note that a file's first bytes are written and have this sha256."""
        self._write({"file": file, "bytes": num_bytes, "sha256": sha256})

    def add_source(self, path: Path, sha256: str, flaws: dict[str, Flaws]) -> None:
        """Note that a source has been read to its end, and what was found in it."""
        found = {name: dataclasses.astuple(flaw) for name, flaw in flaws.items()}
        self._write({"source": str(path), "sha256": sha256, "flaws": found})

    def _take(self, line: dict[str, Any]) -> None:
        if "file" in line:
            self.marks.setdefault(line["file"], []).append((line["bytes"], line["sha256"]))
        else:
            flaws = {name: Flaws(*counts) for name, counts in line["flaws"].items()}
            self.sources[line["source"]] = line["sha256"], flaws

    def _write(self, line: dict[str, Any] | None) -> None:
        text = "\n" if line is None else json.dumps(line) + "\n"
        os.write(self._descriptor, text.encode())


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        for line in path.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError):  # torn by a kill, or empty
                yield json.loads(line)


def _describe_conversion(plan: ConversionPlan) -> dict[str, Any]:
    sources = []
    for path in plan.source_files:
        status = path.stat()
        sources.append([str(path), status.st_size, status.st_mtime_ns])
    return {
        "format": JOURNAL_FORMAT,
        "tool_version": __version__,
        "plan": hash_plan(plan),
        "sources": sources,
    }


def hash_plan(plan: ConversionPlan) -> str:
    """Return a sha256 over everything that decides the output's bytes, but the sources' own."""
    digest = hashlib.sha256(f"{CHUNK_BYTES} {json.dumps(plan.config)}".encode())
    for rank in plan.ranks:
        for name, tensor in rank.items():
            digest.update(f"\n{name} {_describe(tensor)}".encode())
            for piece in tensor.pieces:
                info = piece.source.tensors[piece.name]
                # A measured scale lies in no file that would tell whether it is the same.
                if info.num_bytes <= SCALE_BYTES and piece.source.locate(piece.name) is None:
                    digest.update(piece.source.read(piece.name).tobytes())
    return digest.hexdigest()


def _describe(value: Any) -> Any:
    """Return a planned tensor, or a part of one, as text; a source by its path."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return [type(value).__name__, *(_describe(getattr(value, f.name)) for f in fields)]
    if isinstance(value, (list, tuple)):
        return [_describe(item) for item in value]
    if hasattr(value, "tensors") and hasattr(value, "path"):
        return str(value.path)
    return value


def _check_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raise SpecDecError unless the conversion that was begun is the one that is asked for."""
    hint = "run it again without --resume, which starts over"
    if before.get("sources") != now["sources"]:
        known: Sequence[Any] = before.get("sources") or ()
        changed = [source[0] for source in now["sources"] if source not in known]
        raise SpecDecError(
            f"{folder} was started from other sources; new or changed since:"
            f" {join_names(changed) or 'none, but some are gone'}",
            hint,
        )
    different = [key for key in now if before.get(key) != now[key]]
    if different:
        what = "another version of specdec" if "plan" not in different else "other settings"
        raise SpecDecError(f"{folder} was started with {what} than these", hint)
