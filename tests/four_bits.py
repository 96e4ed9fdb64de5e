"""What a four-bit matrix of a checkpoint stands for, row by row."""

from __future__ import annotations

import numpy as np

from specdec.files.reading import Array
from specdec.model import int4


def read_weight(matrix: int4.Int4Matrix, start: int, stop: int) -> Array:
    """Rows [start, stop) as float32 [rows, in], columns in the inputs' own order.

    The input is still to be multiplied with the input scale, if there is one.
    """
    stored = int4.dequantize(
        int4.read_codes(matrix.source, f"{matrix.module}.weight", start, stop),
        matrix.read_scales(start, stop),
        matrix.read_zeros(start, stop),
    )
    permutation = matrix.read_permutation()
    if permutation is None:
        return stored
    weight = np.empty_like(stored)
    weight[:, permutation] = stored
    return weight
