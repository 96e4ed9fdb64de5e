"""Check of an engine folder against the machine that is to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.checkpoint.config import parse_checkpoint_config
from specdec.files.backends import find_backend, refuse_config
from specdec.files.folders import ENGINE, expect_folder
from specdec.files.manifest import CHANGED_HINT, NAME, find_changes
from specdec.files.reading import read_json


def check_engine(folder: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """Return the problems that keep an engine from running here, and notes beside them."""
    expect_folder(folder, ENGINE, "--engine-dir")
    document = read_json(folder / "config.json")
    if not isinstance(document.get("build_config"), dict):
        raise refuse_config(folder)
    backend = find_backend(folder)
    pretrained = document.get("pretrained_config")
    checkpoint = parse_checkpoint_config(pretrained if isinstance(pretrained, dict) else {})
    section = backend.load("doctor")
    problems, notes = section.check_engine(folder, document, checkpoint, machine)
    if (folder / NAME).is_file():
        changes, lacks = find_changes(folder)
        config_path = str(folder / "config.json")  # is checked; may be changed on purpose
        problems += [(fact, CHANGED_HINT) for fact in changes if not fact.startswith(config_path)]
        notes += [fact for fact in changes if fact.startswith(config_path)] + lacks
    else:
        notes.append(f"it has no {NAME}: its files cannot be compared with what was built")
    return {
        "engine_dir": str(folder),
        "backend": backend.name,
        "method": checkpoint.method.name if checkpoint.method else "plain",
        "dtype": checkpoint.model.dtype,
        "tp_size": checkpoint.model.tp_size,
        "can_run": not problems,
        "problems": [{"fact": fact, "remedy": remedy} for fact, remedy in problems],
        "notes": notes,
    }
