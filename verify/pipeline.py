"""Checkpoint folder to verdict: the manifest's files, then what config.json describes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from specdec.command.settings import need, require
from specdec.errors import SpecDecError
from specdec.files.folders import CHECKPOINT, expect_folder
from specdec.files.manifest import NAME, Manifest, find_differences, list_surplus, read_manifest
from specdec.system.threads import count_usable_cores

from .contents import check_contents
from .settings import VerifySettings, check_flags

SAME, CHANGED, ABSENT = "same", "changed", "absent"


def verify_checkpoint(settings: VerifySettings) -> dict[str, Any]:
    """Check a checkpoint folder and return the verdict with all that is wrong."""
    check_flags(settings)
    require(settings, "checkpoint_dir")
    folder = need(settings.checkpoint_dir)
    expect_folder(folder, CHECKPOINT, "--checkpoint-dir")
    began = time.monotonic()
    workers = settings.workers or count_usable_cores()
    problems: list[str] = []
    manifest = None
    if os.path.lexists(folder / NAME):
        try:
            manifest = read_manifest(folder, "checkpoint")
        except SpecDecError as error:
            problems.append(error.message)
    contents = check_contents(folder, problems)
    sources: dict[str, list[str]] = {SAME: [], CHANGED: [], ABSENT: []}
    if manifest is not None:
        check_outputs(folder, manifest, problems, workers=workers)
        sources = compare_sources(manifest, workers=workers)
    return {
        "verdict": "damaged" if problems else "intact",
        "files": len(manifest.outputs) if manifest else contents["files"] if contents else 0,
        "problems": list(dict.fromkeys(problems)),
        "checkpoint_dir": str(folder),
        "contents": contents,
        "manifest": manifest and describe_manifest(manifest),
        "sources": sources,
        "verify_seconds": round(time.monotonic() - began, 2),
    }


def check_outputs(folder: Path, manifest: Manifest, problems: list[str], *, workers: int) -> None:
    """Append what differs from the manifest: missing, surplus and changed files."""
    places = [(folder / entry.path, entry) for entry in manifest.outputs]
    differences = find_differences(places, workers=workers, label="hashing")
    problems += [
        f"{path} {difference}"
        for (path, _), difference in zip(places, differences, strict=True)
        if difference is not None
    ]
    problems += [f"{folder / name} is not in {NAME}" for name in list_surplus(folder, manifest)]


def compare_sources(manifest: Manifest, *, workers: int) -> dict[str, list[str]]:
    """Sort the conversion's sources: what they are like is no part of the verdict."""
    places = [(Path(entry.path), entry) for entry in manifest.sources]
    present = [(path, entry) for path, entry in places if path.exists()]
    differences = find_differences(present, workers=workers, label="hashing sources")
    found: dict[str, list[str]] = {SAME: [], CHANGED: [], ABSENT: []}
    for (path, _), difference in zip(present, differences, strict=True):
        found[SAME if difference is None else CHANGED].append(str(path))
    found[ABSENT] = [str(path) for path, entry in places if (path, entry) not in present]
    return found


def describe_manifest(manifest: Manifest) -> dict[str, Any]:
    """Return what a report tells of a manifest."""
    return {
        "tool": manifest.tool,
        "tool_version": manifest.tool_version,
        "bytes": sum(entry.num_bytes for entry in manifest.outputs),
        "unhashed": [entry.path for entry in manifest.outputs if entry.sha256 is None],
    }
