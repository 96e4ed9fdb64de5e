"""Quantized Hugging Face targets: what of them a checkpoint holds, or plain weights in their place.

Computed tensors take the place of the stored ones in the folder, so that families, splitting and
streaming see matrices [out, in] by the names that the unquantized model has.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specdec.errors import Problems, SpecDecError, join_names
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo
from specdec.model import int4
from specdec.model.quantization import (
    ACTIVATION_SCALE,
    ALGORITHMS,
    FP8,
    INPUT_SCALE,
    NVFP4_GROUP_SIZE,
    WEIGHT_SCALE,
    WEIGHT_SCALE_2,
    Algorithm,
)
from specdec.model.sharding import Block
from specdec.model.tensors import Shard, TensorSpec, list_linears
from specdec.system import logs

from ..hf import HfFolder, TargetTensors
from ..plan import (
    OUTPUT_BLOCK_BYTES,
    ComputedTensors,
    OutputBlock,
    PlannedTensor,
    RankPlan,
    SourceRows,
    SourceSlice,
    collect,
    merge_ranks,
    report_unread,
)
from . import unified
from .float4 import Nvfp4Matrix
from .matrices import IntMatrix, Matrix
from .scales import EXCLUDED
from .sections import INT4, Scheme
from .unified import DEQUANTIZE, ScaleReader, plan_kv_scales, sort_linears

logger = logs.get_logger(__name__)

KV_ENDINGS = (".k_scale", ".v_scale")


def find_modules(folder: HfFolder, scheme: Scheme) -> list[str]:
    """List the modules of a folder whose matrices are quantized; SpecDecError where none is."""
    modules = scheme.find_modules(folder)
    if not modules:
        raise SpecDecError(
            f"{folder.path} is quantized ({scheme.description}), but holds no"
            f" .{scheme.format.marker} of that format",
            "copy or download the folder again; where its weights were made plain, remove"
            " quantization_config from its config.json, and hf_quant_config.json",
        )
    return modules


def open_matrices(folder: HfFolder, scheme: Scheme) -> dict[str, Matrix]:
    """Check every quantized matrix of a folder; return them by module."""
    problems = Problems()
    matrices: dict[str, Matrix] = {}
    modules = find_modules(folder, scheme)
    _refuse_copies(folder, scheme.format.marker, modules)
    for module in modules:
        with collect(problems):
            matrices[module] = scheme.make(folder, module)
    problems.raise_all()
    return matrices


def _refuse_copies(folder: HfFolder, marker: str, modules: Sequence[str]) -> None:
    """Raise SpecDecError for quantized matrices that the folder has in plain weights as well."""
    copies = [
        module for module in modules if marker != "weight" and f"{module}.weight" in folder.tensors
    ]
    if copies:
        others = f", and so of {len(copies) - 1} more matrices" if len(copies) > 1 else ""
        raise SpecDecError(
            f"{folder.path} holds {copies[0]}.weight and, quantized, {copies[0]}.{marker}{others}",
            "keep one of them: which holds the model's weights cannot be known",
        )


def _compute(
    folder: HfFolder,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str, str, int, int], Array],
) -> ComputedTensors:
    """Compute a tensor from those that are read by module, kind and rows."""

    def compute(name: str, start: int, stop: int, columns: tuple[int, int] | None) -> Array:
        module, _, kind = name.rpartition(".")
        rows = read(module, kind, start, stop)
        return rows if columns is None else rows[:, columns[0] : columns[1]]

    return ComputedTensors(folder, tensors, compute)


@dataclasses.dataclass(frozen=True)
class PackedTensor(PlannedTensor):
    """Codes, of which pairs of rows become one row of bytes."""

    def list_output_blocks(self) -> Iterator[OutputBlock]:
        num_columns = self.info.shape[1]
        height = max(2, OUTPUT_BLOCK_BYTES // num_columns // 2 * 2)
        for source_slice in self.slices:
            for start in range(source_slice.block.start, source_slice.block.stop, height):
                stop = min(start + height, source_slice.block.stop)
                block = Block(start, stop, source_slice.block.columns)
                yield _pack_later(source_slice, block, (stop - start) // 2 * num_columns)


def _pack_later(source_slice: SourceSlice, block: Block, num_bytes: int) -> OutputBlock:
    return OutputBlock(num_bytes, lambda: int4.pack(source_slice.read(block, "uint8")))


def name_scales(folder: HfFolder, scheme: Scheme) -> None:
    """Give the scales of FP8 ModelOpt's names, where transformers has written its own.

    A scale of a block of weights keeps its name.
    """
    names = {".activation_scale": ".input_scale"}
    if scheme.name == "fp8-static":
        names[".weight_scale_inv"] = ".weight_scale"
    if scheme.format.stored_as in (None, FP8):
        folder.rename(
            {
                name: name.removesuffix(ending) + new_ending
                for name in folder.tensors for ending, new_ending in names.items()
                if name.endswith(ending)
            },
            left_out=(),
        )  # fmt: skip


def dequantize(folder: HfFolder, scheme: Scheme) -> HfFolder:
    """Return a folder that has plain weights in the place of quantized ones."""
    name_scales(folder, scheme)
    matrices = open_matrices(folder, scheme)
    used_names = {name for matrix in matrices.values() for name in matrix.used_names}
    cache = [name for name in folder.tensors if name.endswith(KV_ENDINGS)]
    if cache:
        logger.warning("%s: the scales of its K/V cache are left out", folder.path)
    weights = {f"{module}.weight": matrix.info for module, matrix in matrices.items()}
    source = _compute(
        folder, weights, lambda module, _, start, stop: matrices[module].compute(start, stop)
    )
    plain = folder.substitute(source, used_names.union(cache))
    logger.info(
        "%s: %d matrices of %s are written as plain weights", folder.path, len(matrices),
        scheme.description,
    )  # fmt: skip
    return plain


def find_empty_biases(
    folder: HfFolder, source_rows: Mapping[str, tuple[SourceRows, ...]]
) -> list[str]:
    """Return biases of zeros that a model has no use for, as GPTQ's writers add to every linear."""
    read_names = list_read(source_rows)
    weights = [name for name in read_names if name.endswith(".weight")]
    names = [name.removesuffix("weight") + "bias" for name in weights]
    return [
        name for name in names
        if name in folder.tensors and name not in read_names
        and not folder.read(name).view(np.uint8).any()
    ]  # fmt: skip


def list_read(source_rows: Mapping[str, tuple[SourceRows, ...]]) -> set[str]:
    """Return the names of a folder's tensors of which rows are read."""
    return {rows.name for tensor_rows in source_rows.values() for rows in tensor_rows}


def turn_parts(
    folder: HfFolder, source_rows: Mapping[str, tuple[SourceRows, ...]]
) -> dict[str, tuple[SourceRows, ...]]:
    """Let computed matrices be [out, in], also where the unquantized model stores [in, out]."""
    return {
        name: tuple(
            dataclasses.replace(rows, is_transposed=False) if rows.name in folder.computed else rows
            for rows in tensor_rows
        )
        for name, tensor_rows in source_rows.items()
    }


@dataclasses.dataclass(frozen=True)
class StoredMatrices:
    """Matrices of a quantized folder whose numbers a checkpoint holds as they are.

    by_module: empty for FP8 with static scales, whose tensors are read as they are.
    """

    scheme: Scheme
    by_module: Mapping[str, Matrix]


def open_stored(folder: HfFolder, scheme: Scheme) -> tuple[HfFolder, StoredMatrices]:
    """Return a folder that has what a checkpoint holds of its matrices as tensors, and these."""
    if scheme.stored_as is None:
        raise SpecDecError(
            f"{folder.path} is quantized ({scheme.description}): a checkpoint has no place for such"
            " numbers",
            f"{DEQUANTIZE}; they take the bytes of an unquantized model",
        )
    name_scales(folder, scheme)
    if scheme.stored_as == FP8:
        find_modules(folder, scheme)
        return folder, StoredMatrices(scheme, {})
    matrices = open_matrices(folder, scheme)
    _share_input_dtype(matrices.values())
    used_names = {name for matrix in matrices.values() for name in matrix.used_names}
    infos = {
        f"{module}.{kind}": info
        for module, matrix in matrices.items()
        for kind, info in matrix.list_stored().items()
    }
    source = _compute(
        folder, infos, lambda module, kind, *rows: matrices[module].read_stored(kind, *rows)
    )
    return folder.substitute(source, used_names), StoredMatrices(scheme, matrices)


def _share_input_dtype(matrices: Iterable[Matrix]) -> None:
    """Give matrices whose input is not scaled the type of the scales that others have."""
    int_matrices = [matrix for matrix in matrices if isinstance(matrix, IntMatrix)]
    dtypes = [matrix.input_dtype for matrix in int_matrices if matrix.input_scale is not None]
    for matrix in int_matrices:
        if dtypes and matrix.input_scale is None:
            matrix.input_dtype = dtypes[0]


# Tensors of a linear in a checkpoint: kind -> the whole tensor, and its type.
_Kinds = dict[str, tuple[TensorSpec, str]]
# The matrices that make one linear of a checkpoint have one of these in common.
COMMON_KINDS = (int4.PERMUTATION, INPUT_SCALE, WEIGHT_SCALE_2, ACTIVATION_SCALE)


@dataclasses.dataclass(frozen=True)
class _Module:
    """A linear of the checkpoint that is made of quantized matrices."""

    name: str
    spec: TensorSpec
    source_rows: tuple[SourceRows, ...]
    matrices: tuple[Matrix, ...]


def plan_stored(
    target: TargetTensors, stored: StoredMatrices, kv_scales: Sequence[str]
) -> tuple[list[RankPlan], dict[str, Any]]:
    """Plan a target of which a checkpoint holds the numbers.

    Returns its ranks, and what config.json says of its quantization. Its folder is of
    `open_stored`; kv_scales: the K/V scales to write, where the folder has any.
    """
    folder, specs = target.folder, target.specs
    linears, reader = list_linears(target.model), ScaleReader(folder)
    is_fp8 = stored.scheme.stored_as == FP8
    modules = unified.find_stored(folder) if is_fp8 else stored.by_module
    quantized, plain_names = sort_linears(target, linears, modules)
    if is_fp8:
        weights = {f"{module}.weight": specs[f"{module}.weight"] for module in quantized}
        planned_weights = [unified.plan_fp8(target, weights, reader, modules)]
        section: dict[str, Any] = {"quant_algo": FP8}
    else:
        planned_weights, section = _plan_modules(target, stored, quantized)
    cache_scales, has_cache = plan_kv_scales(target, linears, kv_scales, reader)
    reader.report(target.problems)
    plain_folder = folder.select(set(folder.tensors) - folder.computed - reader.used_names)
    plain = target.plan({name: specs[name] for name in plain_names}, source=plain_folder)
    plain_linears = [name for name in linears if name not in quantized]
    section |= {
        "kv_cache_quant_algo": FP8 if has_cache else None,
        "exclude_modules": [*EXCLUDED, *plain_linears],
    }
    return merge_ranks(*planned_weights, plain, [dict(cache_scales) for _ in plain]), section


def _plan_modules(
    target: TargetTensors, stored: StoredMatrices, quantized: Sequence[str]
) -> tuple[list[list[RankPlan]], dict[str, Any]]:
    """Plan the linears that are made of matrices, and what config.json says of them."""
    modules = [_make_module(target, stored, name) for name in quantized]
    _report_unread(target, stored)
    kinds, section = _describe(target, stored.scheme, modules)
    planned_modules: list[list[RankPlan]] = []
    for module in modules:
        with collect(target.problems):
            _check_shared(module)
            planned_modules.append(_plan_module(target, module, kinds(module)))
    stems = {matrix.stem for module in modules for matrix in module.matrices}
    logger.info(
        "%s: %d matrices keep their numbers, as %s", target.folder.path, len(stems),
        section["quant_algo"],
    )  # fmt: skip
    return planned_modules, section


def _make_module(target: TargetTensors, stored: StoredMatrices, name: str) -> _Module:
    """Return a linear with the matrices that make it."""
    source_rows = target.source_rows[f"{name}.weight"]
    stems = [rows.name.removesuffix(".weight") for rows in source_rows]
    matrices = tuple(stored.by_module[stem] for stem in stems if stem in stored.by_module)
    return _Module(name, target.specs[f"{name}.weight"], source_rows, matrices)


def _report_unread(target: TargetTensors, stored: StoredMatrices) -> None:
    """Note the matrices that no tensor of the target is made of, unless they may be left out."""
    read_names = list_read(target.source_rows)
    unread_names = [
        weight for stem in stored.by_module
        if (weight := f"{stem}.weight") not in read_names
        and not any(fnmatch.fnmatchcase(weight, pattern) for pattern in target.ignored)
    ]  # fmt: skip
    report_unread(target.folder, unread_names, target.problems)


def _describe(
    target: TargetTensors, scheme: Scheme, modules: Sequence[_Module]
) -> tuple[Callable[[_Module], _Kinds], dict[str, Any]]:
    """Return what tells the kinds of tensors of a linear, and what config.json says of them."""
    if scheme.stored_as != INT4:
        algorithm = ALGORITHMS[str(scheme.stored_as)]
        section: dict[str, Any] = {"quant_algo": scheme.stored_as}
        if algorithm.group_sizes:
            section["group_size"] = algorithm.group_sizes[0]
        return functools.partial(_list_kinds, algorithm), section
    return _describe_int4(target, modules)


def _describe_int4(
    target: TargetTensors, modules: Sequence[_Module]
) -> tuple[Callable[[_Module], _Kinds], dict[str, Any]]:
    """Return as `_describe` does, for matrices of four-bit integers."""
    matrices = {m.name: [x for x in m.matrices if isinstance(x, IntMatrix)] for m in modules}
    with_zeros = {name for name, module in matrices.items() if any(x.has_zeros() for x in module)}
    with_order = {
        name for name, module in matrices.items() if any(x.order is not None for x in module)
    }
    has_inputs, group_size = _describe_groups(list(itertools.chain(*matrices.values())))

    def list_int4(module: _Module) -> _Kinds:
        return _list_int4(
            module, matrices[module.name], target.model.tp_size,
            has_zeros=module.name in with_zeros, has_order=module.name in with_order,
            has_inputs=has_inputs,
        )  # fmt: skip

    return list_int4, {
        "quant_algo": int4.INT4_GROUPS if with_zeros or with_order else int4.W4A16_AWQ,
        "group_size": group_size,
        "has_zero_point": bool(with_zeros),
        "pre_quant_scale": has_inputs,
    }


def _describe_groups(matrices: Sequence[IntMatrix]) -> tuple[bool, int]:
    """Return whether inputs of matrices are scaled, and their group size; -1 for whole rows."""
    has_inputs = any(matrix.input_scale is not None for matrix in matrices)
    sizes = {matrix.shape[1] // matrix.num_groups for matrix in matrices}
    has_whole_rows = all(matrix.num_groups == 1 for matrix in matrices)
    assert len(sizes) == 1 or has_whole_rows, "the section has one group size"
    return has_inputs, -1 if has_whole_rows else min(sizes)


def _list_kinds(algorithm: Algorithm, module: _Module) -> _Kinds:
    """List the tensors of any format but four-bit integers."""
    spec = module.spec
    rows = Shard.REPLICATED if spec.shard is Shard.COLUMNS else spec.shard
    shards = {"matrix": Shard.REPLICATED, "row": rows}
    infos = algorithm.describe((spec.shape[0], spec.shape[1]), "float32", NVFP4_GROUP_SIZE)
    return {
        kind: (
            TensorSpec(
                info.shape, shards.get(algorithm.scales.get(kind, ""), spec.shard), spec.owner
            ),
            info.dtype,
        )
        for kind, info in infos.items()
    }


def _list_int4(
    module: _Module, matrices: Sequence[IntMatrix], tp_size: int, *, has_zeros: bool,
    has_order: bool, has_inputs: bool,
) -> _Kinds:  # fmt: skip
    """List the tensors of four-bit integers; see specdec/model/int4.py."""
    spec, num_groups = module.spec, matrices[0].num_groups
    scales = TensorSpec((spec.shape[0], num_groups), spec.shard, spec.owner)
    vector = TensorSpec(spec.shape[1:], Shard.REPLICATED)
    if spec.shard is Shard.COLUMNS and tp_size > 1:
        if has_order:
            reason = "its columns are in an order of their own (act-order)"
            raise _refuse_split(matrices[0], tp_size, reason)
        vector = TensorSpec(spec.shape[1:], Shard.ROWS)
        if num_groups == 1:
            scales = TensorSpec(scales.shape, Shard.REPLICATED)
    dtypes = {matrix.dtype for matrix in matrices}
    scale_dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    kinds = {"weight": (spec, "uint8"), WEIGHT_SCALE: (scales, scale_dtype)}
    if has_zeros:
        kinds[int4.ZERO_POINT] = (scales, "uint8")
    if has_order:
        kinds[int4.PERMUTATION] = (vector, "int32")
    if has_inputs:
        kinds[INPUT_SCALE] = (vector, matrices[0].input_dtype)
    return kinds


def _refuse_split(matrix: Matrix, tp_size: int, reason: str) -> SpecDecError:
    return SpecDecError(
        f"{matrix.folder.path}: {matrix.stem} does not split over {tp_size} ranks: {reason}",
        "use --tp-size 1, or add --dequantize",
    )


def _plan_module(target: TargetTensors, module: _Module, kinds: _Kinds) -> list[RankPlan]:
    """Plan what a checkpoint holds of one linear, on every rank."""
    tp_size = target.model.tp_size
    planned_kinds: list[list[RankPlan]] = []
    for kind, (spec, dtype) in kinds.items():
        if spec.shard is Shard.COLUMNS and spec.shape[1] % tp_size:
            reason = f"its {spec.shape[1]} groups of columns do not divide by {tp_size}"
            raise _refuse_split(module.matrices[0], tp_size, reason)
        sources = tuple(
            dataclasses.replace(rows, name=f"{rows.name.removesuffix('weight')}{kind}")
            for rows in module.source_rows
        )
        if kind in COMMON_KINDS:
            sources = (SourceRows(sources[0].name),)
        name = f"{module.name}.{kind}"
        source = target.folder.select({rows.name for rows in sources})
        planned_kinds.append(
            target.plan(
                {name: spec}, source_rows={name: sources}, source=source, dtype=dtype, ignored=()
            )
        )
    ranks = merge_ranks(*planned_kinds)
    matrix = module.matrices[0]
    for rank in ranks:
        name = f"{module.name}.weight"
        if name in rank and isinstance(matrix, IntMatrix):
            rank[name] = _pack(rank[name], matrix, tp_size)
    return ranks


def _pack(codes: PlannedTensor, matrix: IntMatrix, tp_size: int) -> PackedTensor:
    heights = [source_slice.block.num_rows for source_slice in codes.slices]
    if any(height % 2 for height in heights):
        raise matrix.refuse(
            "a rank would have an odd number of rows"
            f" ({join_names([str(height) for height in heights])}), and rows are packed in pairs",
            "use a smaller --tp-size, or add --dequantize" if tp_size > 1 else DEQUANTIZE,
        )
    num_rows, num_columns = codes.info.shape
    return PackedTensor(TensorInfo("int8", (num_rows // 2, num_columns)), codes.slices)


def _check_shared(module: _Module) -> None:
    """Refuse parts of a linear that differ in what a checkpoint has once for all of them."""
    first_matrix, *other_matrices = module.matrices
    stems = join_names([matrix.stem for matrix in module.matrices])
    for matrix in other_matrices:
        facts = [
            words for words, first_value, other_value in _pair(first_matrix, matrix)
            if first_value != other_value
        ]  # fmt: skip
        if facts:
            raise SpecDecError(
                f"{first_matrix.folder.path}: {stems}, which make one linear of the checkpoint,"
                f" have different {facts[0]}",
                DEQUANTIZE,
            )


def _pair(first_matrix: Matrix, other_matrix: Matrix) -> Iterator[tuple[str, Any, Any]]:
    """Return the properties that two matrices must share: their words, and each one's values."""
    if isinstance(first_matrix, IntMatrix) and isinstance(other_matrix, IntMatrix):
        yield "numbers of groups", first_matrix.num_groups, other_matrix.num_groups
        yield (
            "orders of their inputs (act-order)",
            _list(first_matrix.order),
            _list(other_matrix.order),
        )
        inputs = [_list(m.read_input_scale()) for m in (first_matrix, other_matrix)]
        yield "scales of their inputs (pre_quant_scale)", inputs[0], inputs[1]
    if isinstance(first_matrix, Nvfp4Matrix):
        for kind, words in ((WEIGHT_SCALE_2, "weight_scale_2"), (ACTIVATION_SCALE, "input_scale")):
            yield (
                words,
                _list(first_matrix.read_stored(kind, 0, 1)),
                _list(other_matrix.read_stored(kind, 0, 1)),
            )


def _list(array: Array | None) -> list[float] | None:
    return None if array is None else array.tolist()
