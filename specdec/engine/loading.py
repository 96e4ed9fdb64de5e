"""An engine's weights, from its checked files into memory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec.engine.blocks import BlockMatrix
from specdec.engine.float8 import can_multiply, widen
from specdec.engine.int8 import check_scales
from specdec.engine.layout import (
    DRAFTER_NAME,
    EngineConfig,
    list_engine_files,
    list_engine_tensors,
    name_int8_scales,
    name_offsets,
    name_weight_file,
)
from specdec.engine.native import NativeKernels
from specdec.engine.native_matrices import KernelMatrix, Weight
from specdec.engine.packed import map_packed
from specdec.engine.weight_files import open_engine_file
from specdec.files.tensor_file import TensorFile
from specdec.files.torch_tensors import TORCH_DTYPES, to_array, to_tensor, view_tensor
from specdec.model import int4
from specdec.model.blocks import BLOCK_TYPES, is_blocks
from specdec.model.quantization import FLOAT8, INT8, SCALES, WEIGHT_SCALE
from specdec.model.sharding import join
from specdec.model.tensors import EMBEDDING, list_target_tensors
from specdec.system import logs

logger = logs.get_logger(__name__)


def load_tensors(
    file: TensorFile,
    names: list[str],
    device: torch.device,
    dtype: torch.dtype,
    *,
    maps_matrices: bool = False,
    mapped: Collection[str] = (),
    widens_blocks: bool = False,
) -> dict[str, Tensor]:
    """Copy tensors from a mapped file to the device.

    maps_matrices: matrices of linears stay in the file, to be packed from there, and so do tensors
    that are `mapped`.
    widens_blocks: matrices in GGML's blocks become weights of `dtype`; else they stay in the file.
    Float8 weights stay as they are, their scales alongside them, where the device multiplies such;
    elsewhere they become weights of `dtype`. Integers have their scales alongside them, int4 what
    else specdec/model/int4.py names, scales as float32.
    """
    tensors: dict[str, Tensor] = {}
    float8_names = [name for name in names if file.tensors[name].dtype == FLOAT8]
    for name in names:
        info, module = file.tensors[name], name.removesuffix(".weight")
        if info.dtype == FLOAT8:
            tensors |= _load_float8(file, name, device, dtype)
            continue
        if module != name and is_blocks(module, file.tensors):
            tensors |= _load_blocks(file, name, device, dtype, widens=widens_blocks)
            continue
        tensors |= _load_scales(file, name, device)
        is_matrix = len(info.shape) > 1 and "embedding" not in name
        is_mapped = name in mapped or (maps_matrices and is_matrix)
        take = view_tensor if is_mapped else to_tensor
        tensors[name] = take(file.read(name), info.dtype).to(device)
    _report_float8([tensors[name] for name in float8_names], dtype)
    return tensors


def _load_float8(
    file: TensorFile, name: str, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Load a float8 weight with its scales, or widened where the device cannot multiply it."""
    weight = to_tensor(file.read(name), FLOAT8).to(device)
    keys = [name.removesuffix("weight") + kind for kind in SCALES]
    scales = [to_tensor(file.read(key), "float32").to(device) for key in keys]
    if can_multiply(weight, device):
        return {name: weight, **dict(zip(keys, scales, strict=True))}
    return {name: widen(weight, scales[0], dtype)}


def _load_blocks(
    file: TensorFile, name: str, device: torch.device, dtype: torch.dtype, *, widens: bool
) -> dict[str, Tensor]:
    """Load a matrix in GGML's blocks: its rows and their types, or widened."""
    key = f"{name.removesuffix('.weight')}.{BLOCK_TYPES}"
    types = to_tensor(file.read(key), "uint8")
    rows = view_tensor(file.read(name), "uint8")
    if not widens:
        return {name: rows, key: types}
    flat = BlockMatrix(rows.flatten(0, -2), types).widen_all(dtype)
    return {name: flat.view(*rows.shape[:-1], -1).to(device)}


def _load_scales(file: TensorFile, name: str, device: torch.device) -> dict[str, Tensor]:
    """Load the tensors beside a matrix of integers; none beside another tensor."""
    info, module = file.tensors[name], name.removesuffix(".weight")
    if info.dtype in int4.INT4_STORAGE and int4.is_int4(module, file.tensors):
        return {key: tensor.to(device) for key, tensor in read_int4(file, module).items()}
    if info.dtype != INT8:
        return {}
    key = name_int8_scales(name)
    scales = to_tensor(file.read(key), "float32")
    check_scales(scales.flatten(), f"{file.path}: {key}")
    return {key: scales.to(device)}


def _report_float8(weights: list[Tensor], dtype: torch.dtype) -> None:
    """Log how many float8 weights multiply as they are, and how many were widened."""
    num_float8 = sum(weight.dtype is torch.float8_e4m3fn for weight in weights)
    if num_float8:
        logger.info("FP8: %d linears multiply in float8", num_float8)
    if num_widened := len(weights) - num_float8:
        logger.info(
            "FP8: %d linears have float8 weights widened to %s; their inputs are not rounded",
            num_widened, str(dtype).removeprefix("torch."),
        )  # fmt: skip


def read_int4(file: TensorFile, module: str) -> dict[str, Tensor]:
    """Read the tensors beside a four-bit matrix's codes, by name; scales are float32."""
    matrix = int4.Int4Matrix(file, module)
    int4.check_damage(matrix)
    num_rows = matrix.shape[0]
    arrays = {
        WEIGHT_SCALE: matrix.read_scales(0, num_rows),
        int4.ZERO_POINT: matrix.read_zeros(0, num_rows),
        int4.INPUT_SCALE: matrix.read_input_scale(),
        int4.PERMUTATION: matrix.read_permutation(),
    }
    return {
        f"{module}.{kind}": torch.from_numpy(np.array(array))
        for kind, array in arrays.items()
        if array is not None
    }


def load_weights(
    folder: Path,
    config: EngineConfig,
    device: torch.device,
    *,
    rank: int = 0,
    with_drafter: bool = True,
    is_packed: bool = False,
    kernels: NativeKernels | None = None,
) -> dict[str, Weight]:
    """Check and load a rank's files of an engine: its part of the target, on rank 0 the drafter.

    with_drafter: whether rank 0 loads the drafter. is_packed: linears are about to pack their
    matrices, which need no copy before that. kernels: what packs them, or reads those that the
    engine holds packed.
    """
    model, drafter = config.checkpoint.model, config.checkpoint.drafter
    engine_names = set(list_engine_tensors(model, drafter if with_drafter else None))
    if with_drafter and config.draft_vocab_size is not None:
        engine_names.add(name_offsets(engine_names))
    names = [name_weight_file(model, rank)] + ([DRAFTER_NAME] if rank == 0 else [])
    weights: dict[str, Weight] = {}
    for name in list_engine_files(model, drafter):
        if name in names:
            file = open_engine_file(folder, config, name)
            file_names = [tensor for tensor in file.plain.tensors if tensor in engine_names]
            weights |= load_tensors(
                file.plain, file_names, device, TORCH_DTYPES[model.dtype], maps_matrices=is_packed,
                mapped=() if file.packed is None else (EMBEDDING,), widens_blocks=kernels is None,
            )  # fmt: skip
            if file.packed is not None:
                assert kernels is not None
                weights |= map_packed(file, engine_names, kernels)
            file.plain.release()
    return weights


def load_embedding(
    folder: Path, config: EngineConfig, device: torch.device, kernels: NativeKernels | None
) -> Tensor:
    """Load the whole of an embedding that is split over the ranks."""
    model = config.checkpoint.model
    dtype, arrays = TORCH_DTYPES[model.dtype], []
    for rank in range(model.tp_size):
        file = open_engine_file(folder, config, name_weight_file(model, rank))
        if EMBEDDING in file.replaced:
            assert kernels is not None
            matrix = map_packed(file, [EMBEDDING], kernels)[EMBEDDING]
            assert isinstance(matrix, KernelMatrix)
            embedding = matrix.unpack()
        else:
            embedding = load_tensors(
                file.plain, [EMBEDDING], torch.device("cpu"), dtype, widens_blocks=True
            )[EMBEDDING]
        arrays.append(to_array(embedding))
    whole_embedding = join(arrays, list_target_tensors(model)[EMBEDDING], model)
    return to_tensor(whole_embedding, model.dtype).to(device)
