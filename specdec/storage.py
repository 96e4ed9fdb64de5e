"""Files and folders: safetensors without torch, outputs written aside and renamed, manifests.

The safetensors layout is 8 bytes of little-endian header length, a JSON header, then the tensors'
bytes (https://github.com/huggingface/safetensors, "Format"). bfloat16 has no numpy type: it is
carried as uint16 bit patterns, and float8 as uint8, beside the dtype's name.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from specdec import __version__
from specdec.errors import SpecDecError, shorten

FORMAT_VERSION = 1
JOURNAL_NAME = ".journal"  # in a folder that is being written; see convert/journal.py
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
# Types that the format has and nothing here computes with, and the bits of an element: a file that
# holds some can be listed, and is refused where one of them is to be read.
FOREIGN_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "U16": 16, "U32": 32, "U64": 64, "C64": 64,
}  # fmt: skip
_FROM_HEADER = {header: name for name, (header, _) in DTYPES.items()} | {
    name: name for name in FOREIGN_BITS
}
_ORDER = {name: i for i, name in enumerate(DTYPES)}
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 32  # what every numpy takes
MAX_NUMBER = 2**63 - 1
FLOATS = ("float64", "float32", "float16", "bfloat16")  # between which `cast` converts
# Where looking up each of the 65536 values is several times as fast as computing them.
LOOKED_UP = (("bfloat16", "float16"), ("float16", "bfloat16"), ("float16", "float32"))
CAST_ITEMS = 1 << 15
BLOCK_BYTES = 1 << 19  # read at a time where bytes are only looked at, or sorted out
SPARSE_READ_BYTES = 8192  # leaving out more than this of a row pays for a system call of its own
MAX_JSON_DEPTH = 100  # what can be printed and written again from anywhere
MAX_JSON_DIGITS = 300  # of a whole number, so that a float can hold it


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor's type and size. dtype is a key of DTYPES, or of FOREIGN_BITS."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        if self.dtype in FOREIGN_BITS:
            return math.prod(self.shape) * FOREIGN_BITS[self.dtype] // 8
        return math.prod(self.shape) * int(np.dtype(DTYPES[self.dtype][1]).itemsize)


class TensorFile:
    """A safetensors file, mapped; every header claim is checked before a byte is used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise self._damaged(f"has {size} bytes, fewer than a header's 8")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._file = open(os.dup(file.fileno()), "rb", buffering=0)
        header_bytes = int.from_bytes(self._map[:8], "little")
        if header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise self._damaged(f"claims a header of {header_bytes} bytes in a file of {size}")
        try:
            header = parse_json(self._map[8 : 8 + header_bytes])
        except ValueError as error:
            raise self._damaged(f"has a header that is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._damaged("has a header that is not an object")
        metadata = header.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata
        if not isinstance(metadata, dict) or not all(
            isinstance(value, str) for value in metadata.values()
        ):
            raise self._damaged("has metadata that is not a table of texts")
        self.metadata: dict[str, str] = metadata
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
            raise self._unsupported(name, dtype)
        info = TensorInfo(_FROM_HEADER[dtype], tuple(shape))
        if dtype in FOREIGN_BITS and math.prod(shape) * FOREIGN_BITS[dtype] % 8:
            raise self._damaged(f"gives {name!r} a shape that ends within a byte: {shape}")
        if end - begin != info.num_bytes:
            raise self._damaged(
                f"gives {name!r} {end - begin} bytes,"
                f" its shape {list(shape)} needs {info.num_bytes}"
            )
        return info, begin, end

    def _unsupported(self, name: str, dtype: str) -> SpecDecError:
        return SpecDecError(
            f"{self.path} stores {name!r} as {dtype!r}, which is not supported",
            f"store it as one of {', '.join(header for header, _ in DTYPES.values())}",
        )

    def _damaged(self, what: str) -> SpecDecError:
        return SpecDecError(
            f"{self.path} {what}", "the file is truncated or damaged: copy or download it again"
        )

    def hash_header(self) -> str:
        """Return the sha256 of the header without its metadata, as `hash_header` has it."""
        header = parse_json(self._map[8 : self._data_start])
        header.pop("__metadata__", None)
        return hashlib.sha256(_encode_json(header)).hexdigest()

    def read(self, name: str) -> Array:
        """Return a read-only view of a tensor, in its storage type (bfloat16 as uint16)."""
        info = self.tensors[name]
        if info.dtype in FOREIGN_BITS:
            raise self._unsupported(name, info.dtype)
        storage = np.dtype(DTYPES[info.dtype][1])
        start = self.get_offset(name)
        count = math.prod(info.shape)
        return np.frombuffer(self._map, storage, count, start).reshape(info.shape)

    def get_offset(self, name: str) -> int:
        """Return where in the file a tensor's bytes begin; there are `num_bytes` of them."""
        return self._data_start + self._offsets[name]

    def locate(self, name: str) -> tuple[Path, int]:
        """Return the file that holds a tensor's bytes in one run, and where in it they start."""
        return self.path, self.get_offset(name)

    def read_block(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Array:
        """Return a copy of rows [start, stop), all columns or columns [first, last).

        Read, not mapped: a file that someone shortens meanwhile is an error, not a fatal signal.
        """
        info = self.tensors[name]
        offset = self.get_offset(name)
        storage = np.dtype(DTYPES[info.dtype][1])
        row_items = math.prod(info.shape[1:])
        row_bytes = row_items * storage.itemsize
        if columns in (None, (0, row_items)):
            array = np.empty((stop - start, *info.shape[1:]), storage)
            read_into(self._file.fileno(), array, offset + start * row_bytes, self.path)
            return array
        first, last = columns
        array = np.empty((stop - start, last - first), storage)
        if row_bytes - array.itemsize * (last - first) > SPARSE_READ_BYTES:
            offset += first * storage.itemsize
            for index, row in enumerate(range(start, stop)):
                read_into(self._file.fileno(), array[index], offset + row * row_bytes, self.path)
            return array
        height = max(1, BLOCK_BYTES // max(1, row_bytes))
        rows = np.empty((min(height, stop - start), row_items), storage)
        for top in range(start, stop, height):
            part = rows[: min(height, stop - top)]
            read_into(self._file.fileno(), part, offset + top * row_bytes, self.path)
            array[top - start : top - start + len(part)] = part[:, first:last]
        return array

    def release(self) -> None:
        """Let go of the memory of what was read; views stay valid and are read from disk again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading; raise SpecDecError where it is absent, unreadable or not a file."""
    try:
        # A pipe would keep us waiting for a writer; opened like this, it is seen for what it is.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SpecDecError(
            f"{path} does not exist", f"check that {path.parent} is the folder you mean"
        ) from None
    except OSError as error:
        raise SpecDecError(
            f"{path} cannot be read: {error.strerror}", "check the path and its permissions"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SpecDecError(
            f"{path} is a folder, pipe or device, not a file", "put the file itself in its place"
        )
    return os.fdopen(descriptor, "rb")


def parse_json(data: bytes) -> Any:
    """Read JSON that others can read too; raise ValueError that says what is wrong with it.

    Beyond Python's own reader, what would be lost, or fail later, is refused: a key given twice, a
    number that is none or has no end, half of a character.
    """
    if data.startswith(codecs.BOM_UTF8):
        raise ValueError("it begins with a byte order mark")
    try:
        document = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_refuse_twins,
            parse_int=_parse_int if _LONG_NUMBER.search(data) else None,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
        )
        if b"\\ud" in data.lower():
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("half of a character, an escape between \\ud800 and \\udfff") from None
    except RecursionError:
        raise ValueError("values nested too deeply") from None
    return document


def read_into(descriptor: int, array: Array, offset: int, path: Path) -> None:
    """Fill an array with a file's bytes from an offset on; raise SpecDecError if it ends before."""
    view = array.reshape(-1).view(np.uint8).data
    while view:
        num_bytes = os.preadv(descriptor, [view], offset)
        if num_bytes == 0:
            raise SpecDecError(
                f"{path} ends at byte {os.fstat(descriptor).st_size}: it was shortened while it was"
                " read",
                "let nothing write to the file, and run it again",
            )
        view, offset = view[num_bytes:], offset + num_bytes


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; a key given twice is an error, not the last one's victory."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        twin = counts.most_common(1)[0][0]
        raise ValueError(f"the key {shorten(twin)} is given twice")
    return entries


_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_JSON_DIGITS + 1))


def _parse_int(text: str) -> int:
    if len(text) > MAX_JSON_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {shorten(text)} is too large")
    return number


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _check_depth(document: Any) -> None:
    level, depth = [document], 0
    while level:
        if (depth := depth + 1) > MAX_JSON_DEPTH:
            raise ValueError(f"values nested more than {MAX_JSON_DEPTH} deep")
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]


def cast(array: Array, source: str, target: str) -> Array:
    """Convert between float types with round to nearest even, bit for bit as torch's `.to` does."""
    if source == target:
        return array
    if source not in FLOATS or target not in FLOATS:
        raise SpecDecError(f"cannot convert {source} to {target}", "convert it beforehand")
    flat = np.ascontiguousarray(array).reshape(-1)
    result = np.empty(flat.size, DTYPES[target][1])
    if (source, target) in LOOKED_UP and flat.size > 1 << 16:
        table, codes = _list_casts(source, target), flat.view(np.uint16)
        for start in range(0, flat.size, CAST_ITEMS):
            stop = start + CAST_ITEMS
            # No index is out of range; "wrap" spares numpy a copy of the result in case one were.
            np.take(table, codes[start:stop], out=result[start:stop], mode="wrap")
        return result.reshape(np.shape(array))
    singles = np.empty(min(flat.size, CAST_ITEMS), np.float32)
    bits = np.empty(singles.size, np.uint32)
    # Blocks that stay in the processor's cache: every one is passed over several times.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start in range(0, flat.size, CAST_ITEMS):
            block, wanted = flat[start : start + CAST_ITEMS], result[start : start + CAST_ITEMS]
            # torch goes from float64 to 16 bits by way of float32, rounding twice.
            room = wanted if target == "float32" else singles[: block.size]
            _narrow(_widen(block, source, room), target, wanted, bits[: block.size])
    return result.reshape(np.shape(array))


def _widen(block: Array, source: str, single: Array) -> Array:
    """Return the values as float32, in `single` unless they are that already."""
    if source == "float32":
        return block
    if source == "bfloat16":
        np.left_shift(block, np.uint32(16), out=single.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(single, block, casting="same_kind")
    return single


def _narrow(single: Array, target: str, result: Array, rounded: Array) -> None:
    """Round float32 values into `result`; `rounded` is room for as many uint32."""
    if target != "bfloat16":
        if single is not result:
            np.copyto(result, single, casting="same_kind")
        return
    bits = single.view(np.uint32)
    np.right_shift(bits, np.uint32(16), out=rounded)
    np.bitwise_and(rounded, np.uint32(1), out=rounded)
    np.add(rounded, np.uint32(0x7FFF), out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, np.uint32(16), out=rounded)
    np.copyto(result, rounded, casting="unsafe")
    if np.isnan(single.sum()):  # cheap, and also where infinities of both signs meet
        result[np.isnan(single)] = 0x7FC0


@functools.cache
def _list_casts(source: str, target: str) -> Array:
    """Every 16-bit value of `source` in the type `target`."""
    return cast(np.arange(1 << 16, dtype=np.uint16).view(DTYPES[source][1]), source, target)


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
        header = encode_header(tensors, metadata)
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
    header = encode_header(tensors, metadata)
    return len(header) + sum(info.num_bytes for info in tensors.values())


def encode_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None) -> bytes:
    """Return the bytes of a file before its tensors', which follow in the order of their names."""
    header = _list_entries(tensors)
    if metadata:
        header = {"__metadata__": dict(sorted(metadata.items())), **header}
    text = _encode_json(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def hash_header(tensors: Mapping[str, TensorInfo]) -> str:
    """Return the sha256 of a file's header without its metadata: names, types, shapes, offsets."""
    return hashlib.sha256(_encode_json(_list_entries(tensors))).hexdigest()


def _encode_json(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


def _list_entries(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    header: dict[str, Any] = {}
    position = 0
    for name in sort_tensors(tensors):
        info = tensors[name]
        end = position + info.num_bytes
        header[name] = {
            "dtype": DTYPES[info.dtype][0],
            "shape": list(info.shape),
            "data_offsets": [position, end],
        }
        position = end
    return header


def hash_file(path: Path, is_ending: threading.Event | None = None) -> str:
    """Return the sha256 of a file, or anything once `is_ending` is set: nobody asks any more."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            if is_ending is not None and is_ending.is_set():
                break
            digest.update(chunk)
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise an error that names the file."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_HEADER_BYTES:
            raise SpecDecError(
                f"{path} has {size} bytes, more than the {MAX_HEADER_BYTES} that are read",
                "mend or replace the file",
            )
        data = file.read()
    try:
        document = parse_json(data)
        _check_depth(document)
    except ValueError as error:
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


def measure_free_space(output_dir: Path) -> tuple[Path, int]:
    """Return the existing folder that an output will lie in, and the free bytes of its disk."""
    folder = output_dir.resolve()
    while not folder.exists():
        folder = folder.parent
    return folder, shutil.disk_usage(folder).free


def list_local(*given: Path | str | None) -> list[Path]:
    """Those of some inputs that are files or folders here; hub ids and absent ones are not."""
    return [Path(path) for path in given if path is not None and Path(path).exists()]


def get_partial(output_dir: Path) -> Path:
    """Return the hidden folder in which `output_dir` comes about."""
    output_dir = output_dir.resolve()
    return output_dir.parent / f".{output_dir.name}.partial"


@contextlib.contextmanager
def stage_folder(
    output_dir: Path, *, force: bool, inputs: Sequence[Path] = (), resume: bool = False
) -> Iterator[Path]:
    """Yield a hidden folder beside `output_dir`; it takes that name only if the body succeeds.

    What has come under that name meanwhile stays, and SpecDecError is raised, without `force`. A
    second process that stages the same output is refused; what a killed one left is removed. With
    `resume` that is yielded instead, and kept when the work fails.
    """
    output_dir = output_dir.resolve()
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = get_partial(output_dir)
    old = output_dir.parent / f".{output_dir.name}.old"
    with _hold_lock(output_dir):
        try:
            if old.exists() and not output_dir.exists():
                old.rename(output_dir)  # a process was killed between the two renames
            check_output_dir(output_dir, force=force, inputs=inputs)
            if partial.exists() and not resume:
                shutil.rmtree(partial)
            partial.mkdir(exist_ok=True)
            yield partial
            if not force and output_dir.exists() and _is_in_use(output_dir):
                raise _refuse_newcomer(output_dir)
            (partial / JOURNAL_NAME).unlink(missing_ok=True)
            _sync_tree(partial)
            _place_folder(partial, output_dir, old, force=force)
            _sync(output_dir.parent)
        finally:
            if not resume:
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


def _sync_tree(folder: Path) -> None:
    """Wait until everything in a folder is on the disk."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # of which some file systems can't
            raise
    finally:
        os.close(descriptor)


def _is_in_use(output_dir: Path) -> bool:
    return not output_dir.is_dir() or any(output_dir.iterdir())


def _refuse_newcomer(output: Path) -> SpecDecError:
    return SpecDecError(
        f"{output} was not there at the start, but somebody has made it meanwhile",
        "move it away, or choose another name, and run this again",
    )


def _place_folder(partial: Path, output_dir: Path, old: Path, *, force: bool) -> None:
    if force and output_dir.is_dir():
        if old.exists():
            shutil.rmtree(old)
        output_dir.rename(old)
    try:
        partial.rename(output_dir)  # an empty folder gives way, nothing else does
    except OSError as error:
        if old.exists() and not output_dir.exists():
            old.rename(output_dir)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _refuse_newcomer(output_dir) from None
        raise
    shutil.rmtree(old, ignore_errors=True)


def place_file(partial: Path, output: Path, *, force: bool) -> None:
    """Give a finished file its name; without force, raise SpecDecError where that is taken."""
    if not force:
        try:  # takes the name, which a rename alone would take from anybody
            os.close(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        except FileExistsError:
            raise _refuse_newcomer(output) from None
    partial.replace(output)


def describe_file(path: Path, sha256: str | None = None) -> dict[str, Any]:
    """Return a manifest entry of a file."""
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256 or hash_file(path)}


def list_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that can have had a part in a file."""
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
        if name not in ("manifest.json", JOURNAL_NAME):
            outputs.append(describe_file(path, (hashes or {}).get(name)) | {"path": name})
    write_json(
        folder / "manifest.json",
        {
            "format_version": FORMAT_VERSION,
            "kind": kind,
            "tool": "specdec",
            "tool_version": __version__,
            "libraries": list_versions(),
            "command": sys.argv,
            "settings": dict(settings),
            **extra,
            "sources": sources,
            "outputs": outputs,
        },
    )
