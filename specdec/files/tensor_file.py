"""safetensors without torch.

The layout is 8 bytes of little-endian header length, a JSON header, then the tensors' bytes
(https://github.com/huggingface/safetensors, "Format"). bfloat16 has no numpy type: it is carried as
uint16 bit patterns, and both kinds of float8 as uint8, together with the dtype's name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.reading import Array, check_length, open_file, parse_json, read_into

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
    "float8_e8m0fnu": ("F8_E8M0", np.uint8),
    "float8_e4m3fn": ("F8_E4M3", np.uint8),
    "int8": ("I8", np.int8),
    "uint8": ("U8", np.uint8),
    "bool": ("BOOL", np.uint8),
}
# Types that the format has and nothing here computes with, and the bits of an element: a file that
# holds some can be listed, and is refused where one of them is to be read.
FOREIGN_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "U16": 16, "U32": 32, "U64": 64, "C64": 64,
}  # fmt: skip
_FROM_HEADER = {header: name for name, (header, _) in DTYPES.items()} | {
    name: name for name in FOREIGN_BITS
}
_ORDER = {name: i for i, name in enumerate(DTYPES)}
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 32  # what every numpy takes
MAX_NUMBER = 2**63 - 1
BLOCK_BYTES = 1 << 19  # read at a time where bytes are only looked at, or sorted out
SPARSE_READ_BYTES = 8192  # leaving out more than this of a row pays for a system call of its own


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor's type and size. dtype is a key of DTYPES, or of FOREIGN_BITS."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all matrices, one below the other if there are several; a vector's elements."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 2 else math.prod(self.shape[:1])

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one of `num_rows`."""
        return self.shape[-1:] if len(self.shape) > 1 else ()

    @property
    def num_bytes(self) -> int:
        if self.dtype in FOREIGN_BITS:
            return math.prod(self.shape) * FOREIGN_BITS[self.dtype] // 8
        return math.prod(self.shape) * int(np.dtype(DTYPES[self.dtype][1]).itemsize)


def _parse_entry(entry: Any) -> tuple[str, list[int], int, int]:
    """Return a header entry's type, shape and span; ValueError and its kin for a wrong one."""
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, begin, end]
    if not isinstance(dtype, str) or not all(
        type(n) is int and 0 <= n <= MAX_NUMBER for n in numbers
    ):
        raise ValueError
    # An empty tensor may still claim dimensions that no array can have.
    if len(shape) > MAX_DIMENSIONS or math.prod(n or 1 for n in shape) > MAX_NUMBER // 8:
        raise ValueError
    return dtype, shape, begin, end


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
        header = self._parse_header(self._map[8 : 8 + header_bytes])
        self.metadata: dict[str, str] = self._take_metadata(header)
        self._data_start = 8 + header_bytes
        self._offsets: dict[str, int] = {}
        self.tensors: dict[str, TensorInfo] = {}
        spans: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            info, begin, end = self._read_entry(name, entry)
            self.tensors[name] = info
            self._offsets[name] = begin
            spans.append((begin, end, name))
        self._check_spans(spans, size - self._data_start)

    def _parse_header(self, header_bytes: bytes) -> dict[str, Any]:
        try:
            header = parse_json(header_bytes)
        except ValueError as error:
            raise self._damaged(f"has a header that is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._damaged("has a header that is not an object")
        return header

    def _take_metadata(self, header: dict[str, Any]) -> dict[str, str]:
        """Take the table of texts out of a header that is no tensor's entry."""
        metadata = header.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata
        if not isinstance(metadata, dict) or not all(
            isinstance(value, str) for value in metadata.values()
        ):
            raise self._damaged("has metadata that is not a table of texts")
        return metadata

    def _check_spans(self, spans: list[tuple[int, int, str]], num_bytes: int) -> None:
        """Raise SpecDecError where tensors overlap, or leave bytes of the data between them."""
        position = 0
        for begin, end, name in sorted(spans):
            if begin != position:
                raise self._damaged(f"places {name!r} at byte {begin}, expected {position}")
            position = end
        if position != num_bytes:
            raise self._damaged(f"describes {position} bytes of tensors but holds {num_bytes}")

    def _read_entry(self, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
        try:
            dtype, shape, begin, end = _parse_entry(entry)
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

    def _damaged(self, fact: str) -> SpecDecError:
        return SpecDecError(
            f"{self.path} {fact}", "the file is truncated or damaged: copy or download it again"
        )

    def hash_header(self) -> str:
        """Return the sha256 of the header without its metadata, as `hash_header` has it."""
        header = parse_json(self._map[8 : self._data_start])
        header.pop("__metadata__", None)
        return hashlib.sha256(_encode_json(header)).hexdigest()

    def read(self, name: str) -> Array:
        """Return a read-only view of a tensor, in its storage type (bfloat16 as uint16).

        A file that is shortened after this ends the process with SIGBUS where its end is read.
        """
        info = self.tensors[name]
        if info.dtype in FOREIGN_BITS:
            raise self._unsupported(name, info.dtype)
        storage = np.dtype(DTYPES[info.dtype][1])
        start = self.get_offset(name)
        check_length(self._file.fileno(), start + info.num_bytes, self.path)
        count = math.prod(info.shape)
        return np.frombuffer(self._map, storage, count, start).reshape(info.shape)

    def are_equal(self, name: str, other_name: str) -> bool:
        """Return whether the file has two tensors of one type and shape, equal byte for byte."""
        if self.tensors[name] != self.tensors.get(other_name):
            return False
        numbers, other_numbers = (
            self.read(tensor).reshape(-1).view(np.uint8) for tensor in (name, other_name)
        )
        slices = (
            slice(start, start + BLOCK_BYTES) for start in range(0, len(numbers), BLOCK_BYTES)
        )
        return all(np.array_equal(numbers[part], other_numbers[part]) for part in slices)

    def get_offset(self, name: str) -> int:
        """Return where in the file a tensor's bytes begin; there are `num_bytes` of them."""
        return self._data_start + self._offsets[name]

    def locate(self, name: str) -> tuple[Path, int]:
        """Return the file that holds a tensor's bytes in one run, and where in it they start."""
        return self.path, self.get_offset(name)

    def read_block(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Array:
        """Return a copy of rows [start, stop) of `num_rows`, all columns or [first, last).

        Read, not mapped: a file that someone shortens meanwhile is an error, not a fatal signal.
        """
        info = self.tensors[name]
        offset = self.get_offset(name)
        storage = np.dtype(DTYPES[info.dtype][1])
        row_items = math.prod(info.row_shape)
        row_bytes = row_items * storage.itemsize
        if columns in (None, (0, row_items)):
            array = np.empty((stop - start, *info.row_shape), storage)
            read_into(self._file.fileno(), array, offset + start * row_bytes, self.path)
            return array
        first_column, stop_column = columns
        array = np.empty((stop - start, stop_column - first_column), storage)
        if row_bytes - array.itemsize * (stop_column - first_column) > SPARSE_READ_BYTES:
            offset += first_column * storage.itemsize
            for index, row in enumerate(range(start, stop)):
                read_into(self._file.fileno(), array[index], offset + row * row_bytes, self.path)
            return array
        height = max(1, BLOCK_BYTES // max(1, row_bytes))
        rows = np.empty((min(height, stop - start), row_items), storage)
        for top in range(start, stop, height):
            block = rows[: min(height, stop - top)]
            read_into(self._file.fileno(), block, offset + top * row_bytes, self.path)
            array[top - start : top - start + len(block)] = block[:, first_column:stop_column]
        return array

    def release(self) -> None:
        """Let go of the memory of what was read; views stay valid and are read from disk again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    produce: Callable[[str], Array | Iterable[Array]],
    metadata: Mapping[str, str] | None = None,
    alignment: int = 8,
) -> str:
    """Write a safetensors file one tensor at a time and return its sha256.

    The order in the file depends only on names and types (by type as in DTYPES, then by name), as
    the safetensors library writes it, so equal contents give equal bytes. `produce(name)` returns
    the tensor in its storage type, or an iterable of chunks that are it when laid end to end.
    alignment: of the first tensor in the file, in bytes.
    """
    order = sort_tensors(tensors)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        header = encode_header(tensors, metadata, alignment)
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


def encode_header(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None, alignment: int = 8
) -> bytes:
    """Return the bytes of a file before its tensors', which follow in the order of their names."""
    header = _list_entries(tensors)
    if metadata:
        header = {"__metadata__": dict(sorted(metadata.items())), **header}
    text = _encode_json(header)
    text += b" " * (-(8 + len(text)) % alignment)
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
