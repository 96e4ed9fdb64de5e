"""Casts between float types, bit for bit as torch makes them, in small blocks."""

from __future__ import annotations

import functools

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.reading import Array
from specdec.files.tensor_file import DTYPES

FLOATS = ("float64", "float32", "float16", "bfloat16")  # between which `cast` converts
# Where looking up each of the 65536 values is several times as fast as computing them.
LOOKED_UP = (("bfloat16", "float16"), ("float16", "bfloat16"), ("float16", "float32"))
CAST_ITEMS = 1 << 15


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
            block, block_result = (
                flat[start : start + CAST_ITEMS],
                result[start : start + CAST_ITEMS],
            )
            # torch goes from float64 to 16 bits by way of float32, rounding twice.
            room = block_result if target == "float32" else singles[: block.size]
            _narrow(_widen(block, source, room), target, block_result, bits[: block.size])
    return result.reshape(np.shape(array))


def _widen(block: Array, source: str, singles: Array) -> Array:
    """Return the values as float32, in `single` unless they are that already."""
    if source == "float32":
        return block
    if source == "bfloat16":
        np.left_shift(block, np.uint32(16), out=singles.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(singles, block, casting="same_kind")
    return singles


def _narrow(singles: Array, target: str, result: Array, rounded: Array) -> None:
    """Round float32 values into `result`; `rounded` is room for as many uint32."""
    if target != "bfloat16":
        if singles is not result:
            np.copyto(result, singles, casting="same_kind")
        return
    bits = singles.view(np.uint32)
    np.right_shift(bits, np.uint32(16), out=rounded)
    np.bitwise_and(rounded, np.uint32(1), out=rounded)
    np.add(rounded, np.uint32(0x7FFF), out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, np.uint32(16), out=rounded)
    np.copyto(result, rounded, casting="unsafe")
    if np.isnan(singles.sum()):  # cheap, and also where infinities of both signs meet
        result[np.isnan(singles)] = 0x7FC0


@functools.cache
def _list_casts(source: str, target: str) -> Array:
    """List every 16-bit value of `source` in the type `target`."""
    return cast(np.arange(1 << 16, dtype=np.uint16).view(DTYPES[source][1]), source, target)
