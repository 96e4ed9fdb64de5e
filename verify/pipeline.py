"""Verification of a checkpoint: the manifest's files, then the contents by config.json."""

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
from .settings import VerifySettings, check_settings

UNCHANGED, CHANGED, GONE = "same", "changed", "absent"


def verify_checkpoint(settings: VerifySettings) -> dict[str, Any]:
    """Check a checkpoint folder and return the verdict with every fault."""
    check_settings(settings)
    require(settings, "checkpoint_dir")
    folder = need(settings.checkpoint_dir)
    expect_folder(folder, CHECKPOINT, "--checkpoint-dir")
    start = time.monotonic()
    workers = settings.workers or count_usable_cores()
    problems: list[str] = []
    manifest = None
    if os.path.lexists(folder / NAME):
        try:
            manifest = read_manifest(folder, "checkpoint")
        except SpecDecError as error:
            problems.append(error.message)
    contents = check_contents(folder, problems)
    sources: dict[str, list[str]] = {UNCHANGED: [], CHANGED: [], GONE: []}
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
        "verify_seconds": round(time.monotonic() - start, 2),
    }


def check_outputs(folder: Path, manifest: Manifest, problems: list[str], *, workers: int) -> None:
    """Append the missing, surplus and changed files, by the manifest."""
    entries = [(folder / entry.path, entry) for entry in manifest.outputs]
    differences = find_differences(entries, workers=workers, label="hashing")
    problems += [
        f"{path} {difference}"
        for (path, _), difference in zip(entries, differences, strict=True)
        if difference is not None
    ]
    surplus = list_surplus(folder, manifest.outputs)
    problems += [f"{folder / name} is not in {NAME}" for name in surplus]


def compare_sources(manifest: Manifest, *, workers: int) -> dict[str, list[str]]:
    """Sort the conversion's sources into unchanged, changed and gone, without a verdict."""
    entries = [(Path(entry.path), entry) for entry in manifest.sources]
    existing_entries = [(path, entry) for path, entry in entries if path.exists()]
    differences = find_differences(existing_entries, workers=workers, label="hashing sources")
    paths_by_state: dict[str, list[str]] = {UNCHANGED: [], CHANGED: [], GONE: []}
    for (path, _), difference in zip(existing_entries, differences, strict=True):
        paths_by_state[UNCHANGED if difference is None else CHANGED].append(str(path))
    paths_by_state[GONE] = [
        str(path) for path, entry in entries if (path, entry) not in existing_entries
    ]
    return paths_by_state


def describe_manifest(manifest: Manifest) -> dict[str, Any]:
    """Return the report's entry of a manifest."""
    return {
        "tool": manifest.tool,
        "tool_version": manifest.tool_version,
        "bytes": sum(entry.num_bytes for entry in manifest.outputs),
        "unhashed": [entry.path for entry in manifest.outputs if entry.sha256 is None],
    }
