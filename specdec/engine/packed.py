"""Matrices that the build lays out for its machine's kernels, mapped when the engine is loaded.

An engine's folder `packed` has a file for each weight file: the same names, each matrix as the
kernels pack it. It is used where the kernels here pack alike, which `identify_packing` tells; else
the portable weights are packed at load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from specdec.engine.layout import EngineConfig, open_packed_file
from specdec.engine.native import NativeKernels
from specdec.engine.native_border import TILE
from specdec.errors import SpecDecError
from specdec.files.tensor_file import TensorFile
from specdec.files.torch_tensors import to_array, view_tensor
from specdec.system import logs

logger = logs.get_logger(__name__)

# Bumped where packed matrices mean something else though `identify_packing` sees the same bytes; it
# is not ABI_VERSION, so that new kernels read what older ones with the same layout packed.
PACKING_VERSION = 15


def find_packed(
    folder: Path, config: EngineConfig, name: str, kernels: NativeKernels
) -> TensorFile | None:
    """Open the packed matrices of a weight file, if there are any for kernels such as these."""
    file = open_packed_file(folder, config, name)
    if file is None or file.metadata.get("packing") == identify_packing(kernels):
        return file
    logger.warning(
        "%s was packed for another kind of processor, or another version of specdec: the weights"
        " are packed anew, which makes every load slower; build the engine again on this machine",
        file.path,
    )  # fmt: skip
    return None


def use_packed(file: TensorFile, weights: Mapping[str, Tensor], kernels: NativeKernels) -> None:
    """Let kernels take a file's matrices instead of packing `weights`, which are mapped, too."""
    for name, info in file.tensors.items():
        weight = weights.get(name)
        if weight is None:
            continue
        packed = view_tensor(file.read(name), info.dtype)
        if weight.dim() < 3:
            kernels.add_packed(weight, packed)
            continue
        if packed.shape[:1] != weight.shape[:1]:
            raise SpecDecError(
                f"{file.path} has {list(packed.shape)} for {len(weight)} experts, {name}",
                "build the engine again",
            )
        for expert_weight, expert_packed in zip(weight, packed, strict=True):
            kernels.add_packed(expert_weight, expert_packed)


def identify_packing(kernels: NativeKernels) -> str:
    """Identify how kernels lay matrices out: by a sum of some that they packed.

    It is the same on two machines only if matrices that were packed on one are right on the other.
    """
    digest = hashlib.sha256(f"{PACKING_VERSION} {kernels.dtype}".encode())

    def add(packed: Tensor) -> None:
        digest.update(to_array(packed).tobytes())

    for rows, depth in ((2 * TILE + 6, 71), (4 * TILE, 2 * TILE)):
        numbers = torch.arange(rows * depth, dtype=torch.int16)  # below all that are not finite
        if kernels.dtype is torch.float32:
            add(kernels.pack_matrix(numbers.float().view(rows, depth)))
        else:
            add(kernels.pack_matrix(numbers.view(kernels.dtype).view(rows, depth)))
        for bits, group, has_more in ((8, 64, False), (4, 64, False), (4, 32, True)):
            codes = numbers.to(torch.int8).view(rows, depth)[: rows * bits // 8].contiguous()
            num_groups = -(-depth // group) if has_more else 1
            scales = numbers[: rows * num_groups].float().view(rows, num_groups)
            zeros = scales.to(torch.uint8) if has_more else None
            inputs = torch.arange(depth)
            add(
                kernels.pack_integers(
                    codes, scales, zeros, bits=bits, group=group,
                    input_scales=inputs.float() if has_more else None,
                )
            )  # fmt: skip
    return digest.hexdigest()[:32]
