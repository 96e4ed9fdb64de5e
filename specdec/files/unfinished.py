"""Names of what lies beside an output, or in it, while it is written."""

from __future__ import annotations

import re
from pathlib import Path

JOURNAL_NAME = ".journal"  # in a folder that is being written; see train/hidden_states.py


def get_partial(output_dir: Path) -> Path:
    """Return the hidden folder in which `output_dir` comes about."""
    return _get_hidden(output_dir, "partial")


def get_backup(output_dir: Path) -> Path:
    """Return the name that an output has while another takes its place."""
    return _get_hidden(output_dir, "old")


def get_lock(output_dir: Path) -> Path:
    """Return the file that the process which writes `output_dir` has locked."""
    return _get_hidden(output_dir, "lock")


def _get_hidden(output_dir: Path, ending: str) -> Path:
    output_dir = output_dir.resolve()
    return output_dir.parent / f".{output_dir.name}.{ending}"


def name_final(path: Path) -> Path:
    """Return what a path will be called once the hidden folders that it lies in have their names.

    `specdec generate` lets other stages write into such a folder.
    """
    return Path(*(re.sub(r"\.(.+)\.partial", r"\1", name) for name in path.parts))
