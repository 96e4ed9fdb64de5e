"""The torch backend's build: weights laid out for execution, kernels for this machine."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec import __version__
from specdec.checkpoint.config import CheckpointConfig
from specdec.checkpoint.inventory import find_rank_files, list_tensors
from specdec.engine.layout import (
    DRAFTER_NAME,
    BuildConfig,
    EngineConfig,
    encode_engine_config,
    list_drafter_tensors,
    name_weight_file,
    plan_drafter,
)
from specdec.engine.weight_files import make_metadata
from specdec.errors import SpecDecError
from specdec.files.backends import TENSORRT, TORCH
from specdec.files.reading import Array, write_json
from specdec.files.tensor_file import TensorFile, TensorInfo, write_tensor_file
from specdec.methods.eagle import EagleParams
from specdec.model import int4
from specdec.model.quantization import (
    FLOAT8,
    FP8,
    INT4,
    INT8,
    INT8_SCALES,
    SCALES,
    WEIGHT_SCALE,
)
from specdec.model.sharding import join
from specdec.model.tensors import (
    HEAD,
    HEAD_BIAS,
    OFFSETS,
    Shard,
)
from specdec.system import logs

from ..draft_vocabulary import choose_tokens
from ..limits import resolve_limits
from ..settings import AUTO, SAME, BuildSettings
from .embedded import build_embedded
from .torch_checks import check_config, check_drafter, check_sources, will_compile, will_pack
from .torch_tensors import (
    has_copied_head,
    name_parts,
    plan_layout,
    plan_stored,
    read_four_bits,
    share_head,
    stack_parts,
)

if TYPE_CHECKING:
    from torch import Tensor

logger = logs.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class TorchPlan:
    """A checked build: the rank files to read, the files to write, whether to compile.

    checkpoint: as the engine has it, see `share_head`. needs_kernels: whether the build fails where
    the compiler does. packs: whether the matrices are stored as the kernels read them.
    draft_tokens: of `choose_tokens`. block_types: of `count_block_types`, for a checkpoint in
    GGML's blocks.
    """

    checkpoint: CheckpointConfig
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
        hashes, has_kernels = write_engine(plan, limits, folder, build_id)
        count, size = sum(map(len, plan.files.values())), plan.num_bytes / 1e6
        kernels = "native kernels" if has_kernels else "no native kernels"
        return hashes, {"native_kernels": has_kernels}, f"{count} tensors, {size:.1f} MB, {kernels}"

    return Work(plan, describe_plan(plan), plan.num_bytes, write)


def build_engine(settings: BuildSettings) -> dict[str, Any]:
    """Build an engine of the torch backend, or only check and describe it."""
    return build_embedded(settings, TORCH, plan_engine)


def foresee_limits(settings: BuildSettings, checkpoint: CheckpointConfig) -> BuildConfig:
    """Return the limits of a planned checkpoint's engine, which needs no tensor."""
    limits = resolve_limits(settings, checkpoint)
    check_config(settings, checkpoint)
    plan_layout(settings, checkpoint, set())
    return limits


def plan_build(settings: BuildSettings, checkpoint: CheckpointConfig, folder: Path) -> TorchPlan:
    """Check everything the torch backend needs; raise SpecDecError that lists what is wrong."""
    model = checkpoint.model
    check_config(settings, checkpoint)
    paths, problems = find_rank_files(folder, model.tp_size, f"tp_size={model.tp_size}")
    problems.raise_all()
    sources = [TensorFile(path) for path in paths]
    quantized = check_sources(sources, checkpoint)
    compile_kernels = will_compile(settings)
    packs = compile_kernels and will_pack(settings)
    if packs:
        checkpoint = share_head(checkpoint, sources)
    is_fp8 = checkpoint.quantization.quant_algo == FP8
    files = plan_layout(settings, checkpoint, quantized if is_fp8 else set())
    draft_tokens = choose_tokens(settings, model, checkpoint.drafter)
    weight_type = choose_drafter_type(settings, checkpoint, sources, quantized, packs=packs)
    if weight_type is not None or draft_tokens is not None:
        size = None if draft_tokens is None else len(draft_tokens)
        plan_drafter_files(files, checkpoint, quantized, weight_type, size)
    block_types = plan_stored(files, sources, quantized, checkpoint)
    log_matrices(settings, checkpoint, block_types, compiles=compile_kernels)
    return TorchPlan(
        checkpoint=checkpoint, sources=sources, files=files, prepack=settings.optimize != "none",
        compile_kernels=compile_kernels,
        needs_kernels=settings.optimize == "native" or settings.packed_weights is True,
        packs=packs,
        quantization=settings.quantization, drafter_weights=weight_type,
        draft_tokens=draft_tokens, block_types=block_types,
    )  # fmt: skip


def choose_drafter_type(
    settings: BuildSettings, checkpoint: CheckpointConfig, sources: Sequence[TensorFile],
    quantized: set[str], *, packs: bool,
) -> str | None:  # fmt: skip
    """Return the type that a drafter's matrices are rounded to; None for the type they have.

    quantized: names of the checkpoint's matrices that are rounded already. packs: whether a CPU
    runs the engine by kernels, which alone gain by it. A head that is the target's is in memory
    already, so `auto` makes no copy of it. EAGLE-3, which is read whole for each level, loses the
    fewest tokens to int4.
    """
    if settings.drafter_weights != AUTO:
        return None if settings.drafter_weights == SAME else settings.drafter_weights
    is_rounded = settings.quantization or checkpoint.quantization.quant_algo
    if checkpoint.drafter is None or not packs or not is_rounded:
        return None
    names = list_drafter_tensors(checkpoint.model, checkpoint.drafter).keys()
    if quantized & names or any(has_copied_head(source, names) for source in sources):
        return None
    drafter = checkpoint.drafter
    return INT4 if isinstance(drafter, EagleParams) and drafter.eagle3 is not None else INT8


def plan_drafter_files(
    files: dict[str, dict[str, TensorInfo]], checkpoint: CheckpointConfig, quantized: set[str],
    weight_type: str | None, num_tokens: int | None,
) -> None:  # fmt: skip
    """Let a drafter's tensors in `files` be of another type, or of a shorter vocabulary.

    weight_type: None for the model's. num_tokens: of the drafted vocabulary, None for the whole.
    """
    model, drafter = checkpoint.model, checkpoint.drafter
    drafter_tensors = list_drafter_tensors(model, drafter)
    check_drafter(drafter_tensors, quantized, model, has_tokens=num_tokens is not None)
    for file, tensors in files.items():
        if infos := {name: info for name, info in tensors.items() if name in drafter_tensors}:
            files[file] = tensors | plan_drafter(infos, weight_type, num_tokens)


def log_matrices(
    settings: BuildSettings, checkpoint: CheckpointConfig, block_types: dict[str, int] | None, *,
    compiles: bool,
) -> None:  # fmt: skip
    """Log how GGML's blocks and integers will be multiplied; compiles: by native kernels."""
    dtype, algorithm = checkpoint.model.dtype, checkpoint.quantization.quant_algo
    if block_types is not None:
        treatment = "multiplied as they are" if compiles else "widened when the engine is loaded"
        counts = ", ".join(f"{kind} ({n})" for kind, n in block_types.items() if kind != dtype)
        plain = f"; {dtype}: {block_types[dtype]}" if dtype in block_types else ""
        logger.info("GGUF: matrices %s: %s%s", treatment, counts, plain)
    has_integers = settings.quantization is not None or algorithm in int4.INT4_ALGORITHMS
    if has_integers and not compiles and settings.backend != TENSORRT:
        logger.warning(
            "%s without native kernels: weights will be widened in every step, which is slow",
            settings.quantization or algorithm,
        )


def write_engine(
    plan: TorchPlan, limits: BuildConfig, folder: Path, build_id: str
) -> tuple[dict[str, str], bool]:
    """Write the engine's files into `folder`.

    build_id: of `make_build_id`. Returns their sha256 sums by name where known, and whether it has
    native kernels.
    """
    checkpoint = plan.checkpoint
    kernels = write_kernels(plan, folder) if plan.compile_kernels else None
    native = packing = None
    if plan.packs and kernels is not None:
        from specdec.engine.native import load_kernels
        from specdec.engine.packed import identify_packing
        from specdec.files.torch_tensors import TORCH_DTYPES

        native = load_kernels(kernels, TORCH_DTYPES[checkpoint.model.dtype])
        packing = identify_packing(native)
    hashes = {}
    for name, tensors in plan.files.items():
        read = EngineReader(plan, name).read
        if native is None:
            metadata = make_metadata(name, build_id, tensors)
            hashes[name] = write_tensor_file(folder / name, tensors, read, metadata)
        else:
            from .packing import PackedWriter

            writer = PackedWriter(tensors, read, checkpoint.model, native)
            hashes |= writer.write(folder, name, build_id)
    config = EngineConfig(
        version=__version__, checkpoint=checkpoint, build=limits, build_id=build_id,
        prepack=plan.prepack, kernels=kernels, packing=packing, quantization=plan.quantization,
        drafter_weights=plan.drafter_weights, draft_vocab_size=plan.draft_vocab_size,
    )  # fmt: skip
    write_json(folder / "config.json", encode_engine_config(config))
    return hashes, kernels is not None


def write_kernels(plan: TorchPlan, folder: Path) -> dict[str, str] | None:
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
    logger.info("native kernels: %s", describe_coverage(plan.checkpoint.model))
    return kernels


class EngineReader:
    """Reads the tensors of one engine file out of the checkpoint's files, scales before weights."""

    def __init__(self, plan: TorchPlan, file: str) -> None:
        checkpoint = plan.checkpoint
        self._plan, self._file = plan, file
        self._model, self._tensors = checkpoint.model, plan.files[file]
        self._specs = list_tensors(self._model, checkpoint.drafter)
        ranks = range(self._model.tp_size)
        self._rank = next((r for r in ranks if name_weight_file(self._model, r) == file), 0)
        self._source = plan.sources[self._rank]
        self._int8_scales: dict[str, Tensor] = {}
        self._int4_scales: dict[str, Tensor] = {}

    def read(self, name: str) -> Array | Iterable[Array]:
        """Return a tensor of the engine's file; matrices in int8 one after another."""
        for source in self._plan.sources:  # what was read before is written by now
            source.release()
        module, _, kind = name.rpartition(".")
        tokens = self._plan.draft_tokens
        if kind == OFFSETS and tokens is not None:
            offsets: Array = tokens - np.arange(len(tokens))
            return offsets
        first_module = name_parts(module, self._model)[0]
        is_four_bits = int4.is_int4(first_module, self._source.tensors) and name in self._tensors
        if is_four_bits and kind != "bias":
            return self._read_four_bits(name)
        if kind in (INT8_SCALES, *SCALES):
            return self._read_scales(module, kind)
        return self._read_numbers(name)

    def _read_four_bits(self, name: str) -> Array:
        """Return the codes of a matrix that the checkpoint has in four bits, or what is beside."""
        module, _, kind = name.rpartition(".")
        if kind == "weight":
            return self._stack(name).view(np.int8)
        modules = name_parts(module, self._model)
        matrices = [int4.Int4Matrix(self._source, part_module) for part_module in modules]
        return read_four_bits(matrices, self._model)[kind]

    def _read_scales(self, module: str, kind: str) -> Array:
        """Return scales of int8, int4 or FP8: chosen now, or as the checkpoint has them."""
        matrix = f"{module}.weight"
        if kind == INT8_SCALES or (kind == WEIGHT_SCALE and self._tensors[matrix].dtype != FLOAT8):
            return self._make_scales(matrix, kind)
        modules = name_parts(module, self._model)
        scales = np.concatenate([self._source.read(f"{m}.{kind}").reshape(1) for m in modules])
        return scales if kind == WEIGHT_SCALE else scales.max(keepdims=True)  # of its input

    def _read_numbers(self, name: str) -> Array | Iterable[Array]:
        """Return a tensor of numbers, rounded by the scales that were chosen for it."""
        if name in self._int8_scales or name in self._int4_scales:
            return self._round(name)
        array = self._stack(name)
        if self._tensors[name].dtype == FLOAT8:
            return array.view(np.uint8)  # older writers store it as int8
        return array

    def _read_source(self, name: str, source: TensorFile) -> Array:
        if self._file == DRAFTER_NAME:  # every rank has a part of it
            rank_arrays = [rank_source.read(name) for rank_source in self._plan.sources]
            return join(rank_arrays, self._specs[name], self._model)
        return source.read(name)

    def _stack(self, name: str, source: TensorFile | None = None) -> Array:
        module, _, kind = name.rpartition(".")
        names = [f"{part_module}.{kind}" for part_module in name_parts(module, self._model)]
        arrays = [self._read_source(part_name, source or self._source) for part_name in names]
        array = stack_parts(arrays, self._model, names[0])
        is_drafters = name.endswith((f".{HEAD}", f".{HEAD_BIAS}"))
        tokens = self._plan.draft_tokens
        return array[tokens] if is_drafters and tokens is not None else array

    def _view_matrices(self, array: Array) -> Tensor:
        """Return the matrices of experts, or the one, as [N, out, in]."""
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
        """Return the scales of whole rows, of which ranks may hold parts: tp_size changes none."""
        import torch

        from specdec.engine import int8

        sources, experts = [self._source], self._model.experts
        shard = self._specs[name].shard if name in self._specs else None
        if shard is Shard.COLUMNS:
            sources = self._plan.sources
        elif shard is Shard.EXPERT_COLUMNS and experts is not None:
            own_experts = experts.list_rank_experts(self._rank)
            sources = [
                source for rank, source in enumerate(self._plan.sources)
                if experts.list_rank_experts(rank) == own_experts
            ]  # fmt: skip
        largest_values = [
            torch.stack([int8.find_largest(w) for w in self._view_matrices(self._stack(name, s))])
            for s in sources
        ]
        scales = int8.make_scales(torch.stack(largest_values).amax(0).flatten(), name)
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
