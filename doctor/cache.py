"""The user's cache: what it holds, its limit, and clearing it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError
from specdec.files.engine_cache import (
    FOLDER_NAME,
    LIMIT_VARIABLE,
    EngineCache,
    measure_folder,
    read_limit,
)
from specdec.system.cache import DOWNLOADS, PARTS, clear_entry, find_cache

ENGINES = PARTS[FOLDER_NAME]
PARTIAL_PREFIXES = (".", "tmp")  # of names of what is being written
ABANDONED_SECONDS = 3600.0  # since its last change, for what no process goes on writing


def describe_cache() -> dict[str, Any]:
    """Return where the cache is, the number and bytes of what it holds, and its limit.

    Raises SpecDecError where the variable of the limit is no number.
    """
    cache = find_cache()
    if cache is None:
        return {"path": None, "parts": [], "bytes": 0, "limit_bytes": None, "oldest_use": None}
    entries = EngineCache(cache / FOLDER_NAME).list_entries()
    parts = [_describe_part(ENGINES, [entry.num_bytes for entry in entries])]
    for folder_name, name in PARTS.items():
        if name != ENGINES:
            paths = [path for path in _list_part(cache, folder_name) if not _is_partial(path)]
            parts.append(_describe_part(name, [_measure(path) for path in paths]))
    return {
        "path": str(cache), "parts": parts, "bytes": sum(part["bytes"] for part in parts),
        "limit_bytes": int(read_limit(cache)),
        "oldest_use": _format_time(entries[0].last_use) if entries else None,
    }  # fmt: skip


def format_cache(report: dict[str, Any]) -> list[str]:
    """Return the cache's part of the report as lines of text."""
    if report["path"] is None:
        return ["  cache: none, for there is no home folder: set SPECDEC_CACHE_DIR"]
    lines = [f"  cache: {report['bytes'] / 1e6:.1f} MB in {report['path']}"]
    for part in report["parts"]:
        line = f"    {part['name']}: {part['count']}, {part['bytes'] / 1e6:.1f} MB"
        if part["name"] == ENGINES:
            line += f" of at most {report['limit_bytes'] / 1e9:g} GB ({LIMIT_VARIABLE})"
            if report["oldest_use"] is not None:
                line += f", the oldest last used on {report['oldest_use'].replace('T', ' ')}"
        lines.append(line)
    return lines


def clear_cache() -> dict[str, Any]:
    """Remove what the cache holds and no process uses or writes; return what was removed."""
    cache = find_cache()
    if cache is None:
        raise SpecDecError("there is no home folder, and no cache in it", "set SPECDEC_CACHE_DIR")
    if (cache / "config.json").exists():
        raise SpecDecError(
            f"SPECDEC_CACHE_DIR is {cache}, which is an engine or a model and no cache",
            "leave SPECDEC_CACHE_DIR out, or name the folder of a cache",
        )
    removed: list[dict[str, Any]] = []
    left: list[dict[str, Any]] = []
    if (cache / FOLDER_NAME).is_dir():
        engines = EngineCache(cache / FOLDER_NAME)
        removed_entries, _ = engines.clear()
        removed += [_describe_entry(ENGINES, e.name, e.num_bytes) for e in removed_entries]
        left += [_describe_entry(ENGINES, e.name, e.num_bytes) for e in engines.list_entries()]
    for folder_name, name in PARTS.items():
        for path in _list_part(cache, folder_name) if name != ENGINES else ():
            entry = _describe_entry(name, path.name, _measure(path))
            (removed if _remove(path) else left).append(entry)
    return {
        "path": str(cache), "removed": removed, "left": left,
        "removed_bytes": sum(entry["bytes"] for entry in removed),
    }  # fmt: skip


def format_cleared(report: dict[str, Any]) -> str:
    """Return what was removed as lines of text, engines and downloads each by its name."""
    lines = [f"removed from {report['path']}: {report['removed_bytes'] / 1e6:.1f} MB"]
    for part in PARTS.values():
        entries = [entry for entry in report["removed"] if entry["part"] == part]
        size = sum(entry["bytes"] for entry in entries)
        lines.append(f"  {part}: {len(entries)}, {size / 1e6:.1f} MB")
        if part in (ENGINES, PARTS[DOWNLOADS]):
            lines += [f"    {entry['name']}: {entry['bytes'] / 1e6:.1f} MB" for entry in entries]
    if report["left"]:
        names = ", ".join(entry["name"] for entry in report["left"])
        number = len(report["left"])
        lines.append(f"left: {number} {'entry' if number == 1 else 'entries'} in use: {names}")
    return "\n".join(lines)


def _list_part(cache: Path, folder_name: str) -> Iterator[Path]:
    """Yield what lies in a folder of the cache; nothing of one that is a link to elsewhere."""
    folder = cache / folder_name
    if folder.is_dir() and not folder.is_symlink():
        yield from sorted(folder.iterdir())


def _describe_part(name: str, sizes: list[int]) -> dict[str, Any]:
    return {"name": name, "count": len(sizes), "bytes": sum(sizes)}


def _describe_entry(part: str, name: str, num_bytes: int) -> dict[str, Any]:
    return {"part": part, "name": name, "bytes": num_bytes}


def _measure(path: Path) -> int:
    """Return the bytes of a file or a folder; 0 where another process has removed it."""
    with contextlib.suppress(FileNotFoundError):
        return measure_folder(path) if path.is_dir() else path.lstat().st_size
    return 0


def _is_partial(path: Path) -> bool:
    return path.name.startswith(PARTIAL_PREFIXES)


def _remove(path: Path) -> bool:
    """Remove an entry; return False for one that a process uses, or may still be writing."""
    with contextlib.suppress(FileNotFoundError):
        if _is_partial(path):
            newest = max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
            if time.time() - newest < ABANDONED_SECONDS:
                return False
        return clear_entry(path)
    return True


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(timespec="seconds")
