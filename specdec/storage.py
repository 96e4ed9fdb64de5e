"""Files and folders: safetensors without torch, outputs written aside and renamed, manifests.

The safetensors layout is 8 bytes of little-endian header length, a JSON header, then the tensors'
bytes (https://github.com/huggingface/safetensors, "Format"). bfloat16 has no numpy type: it is
carried as uint16 bit patterns, and float8 as uint8, beside the dtype's name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec import __version__
from specdec.errors import SpecDecError

FORMAT_VERSION = 1
Array = npt.NDArray[Any]

# name here -> (name in a safetensors header, numpy storage type)
DTYPES: dict[str, tuple[str, Any]] = {
    "float64": ("F64", np.float64),
    "float32": ("F32", np.float32),
    "float16": ("F16", np.float16),
    "bfloat16": ("BF16", np.uint16),
    "float8_e4m3fn": ("F8_E4M3", np.uint8),
    "int64": ("I64", np.int64),
    "int32": ("I32", np.int32),
    "int16": ("I16", np.int16),
    "int8": ("I8", np.int8),
    "uint8": ("U8", np.uint8),
    "bool": ("BOOL", np.uint8),
}
_FROM_HEADER = {header: name for name, (header, _) in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor's type and size. dtype is a key of DTYPES."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype][1]).itemsize


class TensorFile:
    """A safetensors file, mapped; every header claim is checked before a byte is used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8:
                    raise self._damaged(f"has {size} bytes, fewer than a header's 8")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise SpecDecError(f"{path} does not exist", "check the folder's contents") from None
        header_bytes = int.from_bytes(self._map[:8], "little")
        if header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise self._damaged(f"claims a header of {header_bytes} bytes in a file of {size}")
        try:
            header = json.loads(self._map[8 : 8 + header_bytes].decode("utf-8"))
        except (UnicodeDecodeError, ValueError, RecursionError):
            raise self._damaged("has a header that is not JSON") from None
        if not isinstance(header, dict):
            raise self._damaged("has a header that is not an object")
        metadata = header.pop("__metadata__", None) or {}
        self.metadata: dict[str, str] = metadata if isinstance(metadata, dict) else {}
        self._data_start = 8 + header_bytes
        self._offsets: dict[str, int] = {}
        self.tensors: dict[str, TensorInfo] = {}
        spans: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            info, begin, end = self._read_entry(name, entry)
            self.tensors[name] = info
            self._offsets[name] = begin
            spans.append((begin, end, name))
        position = 0
        for begin, end, name in sorted(spans):
            if begin != position:
                raise self._damaged(f"places {name!r} at byte {begin}, expected {position}")
            position = end
        if self._data_start + position != size:
            raise self._damaged(
                f"describes {position} bytes of tensors but holds {size - self._data_start}"
            )

    def _read_entry(self, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [*shape, begin, end]
            if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise self._damaged(f"has an unreadable entry for {name!r}") from None
        if dtype not in _FROM_HEADER:
            raise self._damaged(f"stores {name!r} as {dtype!r}, which is not supported")
        info = TensorInfo(_FROM_HEADER[dtype], tuple(shape))
        if end - begin != info.num_bytes:
            raise self._damaged(
                f"gives {name!r} {end - begin} bytes, its shape {list(shape)} needs {info.num_bytes}"
            )
        return info, begin, end

    def _damaged(self, what: str) -> SpecDecError:
        return SpecDecError(
            f"{self.path} {what}", "the file is truncated or damaged: copy or download it again"
        )

    def read(self, name: str) -> Array:
        """Return a read-only view of a tensor, in its storage type (bfloat16 as uint16)."""
        info = self.tensors[name]
        storage = np.dtype(DTYPES[info.dtype][1])
        start = self._data_start + self._offsets[name]
        count = math.prod(info.shape)
        return np.frombuffer(self._map, storage, count, start).reshape(info.shape)


def cast(array: Array, source: str, target: str) -> Array:
    """Convert between float types with round to nearest even, bit for bit as torch's `.to` does."""
    if source == target:
        return array
    floats = ("float64", "float32", "float16", "bfloat16")
    if source not in floats or target not in floats:
        raise SpecDecError(f"cannot convert {source} to {target}", "convert it beforehand")
    if source == "bfloat16":
        array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if target != "bfloat16":
        with np.errstate(over="ignore", invalid="ignore"):
            return array.astype(DTYPES[target][1])
    with np.errstate(over="ignore", invalid="ignore"):
        single = np.ascontiguousarray(array, np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(single), np.uint32(0x7FC0), rounded).astype(np.uint16)


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    produce: Callable[[str], Array],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write a safetensors file one tensor at a time and return its sha256.

    The order in the file depends only on names and types (widest type first, then by name), as the
    safetensors library writes it, so equal contents give equal bytes. `produce(name)` returns the
    tensor in its storage type.
    """

    def rank(name: str) -> tuple[int, str]:
        return -np.dtype(DTYPES[tensors[name].dtype][1]).itemsize, name

    order = sorted(tensors, key=rank)
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    position = 0
    for name in order:
        info = tensors[name]
        end = position + info.num_bytes
        header[name] = {
            "dtype": DTYPES[info.dtype][0],
            "shape": list(info.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in (len(text).to_bytes(8, "little"), text):
            file.write(chunk)
            digest.update(chunk)
        for name in order:
            info = tensors[name]
            array = np.ascontiguousarray(produce(name))
            assert array.shape == info.shape and array.dtype == DTYPES[info.dtype][1], name
            data = memoryview(array.reshape(-1).view(np.uint8))
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if sys.version_info >= (3, 11)
            else (_hash_stream(file))
        )


def _hash_stream(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise an error that names the file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecDecError(
            f"{path} does not exist", f"check that {path.parent} is the folder you mean"
        ) from None
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise SpecDecError(f"{path} is not JSON: {error}", "mend or replace the file") from None
    if not isinstance(document, dict):
        raise SpecDecError(f"{path} holds no JSON object", "mend or replace the file")
    return document


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object with a stable layout."""
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def check_output_dir(output_dir: Path, *, force: bool) -> None:
    """Raise SpecDecError when an output folder cannot be written or would be overwritten."""
    if output_dir.exists() and not output_dir.is_dir():
        raise SpecDecError(f"{output_dir} is a file", "name a folder for the output")
    if output_dir.is_dir() and any(output_dir.iterdir()) and not force:
        raise SpecDecError(
            f"{output_dir} exists and is not empty",
            "choose another folder, or replace it with --force",
        )


@contextlib.contextmanager
def stage_folder(output_dir: Path, *, force: bool) -> Iterator[Path]:
    """Yield a hidden folder beside `output_dir`; it takes that name only if the body succeeds.

    A second process that stages the same output is refused; what a killed one left is removed.
    """
    check_output_dir(output_dir, force=force)
    output_dir = output_dir.resolve()
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = output_dir.parent / f".{output_dir.name}.partial"
    lock_path = output_dir.parent / f".{output_dir.name}.lock"
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SpecDecError(
                f"another process is writing {output_dir}", "wait for it, or choose another folder"
            ) from None
        try:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()
            yield partial
            _replace_folder(partial, output_dir)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock_path.unlink(missing_ok=True)


def _replace_folder(partial: Path, output_dir: Path) -> None:
    old = output_dir.parent / f".{output_dir.name}.old"
    if output_dir.exists():
        if old.exists():
            shutil.rmtree(old)
        output_dir.rename(old)
    try:
        partial.rename(output_dir)
    except OSError:
        if old.exists():
            old.rename(output_dir)
        raise
    shutil.rmtree(old, ignore_errors=True)


def describe_file(path: Path, sha256: str | None = None) -> dict[str, Any]:
    """Return a manifest entry of a file."""
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256 or hash_file(path)}


def write_manifest(
    folder: Path,
    *,
    kind: str,
    settings: Mapping[str, Any],
    sources: list[dict[str, Any]],
    hashes: Mapping[str, str] | None = None,
    **extra: Any,
) -> None:
    """Write `manifest.json` over the files in `folder`: what it is, from what, by which command.

    `hashes` are known sha256 sums by file name, so that large files are not read again.
    """
    outputs = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name != "manifest.json":
            outputs.append(describe_file(path, (hashes or {}).get(name)) | {"path": name})
    write_json(
        folder / "manifest.json",
        {
            "format_version": FORMAT_VERSION,
            "kind": kind,
            "tool": "specdec",
            "tool_version": __version__,
            "command": sys.argv,
            "settings": dict(settings),
            **extra,
            "sources": sources,
            "outputs": outputs,
        },
    )
