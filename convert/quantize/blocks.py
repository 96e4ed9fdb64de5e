"""Matrices of a GGUF file in GGML's block types, which a checkpoint keeps as they are.

The target is planned as if its weights were plain; then what can stay in blocks takes their place.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
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
from specdec.model.tensors import EMBEDDING, HEAD, list_linears, list_target_tensors
from specdec.system import logs

from ..hf import HfFolder
from ..plan import ComputedTensors, PlannedTensor, RankPlan, SourceSlice
from .unified import DEQUANTIZE

# Of a mixture, which are a millionth of it and stay plain.
INPUTS = re.compile(r"\.(layer_inputs|layer_input_proj|input_gate|input_proj)\.weight$")
ROUTERS = ("mlp.router", "shared_expert_gate")
# Name -> ggml's type, shape and rows, see `GgufModel.raw`.
Sources = Mapping[str, tuple[Any, tuple[int, ...], Any]]
logger = logs.get_logger(__name__)


def keep_blocks(
    ranks: Sequence[RankPlan], folder: HfFolder, model: ModelConfig
) -> tuple[list[RankPlan], dict[str, Any]]:
    """Put blocks in the place of plain weights; return what config.json says of them, too.

    Of matrices that an engine stacks, all are kept or none. Raises SpecDecError where ranks would
    have parts of blocks.
    """
    modules = [
        name.removesuffix(".weight")
        for name in (EMBEDDING, *_list_inputs(model), *list_linears(model), HEAD)
        if not name.endswith(ROUTERS)
    ]  # fmt: skip
    sources = _choose_modules(modules, ranks[0], folder, model)
    if sources and model.pp_size > 1:
        raise SpecDecError(
            f"{folder.path}: --pp-size {model.pp_size}: only the torch backend runs GGML's blocks,"
            " and it has no pipeline stages",
            f"use --pp-size 1, or {DEQUANTIZE}",
        )
    block_ranks = [dict(rank) for rank in ranks]
    for module, module_sources in sources.items():
        for rank in block_ranks:
            rank |= _plan_blocks(module, rank[f"{module}.weight"], module_sources, folder, model)
    plain = [m for m in modules if m not in sources and f"{m}.weight" in ranks[0]]
    _report(folder, ranks[0], list(sources), plain, model)
    return block_ranks, {"quant_algo": GGUF, "exclude_modules": plain} if sources else {}


def _list_inputs(model: ModelConfig) -> list[str]:
    """List the matrices of what layers read of tokens besides one another: Gemma 4's."""
    names = list_target_tensors(model) if model.layer_sizes is not None else ()
    return [name for name in names if INPUTS.search(name)]


def _choose_modules(
    modules: Sequence[str], rank: RankPlan, folder: HfFolder, model: ModelConfig
) -> dict[str, Sources]:
    """Map the modules that stay in blocks to their stored tensors; a group stays whole or not."""
    sources: dict[str, Sources] = {}
    plain_groups = set()
    for module in modules:
        module_sources = _find_sources(rank.get(f"{module}.weight"), folder)
        if module_sources is None:
            plain_groups.add(_name_group(module, model))
        else:
            sources[module] = module_sources
    return {
        m: tensors for m, tensors in sources.items() if _name_group(m, model) not in plain_groups
    }


def _name_group(module: str, model: ModelConfig) -> str:
    """Name the group of a module that an engine stacks, or one call runs with other experts."""
    layer, _, module_name = module.partition(".mlp.")
    is_joint = module_name in ("fc", "gate") or (model.experts is not None and module_name)
    return layer if is_joint else module


def _find_sources(tensor: PlannedTensor | None, folder: HfFolder) -> Sources | None:
    """Find the stored tensors of a matrix, by name; None where not all can be kept."""
    if tensor is None or not tensor.slices or len(tensor.info.shape) < 2:
        return None
    sources = {}
    for source_slice in tensor.slices:
        stored = folder.raw(source_slice.name)
        is_changed = source_slice.is_transposed or source_slice.addend
        if is_changed or stored is None or stored[2] is None or int(stored[0]) not in TYPES:
            return None
        sources[source_slice.name] = stored
    return sources


def _plan_blocks(
    module: str, tensor: PlannedTensor, sources: Sources, folder: HfFolder, model: ModelConfig
) -> RankPlan:
    """Plan one rank's part of a matrix, and the types of its rows."""
    *shape, num_columns = tensor.info.shape
    num_rows = math.prod(shape)
    width = max(TYPES[int(kind)].count_bytes(num_columns) for kind, _, _ in sources.values())
    rows: list[SourceSlice] = []
    types: list[SourceSlice] = []
    for source_slice in tensor.slices:
        kind, (height, depth), raw = sources[source_slice.name]
        columns = source_slice.block.columns or (0, depth)
        first_byte, last_byte = map(TYPES[kind].count_bytes, columns)
        if columns[0] % TYPES[kind].size or columns[1] % TYPES[kind].size:
            raise SpecDecError(
                f"{folder.path}: {module} does not split over {model.tp_size} ranks: each would"
                f" have {columns[1] - columns[0]} columns, and {TYPES[kind].name} has blocks of"
                f" {TYPES[kind].size}",
                f"use a smaller --tp-size, or {DEQUANTIZE}",
            )
        for slices, info, compute in (
            (
                rows,
                (height, width),
                functools.partial(_read_rows, raw, first_byte, last_byte, width),
            ),
            (types, (height,), functools.partial(_read_types, int(kind))),
        ):
            source = ComputedTensors(
                folder, {source_slice.name: TensorInfo("uint8", info)}, compute
            )
            block = Block(source_slice.block.start, source_slice.block.stop)
            slices.append(SourceSlice(source, source_slice.name, block))
    num_missing_rows = num_rows - sum(source_slice.block.num_rows for source_slice in rows)
    if num_missing_rows:  # rows of zeros after the vocabulary, in blocks of some type
        types += [dataclasses.replace(types[-1], block=Block(0, 1))] * num_missing_rows
    return {
        f"{module}.weight": PlannedTensor(TensorInfo("uint8", (*shape, width)), tuple(rows)),
        f"{module}.{BLOCK_TYPES}": PlannedTensor(TensorInfo("uint8", (num_rows,)), tuple(types)),
    }


def _read_rows(
    raw: Any,
    first_byte: int,
    last_byte: int,
    width: int,
    _: str,
    start: int,
    stop: int,
    _columns: object,
) -> Array:
    """Return bytes [first_byte, last_byte) of rows of blocks, and zeros up to a width."""
    blocks = np.ascontiguousarray(raw[start:stop, first_byte:last_byte])
    return widen_rows([blocks, np.empty((0, width), np.uint8)])[0]


def _read_types(kind: int, _: str, start: int, stop: int, _columns: object) -> Array:
    return np.full(stop - start, kind, np.uint8)


def _report(
    folder: HfFolder, rank: RankPlan, kept_modules: Sequence[str], plain: Sequence[str],
    model: ModelConfig,
) -> None:  # fmt: skip
    """Say which types stay in blocks and which are widened, unless the file has no blocks."""
    type_counts, names = [], set()
    for modules in (kept_modules, plain):
        sources = {
            source_slice.name for m in modules for source_slice in rank[f"{m}.weight"].slices
        }
        type_names = [raw[0].name for name in sources if (raw := folder.raw(name)) is not None]
        names |= set(type_names)
        counts = sorted(collections.Counter(type_names).items())
        type_counts.append(", ".join(f"{name} ({n})" for name, n in counts) or "none")
    if not names <= set(PLAIN):
        logger.info(
            "%s: matrices that stay as they are: %s; widened to %s: %s", folder.path,
            type_counts[0], model.dtype, type_counts[1],
        )  # fmt: skip
