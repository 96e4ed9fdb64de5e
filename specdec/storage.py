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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec import __version__
from specdec.errors import SpecDecError

FORMAT_VERSION = 1
Array = npt.NDArray[Any]

# name here -> (name in a safetensors header, numpy storage type), in the order in which the
# safetensors library writes them into a file.
DTYPES: dict[str, tuple[str, Any]] = {
    "int64": ("I64", np.int64),
    "float64": ("F64", np.float64),
    "float32": ("F32", np.float32),
    "int32": ("I32", np.int32),
    "bfloat16": ("BF16", np.uint16),
    "float16": ("F16", np.float16),
    "int16": ("I16", np.int16),
    "float8_e4m3fn": ("F8_E4M3", np.uint8),
    "int8": ("I8", np.int8),
    "uint8": ("U8", np.uint8),
    "bool": ("BOOL", np.uint8),
}
_FROM_HEADER = {header: name for name, (header, _) in DTYPES.items()}
_ORDER = {name: i for i, name in enumerate(DTYPES)}
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 32  # what every numpy takes
MAX_NUMBER = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor's type and size. dtype is a key of DTYPES."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(np.dtype(DTYPES[self.dtype][1]).itemsize)


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
            header = json.loads(
                self._map[8 : 8 + header_bytes].decode("utf-8"), object_pairs_hook=_refuse_twins
            )
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
            if not isinstance(dtype, str) or not all(
                type(n) is int and 0 <= n <= MAX_NUMBER for n in numbers
            ):
                raise ValueError
            # An empty tensor may still claim dimensions that no array can have.
            if len(shape) > MAX_DIMENSIONS or math.prod(n or 1 for n in shape) > MAX_NUMBER // 8:
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise self._damaged(f"has an unreadable entry for {name!r}") from None
        if dtype not in _FROM_HEADER:
            raise SpecDecError(
                f"{self.path} stores {name!r} as {dtype!r}, which is not supported",
                f"store it as one of {', '.join(_FROM_HEADER)}",
            )
        info = TensorInfo(_FROM_HEADER[dtype], tuple(shape))
        if end - begin != info.num_bytes:
            raise self._damaged(
                f"gives {name!r} {end - begin} bytes,"
                f" its shape {list(shape)} needs {info.num_bytes}"
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

    def release(self) -> None:
        """Let go of the memory of what was read; views stay valid and are read from disk again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; a key given twice is an error, not the last one's victory."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key is given twice")
    return entries


def cast(array: Array, source: str, target: str) -> Array:
    """Convert between float types with round to nearest even, bit for bit as torch's `.to` does."""
    if source == target:
        return array
    floats = ("float64", "float32", "float16", "bfloat16")
    if source not in floats or target not in floats:
        raise SpecDecError(f"cannot convert {source} to {target}", "convert it beforehand")
    if source == "bfloat16":
        array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if source == "float64":  # torch goes to 16 bits by way of float32, rounding twice
            array = array.astype(np.float32)
        if target != "bfloat16":
            return array.astype(DTYPES[target][1], copy=False)
        single = np.asarray(array, np.float32, order="C")
        bits = single.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        return np.asarray(np.where(np.isnan(single), np.uint32(0x7FC0), rounded), np.uint16)


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    produce: Callable[[str], Array | Iterable[Array]],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write a safetensors file one tensor at a time and return its sha256.

    The order in the file depends only on names and types (by type as in DTYPES, then by name), as
    the safetensors library writes it, so equal contents give equal bytes. `produce(name)` returns
    the tensor in its storage type, or an iterable of chunks that are it when laid end to end.
    """
    order = sort_tensors(tensors)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        header = _encode_header(tensors, order, metadata)
        file.write(header)
        digest.update(header)
        for name in order:
            info = tensors[name]
            produced = produce(name)
            chunks: Iterable[Array] = produced
            if isinstance(produced, np.ndarray):
                assert produced.shape == info.shape, name
                chunks = (produced,)
            num_bytes = 0
            for chunk in chunks:
                array = np.asarray(chunk, order="C")
                assert array.dtype == DTYPES[info.dtype][1], name
                data = array.reshape(-1).view(np.uint8).data
                file.write(data)
                digest.update(data)
                num_bytes += array.nbytes
            assert num_bytes == info.num_bytes, name
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def sort_tensors(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """List the tensors' names in their order in a file."""
    return sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))


def measure_tensor_file(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None
) -> int:
    """Return how many bytes `write_tensor_file` writes for these tensors."""
    header = _encode_header(tensors, sort_tensors(tensors), metadata)
    return len(header) + sum(info.num_bytes for info in tensors.values())


def _encode_header(
    tensors: Mapping[str, TensorInfo], order: Sequence[str], metadata: Mapping[str, str] | None
) -> bytes:
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
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
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def hash_file(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
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


def check_output_dir(output_dir: Path, *, force: bool, inputs: Sequence[Path] = ()) -> None:
    """Raise SpecDecError when an output folder cannot be written or would be overwritten.

    `inputs` are folders and files that the work reads: the output may not take their place.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise SpecDecError(f"{output_dir} is a file", "name a folder for the output")
    output = output_dir.resolve()
    for kept in (Path.cwd(), *(path.resolve() for path in inputs)):
        if output == kept or output in kept.parents:
            raise SpecDecError(
                f"{output_dir} is or holds {kept}, which it would replace",
                "choose another folder for the output",
            )
    if output_dir.is_dir() and any(output_dir.iterdir()) and not force:
        raise SpecDecError(
            f"{output_dir} exists and is not empty",
            "choose another folder, or replace it with --force",
        )


def list_local(*given: Path | str | None) -> list[Path]:
    """Those of some inputs that are files or folders here; hub ids and absent ones are not."""
    return [Path(path) for path in given if path is not None and Path(path).exists()]


@contextlib.contextmanager
def stage_folder(output_dir: Path, *, force: bool, inputs: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield a hidden folder beside `output_dir`; it takes that name only if the body succeeds.

    A second process that stages the same output is refused; what a killed one left is removed.
    """
    output_dir = output_dir.resolve()
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = output_dir.parent / f".{output_dir.name}.partial"
    old = output_dir.parent / f".{output_dir.name}.old"
    with _hold_lock(output_dir):
        try:
            if old.exists() and not output_dir.exists():
                old.rename(output_dir)  # a process was killed between the two renames
            check_output_dir(output_dir, force=force, inputs=inputs)
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()
            yield partial
            _replace_folder(partial, output_dir, old)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _hold_lock(output_dir: Path) -> Iterator[None]:
    """Hold a lock file beside `output_dir`, or raise SpecDecError when another process does."""
    path = output_dir.parent / f".{output_dir.name}.lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before us may have removed the file between our open and our lock; a third
            # process would then lock a new file of that name.
            if not (path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise SpecDecError(
                f"another process is writing {output_dir}", "wait for it, or choose another folder"
            ) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _replace_folder(partial: Path, output_dir: Path, old: Path) -> None:
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
