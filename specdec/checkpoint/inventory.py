"""Tensors that a checkpoint's rank files must hold, and the comparison of a file with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import CheckpointConfig
from specdec.errors import Problems, SpecDecError, join_names
from specdec.files.manifest import check_sources, describe_file
from specdec.files.tensor_file import TensorFile, TensorInfo
from specdec.methods import DrafterParams
from specdec.model.blocks import GGUF, describe_blocks
from specdec.model.config import ModelConfig
from specdec.model.int4 import INT4_ALGORITHMS, describe_int4, is_int4
from specdec.model.quantization import (
    ALGORITHMS,
    FLOAT8,
    FLOAT8_STORAGE,
    FP8,
    KV_SCALES,
    NVFP4_GROUP_SIZE,
    SCALES,
    WEIGHT_SCALE,
    Quantization,
    find_contradictions,
    is_scale,
)
from specdec.model.tensors import (
    TensorSpec,
    get_rank_shape,
    get_stored_dtype,
    list_rank_names,
    list_target_tensors,
)

# Tensors that TensorRT-LLM's own writer stores and every loader computes again.
ROTARY_BUFFERS = ("embed_positions", "rotary_inv_freq", "embed_positions_for_gpt_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inventory:
    """Comparison of a file's tensors with config.json; `mismatches` are facts, the others names.

    Buffers that every loader computes are in none of the lists.
    """

    matching_tensors: list[str]
    scales: list[str]
    missing_tensors: list[str]
    mismatches: list[str]
    unread_tensors: list[str]

    def list_faults(self) -> list[str]:
        """List the file's faults, each to be read after its name."""
        groups = (
            ("lacks", self.missing_tensors),
            ("is at odds with config.json:", self.mismatches),
            ("holds what config.json does not describe:", self.unread_tensors),
        )  # fmt: skip
        return [f"{fact} {join_names(names)}" for fact, names in groups if names]


def list_tensors(model: ModelConfig, drafter: DrafterParams | None) -> dict[str, TensorSpec]:
    """List every tensor of a checkpoint, whole, by canonical name."""
    tensors = list_target_tensors(model)
    if drafter is not None:
        tensors |= drafter.list_tensors(model)
    return tensors


def describe_rank(checkpoint: CheckpointConfig, rank: int) -> dict[str, TensorInfo]:
    """Return types and shapes of one rank's tensors, by their names in its file; no scales."""
    model = checkpoint.model
    specs = list_tensors(model, checkpoint.drafter)
    canonical = list_rank_names(model, rank)
    names = {rank_name: name for rank_name, name in canonical.items() if name in specs}
    if checkpoint.drafter is not None:  # such checkpoints have no pipeline stages
        names |= {name: name for name in specs if name not in names}
    return {
        rank_name: TensorInfo(
            get_stored_dtype(name, model.dtype), get_rank_shape(specs[name], model)
        )
        for rank_name, name in names.items()
    }


def compare_tensors(
    stored: Mapping[str, TensorInfo],
    expected: Mapping[str, TensorInfo],
    quantization: Quantization,
) -> Inventory:
    """Compare a file's tensors with those expected in it, and with their scales."""
    mismatches: list[str] = []
    quantized = _describe_matrices(stored, expected, quantization.quant_algo, mismatches)
    expected = {**expected, **quantized}
    # Matrices that may be FP8 in the place of the type that is expected.
    as_float8 = {name for name in expected if name not in quantized}
    matching_tensors = []
    for name, info in expected.items():
        if name not in stored:
            continue
        is_fp8 = name in as_float8 and _is_float8(name, stored[name], quantization)
        if fact := _compare_tensor(name, stored[name], info, name in quantized, is_fp8):
            mismatches.append(fact)
        else:
            matching_tensors.append(name)
    linears = [name.removesuffix(".weight") for name in matching_tensors
               if _is_linear(name, stored[name].shape)]  # fmt: skip
    dtypes = {name: info.dtype for name, info in stored.items()}
    mismatches += find_contradictions(quantization, linears, dtypes)
    scales, unread_tensors = _sort_surplus(stored, expected, quantization, mismatches)
    needed_names = [*expected, *_list_scales(stored, expected, as_float8, quantization)]
    return Inventory(
        matching_tensors=matching_tensors, scales=scales, mismatches=mismatches,
        missing_tensors=[name for name in needed_names if name not in stored],
        unread_tensors=unread_tensors,
    )  # fmt: skip


def _is_linear(name: str, shape: Sequence[int]) -> bool:
    return name.endswith(".weight") and len(shape) == 2 and "embedding" not in name


def _compare_tensor(
    name: str, info: TensorInfo, expected: TensorInfo, is_quantized: bool, is_fp8: bool
) -> str | None:
    """Return in what a stored tensor differs from the expected one, None where it does not."""
    # ModelOpt's NVFP4 has scalars where others have vectors of one number.
    is_scalar = is_quantized and math.prod(expected.shape) == math.prod(info.shape) == 1
    if info.shape != expected.shape and not is_scalar:
        return f"{name} has shape {list(info.shape)}, not {list(expected.shape)}"
    if info.dtype != expected.dtype and not is_fp8:
        return f"{name} is {info.dtype}, config.json says {expected.dtype}"
    return None


def _sort_surplus(
    stored: Mapping[str, TensorInfo],
    expected: Mapping[str, TensorInfo],
    quantization: Quantization,
    mismatches: list[str],
) -> tuple[list[str], list[str]]:
    """Return the scales among tensors that are not expected, and those that nobody reads.

    Scales that are no single float32 are added to `mismatches`.
    """
    scales, unread_tensors = [], []
    for name, info in stored.items():
        if name in expected or name.rpartition(".")[2].removesuffix("_local") in ROTARY_BUFFERS:
            continue
        if not quantization.is_quantized or not is_scale(name, expected):
            unread_tensors.append(name)
        elif info.dtype != "float32" or math.prod(info.shape) != 1:
            mismatches.append(f"{name} is {info.dtype} {list(info.shape)}, not one float32")
        else:
            scales.append(name)
    return scales, unread_tensors


def _describe_matrices(
    stored: Mapping[str, TensorInfo],
    expected: Mapping[str, TensorInfo],
    algorithm: str | None,
    mismatches: list[str],
) -> dict[str, TensorInfo]:
    """Return the tensors of matrices that are quantized to other types than FP8, by name.

    Their types tell which ones are; what is impossible about them is added to `mismatches`.
    """
    if algorithm == GGUF:
        try:
            return describe_blocks({name: info.shape for name, info in expected.items()}, stored)
        except SpecDecError as error:
            mismatches.append(error.message)
            return {}
    infos: dict[str, TensorInfo] = {}
    if algorithm in (None, FP8) or algorithm not in (*ALGORITHMS, *INT4_ALGORITHMS):
        return infos
    for name, info in expected.items():
        is_stored = name in stored and stored[name].dtype in FLOAT8_STORAGE
        if is_stored and _is_linear(name, info.shape):
            try:
                infos |= _describe_matrix(name, info, stored, algorithm)
            except SpecDecError as error:
                mismatches.append(error.message)
                infos[name] = stored[name]
    return infos


def _describe_matrix(
    name: str, info: TensorInfo, stored: Mapping[str, TensorInfo], algorithm: str | None
) -> dict[str, TensorInfo]:
    """Return the tensors of one quantized matrix; raise SpecDecError for what is impossible."""
    module, shape = name.removesuffix(".weight"), (info.shape[0], info.shape[1])
    infos: dict[str, TensorInfo] = {}
    if (record := ALGORITHMS.get(algorithm or "")) is not None:
        kinds = record.describe(shape, info.dtype, NVFP4_GROUP_SIZE)
        infos = {f"{module}.{kind}": info for kind, info in kinds.items()}
    if algorithm not in INT4_ALGORITHMS:
        return infos
    scalars = {name: info for name, info in infos.items() if info.shape == (1,)}
    return scalars | describe_int4(module, shape, stored)


def describe_quantized(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo], algorithm: str | None,
    float8: Collection[str] = FLOAT8_STORAGE,
) -> dict[str, TensorInfo]:  # fmt: skip
    """Return the tensors of the quantized matrices that the torch backend multiplies as they are.

    shapes: of the weights, by name. stored: the file's tensors, which tell the matrices that are
    quantized. float8: the types of FP8's. Raises SpecDecError for what is impossible of them.
    """
    if algorithm == GGUF:
        return describe_blocks(shapes, stored)
    infos: dict[str, TensorInfo] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if not _is_linear(name, shape):
            continue
        if algorithm in INT4_ALGORITHMS and is_int4(module, stored):
            infos |= describe_int4(module, (shape[0], shape[1]), stored)
        elif algorithm == FP8 and name in stored and stored[name].dtype in float8:
            infos[name] = TensorInfo(FLOAT8, shape)
            infos |= {scale: _describe_scale(scale, stored)
                      for scale in (f"{module}.{kind}" for kind in SCALES)}  # fmt: skip
    return infos


def _describe_scale(name: str, stored: Mapping[str, TensorInfo]) -> TensorInfo:
    """Return type and shape of a scale of FP8: one number.

    There are two for halves that an engine stacks and that were quantized one by one.
    """
    shape = stored[name].shape if name in stored else (1,)
    is_pair = name.endswith(f".mlp.gate_up.{WEIGHT_SCALE}") and shape == (2,)
    return TensorInfo("float32", shape if math.prod(shape) == 1 or is_pair else (1,))


def find_rank_files(folder: Path, num_ranks: int, reason: str) -> tuple[list[Path], Problems]:
    """Return the files of the ranks that are there, and what is wrong with the set of them.

    reason: for the number of ranks, in the words of a message.
    """
    stored_names = {path.name for path in folder.glob("rank*.safetensors")}
    # A few more than are there are enough to tell what is absent.
    expected_names = [
        f"rank{rank}.safetensors" for rank in range(min(num_ranks, len(stored_names) + 10))
    ]
    missing_names = [name for name in expected_names if name not in stored_names]
    surplus_names = sorted(stored_names - set(expected_names))
    problems = Problems.from_table(
        (missing_names, f"{folder} has {reason} but lacks {join_names(missing_names)}",
         "copy the folder again"),
        (surplus_names, f"{folder} has {reason} but also holds {join_names(surplus_names)}",
         "its config.json belongs to another conversion: copy the folder again"),
    )  # fmt: skip
    return [folder / name for name in expected_names if name in stored_names], problems


def describe_sources(folder: Path, files: Sequence[TensorFile]) -> list[dict[str, Any]]:
    """Return manifest entries of a checkpoint's files; raise SpecDecError for changed weights."""
    sources = [describe_file(folder / "config.json"), *(describe_file(f.path) for f in files)]
    check_sources(sources)
    return sources


def _is_float8(name: str, info: TensorInfo, quantization: Quantization) -> bool:
    is_matrix = name.endswith(".weight") and len(info.shape) == 2
    return quantization.quant_algo is not None and is_matrix and info.dtype in FLOAT8_STORAGE


def _list_scales(
    stored: Mapping[str, TensorInfo],
    expected: Mapping[str, TensorInfo],
    as_float8: Collection[str],
    quantization: Quantization,
) -> list[str]:
    """List the scales of a quantized KV cache and of matrices that are quantized to FP8."""
    scales = []
    for name, info in stored.items():
        if name in as_float8 and _is_float8(name, info, quantization):
            scales += [f"{name.removesuffix('weight')}{scale}" for scale in SCALES]
    if quantization.kv_cache_quant_algo is not None:
        ending = "qkv.weight"
        targets = (name for name in expected if name.startswith("transformer."))
        attentions = [name.removesuffix(ending) for name in targets if name.endswith(ending)]
        scales += [module + KV_SCALES[0] for module in attentions]
    return scales
