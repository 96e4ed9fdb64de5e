"""MXFP4 (OCP Microscaling, 1.0): numbers of four bits, 32 of which share a power of two.

A Hugging Face folder has the numbers of a group by pairs, low bits first, and its powers in another
tensor. GGML's block has the power first, then each of the first 16 numbers with the one 16 further.
"""

from __future__ import annotations

import enum

import numpy as np

from specdec.files.casts import cast
from specdec.files.reading import Array

from .quantize.float8 import FLOAT4_VALUES

GROUP, BIAS = 32, 127  # of the powers, which are stored with it added
BLOCK_BYTES = 1 + GROUP // 2


class Kind(enum.IntEnum):
    """GGML's number of the type."""

    MXFP4 = 39


def widen(numbers: Array, powers: Array) -> Array:
    """Return the weights, which bfloat16 holds exactly, as its bits: uint16 [rows, columns].

    numbers: uint8 [rows, groups, 16]; powers: uint8 [rows, groups].
    """
    codes = _list_codes(numbers)
    with np.errstate(over="ignore"):  # an infinity is refused as any other
        weights = np.ldexp(FLOAT4_VALUES[codes], powers[..., None].astype(np.int32) - BIAS)
    return cast(weights.reshape(len(powers), -1), "float32", "bfloat16")


def make_blocks(numbers: Array, powers: Array) -> Array:
    """Return rows of GGML's blocks, uint8 [rows, groups * 17]; arguments as of `widen`."""
    codes = _list_codes(numbers)
    pairs = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    return np.concatenate((powers[..., None], pairs), axis=-1).reshape(len(powers), -1)


def _list_codes(numbers: Array) -> Array:
    """Return the four bits of each number: uint8 [rows, groups, 32]."""
    codes = np.stack((numbers & 15, numbers >> 4), axis=-1)
    return codes.reshape(*numbers.shape[:-1], GROUP)
