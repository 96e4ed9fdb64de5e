"""Zeros in the place of weights, as an unfinished download leaves them in a file of full size.

Legitimate are biases, norms to which 1 is added, matrices that begin as zero (Medusa's and
ReDrafter's residual linears, DSpark's Markov head, a mask's hidden state), rows of zeros after a
vocabulary or an inner size, and columns of zeros after a row.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from specdec.errors import SpecDecError, count, join_names
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo
from specdec.model.tensors import MARKOV_HEAD, ROUTER

PAGE_BYTES = 4096  # shorter runs of zeros are not looked at, but for a tensor's whole
_WORDS = PAGE_BYTES // 8
# Canonical names: of matrices that trainers begin with zeros, and of those whose zeros make a layer
# or an expert do nothing, as merges of models have them.
INITIAL = (".linear.weight", MARKOV_HEAD)
IDENTITY = (".dense.weight", ".proj.weight", f".{ROUTER}", "_gate.weight")


class RowSource(Protocol):
    """A source of tensors by rows."""

    @property
    def tensors(self) -> Any: ...

    def read_block(self, name: str, start: int, stop: int) -> Array: ...


def may_be_zero(name: str, *, is_added_to: bool) -> bool | None:
    """Return whether a tensor may be all zero, by its canonical name; None: it does nothing then.

    is_added_to: whether 1 is added to its elements.
    """
    if is_added_to or not name.endswith(".weight") or name.endswith(INITIAL):
        return True
    return None if name.endswith(IDENTITY) else False


class ZeroFinder:
    """Finds the runs of zero bytes in a tensor's rows, which are given in order.

    A page's first word is looked at alone, and the others where that is zero.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.runs: list[tuple[int, int]] = []  # of whole pages

    def add(self, data: Array) -> None:
        """Look at the next bytes; data: contiguous."""
        raw = data.reshape(-1).view(np.uint8)
        page_bytes = raw.size // PAGE_BYTES * PAGE_BYTES
        words = raw[:page_bytes].view(np.uint64).reshape(-1, _WORDS)
        for page in np.flatnonzero(words[:, 0] == 0):
            if not words[page].any():
                self._note(int(page) * PAGE_BYTES, PAGE_BYTES)
        if page_bytes < raw.size and not raw[page_bytes:].any():
            self._note(page_bytes, raw.size - page_bytes)
        self.num_bytes += raw.size

    def _note(self, offset: int, num_bytes: int) -> None:
        start = self.num_bytes + offset
        if self.runs and self.runs[-1][1] == start:
            start = self.runs.pop()[0]
        self.runs.append((start, self.num_bytes + offset + num_bytes))

    @property
    def is_zero(self) -> bool:
        """Return whether all bytes so far are zero."""
        return bool(self.num_bytes) and self.runs == [(0, self.num_bytes)]


def find_hole(finder: ZeroFinder, source: RowSource, name: str, first_row: int) -> str | None:
    """Return where zeros begin or end amid a row of a matrix, as no padding does; None: nowhere.

    first_row: the row that the finder's first byte is of.
    """
    info: TensorInfo = source.tensors[name]
    row_bytes = info.num_bytes // max(1, info.num_rows)
    if len(info.shape) < 2 or not row_bytes or finder.is_zero:
        return None
    for start, stop in finder.runs:
        if stop - start < max(PAGE_BYTES, 3 * row_bytes):  # a unit matrix has one row between ones
            continue
        begin, is_amid = _find_begin(source, name, first_row, start)
        if is_amid and begin < stop - row_bytes:
            return f"from amid row {first_row + begin // row_bytes} of {info.num_rows}"
        end = _find_end(finder, source, name, first_row, stop)
        if end is not None and end - begin > row_bytes:
            return f"up to amid row {first_row + end // row_bytes} of {info.num_rows}"
    return None


def _find_begin(source: RowSource, name: str, first_row: int, start: int) -> tuple[int, bool]:
    """Return the first byte of a run of zeros, and whether it lies amid a row.

    It does not where the row above is zero from the same column on: these are columns of zeros.
    """
    info = source.tensors[name]
    row_bytes = info.num_bytes // info.num_rows
    top = max(0, (start - PAGE_BYTES) // row_bytes - 1)
    rows = _read(source, name, first_row + top, first_row + -(-start // row_bytes) + 1)
    begin = top * row_bytes + _end_of_bytes(rows.reshape(-1)[: start - top * row_bytes])
    column = begin % row_bytes
    above = rows[begin // row_bytes - 1 - top] if begin // row_bytes > top else rows[0][:0]
    return begin, bool(column and (not above.size or above[column:].any()))


def _find_end(
    finder: ZeroFinder, source: RowSource, name: str, first_row: int, stop: int
) -> int | None:
    """Return the end of a run of zeros if it lies amid a row and the next row begins otherwise."""
    info = source.tensors[name]
    row_bytes = info.num_bytes // info.num_rows
    num_rows = finder.num_bytes // row_bytes
    if stop >= finder.num_bytes:
        return None
    top = stop // row_bytes
    bottom = min(num_rows, (stop + PAGE_BYTES) // row_bytes + 2)
    rows = _read(source, name, first_row + top, first_row + bottom)
    following_bytes = rows.reshape(-1)[stop - top * row_bytes :]
    end = stop + int(np.argmax(following_bytes != 0))
    below = end // row_bytes + 1 - top
    column = end % row_bytes
    has_below = below < len(rows)
    return end if column and has_below and rows[below][:column].any() else None


def _read(source: RowSource, name: str, start: int, stop: int) -> Array:
    """Return the bytes of some rows, [rows, bytes]."""
    rows = np.ascontiguousarray(source.read_block(name, start, stop))
    return rows.reshape(-1).view(np.uint8).reshape(stop - start, -1)


def _end_of_bytes(data: Array) -> int:
    """Return how many bytes there are up to the last that is not zero."""
    positions = np.flatnonzero(data)
    return int(positions[-1]) + 1 if positions.size else 0


def refuse_zeros(zeros: list[str]) -> SpecDecError:
    """Return the error for zeros in the place of weights."""
    return SpecDecError(
        f"{count(len(zeros), 'tensor')} with zeros in the place of weights:"
        f" {join_names(sorted(zeros))}",
        "finish or repeat the download: a file may have its full size from the beginning, with"
        " zeros where nothing has come; if they are meant, specdec-convert --allow-zeros writes"
        " them",
    )
