"""Layout of the torch backend's engine folder, which build writes, run reads, doctor checks.

Needs no torch; loading.py takes weights into memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import CheckpointConfig, parse_checkpoint_config
from specdec.checkpoint.inventory import describe_quantized
from specdec.errors import Problems, SpecDecError, shorten
from specdec.files.backends import BACKENDS, TORCH, name_backend
from specdec.files.folders import ENGINE, expect_folder
from specdec.files.manifest import NAME
from specdec.files.reading import read_json
from specdec.files.tensor_file import TensorInfo
from specdec.files.vocabulary import read_recorded
from specdec.methods import METHODS, DrafterParams, Method, find_mode
from specdec.model.bounds import MAX_DRAFT_TOKENS
from specdec.model.config import ModelConfig
from specdec.model.int4 import INT4_GROUPS, describe_int4
from specdec.model.quantization import FLOAT8, INT4, INT8, INT8_SCALES, WEIGHT_SCALE
from specdec.model.rotary_scaling import get_kind
from specdec.model.tensors import (
    HEAD,
    HEAD_BIAS,
    LINEAR_MODULE,
    OFFSETS,
    ROUTER,
    find_first_copy,
    get_rank_shape,
    get_stored_dtype,
    list_target_tensors,
)
from specdec.system import logs

logger = logs.get_logger(__name__)

# An engine of one rank has one file; with several ranks, each has a file and so has the drafter.
WEIGHTS_NAME = "weights.safetensors"
DRAFTER_NAME = "drafter.safetensors"
PACKED_FOLDER = "packed"  # matrices as the kernels read them, in files of the same names
ENGINE_FORMAT = 2  # of the folder: since 2 a matrix that is packed stands there in no other form
# Weights of a drafter that share a scale in four bits; half a matrix's columns hold whole groups,
# for a ReDrafter's projection of two states is read as two matrices.
DRAFTER_GROUP = 32
# Matrices that are never rounded: they are small, and the kernels read them as they are.
UNROUNDED = (ROUTER, "shared_expert_gate.weight", f"{LINEAR_MODULE}ba.weight")


# Fields of `EngineConfig` that an engine's config.json has in the backend's section.
OPTIONS = (
    "prepack", "kernels", "packing", "quantization", "drafter_weights", "draft_vocab_size",
    "build_id",
)  # fmt: skip


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
    """An engine's config.json, and the target's tokens as its manifest has them.

    build_id: names the sources of the weights; each weight file has it too. kernels: what the
    kernels were compiled with, None where torch's own operators are to run. packing: how these lay
    the folder's packed matrices out, None where it has none. quantization: type that
    the build rounded an unquantized checkpoint's linears to, INT8, INT4 or None; drafter_weights:
    that of the drafter's. draft_vocab_size: number of drafted tokens, where the build chose them.
    has_fixed_drafts: whether the build fixed who drafts, and how much, as networks of TensorRT do;
    elsewhere each run chooses both, and the build's mode and length are its defaults.
    """

    version: str
    checkpoint: CheckpointConfig
    build: BuildConfig
    build_id: str
    prepack: bool
    kernels: dict[str, str] | None
    packing: str | None = None
    quantization: str | None = None
    drafter_weights: str | None = None
    draft_vocab_size: int | None = None
    vocabulary: dict[str, Any] | None = None
    has_fixed_drafts: bool = False

    @property
    def num_positions(self) -> int:
        """Number of positions of the longest text and the deepest draft after it."""
        drafter, build = self.checkpoint.drafter, self.build
        depth = drafter.max_draft_depth if drafter else build.max_draft_len
        if not self.has_fixed_drafts:
            depth = max(depth, self.draft_room)
        return build.max_seq_len + depth + 1

    @property
    def draft_room(self) -> int:
        """Most draft tokens of a request in a step of all requests."""
        build = self.build
        room = build.max_num_tokens // build.max_batch_size - 1
        return max(build.max_draft_len, min(room, MAX_DRAFT_TOKENS - 1))

    @property
    def default_method(self) -> Method | None:
        """Method that drafts where a run names none; None for plain decoding."""
        method = self.checkpoint.method or find_mode(self.build.speculative_decoding_mode)
        # An engine for external drafts awaits them only where the build fixed that.
        is_awaited = method is not None and method.source == "engine"
        return None if is_awaited and not self.has_fixed_drafts else method


def list_engine_tensors(
    model: ModelConfig, drafter: DrafterParams | None
) -> dict[str, tuple[int, ...]]:
    """List name -> shape of engine tensors: the checkpoint's, but [fc; gate] stacked as gate_up.

    Experts stay as they are.

    The target's shapes are one rank's; the drafter is whole.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, spec in list_target_tensors(model).items():
        shape = get_rank_shape(spec, model)
        if model.arithmetic.mlp in ("plain", "experts") or ".mlp.fc." not in name:
            if ".mlp.gate." not in name:
                shapes[name] = shape
            continue
        rows, *other_sizes = shape
        if model.arithmetic.mlp == "gated":
            rows *= 2
        shapes[name.replace(".mlp.fc.", ".mlp.gate_up.")] = (rows, *other_sizes)
    if drafter is not None:
        shapes |= {
            name: spec.shape
            for name, spec in drafter.list_tensors(model).items()
            if find_first_copy(name) == name
        }
    return shapes


def name_weight_file(model: ModelConfig, rank: int) -> str:
    """Name the file of an engine folder that holds a rank's tensors of the target."""
    return WEIGHTS_NAME if model.tp_size == 1 else f"rank{rank}.safetensors"


def list_engine_files(
    model: ModelConfig, drafter: DrafterParams | None
) -> dict[str, dict[str, tuple[int, ...]]]:
    """List weight file -> its tensors, name -> shape. The drafter is rank 0's, and stored once."""
    everything = list_engine_tensors(model, drafter)
    if model.tp_size == 1:
        return {WEIGHTS_NAME: everything}
    target = list_engine_tensors(model, None)
    files = {name_weight_file(model, rank): target for rank in range(model.tp_size)}
    if drafter is not None:
        files[DRAFTER_NAME] = list_drafter_tensors(model, drafter)
    return files


def list_integers(model: ModelConfig) -> list[str]:
    """List the matrices that are int8 or int4 in such an engine: those of the target's layers.

    The head is read once a step as they are, but an error in it goes straight into the logits.
    """
    return [
        name for name, shape in list_engine_tensors(model, None).items()
        if name.startswith("transformer.layers.") and len(shape) > 1
        and not name.endswith(UNROUNDED)
    ]  # fmt: skip


def list_drafter_tensors(
    model: ModelConfig, drafter: DrafterParams | None
) -> dict[str, tuple[int, ...]]:
    """List name -> shape of those of an engine's tensors that are the drafter's."""
    target = list_engine_tensors(model, None)
    everything = list_engine_tensors(model, drafter)
    return {name: everything[name] for name in everything if name not in target}


def name_int8_scales(name: str) -> str:
    """Return the name of an int8 matrix's scales."""
    return f"{name.removesuffix('.weight')}.{INT8_SCALES}"


def encode_engine_config(config: EngineConfig, backend: str = TORCH) -> dict[str, Any]:
    """Return the JSON form of an engine's config."""
    return {
        "version": config.version,
        "backend": backend,
        "pretrained_config": config.checkpoint.raw,
        "build_config": dataclasses.asdict(config.build),
        f"{backend}_config": {
            "format": ENGINE_FORMAT,
            **{name: getattr(config, name) for name in OPTIONS},
        },
    }


def read_engine_config(folder: Path, backend: str = TORCH) -> EngineConfig:
    """Read an engine's config.json; raise SpecDecError if it is none, or not of `backend`."""
    expect_folder(folder, ENGINE)
    document = read_json(folder / "config.json")
    recorded_backend = name_backend(folder, document)
    if recorded_backend != backend:
        raise SpecDecError(
            f"{folder} was built for the backend {recorded_backend!r}, not for {backend}",
            f"build it again with --backend {backend}",
        )
    checkpoint = parse_checkpoint_config(_read_object(folder, document, "pretrained_config"))
    section = f"{backend}_config"
    options = _read_object(folder, document, section)
    if backend == TORCH and options.get("format", 1) != ENGINE_FORMAT:
        raise SpecDecError(
            f"{folder} is an engine of format {shorten(options.get('format', 1))}, this version of"
            f" specdec reads format {ENGINE_FORMAT}",
            f"build it again: {suggest_build(folder)}",
        )
    build = _read_build_config(folder, document, checkpoint)
    wrong_options = _find_wrong_options(options, checkpoint)
    wrong_names = [f"{section}.{name}" for name in wrong_options]
    if not isinstance(document.get("version"), str):
        wrong_names.insert(0, "version")
    _refuse(folder, document, wrong_names)
    return EngineConfig(
        version=document["version"],
        checkpoint=checkpoint,
        build=build,
        vocabulary=read_recorded(folder),
        has_fixed_drafts=BACKENDS[backend].has_fixed_drafts,
        **dict[str, Any]((name, options.get(name)) for name in OPTIONS),
    )


def _find_wrong_options(options: Mapping[str, Any], checkpoint: CheckpointConfig) -> list[str]:
    """Name the options of a backend's section that no build writes."""
    size, kernels, weights = (
        options.get(name) for name in ("draft_vocab_size", "kernels", "drafter_weights")
    )
    has_drafter = checkpoint.drafter is not None
    is_size = type(size) is int and 0 < size < checkpoint.model.vocab_size
    is_right = {
        "prepack": isinstance(options.get("prepack"), bool),
        "kernels": kernels is None
        or (isinstance(kernels, dict) and all(isinstance(v, str) for v in kernels.values())),
        "packing": options.get("packing") is None
        or (isinstance(options["packing"], str) and kernels is not None),
        "quantization": options.get("quantization") in (None, INT8, INT4),
        "drafter_weights": weights is None or (weights in (INT8, INT4) and has_drafter),
        "draft_vocab_size": size is None or (is_size and has_drafter),
        "build_id": isinstance(options.get("build_id"), str),
    }
    return [name for name in is_right if not is_right[name]]


def _read_object(folder: Path, document: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = document.get(name)
    if not isinstance(value, dict):
        _refuse(folder, document, [name])
    return dict(document[name])


def _read_build_config(
    folder: Path, document: Mapping[str, Any], checkpoint: CheckpointConfig
) -> BuildConfig:
    values = _read_object(folder, document, "build_config")
    lowest = {
        "max_batch_size": 1, "max_input_len": 1, "max_seq_len": 2, "max_num_tokens": 1,
        "max_draft_len": 0, "max_beam_width": 1,
    }  # fmt: skip
    wrong_names = [
        name for name, least_value in lowest.items()
        if type(values.get(name)) is not int or not least_value <= values[name] < 2**31
    ]  # fmt: skip
    modes: list[str | None] = [checkpoint.mode]
    if checkpoint.method is None:
        modes += [method.mode for method in METHODS.values() if method.params is None]
    if values.get("speculative_decoding_mode", "") not in modes:
        wrong_names.append("speculative_decoding_mode")
    wrong_names += sorted(set(values) - {field.name for field in dataclasses.fields(BuildConfig)})
    _refuse(folder, document, [f"build_config.{name}" for name in wrong_names])
    build = BuildConfig(**values)
    Problems(
        (f"{folder}/config.json: build_config has {fact}", "build the engine again")
        for fact in _find_contradictions(build, checkpoint)
    ).raise_all()
    return build


def _find_contradictions(build: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    """List limits that no build writes, and that would take memory before a request is there."""
    drafter, positions = checkpoint.drafter, count_positions(checkpoint.model)
    is_external = checkpoint.method is None and build.speculative_decoding_mode is not None
    facts = []
    if build.max_seq_len > positions:
        facts.append(f"max_seq_len {build.max_seq_len}, more than the model's {positions}")
    if build.max_input_len >= build.max_seq_len:
        facts.append(f"max_input_len {build.max_input_len}, max_seq_len {build.max_seq_len}")
    if not is_external and build.max_draft_len != (drafter.max_draft_tokens if drafter else 0):
        facts.append(f"max_draft_len {build.max_draft_len}, which is not the drafter's")
    elif is_external and not 0 < build.max_draft_len < build.max_num_tokens:
        facts.append(f"max_draft_len {build.max_draft_len}, max_num_tokens {build.max_num_tokens}")
    if build.max_beam_width != 1:
        facts.append(f"max_beam_width {build.max_beam_width}")
    return facts


def count_positions(model: ModelConfig) -> int:
    """Count the positions of the longest sequence that a model is for.

    Linear and dynamic scaling extend what max_position_embeddings says; other kinds are counted in
    it already.
    """
    scaling, positions = model.rotary_scaling or {}, model.max_position_embeddings
    factor = scaling.get("factor")
    if get_kind(scaling) not in ("linear", "dynamic"):
        return positions
    return math.ceil(positions * factor) if isinstance(factor, (int, float)) else positions


def _refuse(folder: Path, document: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise SpecDecError for entries of config.json that are not what a build writes."""
    problems = Problems()
    for name in names:
        value: Any = document
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        problems.add(
            f"{folder}/config.json: {name} is {shorten(value)}, which this version of specdec"
            " does not write",
            "build the engine again",
        )
    problems.raise_all()


def make_build_id(checkpoint_sums: Sequence[str | None], *kinds: str | None) -> str:
    """Make the id that the weight files of one engine share, of their sources and their kinds."""
    text = json.dumps([*checkpoint_sums, *kinds])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def suggest_build(folder: Path, changes: Mapping[str, str | None] | None = None) -> str:
    """Return the command that builds an engine again on this machine.

    changes: values of options other than those that the engine was built with; None leaves the
    option out.
    """
    path = folder / NAME
    arguments = read_json(path).get("build_arguments") if path.is_file() else None
    if not isinstance(arguments, list) or not all(isinstance(word, str) for word in arguments):
        arguments = ["--checkpoint-dir=CHECKPOINT"]
    changed = dict(changes or {})
    kept = [word for word in arguments if word.partition("=")[0] not in changed]
    added = [f"{option}={value}" for option, value in changed.items() if value is not None]
    command = ["specdec", "build", *kept, *added, f"--output-dir={folder}", "--force"]
    return shlex.join(command)


def describe_tensors(
    config: EngineConfig, name: str, stored: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Describe the tensors of a weight file as config.json has them.

    stored: the tensors in the file, which decide which matrices are float8 or int4, and how those
    of four bits are grouped.
    """
    model, drafter = config.checkpoint.model, config.checkpoint.drafter
    drafters = list_drafter_tensors(model, drafter)
    shapes = list_engine_tensors(model, None) if name != DRAFTER_NAME else {}
    if name in (WEIGHTS_NAME, DRAFTER_NAME):
        shapes |= drafters
    tensors = _describe_quantized(config, shapes, stored)
    drafter_infos = {
        n: TensorInfo(get_stored_dtype(n, model.dtype), drafters[n])
        for n in drafters if n in shapes
    }  # fmt: skip
    if not drafter_infos or config.drafter_weights is None is config.draft_vocab_size:
        return tensors
    planned_infos = plan_drafter(drafter_infos, config.drafter_weights, config.draft_vocab_size)
    return tensors | planned_infos


def _describe_quantized(
    config: EngineConfig, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Describe the tensors of a weight file before the build rounds the drafter's."""
    model, algorithm = config.checkpoint.model, config.checkpoint.quantization.quant_algo
    tensors = {n: TensorInfo(get_stored_dtype(n, model.dtype), s) for n, s in shapes.items()}
    if config.quantization == INT8:
        return plan_int8(tensors, list_integers(model))
    if config.quantization == INT4:
        algorithm = INT4_GROUPS
        for weight in list_integers(model):
            if weight in shapes:
                num_rows, num_inputs = shapes[weight]
                module = weight.removesuffix(".weight")
                tensors |= describe_int4(module, (num_rows, num_inputs), stored)
    return tensors | describe_quantized(shapes, stored, algorithm, (FLOAT8,))


def list_matrices(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """List the modules that multiply with a matrix."""
    return [
        name.removesuffix(".weight") for name, shape in shapes.items()
        if len(shape) == 2 and "embedding" not in name and name.endswith(".weight")
    ]  # fmt: skip


def plan_int8(tensors: Mapping[str, TensorInfo], names: Collection[str]) -> dict[str, TensorInfo]:
    """Plan a file's tensors with the matrices of these names as int8."""
    rounded_shapes = {name: tensors[name].shape for name in names if name in tensors}
    return {
        **tensors,
        **{name: TensorInfo(INT8, shape) for name, shape in rounded_shapes.items()},
        **{
            name_int8_scales(name): TensorInfo("float32", s[:-1])
            for name, s in rounded_shapes.items()
        },
    }


def plan_int4(
    tensors: Mapping[str, TensorInfo], name: str, group_size: int
) -> dict[str, TensorInfo]:
    """Plan the tensors that a matrix rounded to int4 has in place of its own, by name."""
    num_rows, num_inputs = tensors[name].shape
    scales = TensorInfo("float32", (num_rows, num_inputs // group_size))
    return {
        name: TensorInfo("int8", (num_rows // 2, num_inputs)),
        f"{name.removesuffix('.weight')}.{WEIGHT_SCALE}": scales,
    }


def plan_drafter(
    tensors: Mapping[str, TensorInfo], weights: str | None, vocab_size: int | None
) -> dict[str, TensorInfo]:
    """Plan a drafter's tensors where its matrices are INT8 or INT4, or its heads shortened.

    With INT4 matrices that do not divide into groups are int8. Experts, shared ones too, stay as
    they are.
    """
    planned_infos = dict(tensors)
    if vocab_size is not None:
        planned_infos |= _plan_shortened_heads(tensors, vocab_size)
    if weights is None:
        return planned_infos
    modules = list_matrices({name: info.shape for name, info in planned_infos.items()})
    names = [
        name for name in (f"{module}.weight" for module in modules)
        if not name.endswith(UNROUNDED) and ".shared_expert." not in name
    ]  # fmt: skip
    int4_names = [
        name for name in names if weights == INT4 and _takes_int4(planned_infos[name].shape)
    ]
    planned_infos = plan_int8(planned_infos, set(names) - set(int4_names))
    for name in int4_names:
        planned_infos |= plan_int4(planned_infos, name, DRAFTER_GROUP)
    return planned_infos


def _plan_shortened_heads(
    tensors: Mapping[str, TensorInfo], vocab_size: int
) -> dict[str, TensorInfo]:
    """Plan a drafter's heads of fewer tokens, and the offsets to the target's tokens."""
    heads = [name for name in tensors if name.endswith((HEAD, HEAD_BIAS))]
    shortened = {
        name: TensorInfo(tensors[name].dtype, (vocab_size, *tensors[name].shape[1:]))
        for name in heads
    }
    return shortened | {name_offsets(tensors): TensorInfo("int64", (vocab_size,))}


def _takes_int4(shape: tuple[int, ...]) -> bool:
    """Return whether a matrix can be rounded to int4 in groups, half by half."""
    return shape[0] % 2 == 0 == shape[1] % (2 * DRAFTER_GROUP)


def name_offsets(drafter: Iterable[str]) -> str:
    """Name the tensor, beside the first head, of offsets of a shortened vocabulary."""
    head = min(name for name in drafter if name.endswith(f".{HEAD}"))
    return head.removesuffix(HEAD) + OFFSETS
