"""Checks of a checkpoint and its settings before an engine of torch is built."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from specdec.checkpoint.config import CheckpointConfig
from specdec.checkpoint.inventory import describe_quantized, list_tensors
from specdec.engine.layout import name_offsets
from specdec.engine.weight_files import check_inventory
from specdec.errors import Problems, SpecDecError, join_names
from specdec.files.backends import TENSORRT, TORCH, list_worth_telling
from specdec.files.tensor_file import TensorFile
from specdec.methods.net import NetParams
from specdec.model import blocks, int4
from specdec.model.config import ModelConfig
from specdec.model.quantization import (
    EXECUTED,
    FP8,
    INT4,
    INT8,
    KV_SCALES,
    find_contradictions,
    is_scale,
)
from specdec.model.tensors import (
    HEAD,
    find_first_copy,
    get_rank_shape,
    get_stored_dtype,
    list_linears,
)
from specdec.system import logs

from ..settings import AUTO, SAME, BuildSettings

logger = logs.get_logger(__name__)


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


def find_problems(settings: BuildSettings, checkpoint: CheckpointConfig) -> Problems:
    """List the settings and the parts of a checkpoint that the torch backend does not take."""
    from specdec.engine.layers import ACTIVATIONS

    backend = f"the {TENSORRT if settings.backend == TENSORRT else TORCH} backend"
    model, weight_type, size = checkpoint.model, settings.quantization, settings.group_size
    quantization, algorithm = checkpoint.quantization, checkpoint.quantization.quant_algo
    return Problems.from_table(
        (settings.kv_cache_type == "paged",
         f"{backend} has a continuous KV cache only", "leave --kv-cache-type out"),
        (model.pp_size != 1,
         f"the checkpoint is split for pp_size={model.pp_size}; {backend} has no pipeline"
         " stages", "convert it again with --pp-size 1"),
        (model.hidden_act not in ACTIVATIONS,
         f"hidden_act={model.hidden_act!r}",
         f"{backend} executes {', '.join(ACTIVATIONS)}"),
        (algorithm not in EXECUTED,
         f"the checkpoint is quantized ({algorithm}), which {backend} does not execute",
         f"it executes {', '.join(filter(None, EXECUTED))}, float16, bfloat16 and float32;"
         f" {suggest_backends(checkpoint)}convert a published model with --dequantize"),
        (weight_type is not None and quantization.is_quantized,
         f"--quantization {weight_type}: the checkpoint is quantized already"
         f" ({algorithm or quantization.kv_cache_quant_algo})",
         "leave it out, or add --dequantize where the model is converted; one that specdec-convert"
         " quantized, convert without --quantization"),
        (settings.packed_weights and settings.optimize == "none",
         "--packed-weights enable: weights are packed for native kernels, and --optimize none"
         " leaves these out", "leave out one of the two"),
        (size is not None and weight_type != INT4,
         "--group-size without --quantization int4", "leave it out"),
        (settings.drafter_weights not in (AUTO, SAME) and checkpoint.drafter is None,
         f"--drafter-weights {settings.drafter_weights}: the checkpoint has no drafter",
         "leave it out; a draft model's engine is built by itself, with --quantization"),
        (size not in (None, *int4.ENGINE_GROUPS), f"--group-size {size}", "use 32, 64 or 128"),
        (weight_type == INT4 and model.experts is not None,
         f"--quantization {INT4}: {model.architecture} is a mixture of experts",
         f"use {INT8}, or leave it out: experts have no four-bit form yet"),
    )  # fmt: skip


def suggest_backends(checkpoint: CheckpointConfig) -> str:
    """Return the part of a hint that names the other backends here that take a checkpoint."""
    flags = []
    for backend in list_worth_telling(is_asked=False):
        problems = backend.load("support").find_checkpoint_problems(checkpoint)
        if problems is not None and not problems:
            flags.append(f"--backend {backend.name}")
    return f"use {join_names(flags)}, or " if flags else ""


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


def will_pack(settings: BuildSettings) -> bool:
    """Return whether the kernels' matrices are packed: unless a GPU here will run the engine."""
    if settings.packed_weights is not None:
        return settings.packed_weights
    import torch

    if not torch.cuda.is_available():
        return True
    logger.info(
        "torch sees a GPU, which reads no packed weights: they are not packed, and the engine runs"
        " on both; --packed-weights enable makes one for this CPU, which loads in a moment"
    )
    return False


def check_drafter(
    shapes: Mapping[str, tuple[int, ...]], quantized: set[str], model: ModelConfig, *,
    has_tokens: bool,
) -> None:  # fmt: skip
    """Raise SpecDecError for a drafter that cannot be rounded, or draft only some tokens.

    shapes: of its tensors. has_tokens: whether it is to draft only some tokens.
    """
    if float8 := sorted(quantized & set(shapes)):
        raise SpecDecError(
            f"the drafter's {join_names(float8)} are quantized already",
            "leave --drafter-weights and --draft-vocab-file out, or convert it again",
        )
    if has_tokens and not any(name.endswith(f".{HEAD}") for name in shapes):
        raise SpecDecError(
            "--draft-vocab-file: the drafter has no head of all tokens, it scores those of its best"
            " centroids",
            "leave it out",
        )
    if has_tokens and (name := name_offsets(shapes)) in shapes:
        raise SpecDecError(
            f"--draft-vocab-file: the drafter drafts {shapes[name][0]} tokens of {model.vocab_size}"
            " already",
            "leave it out",
        )


def check_sources(sources: Sequence[TensorFile], checkpoint: CheckpointConfig) -> set[str]:
    """Check every rank's file against config.json; return the matrices quantized in all."""
    quantized_by_rank = [check_source(source, checkpoint) for source in sources]
    for source, quantized in zip(sources[1:], quantized_by_rank[1:], strict=True):
        if unlike_names := sorted(quantized ^ quantized_by_rank[0]):
            raise SpecDecError(
                f"{source.path} and {sources[0].path} differ in which linears are quantized:"
                f" {join_names(unlike_names)}",
                "the ranks' files must come from one run: convert again",
            )
    return quantized_by_rank[0]


def check_source(source: TensorFile, checkpoint: CheckpointConfig) -> set[str]:
    """Check one rank's file: names, shapes and types; return its quantized matrices."""
    model = checkpoint.model
    specs = list_tensors(model, checkpoint.drafter)
    expected = {name: get_rank_shape(spec, model) for name, spec in specs.items()}
    algorithm = checkpoint.quantization.quant_algo
    described_infos = describe_quantized(expected, source.tensors, algorithm)
    quantized = described_infos.keys() & expected.keys()
    check_twins(source, quantized)
    check_numbers(source, quantized, expected, algorithm)
    expected |= {name: info.shape for name, info in described_infos.items()}
    if algorithm == FP8 and quantized:
        # The cache keeps the model's type, for which it needs none of its scales.
        expected |= {
            name: info.shape for name, info in source.tensors.items()
            if name.rpartition(".")[2] in KV_SCALES and is_scale(name, specs)
        }  # fmt: skip
    check_inventory(source.path, source.tensors, expected, "checkpoint")
    check_types(source, checkpoint, [name for name in specs if name not in quantized])
    check_copies(source, specs)
    return quantized


def check_types(
    source: TensorFile, checkpoint: CheckpointConfig, plain_names: Iterable[str]
) -> None:
    """Raise SpecDecError for tensors of another type than config.json says.

    plain_names: of those that are not quantized.
    """
    model = checkpoint.model
    dtypes = {name: info.dtype for name, info in source.tensors.items()}
    linears = [*list_linears(model), "lm_head"]
    if contradictions := find_contradictions(checkpoint.quantization, linears, dtypes):
        raise SpecDecError(
            f"{source.path}: {len(contradictions)} linears are not quantized as config.json says:"
            f" {'; '.join(contradictions[:4])}",
            "config.json and the tensors must come from one run: convert again",
        )
    wrong_dtypes = {
        dtypes[name] for name in plain_names
        if dtypes[name] != get_stored_dtype(name, model.dtype)
    }  # fmt: skip
    if wrong_dtypes:
        raise SpecDecError(
            f"config.json says dtype={model.dtype}, the tensors are"
            f" {', '.join(sorted(wrong_dtypes))}",
            "target and drafter must be converted with one --dtype",
        )


def check_copies(source: TensorFile, names: Iterable[str]) -> None:
    """Raise SpecDecError where EAGLE nets that are to be copies differ: only the first is run."""
    for name in names:
        first_name = find_first_copy(name)
        if first_name != name and not np.array_equal(source.read(name), source.read(first_name)):
            raise SpecDecError(
                f"{source.path}: {name} differs from {first_name}; the torch backend runs one EAGLE"
                " net for all levels of a tree",
                "convert the target and one drafter again, whose net is copied for each level",
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
        groups, size = int4.ENGINE_GROUPS, matrix.group_size
        if matrix.num_groups > 1 and size not in groups and size % max(groups):
            raise SpecDecError(
                f"{source.path}: {name} has groups of {size} columns; the torch backend multiplies"
                f" groups of {join_names([str(group) for group in groups])}, multiples of"
                f" {max(groups)}, and rows with one scale each",
                "quantize the model with another group size",
            )


def check_twins(source: TensorFile, stored: set[str]) -> None:
    """Raise SpecDecError where fc is quantized and gate is not, or the other way round."""
    pairs = ((".fc.", ".gate."), (".gate.", ".fc."))
    for name, (kind, twin_kind) in itertools.product(stored, pairs):
        twin = name.replace(kind, twin_kind) if ".mlp." in name else name
        if twin in source.tensors and twin not in stored:
            raise SpecDecError(
                f"{source.path}: {name} is quantized, {twin} is {source.tensors[twin].dtype}",
                "the torch backend stacks the two: quantize both, or neither",
            )
