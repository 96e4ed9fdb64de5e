"""Files that torch.save wrote, read as weights alone: nothing in them is ever executed.

torch is imported when the first such file is opened, and not before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from specdec.errors import SpecDecError, shorten, summarize
from specdec.files.folders import MAX_PICKLE_BYTES
from specdec.files.reading import Array, open_file
from specdec.files.tensor_file import DTYPES, TensorInfo
from specdec.model.sharding import view_rows
from specdec.system import logs

if TYPE_CHECKING:
    import torch

logger = logs.get_logger(__name__)

ZIP_MAGIC = b"PK\x03\x04"
# Limits of data.pkl beside MAX_PICKLE_BYTES: a tensor's entry has some 120 bytes and its name.
BASE_PICKLE_BYTES, PICKLE_BYTES_A_RECORD = 1 << 20, 4096
MAX_UNPACKING = 20  # times the bytes of compressed records; trained weights have 1 to 2
# torch's names of types that only a safetensors header names otherwise; see storage.FOREIGN_BITS.
FOREIGN_NAMES = {
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "complex64": "C64",
}  # fmt: skip
# The words in which torch's weights-only reader names a class that is no tensor.
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_SAVE_HINT = "save the model's state_dict() alone, best as model.safetensors"


class TorchFile:
    """A flat dictionary of tensors; mapped, or read whole where the file is of the old format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_file(path) as file:
            self._size = os.fstat(file.fileno()).st_size
            reason = "is not of the format that torch has written since 1.6"
            if file.read(len(ZIP_MAGIC)) == ZIP_MAGIC:
                reason = _check_records(path, file)
        self._is_mapped = not reason
        if reason:
            logger.warning(
                "%s %s: all of its %.1f MB go into memory", path, reason, self._size / 1e6
            )
        self._state = _load(path, is_mapped=self._is_mapped)
        self.tensors = {name: self._describe(name, value) for name, value in self._state.items()}
        self._ranges = list(_find_mappings(path)) if self._is_mapped else []

    def read(self, name: str) -> Array:
        """Return a tensor in its storage type (bfloat16 as uint16), as it lies in the file."""
        from specdec.files.torch_tensors import to_array

        # A mapping of what is no longer there ends the process, so look before.
        size = self.path.stat().st_size if self._is_mapped else self._size
        if size != self._size:
            raise SpecDecError(
                f"{self.path} has {size} bytes, {self._size} when it was opened",
                "let nothing write to the file, and run it again",
            )
        return to_array(self._state[name])

    def read_block(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Array:
        """Return rows [start, stop), all columns or columns [first, last)."""
        rows = view_rows(self.read(name))[start:stop]
        return rows if columns is None else rows[:, columns[0] : columns[1]]

    def locate(self, name: str) -> None:
        """Return None: only torch knows where a tensor's bytes lie."""

    def release(self) -> None:
        """Let go of the memory of what was read from the mapping; it is read again if needed."""
        for start, stop in self._ranges:
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED
            )

    def _describe(self, name: str, tensor: torch.Tensor) -> TensorInfo:
        torch_name = str(tensor.dtype).removeprefix("torch.")
        dtype = torch_name if torch_name in DTYPES else FOREIGN_NAMES.get(torch_name)
        if dtype is None:
            raise SpecDecError(
                f"{self.path} stores {shorten(name)} as {torch_name}, which is not supported",
                f"store it as one of {', '.join(DTYPES)}",
            )
        return TensorInfo(dtype, tuple(tensor.shape))


def _check_records(path: Path, file: BinaryIO) -> str:
    """Return why a zip archive's tensors are no bytes of the file, an empty text where they are.

    Raises SpecDecError for an archive that unpacks to what no model needs: unpickling it would take
    minutes and fill the memory.
    """
    try:
        records = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, EOFError, struct.error, ValueError, NotImplementedError):
        return ""  # torch says what is wrong with it
    packed = [record for record in records if record.compress_type != zipfile.ZIP_STORED]
    unpacked = sum(record.file_size for record in packed)
    _check_sizes(path, records, packed)
    lost_record = _find_lost(file, records)
    if lost_record is not None:
        raise SpecDecError(
            f"{path} cannot be read as weights alone: its record {shorten(lost_record)} is not"
            " where its list of records places it",
            "the file is damaged or an unfinished download: copy or download it again",
        )
    if packed:
        return f"has {len(packed)} compressed records, {unpacked / 1e6:.1f} MB when unpacked"
    if _has_other_order(file, records):
        return "was written in another byte order"  # torch turns it in memory
    return ""


def _check_sizes(path: Path, records: list[zipfile.ZipInfo], packed: list[zipfile.ZipInfo]) -> None:
    """Raise SpecDecError for a pickle, or packed records, of more bytes than weights have."""
    pickled = sum(r.file_size for r in records if r.filename.endswith("data.pkl"))
    most_bytes = min(MAX_PICKLE_BYTES, BASE_PICKLE_BYTES + PICKLE_BYTES_A_RECORD * len(records))
    unpacked = sum(record.file_size for record in packed)
    packed_bytes = max(1, sum(record.compress_size for record in packed))
    if pickled > most_bytes or unpacked > MAX_UNPACKING * packed_bytes:
        excess = f"its data.pkl has {pickled}"
        if pickled <= most_bytes:
            excess = f"they unpack to {unpacked}"
        raise SpecDecError(
            f"{path} holds {len(records)} records, and {excess} bytes: no weights do",
            "do not trust the file; get the model from its origin",
        )


def _has_other_order(file: BinaryIO, records: list[zipfile.ZipInfo]) -> bool:
    """Return whether an archive was written in another byte order than this machine's."""
    order = next((r for r in records if r.filename.endswith("/byteorder")), None)
    other_order = {"little": b"big", "big": b"little"}[sys.byteorder]
    return order is not None and _read_start(file, order).endswith(other_order)


def _find_lost(file: BinaryIO, records: list[zipfile.ZipInfo]) -> str | None:
    """Return the first record that begins with no header: torch takes any bytes for one."""
    return next((r.filename for r in records if _read_start(file, r)[:4] != ZIP_MAGIC), None)


def _read_start(file: BinaryIO, record: zipfile.ZipInfo) -> bytes:
    """Return a stored record's header, name and bytes, up to some that no short record has."""
    if record.header_offset < 0:
        return b""
    file.seek(record.header_offset)
    start = file.read(30)
    names = sum(struct.unpack("<HH", start[26:30])) if len(start) == 30 else 0
    return start + file.read(names + min(record.file_size, 16))


def _load(path: Path, *, is_mapped: bool) -> dict[str, torch.Tensor]:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of types that torch will give up one day
            state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # noqa: BLE001 - damaged files make torch raise any kind
        if foreign := _GLOBAL.search(str(error)):
            raise SpecDecError(
                f"{path} cannot be read as weights alone: it holds {foreign[1]}, which is not"
                " a tensor, and might run code",
                _SAVE_HINT,
            ) from None
        raise SpecDecError(
            f"{path} cannot be read as weights alone: {_summarize(error)}",
            "the file is truncated, damaged or not a file of torch.save: copy or download it again",
        ) from None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    ):
        raise SpecDecError(f"{path} is not a flat dictionary of tensors", _SAVE_HINT)
    unusual = [name for name, value in state.items() if not _is_plain(value)]
    if unusual:
        raise SpecDecError(
            f"{path} holds sparse, quantized or empty-shelled tensors, {shorten(unusual[0])} first"
            f" of {len(unusual)}",
            "save the model with dense tensors on the CPU",
        )
    return state


def _summarize(error: Exception) -> str:
    """Return what was wrong, without torch's advice to load the file in a way that runs code."""
    text = str(error)
    if text.startswith("Weights only load failed"):
        match = re.search(r"WeightsUnpickler error: ([^\n]*)", text)
        return "its pickle holds more than weights" + (f" ({match[1][:200]})" if match else "")
    return summarize(error)[:200]


def _find_mappings(path: Path) -> Iterator[tuple[int, int]]:
    """Find where this process has mapped a file: torch does not tell where it has.

    Asked of the system, not of the tensors: a file may hold some whose memory is not mapped.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists() or not hasattr(mmap, "MADV_DONTNEED"):
        return
    for line in maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == os.path.realpath(path):
            start, _, stop = fields[0].partition("-")
            yield int(start, 16), int(stop, 16)


def _is_plain(tensor: torch.Tensor) -> bool:
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_neg()
    )
