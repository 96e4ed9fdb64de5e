"""Output of training data: the file of rows, and the manifest beside it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.command.settings import to_plain
from specdec.errors import SpecDecError
from specdec.files.manifest import describe_file
from specdec.files.reading import read_json
from specdec.files.staging import check_output_file, place_file, write_whole

from .settings import DataSettings


def name_manifest(output: Path) -> Path:
    """Return the path of the manifest beside an output."""
    return output.with_suffix(".manifest.json")


def check_output(output: Path, *, force: bool, inputs: Sequence[Path] = ()) -> None:
    """Raise SpecDecError where the output or its manifest cannot be written, as for one file.

    A manifest that specdec wrote is replaced without `force`: its output was removed.
    """
    check_output_file(output, force=force, inputs=inputs)
    manifest = name_manifest(output)
    is_own = False
    with contextlib.suppress(OSError, SpecDecError):
        is_own = read_json(manifest).get("tool") == "specdec"
    check_output_file(manifest, force=force or is_own, inputs=inputs)


def write_rows(output: Path, lines: Iterable[bytes], *, force: bool) -> None:
    """Write the lines of all rows, under the output's name once they are on the disk."""
    partial = output.with_name(f".{output.name}.partial.output")
    try:
        with partial.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        place_file(partial, output, force=force)
    finally:
        partial.unlink(missing_ok=True)


def write_manifest(
    settings: DataSettings, facts: Mapping[str, Any], input_facts: Mapping[str, Any],
    report: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write the manifest of the output; where that fails, the output goes, too.

    facts: what the rows depend on. input_facts: of the input alone. report: counts.
    """
    output = settings.output
    manifest = {
        "kind": "data",
        "tool": "specdec",
        "tool_version": __version__,
        "settings": to_plain(settings),
        "facts": facts,
        "input": input_facts,
        "output": describe_file(output),
        "results": report,
    }
    text = json.dumps(manifest, indent=2) + "\n"
    try:
        write_whole(name_manifest(output), text, force=True)
    except OSError:
        output.unlink()  # what it was made of is still there
        raise
