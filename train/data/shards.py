"""Shards of the data: rows that several hosts answer, a part each, and their files put together.

Row n belongs to shard n modulo N, and keeps its number, so that its seed and its place in the
merged file are those of a run without shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, UsageError
from specdec.files.manifest import describe_file
from specdec.files.reading import read_json
from specdec.files.staging import list_local

from .output import check_output, name_manifest, write_manifest, write_rows
from .settings import DataSettings

SHARD_FACT = "shard"  # the only fact in which shards of one run differ
SUMMED_COUNTS = ("answered", "failed", "truncated")


@dataclasses.dataclass(frozen=True)
class RowShard:
    """RowShard `number`, from 0, of `count`."""

    number: int = 0
    count: int = 1

    def __contains__(self, index: int) -> bool:
        """Return whether the row of that index belongs to the shard."""
        return index % self.count == self.number

    def name_output(self, output: Path) -> Path:
        """Return the file of the shard: data.jsonl becomes data.0-of-4.jsonl."""
        ending = f".{self.number}-of-{self.count}"
        if self.count == 1 or output.stem.endswith(ending):
            return output
        return output.with_name(f"{output.stem}{ending}{output.suffix}")


def parse_shard(text: str) -> RowShard:
    """Read `I/N`; raise UsageError for anything but a number from 0 to N - 1, and N."""
    parsed = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if parsed is None or not int(parsed[1]) < int(parsed[2]):
        raise UsageError(
            f"--shard is {text!r}", "give I/N, with I from 0 to N - 1: --shard 0/4, 1/4, 2/4, 3/4"
        )
    return RowShard(int(parsed[1]), int(parsed[2]))


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """File of one shard, with its manifest's facts and counts."""

    path: Path
    shard: RowShard
    facts: dict[str, Any]
    input: dict[str, Any]
    results: dict[str, Any]

    def read_rows(self) -> Iterator[tuple[int, bytes]]:
        """Yield each row's index and line, in the input's order."""
        last_index = -1
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                index = _read_index(line)
                if index is None or index <= last_index or index not in self.shard:
                    raise SpecDecError(
                        f"{self.path}, line {number}: it is no next row of shard"
                        f" {self.shard.number} of {self.shard.count}",
                        "make the shard again",
                    )
                last_index = index
                yield index, line


def _read_index(line: bytes) -> int | None:
    try:
        index = json.loads(line)["index"]
    except (ValueError, LookupError, TypeError):
        return None
    return index if type(index) is int else None


def merge_shards(settings: DataSettings) -> dict[str, Any]:
    """Put the files of all shards together, as one run without shards would have written them."""
    output = settings.output
    files = sorted(map(open_shard, map(Path, settings.merge)), key=lambda file: file.shard.number)
    check_shards(files)
    check_output(output, force=settings.force, inputs=list_local(*settings.merge))
    merged_rows = heapq.merge(*(file.read_rows() for file in files))
    write_rows(output, (line for _, line in merged_rows), force=settings.force)
    report = {
        "output": str(output),
        "rows": sum(file.results["rows"] for file in files),
        **{name: sum(file.results[name] for file in files) for name in SUMMED_COUNTS},
        "merged": [str(file.path) for file in files],
    }
    facts = {name: value for name, value in files[0].facts.items() if name != SHARD_FACT}
    write_manifest(settings, facts, files[0].input, report)
    return report


def open_shard(path: Path) -> ShardFile:
    """Read the manifest of a shard's file; raise SpecDecError where the two do not agree."""
    manifest_path = name_manifest(path)
    for needed in (path, manifest_path):
        if not needed.is_file():
            raise SpecDecError(
                f"--merge {path}: {needed} does not exist",
                "give the files that `specdec-train data --shard` wrote, with their manifests",
            )
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, UsageError):
        manifest = read_json(manifest_path)
        facts, results = dict(manifest["facts"]), dict(manifest["results"])
        shard = parse_shard(facts[SHARD_FACT])
        counts = {name: int(results[name]) for name in ("rows", *SUMMED_COUNTS)}
        if manifest["output"]["sha256"] != describe_file(path)["sha256"]:
            raise SpecDecError(
                f"--merge {path}: its bytes are not those that its manifest describes",
                "make the shard again, or copy it again",
            )
        return ShardFile(path, shard, facts, manifest["input"], counts)
    raise SpecDecError(
        f"--merge {path}: {manifest_path} is not the manifest of a shard",
        "give the files that `specdec-train data --shard` wrote",
    )


def check_shards(files: Sequence[ShardFile]) -> None:
    """Raise SpecDecError where files are not all shards of one run, each of them once."""
    first = files[0]
    for file in files:
        _compare_facts(first, file)
    counts = sorted({file.shard.count for file in files})
    if len(counts) > 1:
        raise SpecDecError(
            f"the files are shards of {' and of '.join(map(str, counts))}",
            "give the shards of one run",
        )
    shard_counts = Counter(file.shard.number for file in files)
    problems = []
    if missing := [str(n) for n in range(first.shard.count) if not shard_counts[n]]:
        problems.append(f"shard {', '.join(missing)} of {first.shard.count} is missing")
    if repeated := [str(n) for n, times in sorted(shard_counts.items()) if times > 1]:
        problems.append(f"shard {', '.join(repeated)} of {first.shard.count} is there twice")
    if problems:
        raise SpecDecError(", ".join(problems), "give the file of each shard once")


def _compare_facts(first: ShardFile, other: ShardFile) -> None:
    """Raise SpecDecError where two shards were made of other inputs or with other options."""
    for name in sorted((first.facts.keys() | other.facts.keys()) - {SHARD_FACT}):
        values = first.facts.get(name), other.facts.get(name)
        if values[0] != values[1]:
            raise SpecDecError(
                f"{first.path} and {other.path} were made otherwise: {name} is {values[0]!r} and"
                f" {values[1]!r}",
                "make all shards from one input, with one target and one set of options",
            )
