"""Matrices in GGML's block types, as GGUF files have them and a checkpoint keeps them.

A matrix [out, in] whose rows are of TYPES has in a checkpoint's file:

| name | type, shape | |
| --- | --- | --- |
| `weight` | uint8 [out, bytes] | each row's blocks; zeros after those of a row that takes fewer |
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
from specdec.system.libraries import import_gguf

GGUF = "GGUF"
BLOCK_TYPES = "ggml_types"


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A block type of GGML's.

    size: weights of a block of `num_bytes`. halves, exponents: the columns of its float16 numbers
    and of its powers of two.
    """

    name: str
    num_bytes: int
    size: int
    halves: tuple[int, ...]
    exponents: tuple[int, ...] = ()

    def count_bytes(self, num_inputs: int) -> int:
        """Return the bytes of a row of so many weights."""
        return num_inputs // self.size * self.num_bytes


TYPES = {
    2: BlockType("Q4_0", 18, 32, (0,)),
    3: BlockType("Q4_1", 20, 32, (0, 2)),
    6: BlockType("Q5_0", 22, 32, (0,)),
    7: BlockType("Q5_1", 24, 32, (0, 2)),
    8: BlockType("Q8_0", 34, 32, (0,)),
    10: BlockType("Q2_K", 84, 256, (80, 82)),
    11: BlockType("Q3_K", 110, 256, (108,)),
    12: BlockType("Q4_K", 144, 256, (0, 2)),
    13: BlockType("Q5_K", 176, 256, (0, 2)),
    14: BlockType("Q6_K", 210, 256, (208,)),
    20: BlockType("IQ4_NL", 18, 32, (0,)),
    23: BlockType("IQ4_XS", 136, 256, (0,)),
    39: BlockType("MXFP4", 17, 32, (), (0,)),
}
LARGEST_EXPONENT = 252  # of a block of MXFP4 whose weights are all finite


def is_blocks(module: str, tensors: Mapping[str, object]) -> bool:
    """Return whether a module's matrix is stored in blocks."""
    return f"{module}.{BLOCK_TYPES}" in tensors


def describe_blocks(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Return the tensors that a file must hold for its matrices in blocks, by name.

    shapes: of the weights [..., out, in]. stored: the file's tensors, which decide the bytes of a
    row. Raises SpecDecError where no block type has so many.
    """
    infos: dict[str, TensorInfo] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) < 2 or not is_blocks(module, stored):
            continue
        *rows, num_inputs = shape
        info = stored.get(f"{module}.weight")
        row_bytes = info.shape[-1] if info is not None and info.shape else 0
        block_types = [kind for kind in TYPES.values() if num_inputs % kind.size == 0]
        if row_bytes not in [kind.count_bytes(num_inputs) for kind in block_types]:
            raise SpecDecError(
                f"{module}: rows of {row_bytes} bytes are not blocks of {num_inputs} weights",
                "convert the model again",
            )
        infos[f"{module}.weight"] = TensorInfo("uint8", (*rows, row_bytes))
        infos[f"{module}.{BLOCK_TYPES}"] = TensorInfo("uint8", (math.prod(rows),))
    return infos


def find_runs(types: Array) -> list[tuple[int, int, int]]:
    """Return runs of rows of one type as (type, start, stop)."""
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
        blocks = rows[start:stop, : kind.count_bytes(num_inputs)].reshape(-1, kind.num_bytes)
        halves = [blocks[:, offset : offset + 2].copy().view(np.float16) for offset in kind.halves]
        is_finite = np.isfinite(halves).all()
        if not is_finite or (blocks[:, kind.exponents] > LARGEST_EXPONENT).any():
            raise SpecDecError(
                f"{module}.weight has NaN or infinite scales in rows {start} to {stop - 1}",
                "the file is damaged: make it again, or repair the model",
            )


def widen_rows(matrices: Sequence[Array]) -> list[Array]:
    """Return matrices of bytes [n, bytes] in one width, with zeros after narrow rows."""
    width = max(matrix.shape[1] for matrix in matrices)
    paddings = [width - matrix.shape[1] for matrix in matrices]
    return [
        np.pad(p, ((0, 0), (0, m))) if m else p for p, m in zip(matrices, paddings, strict=True)
    ]


def dequantize(rows: Array, types: Array, num_inputs: int) -> Array:
    """Return the weights of rows in blocks [n, bytes]: float32 [n, num_inputs], by package gguf."""
    gguf = import_gguf("an engine of GGML's blocks")
    weights = np.empty((len(rows), num_inputs), np.float32)
    for number, start, stop in find_runs(types):
        blocks = rows[start:stop, : TYPES[number].count_bytes(num_inputs)]
        weights[start:stop] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(number))
    return weights
