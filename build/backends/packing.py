"""Writes an engine's folder `packed`, which specdec/engine/packed.py describes and loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec.engine.integers import Quantized, list_matrices
from specdec.engine.layout import (
    PACKED_FOLDER,
    EngineConfig,
    make_metadata,
    open_engine_file,
)
from specdec.engine.loading import load_tensors
from specdec.engine.native import NativeKernels
from specdec.engine.native_border import ALIGNMENT, get_packed_shape
from specdec.engine.packed import identify_packing
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo, write_tensor_file
from specdec.files.torch_tensors import TORCH_DTYPES, to_array
from specdec.model.config import ModelConfig
from specdec.model.quantization import INT8
from specdec.model.tensors import EMBEDDING, ROUTER


def list_packed(tensors: Mapping[str, TensorInfo], model: ModelConfig) -> list[str]:
    """Return the tensors of a weight file that are packed as they are.

    What a drafter stacks or cuts before is packed when it is loaded.
    """
    others = (ROUTER, "shared_expert_gate.weight", "drafter.input_proj.weight")
    names = [
        name for name, info in tensors.items()
        if len(info.shape) > 1 and info.dtype in (model.dtype, INT8, "uint8")
        and name.endswith(".weight") and "embedding" not in name and not name.endswith(others)
        and (name.startswith("transformer.") or ".mlp." not in name)
    ]  # fmt: skip
    is_head = model.share_embedding_table and (model.tp_size == 1 or model.use_parallel_embedding)
    return names + [EMBEDDING] if is_head and EMBEDDING in tensors else names


def write_packed(folder: Path, config: EngineConfig, name: str, kernels: NativeKernels) -> str:
    """Pack the matrices of a weight file, one at a time; return the sha256 of what is written."""
    source, device = open_engine_file(folder, config, name), torch.device("cpu")
    model = config.checkpoint.model
    dtype = TORCH_DTYPES[model.dtype]

    def open_matrices(tensor: str) -> Sequence[Tensor | Quantized]:
        """Open the matrices that linears multiply with, of all experts for an expert tensor."""
        weights = load_tensors(source, [tensor], device, dtype, mapped={tensor})
        return list_matrices(weights, tensor.removesuffix(".weight"))

    def plan(tensor: str) -> TensorInfo:
        first, experts = open_matrices(tensor)[0], source.tensors[tensor].shape[:-2]
        if not isinstance(first, Tensor):
            size = round_up(first.measure(kernels))
            return TensorInfo("uint8", (*experts, size))
        rows, depth = first.shape
        return TensorInfo(model.dtype, (*experts, *get_packed_shape(rows, depth, dtype)))

    def produce(tensor: str) -> Iterator[Array]:
        for matrix in open_matrices(tensor):
            if isinstance(matrix, Tensor):
                yield to_array(kernels.pack_matrix(matrix))
            else:
                packed = to_array(matrix.pack(kernels))
                yield packed
                yield np.zeros(round_up(len(packed)) - len(packed), np.uint8)
            source.release()

    tensors = {tensor: plan(tensor) for tensor in list_packed(source.tensors, model)}
    part = f"{PACKED_FOLDER}/{name}"
    (folder / PACKED_FOLDER).mkdir(exist_ok=True)
    metadata = make_metadata(part, config.build_id, tensors)
    metadata["packing"] = identify_packing(kernels)
    return write_tensor_file(folder / part, tensors, produce, metadata, ALIGNMENT)


def round_up(num_bytes: int) -> int:
    """To whole lines, so that what follows is aligned."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
