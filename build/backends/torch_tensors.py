"""Tensors of an engine's files: their types and shapes, and the arrays of four-bit matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec.checkpoint.config import CheckpointConfig
from specdec.engine.layout import (
    list_engine_files,
    list_engine_tensors,
    list_integers,
    name_weight_file,
    plan_int4,
    plan_int8,
)
from specdec.errors import SpecDecError
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorFile, TensorInfo
from specdec.model import blocks, int4
from specdec.model.config import ModelConfig
from specdec.model.quantization import (
    ACTIVATION_SCALE,
    FLOAT8,
    INT4,
    INT8,
    WEIGHT_SCALE,
)
from specdec.model.tensors import (
    EMBEDDING,
    HEAD,
    get_stored_dtype,
    list_linears,
)

from ..settings import BuildSettings


def share_head(checkpoint: CheckpointConfig, sources: Sequence[TensorFile]) -> CheckpointConfig:
    """Return a checkpoint as an engine has it that holds a head equal to the embedding once.

    A rank's head must be its part of the embedding, bit for bit, and so must all that is stored
    beside the two, as the types of blocks.
    """
    model = dataclasses.replace(checkpoint.model, share_embedding_table=True)
    is_split_alike = model.tp_size == 1 or model.use_parallel_embedding
    if checkpoint.model.share_embedding_table or not is_split_alike or model.find_problems():
        return checkpoint
    if not all(has_equal_head(source) for source in sources):
        return checkpoint
    raw = checkpoint.raw | {"share_embedding_table": True}
    return dataclasses.replace(checkpoint, model=model, raw=raw)


def has_copied_head(source: TensorFile, names: Iterable[str]) -> bool:
    """Return whether a head among a file's tensors `names` is the target's head or embedding."""
    heads = [name for name in names if name.endswith(HEAD) and name in source.tensors]
    return any(source.are_equal(name, other) for name in heads for other in (HEAD, EMBEDDING))


def has_equal_head(source: TensorFile) -> bool:
    """Return whether a rank's file has a head that is its part of the embedding, bit for bit."""
    head, embedding = (
        {
            name.removeprefix(module): name
            for name in source.tensors
            if name.rpartition(".")[0] == module and not name.endswith(".bias")
        }
        for module in (HEAD.removesuffix(".weight"), EMBEDDING.removesuffix(".weight"))
    )
    return head.keys() == embedding.keys() and all(
        source.are_equal(name, embedding[kind]) for kind, name in head.items()
    )


def plan_layout(
    settings: BuildSettings, checkpoint: CheckpointConfig, quantized: set[str]
) -> dict[str, dict[str, TensorInfo]]:
    """Return the target's and the drafter's tensors by the engine's files.

    quantized: matrices that the checkpoint holds in FP8.
    """
    model = checkpoint.model
    files = {
        file: plan_tensors(shapes, model, quantized)
        for file, shapes in list_engine_files(model, checkpoint.drafter).items()
    }
    for file, tensors in files.items():
        if settings.quantization == INT8:
            files[file] = plan_int8(tensors, list_integers(model))
        if settings.quantization == INT4:
            group_size = settings.group_size or choose_group_size(tensors, model)
            files[file] = plan_layers_int4(tensors, model, group_size)
    return files


def plan_tensors(
    shapes: Mapping[str, tuple[int, ...]], model: ModelConfig, float8: set[str]
) -> dict[str, TensorInfo]:
    """Plan the engine's tensors; those of `float8` keep their bytes, with their scales."""
    tensors = {}
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        modules = name_parts(module, model)
        if f"{modules[0]}.{kind}" not in float8:
            tensors[name] = TensorInfo(get_stored_dtype(name, model.dtype), shape)
            continue
        tensors[name] = TensorInfo(FLOAT8, shape)
        tensors[f"{module}.{WEIGHT_SCALE}"] = TensorInfo("float32", (len(modules),))
        tensors[f"{module}.{ACTIVATION_SCALE}"] = TensorInfo("float32", (1,))
    return tensors


def choose_group_size(tensors: Mapping[str, TensorInfo], model: ModelConfig) -> int:
    """Return the largest size of groups that the columns of all matrices of a file are cut into."""
    widths = [tensors[name].shape[1] for name in list_integers(model) if name in tensors]
    sizes = [size for size in int4.ENGINE_GROUPS if not any(width % size for width in widths)]
    return max(sizes, default=min(int4.ENGINE_GROUPS))


def plan_layers_int4(
    tensors: Mapping[str, TensorInfo], model: ModelConfig, group_size: int
) -> dict[str, TensorInfo]:
    """Return the tensors of a file in which the matrices of the layers are rounded to int4."""
    planned_infos = dict(tensors)
    for name in (name for name in list_integers(model) if name in tensors):
        num_rows, num_inputs = tensors[name].shape
        if num_inputs % group_size or num_rows % 2:
            fitting_sizes = [str(size) for size in int4.ENGINE_GROUPS if num_inputs % size == 0]
            raise SpecDecError(
                f"--quantization int4: {name} is [{num_rows}, {num_inputs}]; its rows go in pairs,"
                f" its columns in groups of {group_size}",
                f"use --group-size {fitting_sizes[-1]}" if fitting_sizes and num_rows % 2 == 0
                else "use --quantization int8",
            )  # fmt: skip
        planned_infos |= plan_int4(tensors, name, group_size)
    return planned_infos


def name_parts(module: str, model: ModelConfig) -> list[str]:
    """Return the modules of a checkpoint that one of an engine is stacked from."""
    if ".mlp.gate_up" not in module:
        return [module]
    kinds = ("fc", "gate") if model.arithmetic.mlp == "gated" else ("fc",)
    return [module.replace("gate_up", kind) for kind in kinds]


def plan_four_bits(
    source: TensorFile, quantized: set[str], model: ModelConfig
) -> dict[str, TensorInfo]:
    """Return the tensors of matrices in four bits; their scales become float32."""
    planned_infos = {}
    for weight in list_integers(model):
        module = weight.removesuffix(".weight")
        matrices = [
            int4.Int4Matrix(source, part_module) for part_module in name_parts(module, model)
        ]
        if f"{matrices[0].module}.weight" in quantized:
            for kind, array in read_four_bits(matrices, model).items():
                planned_infos[f"{module}.{kind}"] = TensorInfo(str(array.dtype), array.shape)
            num_rows = sum(matrix.shape[0] for matrix in matrices)
            planned_infos[weight] = TensorInfo("int8", (num_rows // 2, matrices[0].shape[1]))
    return planned_infos


def plan_blocks(
    source: TensorFile, quantized: set[str], model: ModelConfig
) -> dict[str, TensorInfo]:
    """Return the engine's tensors for matrices in GGML's blocks."""
    planned_infos = {}
    for weight in list_engine_tensors(model, None):
        module = weight.removesuffix(".weight")
        names = [f"{part_module}.weight" for part_module in name_parts(module, model)]
        if names[0] in quantized:
            shapes = [source.tensors[name].shape for name in names]
            rows = (sum(shape[0] for shape in shapes), *shapes[0][1:-1])
            planned_infos[weight] = TensorInfo("uint8", (*rows, max(shape[-1] for shape in shapes)))
            planned_infos[f"{module}.{blocks.BLOCK_TYPES}"] = TensorInfo(
                "uint8", (math.prod(rows),)
            )
    return planned_infos


def count_block_types(
    source: TensorFile, quantized: set[str], model: ModelConfig
) -> dict[str, int]:
    """Count the checkpoint's matrices of each of GGML's types and of the model's type."""
    counts: dict[str, int] = {}
    matrices = [f"{module}.weight" for module in list_linears(model)]
    for name in (EMBEDDING, *matrices, HEAD):
        kind = model.dtype
        if name in quantized:
            types = source.read(f"{name.removesuffix('.weight')}.{blocks.BLOCK_TYPES}")
            kind = "+".join(blocks.TYPES[int(number)].name for number in np.unique(types))
        if name in source.tensors:
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def plan_stored(
    files: dict[str, dict[str, TensorInfo]], sources: Sequence[TensorFile], quantized: set[str],
    checkpoint: CheckpointConfig,
) -> dict[str, int] | None:  # fmt: skip
    """Plan what is stored in four bits, or in GGML's blocks; count the types of these."""
    model, algorithm = checkpoint.model, checkpoint.quantization.quant_algo
    if algorithm not in (*int4.INT4_ALGORITHMS, blocks.GGUF):
        return None
    plan = plan_blocks if algorithm == blocks.GGUF else plan_four_bits
    for rank, source in enumerate(sources):
        files[name_weight_file(model, rank)] |= plan(source, quantized, model)
    is_blocks = algorithm == blocks.GGUF
    return count_block_types(sources[0], quantized, model) if is_blocks else None


def read_four_bits(matrices: Sequence[int4.Int4Matrix], model: ModelConfig) -> dict[str, Array]:
    """Read the arrays of stacked matrices by kind; they must read their inputs alike."""
    first_matrix = matrices[0]

    def list_inputs(matrix: int4.Int4Matrix) -> list[Any]:
        return [matrix.num_groups, matrix.read_input_scale(), matrix.read_permutation()]

    for matrix in matrices[1:]:
        if not all(map(np.array_equal, list_inputs(matrix), list_inputs(first_matrix))):
            raise SpecDecError(
                f"{first_matrix.module} and {matrix.module} have other groups, input scales or"
                " orders of inputs; the torch backend stacks the two",
                "quantize them together, or convert the model with --dequantize",
            )
    scales = [matrix.read_scales(0, matrix.shape[0]) for matrix in matrices]
    arrays = {
        WEIGHT_SCALE: stack_parts(scales, model, first_matrix.module),
        int4.INPUT_SCALE: first_matrix.read_input_scale(),
        int4.PERMUTATION: first_matrix.read_permutation(),
    }
    if any(matrix.has_zeros for matrix in matrices):
        zeros = []
        for matrix, matrix_scales in zip(matrices, scales, strict=True):
            symmetric_zeros = np.full(matrix_scales.shape, int4.SYMMETRIC_ZERO, np.uint8)
            stored_zeros = matrix.read_zeros(0, matrix.shape[0])
            zeros.append(symmetric_zeros if stored_zeros is None else stored_zeros)
        arrays[int4.ZERO_POINT] = stack_parts(zeros, model, first_matrix.module)
    return {kind: array for kind, array in arrays.items() if array is not None}


def stack_parts(arrays: Sequence[Array], model: ModelConfig, module: str) -> Array:
    """Stack rows of fc and gate as an engine has them: the half that is activated first."""
    if arrays[0].dtype == np.uint8 and arrays[0].ndim == 2:
        arrays = blocks.widen_rows(arrays)
    if ".mlp.fc" in module and model.arithmetic.mlp == "fused":
        up, gate = np.split(arrays[0], 2)  # the activated half comes second
        return np.concatenate([gate, up])
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
