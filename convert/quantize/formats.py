"""Rounding of a matrix's rows by each --quantization; in float32, ties to even.

`values` is [rows, in], already divided by the inputs' scales where the format has any. `restore`
returns what the rounded numbers stand for. A row or group of zeros has scale 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from specdec.files.reading import Array
from specdec.model import int4
from specdec.model.quantization import (
    ALGORITHMS,
    FLOAT8_MAX,
    FP8,
    WEIGHT_SCALE,
    WEIGHT_SCALE_2,
    Algorithm,
)

from . import float8

INT4_MAX, INT8_MAX, FLOAT4_MAX = 7.0, 127.0, 6.0
MIN_FLOAT8 = 2.0**-9
# Whose inputs are rounded as the rows of their weights are.
DYNAMIC_INPUTS = ("FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")


class Rounding:
    """How rows are rounded: with one scale a row or group, alongside those of the whole matrix."""

    def round(
        self, values: Array, whole_scale: np.float32, kept_shares: Array | None
    ) -> tuple[Array, Array]:
        """Return codes [rows, in] and scales [rows] or [rows, groups] as they are stored.

        whole_scale: the matrix's own scale; kept_shares: what part of each group's largest
        magnitude is to be represented, [rows, groups], all of it if None.
        """
        raise NotImplementedError

    def restore(self, codes: Array, scales: Array, whole_scale: np.float32) -> Array:
        """Return float32 [rows, in]."""
        raise NotImplementedError

    def pack(self, codes: Array) -> Array:
        """Return the codes as they are stored."""
        return codes


@dataclasses.dataclass(frozen=True)
class Rows(Rounding):
    """A byte a number, with a scale a row: its largest magnitude / the type's largest number."""

    maximum: float
    encode: Callable[[Array], Array]
    decode: Callable[[Array], Array]

    def round(
        self, values: Array, whole_scale: np.float32, kept_shares: Array | None
    ) -> tuple[Array, Array]:
        scales = _make_scales(np.abs(values).max(1), self.maximum)
        return self.encode(values / scales[:, None]), scales

    def restore(self, codes: Array, scales: Array, whole_scale: np.float32) -> Array:
        restored: Array = self.decode(codes) * scales[:, None]
        return restored


FLOAT8_ROWS = Rows(FLOAT8_MAX, float8.encode, float8.decode)
INT8_ROWS = Rows(
    INT8_MAX, lambda values: np.rint(values).clip(-128, 127).astype(np.int8),
    lambda codes: codes.astype(np.float32),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Int4Groups(Rounding):
    """int4, -8 to 7, with a scale per group: what is kept of its largest magnitude / 7."""

    group_size: int

    def round(
        self, values: Array, whole_scale: np.float32, kept_shares: Array | None
    ) -> tuple[Array, Array]:
        grouped = values.reshape(len(values), -1, self.group_size)
        magnitudes = np.abs(grouped).max(2)
        scales = _make_scales(
            magnitudes if kept_shares is None else magnitudes * kept_shares, INT4_MAX
        )
        codes = np.rint(grouped / scales[:, :, None]).clip(-8, 7)
        return codes.astype(np.int8).reshape(values.shape), scales

    def restore(self, codes: Array, scales: Array, whole_scale: np.float32) -> Array:
        grouped = codes.reshape(len(codes), -1, self.group_size).astype(np.float32)
        restored: Array = (grouped * scales[:, :, None]).reshape(codes.shape)
        return restored

    def pack(self, codes: Array) -> Array:
        return int4.pack((codes + np.int8(8)).view(np.uint8))


class Float4Groups(Rounding):
    """NVFP4: float4 e2m1 with a float8 scale per group of 16, and one float32 for the matrix.

    A group's scale is its largest magnitude / (6 * the matrix's), at least 2^-9.
    """

    group_size = 16
    # Where a magnitude is rounded up to the next of e2m1; a tie goes to the even one.
    BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)

    def round(
        self, values: Array, whole_scale: np.float32, kept_shares: Array | None
    ) -> tuple[Array, Array]:
        grouped = values.reshape(len(values), -1, self.group_size)
        exact_scales = np.abs(grouped).max(2) / (np.float32(FLOAT4_MAX) * whole_scale)
        exact_scales[exact_scales == 0] = 1
        scales = float8.encode(exact_scales.clip(MIN_FLOAT8, FLOAT8_MAX))
        scaled = (grouped / (float8.decode(scales) * whole_scale)[:, :, None]).reshape(values.shape)
        magnitude = np.abs(scaled)
        codes = np.searchsorted(self.BOUNDS, magnitude.reshape(-1)).reshape(values.shape)
        codes += np.isin(magnitude, self.BOUNDS[1::2])
        return codes.astype(np.uint8) | (scaled < 0).astype(np.uint8) << 3, scales

    def restore(self, codes: Array, scales: Array, whole_scale: np.float32) -> Array:
        grouped = float8.FLOAT4_VALUES[codes].reshape(*scales.shape, -1)
        restored: Array = (grouped * (float8.decode(scales) * whole_scale)[:, :, None]).reshape(
            codes.shape
        )
        return restored

    def pack(self, codes: Array) -> Array:
        packed: Array = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
        return packed


def _make_scales(magnitudes: Array, maximum: float) -> Array:
    scales: Array = (magnitudes / np.float32(maximum)).astype(np.float32)
    scales[scales == 0] = 1
    return scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """One choice of --quantization. name: its quant_algo.

    weight: the tensor that holds the largest magnitude of the weights divided by a number; inputs:
    by which the inputs' is divided for activation_scaling_factor. smooths: how inputs get scales of
    their own: by what is searched for them with (`mean` or `largest` magnitudes). excluded: modules
    that it must not be applied to.
    """

    name: str
    weight: tuple[str, float] | None = None
    inputs: float | None = None
    smooths: str | None = None
    group_size: int | None = None
    excluded: tuple[str, ...] = ()

    @property
    def algorithm(self) -> Algorithm:
        return ALGORITHMS[self.name]

    @property
    def needs_data(self) -> bool:
        """Return whether a scale comes from a calibration."""
        return self.inputs is not None or self.smooths is not None

    def make_rounding(self, group_size: int) -> Rounding:
        """Return how rows are rounded, where that is not FP8's."""
        if self.name == "NVFP4":
            return Float4Groups()
        if self.algorithm.rows == 2:
            return Int4Groups(group_size)
        return INT8_ROWS if self.algorithm.dtype == "int8" else FLOAT8_ROWS

    def make_input_rounding(self) -> Callable[[Array, np.float32], Array] | None:
        """Return how inputs [tokens, in] are rounded, given activation_scaling_factor; or None."""
        if self.name in DYNAMIC_INPUTS:
            rounding = self.make_rounding(0)
            return lambda values, step: rounding.restore(*rounding.round(values, step, None), step)
        if self.inputs == INT8_MAX:
            return lambda values, step: np.rint(values / step).clip(-128, 127) * step
        if self.inputs is not None:
            return lambda values, step: float8.decode(float8.encode(values / step)) * step
        return None


# By TensorRT-LLM's own names of them, those of its quantize.py.
FORMATS = {
    "fp8": Format(name=FP8, weight=(WEIGHT_SCALE, FLOAT8_MAX), inputs=FLOAT8_MAX),
    # Where nothing is excluded by name, 1.0 rounds what comes out of the last norm, too.
    "fp8_pc_pt": Format(name="FP8_PER_CHANNEL_PER_TOKEN", excluded=("*ln_f", "*ln_embed")),
    "int8_sq": Format(name="W8A8_SQ_PER_CHANNEL", inputs=INT8_MAX, smooths="largest"),
    "int4_awq": Format(name="W4A16_AWQ", smooths="mean", group_size=128),
    "w4a8_awq": Format(
        name="W4A8_AWQ", weight=(WEIGHT_SCALE_2, FLOAT8_MAX), inputs=FLOAT8_MAX, smooths="mean",
        group_size=128,
    ),
    "nvfp4": Format(
        name="NVFP4", weight=(WEIGHT_SCALE_2, FLOAT4_MAX * FLOAT8_MAX),
        inputs=FLOAT4_MAX * FLOAT8_MAX, group_size=16,
    ),
}  # fmt: skip
