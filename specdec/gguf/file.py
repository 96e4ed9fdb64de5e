"""GGUF files: metadata, and tensors by llama.cpp's names, whose rows are read when they are used.

The layout is that of ggml's docs/gguf.md, versions 2 and 3, in little-endian order. Types of blocks
and their values are those of the package `gguf`; the header is read here, in one pass, and every
claim of it is checked before a byte is used.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import SpecDecError, join_names, shorten
from specdec.files.folders import GGUF_MAGIC, list_parts
from specdec.files.reading import Array, open_file, read_into
from specdec.files.tensor_file import DTYPES
from specdec.system.libraries import import_gguf

VERSIONS = (2, 3)
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TYPES = (
    *PLAIN, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
# Numbers of the types of values -> NumPy's names of them.
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
           11: "<i8", 12: "<f8"}  # fmt: skip
FLOAT, TEXT, ARRAY = 6, 8, 9
MAX_HEADER_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. shape: the slowest dimension first; kind: ggml's type by its name.

    A row is one of the last dimension, in whole blocks; a vector's rows are its elements.
    """

    file: GgufFile
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def read(self, start: int, stop: int) -> Array:
        """Return the bytes of rows [start, stop), uint8 [rows, row bytes]."""
        rows = np.empty((stop - start, self.row_bytes), np.uint8)
        offset = self.offset + start * self.row_bytes
        read_into(self.file.descriptor, rows, offset, self.file.path)
        return rows


class GgufFile:
    """One file: `metadata` by key, `tensors` by llama.cpp's name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened = open_file(path)
        self.descriptor = self._opened.fileno()
        self.size = os.fstat(self.descriptor).st_size
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self._position = 0
        try:
            infos = self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise self._damaged(f"has a header that cannot be read: {error}") from None
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"has an alignment of {shorten(alignment)}")
        begin, expected_offset = _pad(self._position, alignment), 0
        for name, shape, kind, offset in infos:
            if offset != expected_offset:  # as gguf.cpp of llama.cpp requires it
                raise self._damaged(
                    f"places {shorten(name)} at byte {offset} of its data, and the tensors before"
                    f" it end at byte {expected_offset}, with alignment {alignment}"
                )
            self._add(name, shape, kind, begin + offset)
            expected_offset += _pad(self.tensors[name].num_bytes, alignment)

    def _damaged(self, fact: str) -> SpecDecError:
        return SpecDecError(
            f"{self.path} {fact}", "the file is truncated or damaged: copy or download it again"
        )

    def _take(self, num_bytes: int) -> bytes:
        self._position += num_bytes
        if self._position > min(self.size, MAX_HEADER_BYTES):
            raise self._damaged(f"ends within its header, at byte {self.size}")
        return self._opened.read(num_bytes)

    def _unpack(self, letters: str) -> tuple[Any, ...]:
        return struct.unpack("<" + letters, self._take(struct.calcsize("<" + letters)))

    def _read_text(self) -> str:
        (length,) = self._unpack("Q")
        return self._take(length).decode()

    def _read_value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._read_text()
        inner, count = self._unpack("IQ") if kind == ARRAY else (kind, 1)
        if inner == TEXT:
            return [self._read_text() for _ in range(count)]
        if inner not in SCALARS:
            raise self._damaged(f"has values of the unknown type {inner}")
        dtype = np.dtype(SCALARS[inner])
        numbers = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        if kind == ARRAY:
            return numbers
        # The decimal that was rounded to it: 1e-05, not 9.99999975e-06.
        return float(str(np.float32(numbers[0]))) if kind == FLOAT else numbers[0]

    def _read_header(self) -> list[tuple[str, tuple[int, ...], int, int]]:
        if self._take(4) != GGUF_MAGIC:
            raise SpecDecError(f"{self.path} is no GGUF file", "check the path")
        (version,) = self._unpack("I")
        if version not in VERSIONS:
            raise SpecDecError(
                f"{self.path} is GGUF of version {version}, or in big-endian order",
                f"versions {join_names(list(map(str, VERSIONS)))} are read, in little-endian order",
            )
        num_tensors, num_values = self._unpack("QQ")
        for _ in range(num_values):
            key = self._read_text()
            (kind,) = self._unpack("I")
            if key in self.metadata:
                raise self._damaged(f"gives the key {shorten(key)} twice")
            self.metadata[key] = self._read_value(kind)
        infos = []
        for _ in range(num_tensors):
            name = self._read_text()
            (dimensions,) = self._unpack("I")
            if not 1 <= dimensions <= 4:
                raise self._damaged(f"gives {shorten(name)} {dimensions} dimensions")
            shape = self._unpack("Q" * dimensions)[::-1]
            infos.append((name, shape, *self._unpack("IQ")))
        return infos

    def _add(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> None:
        gguf = import_gguf(f"reading {self.path}")
        kinds = {int(kind): kind for kind in gguf.GGMLQuantizationType}
        kind = kinds[number].name if number in kinds else f"number {number}"
        if kind not in TYPES:
            raise SpecDecError(
                f"{self.path}: {name} is of ggml's type {kind}, which is not read",
                f"take a file of these types: {', '.join(TYPES)}",
            )
        block, block_bytes = gguf.GGML_QUANT_SIZES[kinds[number]]
        is_matrix = len(shape) > 1
        if name in self.tensors:
            raise self._damaged(f"has the tensor {shorten(name)} twice")
        if is_matrix and shape[-1] % block or not is_matrix and block > 1 or 0 in shape:
            raise self._damaged(f"gives {name} of type {kind} the shape {list(shape)}")
        row_bytes = shape[-1] // block * block_bytes if is_matrix else block_bytes
        stored = StoredTensor(self, name, kind, shape, offset, row_bytes)
        if offset + stored.num_bytes > self.size:
            raise self._damaged(
                f"has {self.size} bytes, and {name} ends at byte {offset + stored.num_bytes}"
            )
        self.tensors[name] = stored


def _pad(position: int, alignment: int) -> int:
    """Return the first aligned position from this one on."""
    return -(-position // alignment) * alignment


def open_parts(path: Path) -> tuple[list[GgufFile], dict[str, StoredTensor]]:
    """Open a file, or all of which the first is given; return their tensors, too.

    Raises SpecDecError unless they belong together.
    """
    files: list[GgufFile] = []
    tensors: dict[str, StoredTensor] = {}
    for number, part_path in enumerate(paths := list_parts(path)):
        if not part_path.is_file():
            raise SpecDecError(
                f"{path} is the first of {len(paths)} files, and {part_path.name} is not there",
                "finish the download of all of them into one folder",
            )
        file = GgufFile(part_path)
        position = file.metadata.get("split.no", 0), file.metadata.get("split.count", 0) or 1
        if position != (number, len(paths)):
            raise SpecDecError(
                f"{part_path} says that split.no, counted from 0, is {shorten(position[0])} of"
                f" {shorten(position[1])}, and its name says part {number + 1} of {len(paths)}",
                "give the files the names that gguf-split gave them, NAME-00001-of-0000N.gguf",
            )
        if twins := tensors.keys() & file.tensors.keys():
            raise SpecDecError(
                f"{part_path} holds tensors of another part: {join_names(sorted(twins))}",
                "download all parts again",
            )
        files.append(file)
        tensors |= file.tensors
    expected = files[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise SpecDecError(
            f"{path} says that there are {expected} tensors, its files hold {len(tensors)}",
            "download all parts again",
        )
    return files, tensors


def decode(rows: Array, kind: str) -> Array:
    """Return values of rows of blocks: float32, or a plain type as stored (bfloat16 as uint16).

    rows: uint8 [rows, bytes]. They are the bits that the package `gguf` computes.
    """
    if kind in PLAIN:
        return rows.view(DTYPES[PLAIN[kind]][1])
    gguf = import_gguf(f"a matrix of type {kind}")
    values: Array = gguf.quants.dequantize(rows, getattr(gguf.GGMLQuantizationType, kind))
    return values
