"""Matrices of a GGUF file in GGML's block types, which a checkpoint keeps as they are.

The target is planned as if its weights were plain; then what can stay in blocks takes their place.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo
from specdec.gguf.file import PLAIN
from specdec.model.blocks import BLOCK_TYPES, GGUF, TYPES, widen_rows
from specdec.model.config import ModelConfig
from specdec.model.sharding import Block
from specdec.model.tensors import EMBEDDING, HEAD, list_linears
from specdec.system import logs

from ..hf import GgufFolder
from ..plan import ComputedTensors, PlannedTensor, RankPlan, SourceSlice
from .unified import DEQUANTIZE

# Of a mixture, which are a millionth of it and stay plain.
ROUTERS = ("mlp.router", "shared_expert_gate")
# Name -> ggml's type, shape and rows, see `GgufModel.raw`.
Sources = Mapping[str, tuple[Any, tuple[int, ...], Any]]
logger = logs.get_logger(__name__)


def keep_blocks(
    ranks: Sequence[RankPlan], folder: GgufFolder, model: ModelConfig
) -> tuple[list[RankPlan], dict[str, Any]]:
    """Put blocks in the place of plain weights; return what config.json says of them, too.

    Of matrices that an engine stacks, all are kept or none. Raises SpecDecError where ranks would
    have parts of blocks.
    """
    modules = [
        name.removesuffix(".weight") for name in (EMBEDDING, *list_linears(model), HEAD)
        if not name.endswith(ROUTERS)
    ]  # fmt: skip
    found = {m: _find_sources(ranks[0].get(f"{m}.weight"), folder) for m in modules}
    sources = {module: each for module, each in found.items() if each is not None}
    mixed = {_name_group(module, model) for module in modules if module not in sources}
    kept = [module for module in sources if _name_group(module, model) not in mixed]
    if kept and model.pp_size > 1:
        raise SpecDecError(
            f"{folder.path}: --pp-size {model.pp_size}: only the torch backend runs GGML's blocks,"
            " and it has no pipeline stages",
            f"use --pp-size 1, or {DEQUANTIZE}",
        )
    planned = [dict(rank) for rank in ranks]
    for module in kept:
        for rank in planned:
            rank |= _plan_blocks(module, rank[f"{module}.weight"], sources[module], folder, model)
    plain = [m for m in modules if m not in kept and f"{m}.weight" in ranks[0]]
    _report(folder, ranks[0], kept, plain, model)
    return planned, {"quant_algo": GGUF, "exclude_modules": plain} if kept else {}


def _name_group(module: str, model: ModelConfig) -> str:
    """Of modules that an engine stacks, or that one call runs as a layer's experts: one name."""
    layer, _, part = module.partition(".mlp.")
    is_joint = part in ("fc", "gate") or (model.experts is not None and part)
    return layer if is_joint else module


def _find_sources(tensor: PlannedTensor | None, folder: GgufFolder) -> Sources | None:
    """Find the stored tensors of a matrix, by name; None where not all can be kept."""
    if tensor is None or not tensor.slices or len(tensor.info.shape) < 2:
        return None
    sources = {}
    for source_slice in tensor.slices:
        found = folder.raw(source_slice.name)
        is_changed = source_slice.is_transposed or source_slice.addend
        if is_changed or found is None or found[2] is None or int(found[0]) not in TYPES:
            return None
        sources[source_slice.name] = found
    return sources


def _plan_blocks(
    module: str, tensor: PlannedTensor, sources: Sources, folder: GgufFolder, model: ModelConfig
) -> RankPlan:
    """One rank's part of a matrix, and the types of its rows."""
    *shape, num_columns = tensor.info.shape
    num_rows = math.prod(shape)
    width = max(TYPES[int(kind)].count_bytes(num_columns) for kind, _, _ in sources.values())
    rows: list[SourceSlice] = []
    types: list[SourceSlice] = []
    for source_slice in tensor.slices:
        kind, (height, depth), raw = sources[source_slice.name]
        columns = source_slice.block.columns or (0, depth)
        first, last = map(TYPES[kind].count_bytes, columns)
        if columns[0] % TYPES[kind].size or columns[1] % TYPES[kind].size:
            raise SpecDecError(
                f"{folder.path}: {module} does not split over {model.tp_size} ranks: each would"
                f" have {columns[1] - columns[0]} columns, and {TYPES[kind].name} has blocks of"
                f" {TYPES[kind].size}",
                f"use a smaller --tp-size, or {DEQUANTIZE}",
            )
        for slices, info, compute in (
            (rows, (height, width), functools.partial(_read_rows, raw, first, last, width)),
            (types, (height,), functools.partial(_read_types, int(kind))),
        ):
            source = ComputedTensors(
                folder, {source_slice.name: TensorInfo("uint8", info)}, compute
            )
            block = Block(source_slice.block.start, source_slice.block.stop)
            slices.append(SourceSlice(source, source_slice.name, block))
    missing = num_rows - sum(source_slice.block.num_rows for source_slice in rows)
    if missing:  # rows of zeros behind the vocabulary, in blocks of some type
        types += [dataclasses.replace(types[-1], block=Block(0, 1))] * missing
    return {
        f"{module}.weight": PlannedTensor(TensorInfo("uint8", (*shape, width)), tuple(rows)),
        f"{module}.{BLOCK_TYPES}": PlannedTensor(TensorInfo("uint8", (num_rows,)), tuple(types)),
    }


def _read_rows(
    raw: Any, first: int, last: int, width: int, _: str, start: int, stop: int, _columns: object
) -> Array:
    """Bytes [first, last) of rows of blocks, with zeros behind them up to a width."""
    own = np.ascontiguousarray(raw[start:stop, first:last])
    return widen_rows([own, np.empty((0, width), np.uint8)])[0]


def _read_types(kind: int, _: str, start: int, stop: int, _columns: object) -> Array:
    return np.full(stop - start, kind, np.uint8)


def _report(
    folder: GgufFolder, rank: RankPlan, kept: Sequence[str], plain: Sequence[str],
    model: ModelConfig,
) -> None:  # fmt: skip
    """Say which types stay in blocks and which are widened, unless the file has no blocks."""
    told, names = [], set()
    for modules in (kept, plain):
        sources = {
            source_slice.name for m in modules for source_slice in rank[f"{m}.weight"].slices
        }
        found = [raw[0].name for name in sources if (raw := folder.raw(name)) is not None]
        names |= set(found)
        counts = sorted(collections.Counter(found).items())
        told.append(", ".join(f"{name} ({n})" for name, n in counts) or "none")
    if not names <= set(PLAIN):
        logger.info(
            "%s: matrices that stay as they are: %s; widened to %s: %s", folder.path, told[0],
            model.dtype, told[1],
        )  # fmt: skip
