"""Quantized Hugging Face targets: what of them a checkpoint holds, or plain weights in their place.

Computed tensors take the place of the stored ones in the folder, so that families, splitting and
streaming see matrices [out, in] by the names that the unquantized model has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec import logs
from specdec.errors import Problems, SpecDecError, join_names
from specdec.files.casts import cast
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo
from specdec.model import int4
from specdec.model.config import ModelConfig
from specdec.model.quantization import FP8, WEIGHT_SCALE
from specdec.model.sharding import Block
from specdec.model.tensors import Shard, TensorSpec, list_linears

from ..hf import HfFolder
from ..plan import (
    CHUNK_BYTES,
    Chunk,
    Part,
    Piece,
    PlannedTensor,
    RankPlan,
    collect,
    merge_ranks,
    plan_tensors,
)
from .matrices import IntMatrix, Matrix
from .scales import EXCLUDED
from .sections import Scheme
from .unified import ScaleReader, Selection, plan_kv_scales

logger = logs.get_logger(__name__)

KV_ENDINGS = (".k_scale", ".v_scale")


def open_matrices(folder: HfFolder, scheme: Scheme) -> dict[str, Matrix]:
    """Check every quantized matrix of a folder; return them by module."""
    problems = Problems()
    matrices: dict[str, Matrix] = {}
    for module in scheme.find_modules(folder):
        with collect(problems):
            matrices[module] = scheme.make(folder, module)
    problems.raise_all()
    if not matrices:
        raise SpecDecError(
            f"{folder.path} is quantized ({scheme.description}), but holds no"
            f" .{scheme.format.marker} of that format",
            "copy or download the folder again",
        )
    return matrices


class _Computed:
    """Tensors that are computed from a folder's matrices, a source of their own."""

    def __init__(self, folder: HfFolder, matrices: Mapping[str, Matrix]) -> None:
        self.folder = folder
        self.path: Path = folder.path
        self.matrices = matrices
        self.tensors: dict[str, TensorInfo] = {}

    def compute(self, module: str, kind: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of a tensor of a module."""
        raise NotImplementedError

    def read(self, name: str) -> Array:
        return self.read_block(name, 0, self.tensors[name].shape[0])

    def read_block(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Array:
        module, _, kind = name.rpartition(".")
        rows = self.compute(module, kind, start, stop)
        return rows if columns is None else rows[:, columns[0] : columns[1]]

    def locate(self, name: str) -> None:
        """Return None: what is computed lies in no file."""

    def release(self) -> None:
        self.folder.release()


class _Dequantized(_Computed):
    """The weights, in the type that the format's own library computes them in."""

    def __init__(self, folder: HfFolder, matrices: Mapping[str, Matrix]) -> None:
        super().__init__(folder, matrices)
        for module, matrix in matrices.items():
            self.tensors[f"{module}.weight"] = TensorInfo(matrix.dtype, matrix.shape)

    def compute(self, module: str, kind: str, start: int, stop: int) -> Array:
        return self.matrices[module].compute(start, stop)


class _Codes(_Computed):
    """The parts of four-bit matrices, by the names that a checkpoint has for them."""

    matrices: Mapping[str, IntMatrix]

    def __init__(self, folder: HfFolder, matrices: Mapping[str, IntMatrix]) -> None:
        super().__init__(folder, matrices)
        for module, matrix in matrices.items():
            groups = (matrix.shape[0], matrix.num_groups)
            kinds = {
                "weight": TensorInfo("uint8", matrix.shape),
                WEIGHT_SCALE: TensorInfo(matrix.dtype, groups),
                int4.ZERO_POINT: TensorInfo("uint8", groups),
                int4.INPUT_SCALE: TensorInfo(matrix.input_dtype, matrix.shape[1:]),
                int4.PERMUTATION: TensorInfo("int32", matrix.shape[1:]),
            }
            self.tensors |= {f"{module}.{kind}": info for kind, info in kinds.items()}

    def compute(self, module: str, kind: str, start: int, stop: int) -> Array:
        matrix = self.matrices[module]
        if kind == WEIGHT_SCALE:
            return matrix.read_scales(start, stop)
        if kind == int4.ZERO_POINT:
            return matrix.read_zeros(start, stop)
        if kind == int4.INPUT_SCALE:
            if matrix.input_scale is None:  # where others have one, TensorRT-LLM asks all for it
                return cast(np.ones(stop - start, np.float32), "float32", matrix.input_dtype)
            return self.folder.read(matrix.input_scale)[start:stop]
        if kind == int4.PERMUTATION:
            assert matrix.order is not None
            return matrix.order[start:stop]
        codes = matrix.read_numbers(start, stop)
        return codes if matrix.order is None else codes[:, matrix.order]


@dataclasses.dataclass(frozen=True)
class PackedTensor(PlannedTensor):
    """Codes, of which pairs of rows become one row of bytes."""

    def list_chunks(self) -> Iterator[Chunk]:
        num_columns = self.info.shape[1]
        height = max(2, CHUNK_BYTES // num_columns // 2 * 2)
        for piece in self.pieces:
            assert piece.block is not None
            for start in range(piece.block.start, piece.block.stop, height):
                stop = min(start + height, piece.block.stop)
                block = Block(start, stop, piece.block.columns)
                yield _pack_later(piece, block, (stop - start) // 2 * num_columns)


def _pack_later(piece: Piece, block: Block, num_bytes: int) -> Chunk:
    return Chunk(num_bytes, lambda: int4.pack(piece.read(block, "uint8")))


def dequantize(folder: HfFolder, scheme: Scheme) -> HfFolder:
    """Return a folder that has plain weights in the place of quantized ones."""
    matrices = open_matrices(folder, scheme)
    used = {name for matrix in matrices.values() for name in matrix.used}
    cache = [name for name in folder.tensors if name.endswith(KV_ENDINGS)]
    if cache:
        logger.warning("%s: the scales of its K/V cache are left out", folder.path)
    plain = folder.substitute(_Dequantized(folder, matrices), used.union(cache))
    logger.info(
        "%s: %d matrices of %s are written as plain weights", folder.path, len(matrices),
        scheme.description,
    )  # fmt: skip
    return plain


def find_empty_biases(folder: HfFolder, parts: Mapping[str, tuple[Part, ...]]) -> list[str]:
    """Biases of zeros that a model has no use for, as GPTQ's writers add to every linear."""
    wanted = {part.name for several in parts.values() for part in several}
    weights = [name for name in wanted if name.endswith(".weight")]
    names = [name.removesuffix("weight") + "bias" for name in weights]
    return [
        name for name in names
        if name in folder.tensors and name not in wanted
        and not folder.read(name).view(np.uint8).any()
    ]  # fmt: skip


def turn_parts(
    folder: HfFolder, parts: Mapping[str, tuple[Part, ...]]
) -> dict[str, tuple[Part, ...]]:
    """Let computed matrices be [out, in], also where the unquantized model stores [in, out]."""
    return {
        name: tuple(
            dataclasses.replace(part, is_transposed=False) if part.name in folder.computed else part
            for part in own
        )
        for name, own in parts.items()
    }


def open_codes(folder: HfFolder, scheme: Scheme) -> tuple[HfFolder, dict[str, IntMatrix]]:
    """Return a folder that has the parts of four-bit matrices as tensors, and the matrices."""
    matrices = {
        module: matrix
        for module, matrix in open_matrices(folder, scheme).items()
        if isinstance(matrix, IntMatrix)
    }
    scaled = [matrix.input_dtype for matrix in matrices.values() if matrix.input_scale is not None]
    for matrix in matrices.values():
        if scaled and matrix.input_scale is None:
            matrix.input_dtype = scaled[0]
    used = {name for matrix in matrices.values() for name in matrix.used}
    return folder.substitute(_Codes(folder, matrices), used), matrices


def refuse_unheld(folder: HfFolder, scheme: Scheme) -> SpecDecError:
    """Return the error for numbers that no layout of a checkpoint holds."""
    return SpecDecError(
        f"{folder.path} is quantized ({scheme.description}): a checkpoint has no place for such"
        " numbers",
        "add --dequantize to write the weights that they stand for in --dtype; they then take the"
        " bytes of an unquantized model",
    )


@dataclasses.dataclass(frozen=True)
class _Module:
    """A linear of the checkpoint that is made of four-bit matrices, and what they have."""

    name: str
    spec: TensorSpec
    parts: tuple[Part, ...]
    matrices: tuple[IntMatrix, ...]

    @property
    def has_zeros(self) -> bool:
        return any(matrix.has_zeros() for matrix in self.matrices)


def plan_int4(
    folder: HfFolder,
    matrices: Mapping[str, IntMatrix],
    specs: Mapping[str, TensorSpec],
    parts: Mapping[str, tuple[Part, ...]],
    model: ModelConfig,
    config: Mapping[str, Any],
    *,
    ignored: Sequence[str],
    kv_scales: Sequence[str],
    problems: Problems,
) -> tuple[list[RankPlan], dict[str, Any]]:
    """Plan a target with four-bit matrices; return its ranks and its config.json.

    folder: of `open_codes`; kv_scales: the K/V scales to write, where the folder has any.
    """
    linears = list_linears(model)
    modules = []
    for name in linears:
        stems = [part.name.removesuffix(".weight") for part in parts[f"{name}.weight"]]
        own = [matrices[stem] for stem in stems if stem in matrices]
        if own and len(own) < len(stems):
            problems.add(
                f"{folder.path}: of {join_names(stems)}, which make one linear of the checkpoint,"
                f" {len(own)} are quantized",
                "add --dequantize",
            )
        elif own:
            shape = parts[f"{name}.weight"]
            modules.append(_Module(name, specs[f"{name}.weight"], shape, tuple(own)))
    taken = {matrix.stem for module in modules for matrix in module.matrices}
    others = [stem for stem in matrices if stem not in taken]
    if others and not problems:
        problems.add(
            f"{folder.path}: {join_names(others)} is quantized, of which a checkpoint holds plain"
            " weights alone",
            "add --dequantize",
        )
    zeros = {module.name for module in modules if module.has_zeros}
    has_inputs = any(matrix.input_scale is not None for matrix in matrices.values())
    orders = {m.name for m in modules if any(x.order is not None for x in m.matrices)}
    planned: list[list[RankPlan]] = []
    for module in modules:
        with collect(problems):
            planned.append(
                _plan_module(
                    module, folder, model, problems, has_zeros=module.name in zeros,
                    has_order=module.name in orders, has_inputs=has_inputs,
                )
            )  # fmt: skip
    sizes = {matrix.shape[1] // matrix.num_groups for matrix in matrices.values()}
    whole = all(matrix.num_groups == 1 for matrix in matrices.values())
    if len(sizes) > 1 and not whole:
        problems.add(
            f"{folder.path} has groups of {join_names(sorted(map(str, sizes)))} columns",
            "add --dequantize: a checkpoint has one group size",
        )
    reader = ScaleReader(folder)
    added, has_cache = plan_kv_scales(folder, parts, linears, kv_scales, reader)
    reader.report(problems)
    weights = {f"{module.name}.weight" for module in modules}
    rest = {name: spec for name, spec in specs.items() if name not in weights}
    computed = {f"{stem}.{kind}" for stem in matrices for kind in _KINDS}
    left = set(folder.tensors) - computed - reader.used
    plain = plan_tensors(
        rest, parts, Selection(folder, left), model=model, dtype=model.dtype, ignored=ignored,
        problems=problems,
    )  # fmt: skip
    ranks = merge_ranks(*planned, plain, [dict(added) for _ in plain])
    is_own = bool(zeros or orders)
    names = {module.name for module in modules}
    section = {
        **config["quantization"],
        "quant_algo": int4.INT4_GROUPS if is_own else int4.W4A16_AWQ,
        "kv_cache_quant_algo": FP8 if has_cache else None,
        "group_size": -1 if whole else min(sizes),
        "has_zero_point": bool(zeros),
        "pre_quant_scale": has_inputs,
        "exclude_modules": [*EXCLUDED, *(name for name in linears if name not in names)],
    }
    logger.info(
        "%s: %d matrices keep their four bits%s", folder.path, len(taken),
        "; they have zeros or an order of inputs, which TensorRT-LLM has no layout for" * is_own,
    )  # fmt: skip
    return ranks, {**config, "quantization": section}


_KINDS = ("weight", WEIGHT_SCALE, int4.ZERO_POINT, int4.INPUT_SCALE, int4.PERMUTATION)


def _plan_module(
    module: _Module,
    folder: HfFolder,
    model: ModelConfig,
    problems: Problems,
    *,
    has_zeros: bool,
    has_order: bool,
    has_inputs: bool,
) -> list[RankPlan]:
    """Plan what a checkpoint holds of one linear, on every rank."""
    spec, matrices, tp_size = module.spec, module.matrices, model.tp_size
    num_groups = matrices[0].num_groups
    scales = TensorSpec((spec.shape[0], num_groups), spec.shard, spec.owner)
    vector = TensorSpec(spec.shape[1:], Shard.WHOLE)
    if spec.shard is Shard.COLUMNS and tp_size > 1:
        if has_order or (num_groups > 1 and num_groups % tp_size):
            reason = (
                "its columns are in an order of their own (act-order)" if has_order
                else f"its {num_groups} groups of columns do not divide by {tp_size}"
            )  # fmt: skip
            raise SpecDecError(
                f"{folder.path}: {matrices[0].stem} does not split over {tp_size} ranks: {reason}",
                "use --tp-size 1, or add --dequantize",
            )
        vector = TensorSpec(spec.shape[1:], Shard.ROWS)
        if num_groups == 1:
            scales = TensorSpec(scales.shape, Shard.WHOLE)
    _check_shared(module, folder)
    dtypes = {matrix.dtype for matrix in matrices}
    scale_dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    wanted = {"weight": (spec, "uint8"), WEIGHT_SCALE: (scales, scale_dtype)}
    if has_zeros:
        wanted[int4.ZERO_POINT] = (scales, "uint8")
    if has_order:
        wanted[int4.PERMUTATION] = (vector, "int32")
    if has_inputs:
        wanted[int4.INPUT_SCALE] = (vector, matrices[0].input_dtype)
    planned: list[list[RankPlan]] = []
    for kind, (own, dtype) in wanted.items():
        is_vector = len(own.shape) == 1
        sources = tuple(
            dataclasses.replace(part, name=f"{part.name.removesuffix('weight')}{kind}")
            for part in module.parts
        )
        if is_vector:  # which all parts share
            sources = (Part(sources[0].name),)
        name = f"{module.name}.{kind}"
        names = {part.name for part in sources}
        planned.append(
            plan_tensors(
                {name: own}, {name: sources}, Selection(folder, names), model=model, dtype=dtype,
                ignored=(), problems=problems,
            )
        )  # fmt: skip
    ranks = merge_ranks(*planned)
    for rank in ranks:
        name = f"{module.name}.weight"
        if name in rank:
            rank[name] = _pack(rank[name], folder, matrices[0])
    return ranks


def _pack(codes: PlannedTensor, folder: HfFolder, matrix: IntMatrix) -> PackedTensor:
    heights = [p.block.stop - p.block.start for p in codes.pieces if p.block is not None]
    if any(height % 2 for height in heights):
        raise SpecDecError(
            f"{folder.path}: {matrix.stem}: a rank would have an odd number of rows"
            f" ({join_names([str(height) for height in heights])}), and rows are packed in pairs",
            "use a smaller --tp-size, or add --dequantize",
        )
    num_rows, num_columns = codes.info.shape
    return PackedTensor(TensorInfo("int8", (num_rows // 2, num_columns)), codes.pieces)


def _check_shared(module: _Module, folder: HfFolder) -> None:
    """Refuse parts of a linear that need different inputs: another order, or another scaling."""
    first, *others = module.matrices
    stems = join_names([matrix.stem for matrix in module.matrices])
    for matrix in others:
        if matrix.num_groups != first.num_groups:
            fact = f"have {first.num_groups} and {matrix.num_groups} groups of columns"
        elif not _is_same(first.order, matrix.order):
            fact = "have different orders of their inputs (act-order)"
        elif not _is_same(_read_input_scale(first), _read_input_scale(matrix)):
            fact = "have different scales of their inputs (pre_quant_scale)"
        else:
            continue
        raise SpecDecError(
            f"{folder.path}: {stems}, which make one linear of the checkpoint, {fact}",
            "add --dequantize",
        )


def _read_input_scale(matrix: IntMatrix) -> Array | None:
    return None if matrix.input_scale is None else matrix.folder.read(matrix.input_scale)


def _is_same(one: Array | None, other: Array | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(np.array_equal(one, other))
