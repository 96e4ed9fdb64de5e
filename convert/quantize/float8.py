"""Small floats in numpy: float8 e4m3, bit for bit as torch rounds, e8m0 and e2m1; magnitudes.

A byte is a sign, 4 exponent bits with bias 7 and 3 mantissa bits; 0x7F and 0xFF are NaN, there is
no infinity, the largest value is 448 and the smallest 2^-9. A byte of e8m0, a type for scales, is
2^(byte - 127); 255 is NaN. e2m1 is a sign, two bits of exponent and one of mantissa.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from specdec.files.casts import cast
from specdec.files.reading import Array
from specdec.files.tensor_file import DTYPES
from specdec.model.quantization import FLOAT8, FLOAT8_MAX

E8M0 = "float8_e8m0fnu"
FLOAT4_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)
BLOCK_ITEMS = 1 << 15
_NAN = np.uint8(0x7F)
_MAX = np.uint8(0x7E)  # 448
_SMALLEST_NORMAL = np.float32(2.0**-6)
# Adding 2^14 to a number below 2^-6 leaves its multiple of 2^-9, rounded, in the last bits.
_SHIFT = np.float32(2.0**14)


def encode(values: Array) -> Array:
    """Round float32 to the nearest float8, ties to even; what lies beyond 448 becomes 448.

    That is torch's rounding; beyond 464 releases of torch differ (448 or NaN), which no weight
    divided by its own scale reaches.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    sign = (bits >> np.uint32(24)).astype(np.uint8) & np.uint8(0x80)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    absolute = magnitude.view(np.float32)
    odd = (magnitude >> np.uint32(20)) & np.uint32(1)
    rounded = (magnitude + np.uint32(0x7FFFF) + odd) >> np.uint32(20)
    normal = rounded - np.uint32((127 - 7) << 3)  # the exponent's new bias; wraps where not used
    with np.errstate(invalid="ignore"):  # numpy warns of a signalling NaN
        small = (absolute + _SHIFT).view(np.uint32) - _SHIFT.view(np.uint32)
    encoded = np.where(absolute < _SMALLEST_NORMAL, small, normal)
    result = np.minimum(encoded, np.uint32(_MAX)).astype(np.uint8)
    result[absolute >= np.float32(FLOAT8_MAX)] = _MAX
    result[np.isnan(absolute)] = _NAN
    return result | sign


@functools.cache
def _list_values() -> Array:
    """Return every byte's value, float32 [256]."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10)
    )
    values[int(_NAN)] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


def decode(codes: Array) -> Array:
    """Return the float32 values of float8 bytes; exact."""
    return _list_values()[codes]


def find_amax(array: Array, dtype: str) -> np.float32:
    """Return the largest magnitude of an array in storage type; NaN where it holds NaN."""
    if not array.size:
        return np.float32(0)
    # Without its sign, a pattern is the larger, the larger the number is; NaN lies above infinity.
    unsigned = array.view(f"u{array.itemsize}")
    largest = np.array([(unsigned & np.iinfo(unsigned.dtype).max // 2).max()], unsigned.dtype)
    single = to_float32(largest.view(DTYPES[dtype][1]), dtype)
    return np.float32(single[0])


def to_float32(array: Array, dtype: str) -> Array:
    """Return an array in storage type as float32."""
    if dtype == E8M0:
        powers = np.ldexp(np.float32(1), np.arange(-127, 128))
        values: Array = np.append(powers, np.float32(np.nan))[array]
        return values
    return decode(array) if dtype == FLOAT8 else cast(array, dtype, "float32")


class Requantizer:
    """Maps arrays of one type to float8: value * factor / scale, both in float32.

    A type of at most 16 bits has so few values that each is computed once, then looked up.
    """

    def __init__(self, dtype: str, scale: np.float32, factor: np.float32 | None = None) -> None:
        self.dtype, self.scale, self.factor = dtype, scale, factor
        storage = np.dtype(DTYPES[dtype][1])
        self._table: Array | None = None
        if storage.itemsize <= 2:
            patterns = np.arange(1 << 8 * storage.itemsize, dtype=f"u{storage.itemsize}")
            self._table = self._compute(patterns.view(storage))

    def __call__(self, array: Array) -> Array:
        if self._table is None:
            return self._compute(array)
        codes: Array = self._table[array.view(f"u{array.itemsize}")]
        return codes

    def follow(self, make: Callable[[], Array]) -> Callable[[], Array]:
        """Return the map of an array that is still to be made."""
        return lambda: self(make())

    def _compute(self, array: Array) -> Array:
        """Go through the array in blocks that stay in a core's cache."""
        flat = np.ascontiguousarray(array).reshape(-1)
        result = np.empty(flat.shape, np.uint8)
        for start in range(0, flat.size, BLOCK_ITEMS):
            result[start : start + BLOCK_ITEMS] = self._round(flat[start : start + BLOCK_ITEMS])
        return result.reshape(array.shape)

    def _round(self, array: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            values = to_float32(array, self.dtype)
            if self.factor is not None:
                values = values * self.factor
            return encode(values / self.scale)
