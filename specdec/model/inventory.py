"""What a checkpoint's rank files must hold, and how a file compares with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from specdec.errors import Problems, SpecDecError, join_names
from specdec.files.tensor_file import TensorInfo
from specdec.methods import DrafterParams
from specdec.model import int4
from specdec.model.checkpoint import CheckpointConfig
from specdec.model.config import ModelConfig
from specdec.model.quantization import (
    ALGORITHMS,
    FLOAT8,
    FLOAT8_STORAGE,
    KV_SCALES,
    Quantization,
    find_contradictions,
)
from specdec.model.tensors import (
    TensorSpec,
    get_rank_shape,
    get_stored_dtype,
    list_rank_names,
    list_target_tensors,
)

SCALE_INFO = TensorInfo("float32", (1,))
# What TensorRT-LLM's own writer stores and every loader computes anew.
ROTARY_BUFFERS = ("embed_positions", "rotary_inv_freq", "embed_positions_for_gpt_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inventory:
    """A file beside what config.json describes; `wrong` says what is wrong with each tensor.

    Buffers that every loader computes are in none of the lists.
    """

    kept: list[str]
    scales: list[str]
    missing: list[str]
    wrong: list[str]
    unread: list[str]


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
    scales: list[str] = []
    wrong: list[str] = []
    matrices = _describe_quantized(stored, expected, quantization, wrong)
    cache = _list_cache_scales(stored, expected, quantization)
    wanted = {**expected, **matrices, **dict.fromkeys(cache, SCALE_INFO)}
    for name, info in wanted.items():
        found = stored.get(name)
        if found is None:
            continue
        is_one = found.dtype == info.dtype and math.prod(found.shape) == 1
        if name not in expected and info.shape == SCALE_INFO.shape and not is_one:
            wrong.append(f"{name} is {found.dtype} {list(found.shape)}, not one float32")
        elif name in expected and found.shape != info.shape:
            wrong.append(f"{name} has shape {list(found.shape)}, not {list(info.shape)}")
        elif name in expected and found.dtype != info.dtype:
            wrong.append(f"{name} is {found.dtype}, config.json says {info.dtype}")
        elif name not in expected and not is_one and found != info:
            wrong.append(
                f"{name} is {found.dtype} {list(found.shape)}, not {info.dtype} {list(info.shape)}"
            )
        else:
            (kept if name in expected else scales).append(name)
    linears = [
        name.removesuffix(".weight") for name in kept
        if len(stored[name].shape) == 2 and "embedding" not in name
    ]  # fmt: skip
    dtypes = {name: info.dtype for name, info in stored.items()}
    wrong += find_contradictions(quantization, linears, dtypes)
    unread = [
        name for name in stored
        if name not in wanted
        and name.rpartition(".")[2].removesuffix("_local") not in ROTARY_BUFFERS
    ]  # fmt: skip
    missing = [name for name in wanted if name not in stored]
    return Inventory(kept=kept, scales=scales, missing=missing, wrong=wrong, unread=unread)


def find_rank_files(folder: Path, num_ranks: int, because: str) -> tuple[list[Path], Problems]:
    """Return the files of the ranks that are there, and what is wrong with the set of them.

    because: what makes it that many, in the words of a message.
    """
    present = {path.name for path in folder.glob("rank*.safetensors")}
    # A few more than are there are enough to tell what is absent.
    wanted = [f"rank{rank}.safetensors" for rank in range(min(num_ranks, len(present) + 10))]
    absent = [name for name in wanted if name not in present]
    surplus = sorted(present - set(wanted))
    problems = Problems()
    if absent:
        problems.add(
            f"{folder} has {because} but lacks {join_names(absent)}", "copy the folder again"
        )
    if surplus:
        problems.add(
            f"{folder} has {because} but also holds {join_names(surplus)}",
            "its config.json belongs to another conversion: copy the folder again",
        )
    return [folder / name for name in wanted if name in present], problems


def _describe_quantized(
    stored: Mapping[str, TensorInfo],
    expected: Mapping[str, TensorInfo],
    quantization: Quantization,
    wrong: list[str],
) -> dict[str, TensorInfo]:
    """Types and shapes of the matrices that are stored in a quantized type, and of their scales.

    What makes no matrix of the checkpoint's kind is added to `wrong`.
    """
    algorithm = ALGORITHMS.get(str(quantization.quant_algo))
    described: dict[str, TensorInfo] = {}
    for name, info in expected.items():
        module, found = name.removesuffix(".weight"), stored.get(name)
        if found is None or module == name or len(info.shape) != 2:
            continue
        if quantization.quant_algo is None or found.dtype not in FLOAT8_STORAGE:
            continue
        shape = (info.shape[0], info.shape[1])
        own = {}
        if algorithm is not None:
            size = algorithm.choose_group_size(quantization.group_size)
            own = algorithm.describe(shape, info.dtype, size)
            own = {f"{module}.{kind}": each for kind, each in own.items()}
        if quantization.quant_algo in int4.INT4_ALGORITHMS:
            try:
                own |= int4.describe_int4(module, shape, stored)
            except SpecDecError as error:
                wrong.append(error.message)
        elif own and own[name].dtype == FLOAT8:  # older writers label its bytes otherwise
            own[name] = TensorInfo(found.dtype, own[name].shape)
        described |= own
    return described


def _list_cache_scales(
    stored: Mapping[str, TensorInfo],
    expected: Mapping[str, TensorInfo],
    quantization: Quantization,
) -> list[str]:
    """The K/V scales that a quantized cache needs, and others that are there."""
    if not quantization.is_quantized:
        return []
    ending = "qkv.weight"
    own = [n.removesuffix(ending) for n in expected if n.endswith(ending)]
    scales = [prefix + kind for prefix in own for kind in KV_SCALES if prefix + kind in stored]
    if quantization.kv_cache_quant_algo is not None:
        scales += [p + KV_SCALES[0] for p in own if p.startswith("transformer.")]
    return list(dict.fromkeys(scales))
