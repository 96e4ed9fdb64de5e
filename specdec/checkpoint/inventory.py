"""What a checkpoint's rank files must hold, and how a file compares with it."""

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

# What TensorRT-LLM's own writer stores and every loader computes again.
ROTARY_BUFFERS = ("embed_positions", "rotary_inv_freq", "embed_positions_for_gpt_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inventory:
    """A file alongside what config.json describes; `wrong` says what is wrong with each tensor.

    Buffers that every loader computes are in none of the lists.
    """

    kept: list[str]
    scales: list[str]
    missing: list[str]
    wrong: list[str]
    unread: list[str]

    def list_faults(self) -> list[str]:
        """What is wrong with the file, each to be read behind its name."""
        groups = (
            ("lacks", self.missing), ("is at odds with config.json:", self.wrong),
            ("holds what config.json does not describe:", self.unread),
        )  # fmt: skip
        return [f"{fact} {join_names(names)}" for fact, names in groups if names]


def list_tensors(model: ModelConfig, drafter: DrafterParams | None) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint, whole, by canonical name."""
    tensors = list_target_tensors(model)
    if drafter is not None:
        tensors |= drafter.list_tensors(model)
    return tensors


def describe_rank(checkpoint: CheckpointConfig, rank: int) -> dict[str, TensorInfo]:
    """Types and shapes of the tensors of one rank, by their names in its file; no scales."""
    model = checkpoint.model
    specs = list_tensors(model, checkpoint.drafter)
    names = {own: name for own, name in list_rank_names(model, rank).items() if name in specs}
    if checkpoint.drafter is not None:  # such checkpoints have no pipeline stages
        names |= {name: name for name in specs if name not in names}
    return {
        own: TensorInfo(get_stored_dtype(name, model.dtype), get_rank_shape(specs[name], model))
        for own, name in names.items()
    }


def compare_tensors(
    stored: Mapping[str, TensorInfo],
    expected: Mapping[str, TensorInfo],
    quantization: Quantization,
) -> Inventory:
    """Compare a file's tensors with those expected in it, and with their scales."""
    kept: list[str] = []
    wrong: list[str] = []
    own = _describe_matrices(stored, expected, quantization.quant_algo, wrong)
    expected = {**expected, **own}
    as_float8 = {name for name in expected if name not in own}
    for name, wanted in expected.items():
        info = stored.get(name)
        if info is None:
            continue
        is_one = name in own and math.prod(wanted.shape) == math.prod(info.shape) == 1
        if info.shape != wanted.shape and not is_one:  # ModelOpt's NVFP4 has scalars
            wrong.append(f"{name} has shape {list(info.shape)}, not {list(wanted.shape)}")
        elif info.dtype != wanted.dtype and not (
            name in as_float8 and _is_float8(name, info, quantization)
        ):
            wrong.append(f"{name} is {info.dtype}, config.json says {wanted.dtype}")
        else:
            kept.append(name)
    linears = [
        name.removesuffix(".weight") for name in kept
        if name.endswith(".weight") and len(stored[name].shape) == 2 and "embedding" not in name
    ]  # fmt: skip
    dtypes = {name: info.dtype for name, info in stored.items()}
    wrong += find_contradictions(quantization, linears, dtypes)
    scales, unread = [], []
    for name, info in stored.items():
        if name in expected or name.rpartition(".")[2].removesuffix("_local") in ROTARY_BUFFERS:
            continue
        if not quantization.is_quantized or not is_scale(name, expected):
            unread.append(name)
        elif info.dtype != "float32" or math.prod(info.shape) != 1:
            wrong.append(f"{name} is {info.dtype} {list(info.shape)}, not one float32")
        else:
            scales.append(name)
    missing = [name for name in expected if name not in stored]
    wanted_scales = _list_scales(stored, expected, as_float8, quantization)
    missing += [name for name in wanted_scales if name not in stored]
    return Inventory(kept=kept, scales=scales, missing=missing, wrong=wrong, unread=unread)


def _describe_matrices(
    stored: Mapping[str, TensorInfo],
    expected: Mapping[str, TensorInfo],
    algorithm: str | None,
    wrong: list[str],
) -> dict[str, TensorInfo]:
    """What a file must hold for matrices that are quantized to other types than FP8, by name.

    Their types tell which ones are; what is impossible about them is added to `wrong`.
    """
    described: dict[str, TensorInfo] = {}
    if algorithm == GGUF:
        try:
            return describe_blocks({name: info.shape for name, info in expected.items()}, stored)
        except SpecDecError as error:
            wrong.append(error.message)
            return described
    known = ALGORITHMS.get(algorithm or "")
    if algorithm == FP8 or (known is None and algorithm not in INT4_ALGORITHMS):
        return described
    for name, wanted in expected.items():
        module = name.removesuffix(".weight")
        info = stored.get(name)
        is_matrix = module != name and len(wanted.shape) == 2 and "embedding" not in name
        if info is None or not is_matrix or info.dtype not in FLOAT8_STORAGE:
            continue
        shape = (wanted.shape[0], wanted.shape[1])
        own = {} if known is None else known.describe(shape, wanted.dtype, NVFP4_GROUP_SIZE)
        infos = {f"{module}.{kind}": each for kind, each in own.items()}
        if algorithm in INT4_ALGORITHMS:
            single = {key: each for key, each in infos.items() if each.shape == (1,)}
            try:
                infos = single | describe_int4(module, shape, stored)
            except SpecDecError as error:
                wrong.append(error.message)
                infos = {name: info}
        described |= infos
    return described


def describe_quantized(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo], algorithm: str | None,
    float8: Collection[str] = FLOAT8_STORAGE,
) -> dict[str, TensorInfo]:  # fmt: skip
    """What a file must hold for the matrices in it that the torch backend multiplies as they are.

    shapes: of the weights, by name; stored: what the file does hold, which tells the matrices that
    are quantized; float8: the types of FP8's. Raises SpecDecError for what is impossible of them.
    """
    if algorithm == GGUF:
        return describe_blocks(shapes, stored)
    described: dict[str, TensorInfo] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module == name or len(shape) != 2 or "embedding" in name:
            continue
        if algorithm in INT4_ALGORITHMS and is_int4(module, stored):
            described |= describe_int4(module, (shape[0], shape[1]), stored)
        elif algorithm == FP8 and name in stored and stored[name].dtype in float8:
            described[name] = TensorInfo(FLOAT8, shape)
            for scale in (f"{module}.{kind}" for kind in SCALES):
                # One, but of halves that an engine stacks and were quantized one by one.
                is_pair = scale.endswith(f".mlp.gate_up.{WEIGHT_SCALE}")
                own = stored[scale].shape if scale in stored else (1,)
                is_good = math.prod(own) == 1 or (is_pair and own == (2,))
                described[scale] = TensorInfo("float32", own if is_good else (1,))
    return described


def find_rank_files(folder: Path, num_ranks: int, because: str) -> tuple[list[Path], Problems]:
    """Return the files of the ranks that are there, and what is wrong with the set of them.

    because: what makes it that many, in the words of a message.
    """
    present = {path.name for path in folder.glob("rank*.safetensors")}
    # A few more than are there are enough to tell what is absent.
    wanted = [f"rank{rank}.safetensors" for rank in range(min(num_ranks, len(present) + 10))]
    absent = [name for name in wanted if name not in present]
    surplus = sorted(present - set(wanted))
    problems = Problems.from_table(
        (absent, f"{folder} has {because} but lacks {join_names(absent)}", "copy the folder again"),
        (surplus, f"{folder} has {because} but also holds {join_names(surplus)}",
         "its config.json belongs to another conversion: copy the folder again"),
    )  # fmt: skip
    return [folder / name for name in wanted if name in present], problems


def describe_sources(folder: Path, files: Sequence[TensorFile]) -> list[dict[str, Any]]:
    """Manifest entries of a checkpoint's files; SpecDecError for weights that were changed."""
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
    """The scales that a quantized KV cache needs, and matrices that are quantized to FP8."""
    scales = []
    for name, info in stored.items():
        if name in as_float8 and _is_float8(name, info, quantization):
            scales += [f"{name.removesuffix('weight')}{scale}" for scale in SCALES]
    if quantization.kv_cache_quant_algo is not None:
        ending = "qkv.weight"
        own = [n for n in expected if n.startswith("transformer.") and n.endswith(ending)]
        scales += [name.removesuffix(ending) + KV_SCALES[0] for name in own]
    return scales
