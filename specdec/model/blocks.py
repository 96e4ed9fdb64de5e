"""Matrices in GGML's block types, as GGUF files have them and a checkpoint keeps them.

A matrix [out, in] whose rows are of TYPES has in a checkpoint's file:

| name | type, shape | |
| --- | --- | --- |
| `weight` | uint8 [out, bytes] | each row's blocks; zeros behind those of a row that takes fewer |
| `ggml_types` | uint8 [out] | GGML's number of each row's type |

The matrices of experts [E, out, in] lie in one tensor [E, out, bytes], and the types of all their
rows in one vector. Rows of one linear may differ in type, as q, k and v do in Q4_K_M files.
`quant_algo` is GGUF, which only this project reads. Ranks have whole rows, or whole blocks of each.
The types are those of ggml/src/ggml-quants.c.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo

GGUF = "GGUF"
BLOCK_TYPES = "ggml_types"


@dataclasses.dataclass(frozen=True)
class BlockType:
    """size: weights of a block of `num_bytes`; halves: the columns of its float16 numbers."""

    name: str
    num_bytes: int
    size: int
    halves: tuple[int, ...]

    def count_bytes(self, num_inputs: int) -> int:
        """Bytes of a row of so many weights."""
        return num_inputs // self.size * self.num_bytes


TYPES = {
    2: BlockType("Q4_0", 18, 32, (0,)),
    3: BlockType("Q4_1", 20, 32, (0, 2)),
    8: BlockType("Q8_0", 34, 32, (0,)),
    12: BlockType("Q4_K", 144, 256, (0, 2)),
    14: BlockType("Q6_K", 210, 256, (208,)),
}


def is_blocks(module: str, tensors: Mapping[str, object]) -> bool:
    """Whether a module's matrix is stored in blocks."""
    return f"{module}.{BLOCK_TYPES}" in tensors


def describe_blocks(
    module: str, shape: tuple[int, ...], stored: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """What a file must hold for a matrix of `shape` [..., out, in] in blocks, by name.

    stored: what it does hold, which decides the bytes of a row. Raises SpecDecError where no type
    has so many.
    """
    *rows, num_inputs = shape
    info = stored.get(f"{module}.weight")
    found = info.shape[-1] if info is not None and info.shape else 0
    possible = {
        kind.count_bytes(num_inputs) for kind in TYPES.values() if num_inputs % kind.size == 0
    }
    if found not in possible:
        raise SpecDecError(
            f"{module}: rows of {found} bytes are not blocks of {num_inputs} weights",
            "convert the model again",
        )
    return {
        f"{module}.weight": TensorInfo("uint8", (*rows, found)),
        f"{module}.{BLOCK_TYPES}": TensorInfo("uint8", (math.prod(rows),)),
    }


def describe_all(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """The same of all matrices that a file holds in blocks; shapes: of the weights, by name."""
    described: dict[str, TensorInfo] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) > 1 and is_blocks(module, stored):
            described |= describe_blocks(module, shape, stored)
    return described


def find_runs(types: Array) -> list[tuple[int, int, int]]:
    """Rows of one type that follow each other: type, start, stop."""
    bounds = [0, *(np.flatnonzero(np.diff(types)) + 1).tolist(), len(types)]
    return [
        (int(types[start]), start, stop)
        for start, stop in zip(bounds, bounds[1:], strict=False)
        if start < stop
    ]


def check_blocks(module: str, rows: Array, types: Array, num_inputs: int) -> None:
    """Raise SpecDecError for rows that cannot be weights.

    These are types that no build writes, blocks that do not divide the row, numbers that are not
    finite.
    """
    for number, start, stop in find_runs(types):
        kind = TYPES.get(number)
        if kind is None or num_inputs % kind.size:
            fact = f"{module}.{BLOCK_TYPES}: type {number} for rows of {num_inputs} weights"
            raise SpecDecError(fact, "the file is damaged: make it again")
        if not np.isfinite(_cut(rows[start:stop], kind, num_inputs)[0]).all():
            raise SpecDecError(
                f"{module}.weight has NaN or infinite scales in rows {start} to {stop - 1}",
                "the file is damaged: make it again, or repair the model",
            )


def widen_rows(parts: Sequence[Array]) -> list[Array]:
    """Rows of bytes [n, bytes] of one width, narrow ones with zeros behind them."""
    width = max(part.shape[1] for part in parts)
    missing = [width - part.shape[1] for part in parts]
    return [np.pad(p, ((0, 0), (0, m))) if m else p for p, m in zip(parts, missing, strict=True)]


def dequantize(rows: Array, types: Array, num_inputs: int) -> Array:
    """The weights of rows in blocks [n, bytes]: float32 [n, num_inputs].

    They have the bits that the gguf package computes.
    """
    weights = np.empty((len(rows), num_inputs), np.float32)
    for number, start, stop in find_runs(types):
        kind = TYPES[number]
        halves, blocks = _cut(rows[start:stop], kind, num_inputs)
        scales, codes, minima = _READERS[kind.name](halves, blocks)
        numbers = scales[..., None] * codes.reshape(*scales.shape, -1).astype(np.float32)
        if minima is not None:
            numbers += minima[..., None]
        weights[start:stop] = numbers.reshape(-1, num_inputs)
    return weights


def _cut(rows: Array, kind: BlockType, num_inputs: int) -> tuple[Array, Array]:
    """Float32 of the float16 numbers [b, ...] and the blocks [b, num_bytes] of rows of a type."""
    blocks = rows[:, : kind.count_bytes(num_inputs)].reshape(-1, kind.num_bytes)
    halves = [blocks[:, at : at + 2].copy().view("<f2") for at in kind.halves]
    return np.concatenate(halves, 1).astype(np.float32), blocks


# What each reads: scales [b, groups], codes [b, size], and minima [b, groups] or None.
_Numbers = tuple[Array, Array, Array | None]


def _split(data: Array) -> Array:
    """The lower halves of bytes [..., n], then the upper ones: [..., 2 n]."""
    return np.concatenate([data & 15, data >> 4], -1)


def _read_q4_0(halves: Array, blocks: Array) -> _Numbers:
    return halves, _split(blocks[:, 2:]).astype(np.int8) - np.int8(8), None


def _read_q4_1(halves: Array, blocks: Array) -> _Numbers:
    return halves[:, :1], _split(blocks[:, 4:]), halves[:, 1:]


def _read_q8_0(halves: Array, blocks: Array) -> _Numbers:
    return halves, blocks[:, 2:].view(np.int8), None


def _read_q4_k(halves: Array, blocks: Array) -> _Numbers:
    low, high, upper = np.split(blocks[:, 4:16], 3, 1)
    scales = np.concatenate([low & 63, upper & 15 | low >> 6 << 4], 1)
    minima = np.concatenate([high & 63, upper >> 4 | high >> 6 << 4], 1)
    codes = _split(blocks[:, 16:].reshape(-1, 4, 32))
    return halves[:, :1] * scales, codes, -(halves[:, 1:] * minima)


def _read_q6_k(halves: Array, blocks: Array) -> _Numbers:
    low = _split(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    parts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> parts & 3
    codes = (low | high << 4).astype(np.int8) - np.int8(32)
    return halves * blocks[:, 192:208].view(np.int8), codes.reshape(len(blocks), 256), None


_READERS = {
    "Q4_0": _read_q4_0, "Q4_1": _read_q4_1, "Q8_0": _read_q8_0, "Q4_K": _read_q4_k,
    "Q6_K": _read_q6_k,
}  # fmt: skip
