"""Acceptance of a drafter on held-out prompts: a file that goes along with its weights.

The trainer writes it into the drafter's folder, convert and build hand it on, and what paces drafts
begins with it instead of a guess. TensorRT-LLM reads a checkpoint that has it like any other.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError
from specdec.files.reading import read_json

NAME = "acceptance.json"
FORMAT_VERSION = 1
MAX_DEPTH = 12  # deeper tokens are counted as these
NUM_BUCKETS = 10  # of a drafter's confidence
MAX_NODES = 64  # of a tree, whose share of what is accepted is told
HINT = "delete the file, or measure it again: specdec-run --acceptance-output"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Counts of drafted tokens whose parents were accepted, by depth from 1 on and by confidence.

    right, seen: [MAX_DEPTH][NUM_BUCKETS], the accepted ones and all. gains: tokens that a draft
    brought on average, by how many of its likeliest nodes are verified, from 1 on. about: the
    prompts' number and hash, and how they were decoded.
    """

    right: tuple[tuple[int, ...], ...]
    seen: tuple[tuple[int, ...], ...]
    gains: tuple[float, ...]
    num_drafts: int
    about: Mapping[str, Any]

    def write(self, path: Path) -> None:
        """Write the file, as a JSON object."""
        document = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        lines = (f'  "{name}": {json.dumps(value)}' for name, value in document.items())
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_acceptance(folder: Path) -> Acceptance | None:
    """Read a folder's file; None without one, SpecDecError where it is not as it was written."""
    path = folder / NAME
    if not path.exists():
        return None
    document = read_json(path)
    if document.get("format_version") != FORMAT_VERSION:
        version = document.get("format_version")
        raise SpecDecError(
            f"{path} has format_version {version!r}, this specdec reads {FORMAT_VERSION}", HINT
        )
    try:
        acceptance = Acceptance(
            right=_read_counts(document["right"]), seen=_read_counts(document["seen"]),
            gains=tuple(float(gain) for gain in document["gains"]),
            num_drafts=int(document["num_drafts"]), about=dict(document["about"]),
        )  # fmt: skip
        _check(acceptance)
    except (KeyError, TypeError, ValueError) as error:
        raise SpecDecError(f"{path} holds no counts of accepted tokens: {error}", HINT) from None
    return acceptance


def copy_acceptance(source: Path, folder: Path) -> None:
    """Hand a drafter's file on with its weights, where there is one."""
    if (acceptance := read_acceptance(source)) is not None:
        acceptance.write(folder / NAME)


def _read_counts(rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    counts = tuple(tuple(row) for row in rows)
    if len(counts) != MAX_DEPTH or any(len(row) != NUM_BUCKETS for row in counts):
        raise ValueError(f"not {MAX_DEPTH} depths by {NUM_BUCKETS} confidences")
    if any(type(count) is not int or count < 0 for row in counts for count in row):
        raise ValueError("counts that are none")
    return counts


def _check(acceptance: Acceptance) -> None:
    gains = acceptance.gains
    pairs = zip(acceptance.right, acceptance.seen, strict=True)
    if any(a > b for right, seen in pairs for a, b in zip(right, seen, strict=True)):
        raise ValueError("more right tokens than tokens")
    if not all(0 <= gain <= 1e6 for gain in gains):  # nor is one NaN
        raise ValueError("gains that are none")
    if not gains or len(gains) > MAX_NODES or [*gains] != sorted(gains):
        raise ValueError("gains that fall")
    if acceptance.num_drafts < 1:
        raise ValueError("no drafts")
