"""Quantized matrices of four-bit floats, NVFP4: ModelOpt's and those of compressed-tensors.

Numbers lie in pairs, 16 of which share a float8 scale, and a matrix has one more. Sources as of
matrices.py.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo
from specdec.model.quantization import (
    ACTIVATION_SCALE,
    ALGORITHMS,
    FLOAT8,
    NVFP4_GROUP_SIZE,
    WEIGHT_SCALE,
    WEIGHT_SCALE_2,
)

from ..hf import HfFolder
from .float8 import FLOAT4_VALUES, decode
from .matrices import Matrix, split_nibbles

NEGATIVE_ZERO = 8


class Float4Matrix(Matrix):
    """NVFP4 in any writer's names. NUMBERS: the kind of the tensor that has the numbers."""

    NUMBERS: ClassVar[str]

    def __init__(self, folder: HfFolder, stem: str) -> None:
        super().__init__(folder, stem)
        num_outputs, half = self.get_sizes(self.NUMBERS, ("uint8",))
        self.shape = (num_outputs, 2 * half)
        if 2 * half % NVFP4_GROUP_SIZE:
            raise self.refuse(
                f"{2 * half} columns are no multiple of {NVFP4_GROUP_SIZE}",
                "a file is damaged: copy or download the folder again",
            )
        self.get("weight_scale", (FLOAT8,), (num_outputs, 2 * half // NVFP4_GROUP_SIZE))

    def read_numbers(self, start: int, stop: int) -> Array:
        return split_nibbles(self.folder.read_block(f"{self.stem}.{self.NUMBERS}", start, stop))

    def read_scales(self, start: int, stop: int) -> Array:
        """Return what the numbers of rows [start, stop) are multiplied with: [rows, groups]."""
        raise NotImplementedError

    def multiply(self, numbers: Array, start: int, stop: int) -> Array:
        scales = self.read_scales(start, stop)
        grouped = FLOAT4_VALUES[numbers].reshape(*scales.shape, NVFP4_GROUP_SIZE)
        grouped *= scales[:, :, None]
        weights: Array = grouped.reshape(numbers.shape)
        return weights

    def _read_group_scales(self, start: int, stop: int) -> Array:
        return decode(self.folder.read_block(f"{self.stem}.weight_scale", start, stop))


class Nvfp4Matrix(Float4Matrix):
    """ModelOpt's NVFP4. rounds_inputs: whether inputs are rounded too, and have a scale for it."""

    NUMBERS = "weight"
    dtype = "float32"
    STORED: ClassVar[dict[str, str]] = {
        "weight": "weight", WEIGHT_SCALE: "weight_scale", WEIGHT_SCALE_2: "weight_scale_2",
        ACTIVATION_SCALE: "input_scale",
    }  # fmt: skip

    def __init__(self, folder: HfFolder, stem: str, *, rounds_inputs: bool) -> None:
        super().__init__(folder, stem)
        self.get("weight_scale_2", ("float32",), (), (1,))
        if rounds_inputs or self.has("input_scale"):
            self.get("input_scale", ("float32",), (), (1,))

    def list_stored(self) -> dict[str, TensorInfo]:
        return ALGORITHMS["NVFP4"].describe(self.shape, "float32", NVFP4_GROUP_SIZE)

    def read_stored(self, kind: str, start: int, stop: int) -> Array:
        name = f"{self.stem}.{self.STORED[kind]}"
        if kind in (WEIGHT_SCALE_2, ACTIVATION_SCALE):
            return self.folder.read(name).reshape(1)
        return self.folder.read_block(name, start, stop)

    def read_numbers(self, start: int, stop: int) -> Array:
        numbers = super().read_numbers(start, stop)
        numbers[numbers == NEGATIVE_ZERO] = 0  # as ModelOpt reads it
        return numbers

    def read_scales(self, start: int, stop: int) -> Array:
        whole_scale = self.folder.read(f"{self.stem}.weight_scale_2").reshape(())
        return np.multiply(self._read_group_scales(start, stop), whole_scale)


class PackedFloat4Matrix(Float4Matrix):
    """compressed-tensors' nvfp4-pack-quantized, whose matrix's scale divides those of its groups.

    Its library rounds the weights to bfloat16, whatever the model's type.
    """

    NUMBERS = "weight_packed"
    dtype = "bfloat16"

    def __init__(self, folder: HfFolder, stem: str) -> None:
        super().__init__(folder, stem)
        self.get("weight_global_scale", ("float32",), (), (1,))
        if self.has("input_global_scale"):
            self.get("input_global_scale", ("float32",), (), (1,))

    def read_scales(self, start: int, stop: int) -> Array:
        whole_scale = self.folder.read(f"{self.stem}.weight_global_scale").reshape(())
        with np.errstate(divide="ignore", invalid="ignore"):  # such weights are refused
            return np.divide(self._read_group_scales(start, stop), whole_scale)
