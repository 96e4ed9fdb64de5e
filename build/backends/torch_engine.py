"""The torch backend's build: weights laid out for execution, kernels for this machine."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec import __version__
from specdec.checkpoint.config import CheckpointConfig
from specdec.checkpoint.inventory import describe_quantized, find_rank_files, list_tensors
from specdec.engine.layout import (
    DRAFTER_NAME,
    PACKED_FOLDER,
    BuildConfig,
    EngineConfig,
    check_inventory,
    encode_engine_config,
    list_drafter_tensors,
    list_engine_files,
    list_engine_tensors,
    list_integers,
    make_metadata,
    name_offsets,
    name_weight_file,
    plan_drafter,
    plan_int4,
    plan_int8,
)
from specdec.errors import Problems, SpecDecError, join_names
from specdec.files.folders import TENSORRT, TORCH
from specdec.files.reading import Array, write_json
from specdec.files.tensor_file import TensorFile, TensorInfo, write_tensor_file
from specdec.methods.net import NetParams
from specdec.model import blocks, int4
from specdec.model.config import ModelConfig
from specdec.model.quantization import (
    ACTIVATION_SCALE,
    EXECUTED,
    FLOAT8,
    FP8,
    INT4,
    INT8,
    INT8_SCALES,
    KV_SCALES,
    SCALES,
    WEIGHT_SCALE,
    find_contradictions,
    is_scale,
)
from specdec.model.sharding import join
from specdec.model.tensors import (
    EMBEDDING,
    HEAD,
    HEAD_BIAS,
    OFFSETS,
    Shard,
    find_first_copy,
    get_rank_shape,
    get_stored_dtype,
    list_linears,
)
from specdec.system import logs

from ..draft_vocabulary import choose_tokens
from ..settings import SAME, BuildSettings

if TYPE_CHECKING:
    from torch import Tensor

logger = logs.get_logger(__name__)
DEFAULT_GROUP_SIZE = 128


@dataclasses.dataclass(frozen=True)
class TorchPlan:
    """A checked build: the rank files to read, the files to write, whether to compile.

    needs_kernels: whether the build fails where the compiler does. packs: whether the weights are
    also stored as the kernels read them. draft_tokens: of `choose_tokens`. block_types: of
    `count_block_types`, for a checkpoint in GGML's blocks.
    """

    sources: list[TensorFile]
    files: dict[str, dict[str, TensorInfo]]
    prepack: bool
    compile_kernels: bool
    needs_kernels: bool
    packs: bool
    quantization: str | None
    drafter_weights: str | None
    draft_tokens: Array | None
    block_types: dict[str, int] | None

    @property
    def draft_vocab_size(self) -> int | None:
        """How many tokens are drafted, where these are chosen."""
        return None if self.draft_tokens is None else len(self.draft_tokens)

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for file in self.files.values() for info in file.values())


@dataclasses.dataclass(frozen=True)
class Work:
    """A checked build. report: what is told of it before. num_bytes: to be written at least.

    write: the engine's files into a folder, given that and the build's id; it returns their sha256
    sums where known, what else is to be reported, and that in words.
    """

    plan: TorchPlan
    report: dict[str, Any]
    num_bytes: int
    write: Callable[[Path, str], tuple[dict[str, str], dict[str, Any], str]]


def plan_engine(settings: BuildSettings, checkpoint: CheckpointConfig, limits: BuildConfig) -> Work:
    """Check and plan an engine of the torch backend."""
    plan = plan_build(settings, checkpoint, settings.checkpoint_dir)

    def write(folder: Path, build_id: str) -> tuple[dict[str, str], dict[str, Any], str]:
        hashes, has_kernels = write_engine(plan, checkpoint, limits, folder, build_id)
        count, size = sum(map(len, plan.files.values())), plan.num_bytes / 1e6
        kernels = "native kernels" if has_kernels else "no native kernels"
        return hashes, {"native_kernels": has_kernels}, f"{count} tensors, {size:.1f} MB, {kernels}"

    num_bytes = plan.num_bytes + sum_packed(plan, checkpoint.model)
    return Work(plan, describe_plan(plan), num_bytes, write)


def sum_packed(plan: TorchPlan, model: ModelConfig) -> int:
    """Return the bytes of the matrices that are also stored packed."""
    from .packing import list_packed

    files = plan.files.values() if plan.packs else ()
    return sum(file[name].num_bytes for file in files for name in list_packed(file, model))


def plan_build(settings: BuildSettings, checkpoint: CheckpointConfig, folder: Path) -> TorchPlan:
    """Check everything the torch backend needs; raise SpecDecError that lists what is wrong."""
    model, drafter = checkpoint.model, checkpoint.drafter
    check_config(settings, checkpoint)
    paths, problems = find_rank_files(folder, model.tp_size, f"tp_size={model.tp_size}")
    problems.raise_all()
    sources = [TensorFile(path) for path in paths]
    quantized = check_sources(sources, checkpoint)
    compile_kernels = will_compile(settings)
    algorithm = checkpoint.quantization.quant_algo
    files = plan_layout(settings, checkpoint, quantized if algorithm == FP8 else set())
    draft_tokens = choose_tokens(settings, model, drafter)
    drafter_weights = settings.drafter_weights if settings.drafter_weights != SAME else None
    if drafter_weights is not None or draft_tokens is not None:
        own = list_drafter_tensors(model, drafter)
        check_drafter(own, quantized, model, has_tokens=draft_tokens is not None)
        size = None if draft_tokens is None else len(draft_tokens)
        for file, tensors in files.items():
            if drafters := {name: info for name, info in tensors.items() if name in own}:
                files[file] = tensors | plan_drafter(drafters, drafter_weights, size)
    block_types = plan_stored(files, sources, quantized, checkpoint)
    if block_types is not None:
        how = "multiplied as they are" if compile_kernels else "widened when the engine is loaded"
        counts = ", ".join(f"{k} ({n})" for k, n in block_types.items() if k != model.dtype)
        plain = f"; {model.dtype}: {block_types[model.dtype]}" if model.dtype in block_types else ""
        logger.info("GGUF: matrices %s: %s%s", how, counts, plain)
    has_integers = settings.quantization is not None or algorithm in int4.INT4_ALGORITHMS
    if has_integers and not compile_kernels and settings.backend != TENSORRT:
        logger.warning(
            "%s without native kernels: weights will be widened in every step, which is slow",
            settings.quantization or algorithm,
        )
    return TorchPlan(
        sources=sources, files=files, prepack=settings.optimize != "none",
        compile_kernels=compile_kernels, needs_kernels=settings.optimize == "native",
        packs=compile_kernels and settings.packed_weights is not False,
        quantization=settings.quantization, drafter_weights=drafter_weights,
        draft_tokens=draft_tokens, block_types=block_types,
    )  # fmt: skip


def check_config(settings: BuildSettings, checkpoint: CheckpointConfig) -> None:
    """Raise SpecDecError for what a checkpoint's config.json has that the backend does not take."""
    # Imported here, not above: this module is also what `--help` and `--dry-run` errors load.
    from specdec.engine.rotary import compute_frequencies

    model, drafter = checkpoint.model, checkpoint.drafter
    find_problems(settings, checkpoint).raise_all()
    if model.arithmetic.positions == "rotary":
        compute_frequencies(model, model.max_position_embeddings)
    if isinstance(drafter, NetParams):
        net = drafter.make_net_model(model)
        compute_frequencies(net, net.max_position_embeddings)


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
            group_size = settings.group_size or DEFAULT_GROUP_SIZE
            files[file] = plan_layers_int4(tensors, model, group_size)
    return files


def find_problems(settings: BuildSettings, checkpoint: CheckpointConfig) -> Problems:
    """List the settings and the parts of a checkpoint that the torch backend does not take."""
    from specdec.engine.layers import ACTIVATIONS

    ours = f"the {TENSORRT if settings.backend == TENSORRT else TORCH} backend"
    model, wanted, size = checkpoint.model, settings.quantization, settings.group_size
    quantization, algorithm = checkpoint.quantization, checkpoint.quantization.quant_algo
    return Problems.from_table(
        (settings.kv_cache_type == "paged",
         f"{ours} has a continuous KV cache only", "leave --kv-cache-type out"),
        (model.pp_size != 1,
         f"the checkpoint is split for pp_size={model.pp_size}; {ours} has no pipeline"
         " stages", "convert it again with --pp-size 1"),
        (model.hidden_act not in ACTIVATIONS,
         f"hidden_act={model.hidden_act!r}",
         f"{ours} executes {', '.join(ACTIVATIONS)}"),
        (algorithm not in EXECUTED,
         f"the checkpoint is quantized ({algorithm}), which {ours} does not execute",
         f"it executes {', '.join(filter(None, EXECUTED))}, float16, bfloat16 and float32; for"
         " this one use --backend tensorrt-llm, or convert a published model with --dequantize"),
        (wanted is not None and quantization.is_quantized,
         f"--quantization {wanted}: the checkpoint is quantized already"
         f" ({algorithm or quantization.kv_cache_quant_algo})",
         "leave it out, or add --dequantize where the model is converted; one that specdec-convert"
         " quantized, convert without --quantization"),
        (settings.packed_weights and settings.optimize == "none",
         "--packed-weights enable: weights are packed for native kernels, and --optimize none"
         " leaves these out", "leave out one of the two"),
        (size is not None and wanted != INT4,
         "--group-size without --quantization int4", "leave it out"),
        (settings.drafter_weights != SAME and checkpoint.drafter is None,
         f"--drafter-weights {settings.drafter_weights}: the checkpoint has no drafter",
         "leave it out; a draft model's engine is built by itself, with --quantization"),
        (size not in (None, *int4.ENGINE_GROUPS), f"--group-size {size}", "use 32, 64 or 128"),
        (wanted == INT4 and model.experts is not None,
         f"--quantization {INT4}: {model.architecture} is a mixture of experts",
         f"use {INT8}, or leave it out: experts have no four-bit form yet"),
    )  # fmt: skip


def will_compile(settings: BuildSettings) -> bool:
    """Return whether to compile kernels; raise SpecDecError where that is needed and fails."""
    from specdec.engine.compiler import find_compiler

    if settings.optimize != "auto" or find_compiler() is not None:
        return settings.optimize != "none"
    if settings.packed_weights:
        raise SpecDecError(
            "--packed-weights enable: weights are packed for native kernels, and no C++ compiler"
            " was found",
            "install g++, or leave --packed-weights out",
        )
    logger.warning(
        "no C++ compiler found: the engine will run on torch's own operators, slower on a CPU"
    )
    return False


def check_drafter(
    own: Mapping[str, tuple[int, ...]], quantized: set[str], model: ModelConfig, *, has_tokens: bool
) -> None:
    """Raise SpecDecError for a drafter that cannot be rounded, or draft only some tokens.

    own: its tensors. has_tokens: whether it is to draft only some tokens.
    """
    if float8 := sorted(quantized & set(own)):
        raise SpecDecError(
            f"the drafter's {join_names(float8)} are quantized already",
            "leave --drafter-weights and --draft-vocab-file out, or convert it again",
        )
    if has_tokens and (name := name_offsets(own)) in own:
        raise SpecDecError(
            f"--draft-vocab-file: the drafter drafts {own[name][0]} tokens of {model.vocab_size}"
            " already",
            "leave it out",
        )


def check_sources(sources: Sequence[TensorFile], checkpoint: CheckpointConfig) -> set[str]:
    """Check every rank's file against config.json; return the matrices quantized in all."""
    found = [check_source(source, checkpoint) for source in sources]
    for source, quantized in zip(sources[1:], found[1:], strict=True):
        if unlike := sorted(quantized ^ found[0]):
            raise SpecDecError(
                f"{source.path} and {sources[0].path} differ in which linears are quantized:"
                f" {join_names(unlike)}",
                "the ranks' files must come from one run: convert again",
            )
    return found[0]


def check_source(source: TensorFile, checkpoint: CheckpointConfig) -> set[str]:
    """Check one rank's file: names, shapes and types; return its quantized matrices."""
    model = checkpoint.model
    specs = list_tensors(model, checkpoint.drafter)
    expected = {name: get_rank_shape(spec, model) for name, spec in specs.items()}
    algorithm = checkpoint.quantization.quant_algo
    described = describe_quantized(expected, source.tensors, algorithm)
    quantized = described.keys() & expected.keys()
    check_twins(source, quantized)
    check_numbers(source, quantized, expected, algorithm)
    expected |= {name: info.shape for name, info in described.items()}
    if algorithm == FP8 and quantized:
        # The cache keeps the model's type, for which it needs none of its scales.
        expected |= {
            name: info.shape for name, info in source.tensors.items()
            if name.rpartition(".")[2] in KV_SCALES and is_scale(name, specs)
        }  # fmt: skip
    check_inventory(source, expected, "checkpoint")
    dtypes = {name: info.dtype for name, info in source.tensors.items()}
    wrong = find_contradictions(checkpoint.quantization, [*list_linears(model), "lm_head"], dtypes)
    if wrong:
        raise SpecDecError(
            f"{source.path}: {len(wrong)} linears are not quantized as config.json says:"
            f" {'; '.join(wrong[:4])}",
            "config.json and the tensors must come from one run: convert again",
        )
    others = {
        dtypes[name] for name in specs
        if name not in quantized and dtypes[name] != get_stored_dtype(name, model.dtype)
    }  # fmt: skip
    if others:
        raise SpecDecError(
            f"config.json says dtype={model.dtype}, the tensors are {', '.join(sorted(others))}",
            "target and drafter must be converted with one --dtype",
        )
    check_copies(source, specs)
    return quantized


def check_copies(source: TensorFile, names: Iterable[str]) -> None:
    """Raise SpecDecError where EAGLE nets that are to be copies differ: only the first is run."""
    for name in names:
        first = find_first_copy(name)
        if first != name and not np.array_equal(source.read(name), source.read(first)):
            raise SpecDecError(
                f"{source.path}: {name} differs from {first}; the torch backend runs one EAGLE net"
                " for all levels of a tree",
                "use the tensorrt-llm backend, which runs one each",
            )


def check_numbers(
    source: TensorFile, quantized: Iterable[str], shapes: Mapping[str, tuple[int, ...]],
    algorithm: str | None,
) -> None:  # fmt: skip
    """Raise SpecDecError for numbers of four-bit matrices, or GGML's blocks, that cannot be."""
    for name in quantized if algorithm != FP8 else ():
        module = name.removesuffix(".weight")
        if algorithm == blocks.GGUF:
            types = source.read(f"{module}.{blocks.BLOCK_TYPES}")
            rows = source.read(name).reshape(len(types), -1)
            blocks.check_blocks(module, rows, types, shapes[name][-1])
            source.release()
            continue
        matrix = int4.Int4Matrix(source, module)
        int4.check_damage(matrix)
        groups, size, largest = int4.ENGINE_GROUPS, matrix.group_size, max(int4.ENGINE_GROUPS)
        if matrix.num_groups > 1 and size not in groups and size % largest:
            raise SpecDecError(
                f"{source.path}: {name} has groups of {size} columns; the torch backend multiplies"
                f" groups of {join_names([str(group) for group in groups])}, multiples of"
                f" {largest}, and rows with one scale each",
                "quantize the model with another group size",
            )


def check_twins(source: TensorFile, stored: set[str]) -> None:
    """Raise SpecDecError where fc is quantized and gate is not, or the other way round."""
    for name, (one, other) in itertools.product(stored, ((".fc.", ".gate."), (".gate.", ".fc."))):
        twin = name.replace(one, other) if ".mlp." in name else name
        if twin in source.tensors and twin not in stored:
            raise SpecDecError(
                f"{source.path}: {name} is quantized, {twin} is {source.tensors[twin].dtype}",
                "the torch backend stacks the two: quantize both, or neither",
            )


def plan_tensors(
    shapes: Mapping[str, tuple[int, ...]], model: ModelConfig, float8: set[str]
) -> dict[str, TensorInfo]:
    """Plan the engine's tensors; those of `float8` keep their bytes, with their scales."""
    tensors = {}
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        parts = name_parts(module, model)
        if f"{parts[0]}.{kind}" not in float8:
            tensors[name] = TensorInfo(get_stored_dtype(name, model.dtype), shape)
            continue
        tensors[name] = TensorInfo(FLOAT8, shape)
        tensors[f"{module}.{WEIGHT_SCALE}"] = TensorInfo("float32", (len(parts),))
        tensors[f"{module}.{ACTIVATION_SCALE}"] = TensorInfo("float32", (1,))
    return tensors


def plan_layers_int4(
    tensors: Mapping[str, TensorInfo], model: ModelConfig, group_size: int
) -> dict[str, TensorInfo]:
    """Return the tensors of a file in which the matrices of the layers are rounded to int4."""
    planned = dict(tensors)
    for name in (name for name in list_integers(model) if name in tensors):
        num_rows, num_inputs = tensors[name].shape
        if num_inputs % group_size or num_rows % 2:
            fitting = [str(size) for size in int4.ENGINE_GROUPS if num_inputs % size == 0]
            raise SpecDecError(
                f"--quantization int4: {name} is [{num_rows}, {num_inputs}]; its rows go in pairs,"
                f" its columns in groups of {group_size}",
                f"use --group-size {fitting[-1]}" if fitting and num_rows % 2 == 0
                else "use --quantization int8",
            )  # fmt: skip
        planned |= plan_int4(tensors, name, group_size)
    return planned


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
    planned = {}
    for weight in list_integers(model):
        module = weight.removesuffix(".weight")
        parts = [int4.Int4Matrix(source, part) for part in name_parts(module, model)]
        if f"{parts[0].module}.weight" in quantized:
            for kind, array in read_four_bits(parts, model).items():
                planned[f"{module}.{kind}"] = TensorInfo(str(array.dtype), array.shape)
            num_rows = sum(part.shape[0] for part in parts)
            planned[weight] = TensorInfo("int8", (num_rows // 2, parts[0].shape[1]))
    return planned


def plan_blocks(
    source: TensorFile, quantized: set[str], model: ModelConfig
) -> dict[str, TensorInfo]:
    """Return the engine's tensors for matrices in GGML's blocks."""
    planned = {}
    for weight in list_engine_tensors(model, None):
        module = weight.removesuffix(".weight")
        parts = [f"{part}.weight" for part in name_parts(module, model)]
        if parts[0] in quantized:
            shapes = [source.tensors[part].shape for part in parts]
            rows = (sum(shape[0] for shape in shapes), *shapes[0][1:-1])
            planned[weight] = TensorInfo("uint8", (*rows, max(shape[-1] for shape in shapes)))
            planned[f"{module}.{blocks.BLOCK_TYPES}"] = TensorInfo("uint8", (math.prod(rows),))
    return planned


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


def read_four_bits(parts: Sequence[int4.Int4Matrix], model: ModelConfig) -> dict[str, Array]:
    """Read the arrays of stacked matrices by kind; they must read their inputs alike."""
    first = parts[0]

    def list_inputs(part: int4.Int4Matrix) -> list[Any]:
        return [part.num_groups, part.read_input_scale(), part.read_permutation()]

    for part in parts[1:]:
        if not all(map(np.array_equal, list_inputs(part), list_inputs(first))):
            raise SpecDecError(
                f"{first.module} and {part.module} have other groups, input scales or orders of"
                " inputs; the torch backend stacks the two",
                "quantize them together, or convert the model with --dequantize",
            )
    scales = [part.read_scales(0, part.shape[0]) for part in parts]
    found = {
        WEIGHT_SCALE: stack_parts(scales, model, first.module),
        int4.INPUT_SCALE: first.read_input_scale(),
        int4.PERMUTATION: first.read_permutation(),
    }
    if any(part.has_zeros for part in parts):
        zeros = []
        for part, own in zip(parts, scales, strict=True):
            usual = np.full(own.shape, int4.SYMMETRIC_ZERO, np.uint8)
            stored = part.read_zeros(0, part.shape[0])
            zeros.append(usual if stored is None else stored)
        found[int4.ZERO_POINT] = stack_parts(zeros, model, first.module)
    return {kind: array for kind, array in found.items() if array is not None}


def stack_parts(parts: Sequence[Array], model: ModelConfig, module: str) -> Array:
    """Rows of fc and gate as an engine has them: the half that is activated first."""
    if parts[0].dtype == np.uint8 and parts[0].ndim == 2:
        parts = blocks.widen_rows(parts)
    if ".mlp.fc" in module and model.arithmetic.mlp == "fused":
        up, gate = np.split(parts[0], 2)  # the activated half comes second
        return np.concatenate([gate, up])
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def write_engine(
    plan: TorchPlan, checkpoint: CheckpointConfig, limits: BuildConfig, folder: Path, build_id: str
) -> tuple[dict[str, str], bool]:
    """Write the engine's files into `folder`.

    build_id: of `make_build_id`. Returns their sha256 sums by name where known, and whether it has
    native kernels.
    """
    kernels = write_kernels(plan, checkpoint, folder) if plan.compile_kernels else None
    hashes = {}
    for name, tensors in plan.files.items():
        metadata = make_metadata(name, build_id, tensors)
        reader = EngineReader(plan, checkpoint, name)
        hashes[name] = write_tensor_file(folder / name, tensors, reader.read, metadata)
    config = EngineConfig(
        version=__version__, checkpoint=checkpoint, build=limits, build_id=build_id,
        prepack=plan.prepack, kernels=kernels, quantization=plan.quantization,
        drafter_weights=plan.drafter_weights, draft_vocab_size=plan.draft_vocab_size,
    )  # fmt: skip
    write_json(folder / "config.json", encode_engine_config(config))
    if plan.packs and kernels is not None:
        from specdec.engine.native import load_kernels
        from specdec.files.torch_tensors import TORCH_DTYPES

        from .packing import write_packed

        native = load_kernels(kernels, TORCH_DTYPES[checkpoint.model.dtype])
        for name in plan.files:
            hashes[f"{PACKED_FOLDER}/{name}"] = write_packed(folder, config, name, native)
    return hashes, kernels is not None


def write_kernels(
    plan: TorchPlan, checkpoint: CheckpointConfig, folder: Path
) -> dict[str, str] | None:
    """Compile the kernels, into the user's cache and the engine's folder; say what with.

    None where the compiler fails and the kernels are not needed.
    """
    from specdec.engine import kernel_cache
    from specdec.engine.native_layers import describe_coverage
    from specdec.engine.native_library import LIBRARY_NAME, compile_kernels

    with tempfile.TemporaryDirectory(dir=folder, prefix=".kernels-") as workplace:
        try:
            kernels = compile_kernels(Path(workplace))
        except SpecDecError as error:
            if plan.needs_kernels:
                raise
            logger.warning(
                "no native kernels: %s; the engine will run on torch's own operators, slower on a"
                " CPU: %s", error.message, error.hint,
            )  # fmt: skip
            return None
        (folder / kernel_cache.FOLDER_NAME).mkdir(mode=0o755)
        library = Path(workplace) / LIBRARY_NAME
        kernel_cache.write_entry(library.read_bytes(), kernels, folder, mode=0o644)
    logger.info("native kernels: %s", describe_coverage(checkpoint.model))
    return kernels


class EngineReader:
    """Reads the tensors of one engine file out of the checkpoint's files, scales before weights."""

    def __init__(self, plan: TorchPlan, checkpoint: CheckpointConfig, file: str) -> None:
        self._plan, self._file = plan, file
        self._model, self._tensors = checkpoint.model, plan.files[file]
        self._specs = list_tensors(self._model, checkpoint.drafter)
        ranks = range(self._model.tp_size)
        self._rank = next((r for r in ranks if name_weight_file(self._model, r) == file), 0)
        self._own = plan.sources[self._rank]
        self._int8_scales: dict[str, Tensor] = {}
        self._int4_scales: dict[str, Tensor] = {}

    def read(self, name: str) -> Array | Iterable[Array]:  # noqa: PLR0911 - a return for each kind of matrix
        """Return a tensor of the engine's file; matrices in int8 one after another."""
        plan, tensors = self._plan, self._tensors
        for source in plan.sources:  # what was read before is written by now
            source.release()
        module, _, kind = name.rpartition(".")
        if kind == OFFSETS and plan.draft_tokens is not None:
            offsets: Array = plan.draft_tokens - np.arange(len(plan.draft_tokens))
            return offsets
        parts = [int4.Int4Matrix(self._own, part) for part in name_parts(module, self._model)]
        if int4.is_int4(parts[0].module, self._own.tensors) and name in tensors:
            if kind == "weight":
                return self._stack(name).view(np.int8)
            if kind != "bias":
                return read_four_bits(parts, self._model)[kind]
        matrix = f"{module}.weight"
        if kind == INT8_SCALES or (kind == WEIGHT_SCALE and tensors[matrix].dtype != FLOAT8):
            return self._make_scales(matrix, kind)
        if kind in SCALES:
            scales = np.concatenate(
                [self._own.read(f"{p.module}.{kind}").reshape(1) for p in parts]
            )
            return scales if kind == WEIGHT_SCALE else scales.max(keepdims=True)  # of its input
        if name in self._int8_scales or name in self._int4_scales:
            return self._round(name)
        if tensors[name].dtype == FLOAT8:
            return self._stack(name).view(np.uint8)  # older writers store it as int8
        return self._stack(name)

    def _read_source(self, name: str, source: TensorFile) -> Array:
        if self._file == DRAFTER_NAME:  # every rank has a part of it
            parts = [other.read(name) for other in self._plan.sources]
            return join(parts, self._specs[name], self._model)
        return source.read(name)

    def _stack(self, name: str, source: TensorFile | None = None) -> Array:
        module, _, kind = name.rpartition(".")
        names = [f"{part}.{kind}" for part in name_parts(module, self._model)]
        arrays = [self._read_source(part, source or self._own) for part in names]
        array = stack_parts(arrays, self._model, names[0])
        is_drafters = name.endswith((f".{HEAD}", f".{HEAD_BIAS}"))
        tokens = self._plan.draft_tokens
        return array[tokens] if is_drafters and tokens is not None else array

    def _view_matrices(self, array: Array) -> Tensor:
        """[N, out, in], of experts or of one matrix."""
        from specdec.files.torch_tensors import view_tensor

        weight = view_tensor(array, self._model.dtype)
        return weight.view(-1, *weight.shape[-2:])

    def _make_scales(self, matrix: str, kind: str) -> Array:
        """Choose the scales by which a matrix is rounded."""
        from specdec.engine import int4 as int4_rounding
        from specdec.files.torch_tensors import to_array, view_tensor

        if kind == INT8_SCALES:
            self._int8_scales[matrix] = scales = self._make_int8_scales(matrix)
            return to_array(scales)
        weight = view_tensor(self._stack(matrix), self._model.dtype)
        shape = self._tensors[f"{matrix.removesuffix('weight')}{kind}"].shape
        size = weight.shape[1] // shape[1]
        self._int4_scales[matrix] = scales = int4_rounding.choose_scales(weight, size, matrix)
        return to_array(scales)

    def _make_int8_scales(self, name: str) -> Tensor:
        """Whole rows are rounded, also where ranks hold parts of them: tp_size changes nothing."""
        import torch

        from specdec.engine import int8

        sources, experts = [self._own], self._model.experts
        shard = self._specs[name].shard if name in self._specs else None
        if shard is Shard.COLUMNS:
            sources = self._plan.sources
        elif shard is Shard.EXPERT_COLUMNS and experts is not None:
            same = experts.list_rank_experts(self._rank)
            ranked = enumerate(self._plan.sources)
            sources = [source for rank, source in ranked if experts.list_rank_experts(rank) == same]
        largest = [
            torch.stack([int8.find_largest(w) for w in self._view_matrices(self._stack(name, s))])
            for s in sources
        ]
        scales = int8.make_scales(torch.stack(largest).amax(0).flatten(), name)
        return scales.view(self._tensors[name].shape[:-1])

    def _round(self, name: str) -> Array | Iterable[Array]:
        """Return a matrix by the scales that were chosen for it, of int8 or of int4."""
        from specdec.engine import int4 as int4_rounding
        from specdec.engine import int8
        from specdec.files.torch_tensors import to_array

        matrices = self._view_matrices(self._stack(name))
        if name in self._int4_scales:
            (weight,) = matrices
            return int4.pack(int4_rounding.round_weight(weight, self._int4_scales[name]).numpy())
        rows = self._int8_scales[name].view(len(matrices), -1)
        return (to_array(int8.round_weight(matrices[i], rows[i])) for i in range(len(rows)))


def describe_plan(plan: TorchPlan) -> dict[str, Any]:
    """Describe a plan as `--dry-run` and `--json` report it."""
    return {
        "prepack": plan.prepack, "native_kernels": plan.compile_kernels,
        "packed_weights": plan.packs, "quantization": plan.quantization,
        "block_types": plan.block_types,
        "drafter_weights": plan.drafter_weights, "draft_vocab_size": plan.draft_vocab_size,
        "weights_bytes": plan.num_bytes, "num_tensors": sum(map(len, plan.files.values())),
        "weight_files": list(plan.files),
    }  # fmt: skip
