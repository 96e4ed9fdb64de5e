"""manifest.json: written over a folder, and held against the files it describes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import stat
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from specdec import __version__
from specdec.errors import SpecDecError, join_names, shorten
from specdec.files.reading import hash_file, is_inside, read_json, write_json
from specdec.files.unfinished import JOURNAL_NAME
from specdec.system import logs
from specdec.system.threads import Pool, count_usable_cores

logger = logs.get_logger(__name__)
NAME = "manifest.json"
FORMAT_VERSION = 1
# Files of models as they are published, and of work trees.
PRECIOUS = ("model*.safetensors", "pytorch_model*.bin", "*.gguf", ".git")
BLOCK_BYTES = 1 << 26  # of a file, that have a checksum of their own
CHANGED_HINT = "the folder is not what was built: copy it again, or build the engine again"
MISSING_FACT = "is missing"
_AGAIN = "copy the folder again, or make it again"


@dataclasses.dataclass(frozen=True)
class ManifestEntry:
    """A file as a manifest describes it; sha256 None where it was not hashed.

    block_sums: of `list_block_sums`, which an engine's files have.
    """

    path: str
    num_bytes: int
    sha256: str | None
    block_sums: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a manifest.json, which describes the folder that it lies in."""

    tool: str
    tool_version: str
    sources: tuple[ManifestEntry, ...]
    outputs: tuple[ManifestEntry, ...]


def read_manifest(folder: Path, kind: str) -> Manifest:
    """Read manifest.json; raise SpecDecError where it is none that this version can check."""
    path = folder / NAME
    document = read_json(path)
    version, folder_kind = document.get("format_version"), document.get("kind")
    if version != FORMAT_VERSION:
        raise SpecDecError(
            f"{path} has format_version {shorten(version)}, this specdec reads {FORMAT_VERSION}",
            "check it with the version of specdec that wrote it",
        )
    if folder_kind != kind:
        fact = f"{path} describes a folder of kind {shorten(folder_kind)}, not {kind!r}"
        raise SpecDecError(fact, f"give the folder of a {kind}")
    outputs = _read_entries(path, document, "outputs")
    if outside := [entry.path for entry in outputs if not is_inside(entry.path)]:
        raise SpecDecError(f"{path} names files outside the folder: {shorten(outside[0])}", _AGAIN)
    return Manifest(
        tool=str(document.get("tool")), tool_version=str(document.get("tool_version")),
        sources=_read_entries(path, document, "sources"), outputs=outputs,
    )  # fmt: skip


def _read_entries(path: Path, document: dict[str, Any], key: str) -> tuple[ManifestEntry, ...]:
    values = document.get(key)
    if not isinstance(values, list) or not all(_is_entry(value) for value in values):
        raise SpecDecError(f"{path}: {key} is not a list of files with bytes and sha256", _AGAIN)
    return tuple(
        ManifestEntry(
            v["path"], v["bytes"], v["sha256"], tuple(v["crc32"]) if "crc32" in v else None
        )
        for v in values
    )


def _is_entry(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    sha256, num_bytes, sums = value.get("sha256", 0), value.get("bytes"), value.get("crc32")
    if not isinstance(value.get("path"), str) or type(num_bytes) is not int:
        return False
    are_sums = isinstance(sums, list) and all(type(number) is int for number in sums)
    is_whole = sums is None or (are_sums and len(sums) == -(-num_bytes // BLOCK_BYTES))
    return is_whole and (sha256 is None or isinstance(sha256, str))


def find_differences(
    files: Iterable[tuple[Path, ManifestEntry]], *, workers: int, label: str
) -> list[str | None]:
    """Return, for every file, in what it differs from its entry; None where it does not."""
    calls = [functools.partial(_find_difference, *file) for file in files]
    with Pool(workers) as pool:
        return list(pool.gather(dict(enumerate(calls)), label).values())


def _find_difference(path: Path, entry: ManifestEntry, is_ending: threading.Event) -> str | None:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a file"
        if status.st_size != entry.num_bytes:
            return f"has {status.st_size} bytes, not {entry.num_bytes}"
        if entry.sha256 is not None and (sha256 := hash_file(path, is_ending)) != entry.sha256:
            return f"has sha256 {sha256[:16]}..., not {entry.sha256[:16]}..."
    except (FileNotFoundError, NotADirectoryError):
        return MISSING_FACT
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def check_hashes(folder: Path) -> None:
    """Raise SpecDecError where a byte of an engine folder is not what its manifest says."""
    changes, lacks = find_changes(folder)
    if problems := lacks + changes:
        summary = f", and {len(problems) - 1} more problems" if len(problems) > 1 else ""
        raise SpecDecError(f"{problems[0]}{summary}", CHANGED_HINT)


def find_changes(folder: Path) -> tuple[list[str], list[str]]:
    """Compare every byte of an engine folder with its manifest: what differs, and what is absent.

    Absent are files that the manifest knows, and sums of weight files in the manifest.
    """
    manifest = read_manifest(folder, "engine")
    files = [(folder / entry.path, entry) for entry in manifest.outputs]
    summed = {path for path, entry in files if entry.sha256 is not None}
    weights = [*folder.rglob("*.safetensors"), *folder.glob("*.engine"), folder / "config.json"]
    lacks = [f"{path} has no sha256 in {NAME}" for path in sorted(weights) if path not in summed]
    logger.info("comparing %d files of %s with their sha256", len(files), folder)
    differences = find_differences(files, workers=count_usable_cores(), label="hashing")
    changes: list[str] = []
    for (path, _), difference in zip(files, differences, strict=True):
        if difference is not None:
            (lacks if difference == MISSING_FACT else changes).append(f"{path} {difference}")
    return changes, lacks


def check_sources(sources: Iterable[Mapping[str, Any]]) -> None:
    """Raise SpecDecError for weights that differ from the manifest which specdec wrote with them.

    sources: of `describe_file`. Files in folders of other tools are not judged.
    """
    manifests: dict[Path, dict[str, str | None]] = {}
    for source in sources:
        path = Path(source["path"])
        if path.parent not in manifests:
            entries = _list_written(path.parent) or ()
            manifests[path.parent] = {entry.path: entry.sha256 for entry in entries}
        expected_sha256 = manifests[path.parent].get(path.name)
        if path.suffix == ".safetensors" and expected_sha256 not in (None, source["sha256"]):
            raise SpecDecError(
                f"{path} has sha256 {source['sha256'][:16]}..., the {NAME} beside it says"
                f" {str(expected_sha256)[:16]}...",
                f"the file is damaged: {_AGAIN}; if it was changed on purpose, remove {NAME}",
            )


def _list_written(folder: Path) -> tuple[ManifestEntry, ...] | None:
    """List the files that specdec wrote into a folder; None where no manifest says that it did."""
    path = folder / NAME
    document = read_json(path) if path.is_file() else {}
    return _read_entries(path, document, "outputs") if document.get("tool") == "specdec" else None


def find_model(folder: Path) -> str | None:
    """Say what in a folder shows that it is a model's, or a work tree; None where nothing does.

    A folder of specdec's is neither, whatever was put into it.
    """
    with contextlib.suppress(OSError, SpecDecError):
        if _list_written(folder) is not None:
            return None
    found = sorted(path.name for pattern in PRECIOUS for path in folder.glob(pattern))
    return f"it holds {join_names(found)} and no {NAME} of specdec" if found else None


def list_surplus(folder: Path, entries: Iterable[ManifestEntry]) -> list[str]:
    """List the files of a folder that its manifest's outputs do not name."""
    known_names = {NAME, *(str(PurePosixPath(entry.path)) for entry in entries)}
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted({path.relative_to(folder).as_posix() for path in files} - known_names)


def describe_file(path: Path, sha256: str | None = None) -> dict[str, Any]:
    """Return a manifest entry of a file."""
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256 or hash_file(path)}


def list_block_sums(path: Path) -> Iterator[int]:
    """Yield the crc32 of each block of a file, which takes a fraction of the time of its sha256."""
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(1 << 20))
        number = position = 0
        while num_bytes := file.readinto(buffer[: BLOCK_BYTES - position % BLOCK_BYTES]):
            number = zlib.crc32(buffer[:num_bytes], number)
            position += num_bytes
            if position % BLOCK_BYTES == 0:
                yield number
                number = 0
        if position % BLOCK_BYTES:
            yield number


def list_versions() -> dict[str, str]:
    """List versions of Python and of the libraries that can have had a part in a file."""
    import platform
    from importlib import metadata

    versions = {"python": platform.python_version(), "numpy": np.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["safetensors"] = metadata.version("safetensors")
    for name in ("torch", "transformers"):
        if name in sys.modules:
            versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return versions


def write_manifest(
    folder: Path, *, kind: str, settings: Mapping[str, Any], sources: list[dict[str, Any]],
    hashes: Mapping[str, str] | None = None, **further_fields: Any,
) -> None:  # fmt: skip
    """Write `manifest.json` over the files in `folder`: what it is, from what, by which command.

    `hashes` are known sha256 sums by file name, so that large files are not read again.
    """
    outputs = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in (NAME, JOURNAL_NAME):
            entry = describe_file(path, (hashes or {}).get(name)) | {"path": name}
            if kind == "engine":
                entry["crc32"] = list(list_block_sums(path))
            outputs.append(entry)
    write_json(folder / NAME, {
        "format_version": FORMAT_VERSION, "kind": kind, "tool": "specdec",
        "tool_version": __version__, "libraries": list_versions(), "command": sys.argv,
        "settings": dict(settings), **further_fields, "sources": sources, "outputs": outputs,
    })  # fmt: skip
