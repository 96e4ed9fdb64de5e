"""Plan of a conversion: the rows and columns of source tensors that make each rank's tensors.

It is checked as a whole before a byte is written, then executed as a stream of blocks, so that
memory depends neither on the model's size nor on a tensor's. `SourceRows` say what makes a tensor
of the model, a `SourceSlice` which of these rows a rank takes, an `OutputBlock` what is written at
once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specdec.checkpoint.config import CheckpointConfig
from specdec.errors import Problems, SpecDecError, count, join_names
from specdec.files.acceptance import Acceptance
from specdec.files.casts import cast
from specdec.files.origin import Origin
from specdec.files.reading import Array
from specdec.files.tensor_file import DTYPES, TensorInfo
from specdec.model import int4
from specdec.model.config import ModelConfig
from specdec.model.sharding import Block, list_blocks
from specdec.model.tensors import Shard, TensorSpec, get_rank_shape, get_stored_dtype

OUTPUT_BLOCK_BYTES = 4 << 20  # read, computed and written at once
CASTABLE = ("float64", "float32", "float16", "bfloat16")


class TensorSource(int4.MatrixSource, Protocol):
    """A folder or file that tensors are read from."""

    @property
    def path(self) -> Path: ...

    def locate(self, name: str) -> tuple[Path, int] | None: ...

    def release(self) -> None: ...


class ComputedTensors:
    """Tensors that are computed from a folder's when they are read; they lie in no file.

    compute: returns rows [start, stop) of one by name, all columns or columns [first, last).
    """

    def __init__(
        self,
        folder: TensorSource,
        tensors: Mapping[str, TensorInfo],
        compute: Callable[[str, int, int, tuple[int, int] | None], Array],
    ) -> None:
        self.folder, self.tensors, self.compute = folder, tensors, compute
        self.path = folder.path

    def read(self, name: str) -> Array:
        """Return a whole tensor."""
        return self.compute(name, 0, self.tensors[name].shape[0], None)

    def read_block(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Array:
        """Return rows [start, stop), all columns or columns [first, last)."""
        return self.compute(name, start, stop, columns)

    def locate(self, name: str) -> None:
        """Return None: what is computed lies in no file."""

    def release(self) -> None:
        """Let go of the memory of what was read to compute the tensors."""
        self.folder.release()


@dataclasses.dataclass(frozen=True)
class SourceRows:
    """Rows of a source tensor that make up a planned tensor, alone or below those of others.

    The source is transposed where it is stored as [in, out], then its first `skipped` rows are
    left out, then one of `num_shares` equal shares of the rows is taken; `addend` is added to every
    element, in float32. is_row: a single row, between whose size and its elements there may be more
    sizes of one, or fewer. num_matrices: of a source of three dimensions, whose rows are those of
    its matrices, one below the other. sections: of a source whose rows come in groups, the rows of
    each section of a group, by the model; those of number `section` are taken of all groups.
    """

    name: str
    is_transposed: bool = False
    skipped: int = 0
    share: int = 0
    num_shares: int = 1
    addend: float = 0.0
    is_row: bool = False
    num_matrices: int = 0
    sections: Callable[[ModelConfig], tuple[int, ...]] | None = None
    section: int = 0

    def is_alike(self, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        """Return whether a source tensor of `shape` is taken where `expected` is expected."""
        outer, expected_outer = shape[:1] + shape[-1:], expected[:1] + expected[-1:]
        is_row = self.is_row and {1} >= {*shape[:-1]} and len(shape) > 1
        return shape == expected or is_row and outer == expected_outer

    def get_source_shape(
        self, num_rows: int, row_shape: tuple[int, ...], model: ModelConfig
    ) -> tuple[int, ...]:
        """Return the shape that the source must have for these to be `num_rows` rows."""
        height = self.skipped + self.num_shares * num_rows
        if self.sections is not None:
            sizes = self.sections(model)
            height = num_rows // sizes[self.section] * sum(sizes)
        shape = (height, *row_shape)
        if self.num_matrices:
            shape = (self.num_matrices, height // self.num_matrices, *row_shape)
        return shape[::-1] if self.is_transposed else shape

    def list_runs(
        self, start: int, stop: int, height: int, model: ModelConfig
    ) -> Iterator[tuple[int, int]]:
        """Yield the runs [first, last) of source rows that make rows [start, stop) of `height`."""
        if self.sections is None:
            offset = self.skipped + self.share * height
            yield offset + start, offset + stop
            return
        sizes = self.sections(model)
        size = sizes[self.section]
        for group in range(start // size, -(-stop // size)):
            offset = group * (sum(sizes) - size) + sum(sizes[: self.section])
            yield offset + max(start, group * size), offset + min(stop, (group + 1) * size)


@dataclasses.dataclass(frozen=True)
class SourceSlice:
    """A block of one source tensor.

    is_transposed: the block is one of the transposed source. added: added to each element, in
    float32.
    """

    source: TensorSource
    name: str
    block: Block
    is_transposed: bool = False
    addend: float = 0.0

    def read(self, block: Block, dtype: str) -> Array:
        """Return a block of the source in another type, contiguous."""
        stored = self.source.tensors[self.name].dtype
        if self.is_transposed:
            return self._read_transposed(block, stored, dtype)
        rows = self.source.read_block(self.name, block.start, block.stop, block.columns)
        return self._finish(rows, stored, dtype)

    def locate(self, block: Block, dtype: str) -> tuple[Path, int] | None:
        """Return the file and offset of a block's bytes; None where no file has them unchanged."""
        info = self.source.tensors[self.name]
        is_changed = self != SourceSlice(self.source, self.name, self.block)
        if is_changed or info.dtype != dtype:
            return None
        location = self.source.locate(self.name)
        if location is None or block.columns not in (None, (0, *info.row_shape)):
            return None
        path, offset = location
        return path, offset + block.start * (info.num_bytes // max(1, info.num_rows))

    def _read_transposed(self, block: Block, stored: str, dtype: str) -> Array:
        """Read some stored rows at a time: every one of them holds a bit of each wanted row."""
        info = self.source.tensors[self.name]
        first_column, last_column = block.columns or (0, info.shape[0])
        result = np.empty((block.num_rows, last_column - first_column), DTYPES[dtype][1])
        row_bytes = info.num_bytes // max(1, info.shape[0])
        height = max(1, OUTPUT_BLOCK_BYTES // max(1, row_bytes))
        for top in range(first_column, last_column, height):
            bottom = min(top + height, last_column)
            tile = self.source.read_block(self.name, top, bottom, (block.start, block.stop))
            result[:, top - first_column : bottom - first_column] = self._finish(
                tile, stored, dtype
            ).T
        return result

    def _finish(self, rows: Array, stored: str, dtype: str) -> Array:
        """Return stored rows with what is added to them, in another type, contiguous."""
        if self.addend:
            rows, stored = cast(rows, stored, "float32") + np.float32(self.addend), "float32"
        return np.ascontiguousarray(cast(rows, stored, dtype))


@dataclasses.dataclass(frozen=True)
class OutputBlock:
    """Block of the next bytes of a planned tensor, which `make` computes.

    origin: file and offset of the same bytes, for a block that is merely copied.
    """

    num_bytes: int
    make: Callable[[], Array]
    origin: tuple[Path, int] | None = None


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
    """One rank's tensor: its slices from the top, then zero rows up to its shape."""

    info: TensorInfo
    slices: tuple[SourceSlice, ...]

    def list_output_blocks(self) -> Iterator[OutputBlock]:
        """Yield the tensor's rows from the top, about OUTPUT_BLOCK_BYTES at a time."""
        columns, total_rows = self.info.row_shape, self.info.num_rows
        row_bytes = max(1, self.info.num_bytes // max(1, total_rows))
        height = max(1, OUTPUT_BLOCK_BYTES // row_bytes)
        num_rows = 0
        for source_slice in self.slices:
            for start in range(source_slice.block.start, source_slice.block.stop, height):
                stop = min(start + height, source_slice.block.stop)
                block = Block(start, stop, source_slice.block.columns)
                yield self._cut_later(source_slice, block, (stop - start) * row_bytes)
                num_rows += stop - start
        for start in range(num_rows, total_rows, height):
            rows = TensorInfo(self.info.dtype, (min(height, total_rows - start), *columns))
            storage = DTYPES[rows.dtype][1]
            yield OutputBlock(rows.num_bytes, functools.partial(np.zeros, rows.shape, storage))

    def _cut_later(self, source_slice: SourceSlice, block: Block, num_bytes: int) -> OutputBlock:
        dtype = self.info.dtype
        return OutputBlock(
            num_bytes, lambda: source_slice.read(block, dtype), source_slice.locate(block, dtype)
        )


RankPlan = dict[str, PlannedTensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """A whole conversion: the config.json, each rank's tensors, and the files that are read.

    vocabulary: the meaning of the target's tokens, as `specdec.files.vocabulary` describes it.
    measure: finds a quantization's scales, which the tensors cannot be written without, with the
        given number of threads; returns the cost of the quantization, where it was measured.
    origin: what the drafter's folder and the target's say of where the drafter belongs.
    acceptance: what was accepted of the drafter before, as its folder says.
    left_out: how many vision tensors of each module are not read.
    """

    config: dict[str, Any]
    checkpoint: CheckpointConfig
    dtype: str
    ranks: tuple[RankPlan, ...]
    source_files: tuple[Path, ...]
    vocabulary: dict[str, Any] | None
    measure: Callable[[int], dict[str, Any] | None] | None = None
    origin: Origin | None = None
    acceptance: Acceptance | None = None
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)


def plan_tensors(
    specs: Mapping[str, TensorSpec],
    source_rows: Mapping[str, tuple[SourceRows, ...]],
    source: TensorSource,
    *,
    model: ModelConfig,
    dtype: str,
    ignored: Sequence[str],
    problems: Problems,
) -> list[RankPlan]:
    """Plan every rank's tensors from full source tensors, and append what is wrong to `problems`.

    `source_rows` maps a tensor of `specs` to the rows that make it, one below the other.
    Source tensors that no output uses are problems, unless a pattern of `ignored` matches.
    """
    misfits = _Misfits(source)
    ranks: list[RankPlan] = [{} for _ in range(model.tp_size)]
    for canonical, spec in specs.items():
        heights = _list_heights(spec, model, len(source_rows[canonical]))
        stored_dtype = get_stored_dtype(canonical, dtype)
        row_shape = TensorInfo(stored_dtype, spec.shape).row_shape
        fits = [
            misfits.check(rows, rows.get_source_shape(height, row_shape, model), stored_dtype)
            for rows, height in zip(source_rows[canonical], heights, strict=True)
        ]
        if not all(fits):
            continue
        rank_info = TensorInfo(stored_dtype, get_rank_shape(spec, model))
        for rank, tensors in enumerate(ranks):
            blocks = list_blocks(spec, model, rank)
            slices = [
                _find_slices(block, source, source_rows[canonical], heights, model)
                for block in blocks
            ]
            tensors[canonical] = PlannedTensor(rank_info, tuple(itertools.chain(*slices)))
    unread_names = _list_unused(source, source_rows, ignored)
    if prefix := _find_prefix(source, misfits.missing_names):
        problems.add(
            f"{source.path}: the names of {count(len(misfits.missing_names), 'tensor')} begin with"
            f" {prefix}, as {prefix}{misfits.missing_names[0]}",
            f"save the model again without {prefix} in its tensors' names: wrappers for training"
            " put it there, which an unwrapped model's save_pretrained() does not",
        )
        misfits.missing_names.clear()
        unread_names = [name for name in unread_names if not name.startswith(prefix)]
    misfits.report(dtype, problems)
    report_unread(source, unread_names, problems)
    return ranks


def _find_prefix(source: TensorSource, missing_names: Sequence[str]) -> str:
    """Return the text before the names that a source lacks, if it has all of them with one."""
    for name in source.tensors:
        if missing_names and name.endswith(f".{missing_names[0]}"):
            prefix = name.removesuffix(missing_names[0])
            if all(prefix + missing_name in source.tensors for missing_name in missing_names):
                return prefix
    return ""


def _list_unused(
    source: TensorSource, source_rows: Mapping[str, tuple[SourceRows, ...]], ignored: Sequence[str]
) -> list[str]:
    """Return the tensors of a source that no output uses, but those that a pattern ignores."""
    used_names = {rows.name for tensor_rows in source_rows.values() for rows in tensor_rows}
    return [
        name for name in source.tensors
        if name not in used_names and not any(fnmatch.fnmatchcase(name, p) for p in ignored)
    ]  # fmt: skip


class _Misfits:
    """Tensors that a source lacks, or has in another shape or type than a plan needs."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.missing_names: list[str] = []
        self.wrong_shapes: list[str] = []
        self.wrong_dtypes: list[str] = []

    def check(self, rows: SourceRows, shape: tuple[int, ...], dtype: str) -> bool:
        """Return whether a source tensor has a shape and can be cast to a type; note if not."""
        info = self.source.tensors.get(rows.name)
        if info is None:
            self.missing_names.append(rows.name)
        elif not rows.is_alike(info.shape, shape):
            self.wrong_shapes.append(f"{rows.name} has shape {list(info.shape)}, not {list(shape)}")
        elif info.dtype != dtype and not {dtype, info.dtype} <= set(CASTABLE):
            self.wrong_dtypes.append(f"{rows.name} is {info.dtype}")
        else:
            return True
        return False

    def report(self, dtype: str, problems: Problems) -> None:
        """Append a problem for each kind of misfit; dtype: the type of the conversion."""
        report_missing(self.source, self.missing_names, problems)
        if self.wrong_shapes:
            problems.add(
                f"{self.source.path}: {join_names(list(dict.fromkeys(self.wrong_shapes)))}",
                "its config.json and tensors disagree: take both from the same model",
            )
        if self.wrong_dtypes:
            problems.add(
                f"{self.source.path}: {join_names(self.wrong_dtypes)}, which cannot be converted to"
                f" {dtype}",
                f"give a folder with {', '.join(CASTABLE)} weights",
            )


@contextlib.contextmanager
def collect(problems: Problems) -> Iterator[None]:
    """Append an error raised in the body to `problems`, so that others are still looked for."""
    try:
        yield
    except SpecDecError as error:
        problems += error.problems


def check_num_layers(num_layers: int, source: TensorSource) -> None:
    """Raise SpecDecError for more layers than tensors, before a list of them fills the memory."""
    if num_layers > len(source.tensors):
        raise SpecDecError(
            f"{source.path} is said to have {num_layers} layers, but holds"
            f" {count(len(source.tensors), 'tensor')}",
            "its config.json and tensors disagree: take both from the same model",
        )


def report_missing(source: TensorSource, names: Sequence[str], problems: Problems) -> None:
    """Append a problem that names the tensors which a source lacks, if there are any."""
    unplaced = getattr(source, "unplaced", ())  # of an `HfFolder`
    if unindexed := [name for name in dict.fromkeys(names) if name in unplaced]:
        problems.add(
            f"{source.path}: a shard holds {count(len(unindexed), 'tensor')} that the model needs"
            f" and no entry of the index names: {join_names(unindexed)}",
            "add them to the index's weight_map, or download the index again",
        )
    names = [name for name in dict.fromkeys(names) if name not in unplaced]
    if names:
        problems.add(
            f"{source.path} lacks {count(len(names), 'tensor')}: {join_names(names)}",
            "copy or download the folder again, and check its config.json",
        )


def report_unread(source: TensorSource, names: Sequence[str], problems: Problems) -> None:
    """Append a problem that names the tensors which no output would use, if there are any."""
    if names:
        problems.add(
            f"{source.path} holds {count(len(names), 'tensor')} that the conversion would not use:"
            f" {join_names(names)}",
            "its config.json must describe every tensor, as an unread one would be lost: correct"
            " it; where the model does without them, load it with transformers and"
            " save_pretrained()",
        )


def _list_heights(spec: TensorSpec, model: ModelConfig, num_sources: int) -> list[int]:
    """Return the number of rows that each source of a tensor gives it."""
    num_rows = TensorInfo(model.dtype, spec.shape).num_rows
    if num_sources == 1:
        return [num_rows]
    if spec.shard is Shard.QKV:
        model = spec.owner or model
        kv_size = model.num_key_value_heads * model.head_size
        q_size = model.num_attention_heads * model.head_size
        return [q_size, kv_size, kv_size, q_size][:num_sources]
    if spec.sections:  # the first source has those that the others leave
        num_first = len(spec.sections) - num_sources + 1
        return [sum(spec.sections[:num_first]), *spec.sections[num_first:]]
    return [num_rows // num_sources] * num_sources


def _find_slices(
    block: Block, source: TensorSource, source_rows: Sequence[SourceRows], heights: Sequence[int],
    model: ModelConfig,
) -> Iterator[SourceSlice]:  # fmt: skip
    """Yield the slices of the source tensors, one below the other, that make a block."""
    offset = 0
    for rows, height in zip(source_rows, heights, strict=True):
        start, stop = max(block.start - offset, 0), min(block.stop - offset, height)
        for top, bottom in rows.list_runs(start, stop, height, model) if start < stop else ():
            yield SourceSlice(
                source,
                rows.name,
                Block(top, bottom, block.columns),
                is_transposed=rows.is_transposed and len(source.tensors[rows.name].shape) > 1,
                addend=rows.addend,
            )
        offset += height


def are_equal(source: TensorSource, names: tuple[str, str]) -> bool:
    """Return whether two tensors of a source hold equal numbers in float32, some rows at a time.

    A tensor whose type cannot be cast equals no other.
    """
    infos = [source.tensors[name] for name in names]
    if infos[0].shape != infos[1].shape or not {info.dtype for info in infos} <= set(CASTABLE):
        return False
    num_rows = infos[0].num_rows
    height = max(1, OUTPUT_BLOCK_BYTES * num_rows // max(1, infos[0].num_bytes))
    for start in range(0, num_rows, height):
        stop = min(start + height, num_rows)
        rows, other_rows = (
            cast(source.read_block(name, start, stop), info.dtype, "float32")
            for name, info in zip(names, infos, strict=True)
        )
        if not np.array_equal(rows, other_rows):
            return False
    return True


def get_infos(rank: RankPlan) -> dict[str, TensorInfo]:
    """Return the types and shapes of a rank's tensors."""
    return {name: tensor.info for name, tensor in rank.items()}


def merge_ranks(*plans: Iterable[RankPlan]) -> list[RankPlan]:
    """Combine plans for the same ranks, such as the target's and the drafter's."""
    merged_ranks = []
    for rank_plans in zip(*plans, strict=True):
        merged: RankPlan = {}
        for rank_plan in rank_plans:
            assert not merged.keys() & rank_plan.keys()
            merged |= rank_plan
        merged_ranks.append(merged)
    return merged_ranks
