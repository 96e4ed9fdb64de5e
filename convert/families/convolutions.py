"""Convolutions over tokens, one filter for each channel, which a checkpoint keeps as vectors."""

from __future__ import annotations

import math

from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo

from ..hf import HfFolder
from ..plan import ComputedTensors


def flatten_convolutions(folder: HfFolder, ending: str) -> HfFolder:
    """Return the folder with tensors of this ending, [channels, 1, taps], as vectors."""
    infos = {
        name: TensorInfo(info.dtype, (math.prod(info.shape),))
        for name, info in folder.tensors.items() if name.endswith(ending)
    }  # fmt: skip

    def compute(name: str, start: int, stop: int, _: object) -> Array:
        return folder.read(name).reshape(-1)[start:stop]

    return folder.substitute(ComputedTensors(folder, infos, compute), ())
