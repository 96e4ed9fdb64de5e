"""An engine folder of the torch backend: what build writes and run reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec import logs
from specdec.errors import SpecDecError
from specdec.folders import ENGINE, expect_folder
from specdec.methods import DrafterParams
from specdec.quantization import (
    FLOAT8,
    FLOAT8_STORAGE,
    INT8,
    INT8_SCALES,
    SCALES,
    WEIGHT_SCALE,
)
from specdec.schema import CheckpointConfig, ModelConfig, parse_checkpoint_config
from specdec.sharding import join
from specdec.storage import TensorFile, TensorInfo, read_json
from specdec.tensors import (
    EMBEDDING,
    find_first_copy,
    get_rank_shape,
    get_stored_dtype,
    list_drafter_tensors,
    list_target_tensors,
)
from specdec.torch_tensors import TORCH_DTYPES, to_tensor, view_tensor
from specdec.vocabulary import read_recorded

logger = logs.get_logger(__name__)

# Of an engine of one rank, everything; of several, each has a file, and the drafter has its own.
WEIGHTS_NAME = "weights.safetensors"
DRAFTER_NAME = "drafter.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Limits fixed at build time; lengths in tokens."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_draft_len: int
    max_beam_width: int
    speculative_decoding_mode: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """An engine's config.json, and what its manifest says of the target's tokens.

    quantization: what the build made of an unquantized checkpoint's linears, INT8 or nothing.
    """

    version: str
    checkpoint: CheckpointConfig
    build: BuildConfig
    prepack: bool
    kernels: dict[str, str] | None
    quantization: str | None = None
    vocabulary: dict[str, Any] | None = None


def list_engine_tensors(
    model: ModelConfig, drafter: DrafterParams | None
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every engine tensor: the checkpoint's, but [fc; gate] stacked as gate_up.

    Of the target, shapes are one rank's; the drafter is whole.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, spec in list_target_tensors(model).items():
        shape = get_rank_shape(spec, model)
        if model.arithmetic.mlp == "plain" or ".mlp.fc." not in name:
            if ".mlp.gate." not in name:
                shapes[name] = shape
            continue
        rows, *rest = shape
        if model.arithmetic.mlp == "gated":
            rows *= 2
        shapes[name.replace(".mlp.fc.", ".mlp.gate_up.")] = (rows, *rest)
    if drafter is not None:
        shapes |= {
            name: spec.shape
            for name, spec in list_drafter_tensors(drafter, model).items()
            if find_first_copy(name) == name
        }
    return shapes


def name_weight_file(model: ModelConfig, rank: int) -> str:
    """The file of an engine folder that holds a rank's part of the target."""
    return WEIGHTS_NAME if model.tp_size == 1 else f"rank{rank}.safetensors"


def list_engine_files(
    model: ModelConfig, drafter: DrafterParams | None
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Weight file -> its tensors, name -> shape. The drafter is rank 0's alone, and stored once."""
    everything = list_engine_tensors(model, drafter)
    if model.tp_size == 1:
        return {WEIGHTS_NAME: everything}
    target = list_engine_tensors(model, None)
    files = {name_weight_file(model, rank): target for rank in range(model.tp_size)}
    if drafter is not None:
        files[DRAFTER_NAME] = {n: everything[n] for n in everything if n not in target}
    return files


def add_scales(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo]
) -> dict[str, tuple[int, ...]]:
    """Add the scales that belong to those of the tensors which are stored as float8.

    Scales have one element, the weight's of a stacked gate_up two.
    """
    expected = dict(shapes)
    for name in shapes:
        if name in stored and stored[name].dtype in FLOAT8_STORAGE:
            for kind in SCALES:
                scale = f"{name.removesuffix('.weight')}.{kind}"
                info = stored.get(scale)
                is_one = info is not None and math.prod(info.shape) == 1
                is_pair = kind == WEIGHT_SCALE and ".mlp.gate_up." in name
                expected[scale] = info.shape if info and is_one else ((2,) if is_pair else (1,))
    return expected


def list_int8(model: ModelConfig) -> list[str]:
    """The matrices that are int8 in an int8 engine: those of the target's layers.

    The head is read once a step as they are, but an error in it goes straight into the logits.
    """
    return [
        name for name, shape in list_engine_tensors(model, None).items()
        if name.startswith("transformer.layers.") and len(shape) == 2
    ]  # fmt: skip


def name_int8_scales(name: str) -> str:
    """The name of an int8 matrix's scales."""
    return f"{name.removesuffix('.weight')}.{INT8_SCALES}"


def add_int8_scales(
    shapes: Mapping[str, tuple[int, ...]], model: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """Add the scales of those of the tensors that are int8, one a row."""
    scales = {name_int8_scales(n): shapes[n][:1] for n in list_int8(model) if n in shapes}
    return {**shapes, **scales}


def encode_engine_config(config: EngineConfig) -> dict[str, Any]:
    """Return the JSON form of an engine's config."""
    return {
        "version": config.version,
        "backend": "torch",
        "pretrained_config": config.checkpoint.raw,
        "build_config": dataclasses.asdict(config.build),
        "torch_config": {
            "prepack": config.prepack,
            "kernels": config.kernels,
            "quantization": config.quantization,
        },
    }


def read_engine_config(folder: Path) -> EngineConfig:
    """Read an engine's config.json; raise SpecDecError if it is none, or of another backend."""
    expect_folder(folder, ENGINE)
    document = read_json(folder / "config.json")
    if "build_config" not in document:
        raise SpecDecError(
            f"{folder} is not an engine: its config.json has no build_config",
            "run specdec-build on the checkpoint first",
        )
    backend = document.get("backend", "tensorrt-llm")
    if backend != "torch":
        raise SpecDecError(
            f"{folder} was built for the backend {backend!r}, not for torch",
            "build it again with --backend torch",
        )
    names = {field.name for field in dataclasses.fields(BuildConfig)}
    build, options = document["build_config"], document.get("torch_config")
    if (
        not isinstance(build, dict)
        or set(build) != names
        or not isinstance(options, dict)
        or options.get("quantization") not in (None, INT8)
    ):
        raise SpecDecError(
            f"{folder}/config.json is not what this version of specdec writes",
            "build the engine again",
        )
    return EngineConfig(
        version=str(document.get("version")),
        checkpoint=parse_checkpoint_config(document.get("pretrained_config") or {}),
        build=BuildConfig(**build),
        prepack=bool(options.get("prepack")),
        kernels=options.get("kernels"),
        quantization=options.get("quantization"),
        vocabulary=read_recorded(folder),
    )


def check_inventory(file: TensorFile, expected: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Raise SpecDecError that names every missing, unknown or misshapen tensor of a file."""
    missing = sorted(set(expected) - set(file.tensors))
    unknown = sorted(set(file.tensors) - set(expected))
    wrong = sorted(
        f"{name} is {list(file.tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in file.tensors and file.tensors[name].shape != shape
    )
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"
        for kind, names in (("missing", missing), ("unknown", unknown), ("misshapen", wrong))
        if names
    ]
    if problems:
        raise SpecDecError(
            f"{file.path} does not hold the {what} that config.json describes: "
            + "; ".join(problems),
            f"make the {what} again; config.json and the tensors must come from one run",
        )


def check_int8(file: TensorFile, names: Iterable[str], model: ModelConfig) -> None:
    """Raise SpecDecError where other tensors of a file are int8 than those of an int8 engine."""
    integers = set(list_int8(model))
    expected = {n: INT8 if n in integers else get_stored_dtype(n, model.dtype) for n in names}
    expected |= {name_int8_scales(n): "float32" for n in expected if n in integers}
    wrong = [
        f"{name} is {file.tensors[name].dtype}, expected {dtype}"
        for name, dtype in expected.items()
        if file.tensors[name].dtype != dtype
    ]
    if wrong:
        raise SpecDecError(
            f"{file.path} does not hold the int8 engine that config.json describes: {wrong[0]}"
            + (f", and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""),
            "make the engine again; config.json and the tensors must come from one run",
        )


def load_tensors(
    file: TensorFile,
    names: list[str],
    device: torch.device,
    dtype: torch.dtype,
    *,
    maps_matrices: bool = False,
) -> dict[str, Tensor]:
    """Copy tensors from a mapped file to the device.

    maps_matrices: what linears multiply with stays in the file, to be packed from there.
    Float8 weights stay as they are, their scales beside them, where the device multiplies such;
    elsewhere they become weights of `dtype`. Int8 weights have their scales beside them.
    """
    from specdec.engine.float8 import can_multiply, widen
    from specdec.engine.int8 import check_scales

    tensors: dict[str, Tensor] = {}
    num_widened = num_float8 = 0
    for name in names:
        info = file.tensors[name]
        if info.dtype == FLOAT8:
            weight = to_tensor(file.read(name), info.dtype).to(device)
            keys = [name.removesuffix("weight") + kind for kind in SCALES]
            scales = [to_tensor(file.read(key), "float32").to(device) for key in keys]
            if can_multiply(weight, device):
                tensors |= {name: weight, **dict(zip(keys, scales, strict=True))}
                num_float8 += 1
            else:
                tensors[name] = widen(weight, scales[0], dtype)
                num_widened += 1
            continue
        if info.dtype == INT8:
            key = name_int8_scales(name)
            tensors[key] = to_tensor(file.read(key), "float32")
            check_scales(tensors[key], f"{file.path}: {key}")
            tensors[key] = tensors[key].to(device)
        elif info.dtype not in TORCH_DTYPES and info.dtype != get_stored_dtype(name, ""):
            raise SpecDecError(
                f"{file.path}: {name} is stored as {info.dtype}",
                f"the torch backend reads {', '.join(TORCH_DTYPES)}",
            )
        is_mapped = maps_matrices and len(info.shape) == 2 and "embedding" not in name
        take = view_tensor if is_mapped else to_tensor
        tensors[name] = take(file.read(name), info.dtype).to(device)
    if num_float8:
        logger.info("FP8: %d linears multiply in float8", num_float8)
    if num_widened:
        logger.info(
            "FP8: %d linears have float8 weights widened to %s; their inputs are not rounded",
            num_widened, str(dtype).removeprefix("torch."),
        )  # fmt: skip
    return tensors


def load_weights(
    folder: Path,
    config: EngineConfig,
    device: torch.device,
    *,
    rank: int = 0,
    drafts: bool = True,
    is_packed: bool = False,
) -> dict[str, Tensor]:
    """Check and load a rank's files of an engine: its part of the target, on rank 0 the drafter.

    is_packed: linears are about to pack their matrices, which need no copy before that.
    """
    model, drafter = config.checkpoint.model, config.checkpoint.drafter
    wanted = list_engine_tensors(model, drafter if drafts else None)
    names = [name_weight_file(model, rank)] + ([DRAFTER_NAME] if rank == 0 else [])
    files = list_engine_files(model, drafter)
    weights: dict[str, Tensor] = {}
    for name in names:
        if name in files:
            file, shapes = TensorFile(folder / name), files[name]
            if config.quantization == INT8:
                check_inventory(file, add_int8_scales(shapes, model), "engine")
                check_int8(file, shapes, model)
            else:
                check_inventory(file, add_scales(shapes, file.tensors), "engine")
            chosen = [tensor for tensor in shapes if tensor in wanted]
            weights |= load_tensors(
                file, chosen, device, TORCH_DTYPES[model.dtype], maps_matrices=is_packed
            )
    return weights


def load_embedding(folder: Path, config: EngineConfig, device: torch.device) -> Tensor:
    """Load the whole of an embedding that is split over the ranks."""
    model = config.checkpoint.model
    files = [TensorFile(folder / name_weight_file(model, rank)) for rank in range(model.tp_size)]
    parts = [file.read(EMBEDDING) for file in files]
    whole = join(parts, list_target_tensors(model)[EMBEDDING], model)
    return to_tensor(whole, files[0].tensors[EMBEDDING].dtype).to(device)
