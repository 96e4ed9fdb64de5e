"""The plan: which rows and columns of which source tensors make each tensor of each rank.

It is checked as a whole before a byte is written, then executed as a stream of chunks, so that
memory depends neither on the model's size nor on a tensor's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specdec.errors import Problems, SpecDecError, count, join_names
from specdec.files.casts import cast
from specdec.files.reading import Array
from specdec.files.tensor_file import DTYPES, TensorInfo
from specdec.model import int4
from specdec.model.checkpoint import CheckpointConfig
from specdec.model.config import ModelConfig
from specdec.model.sharding import Block, list_blocks
from specdec.model.tensors import Shard, TensorSpec, get_rank_shape, get_stored_dtype

from .origin import Origin

CHUNK_BYTES = 4 << 20
CASTABLE = ("float64", "float32", "float16", "bfloat16")


class TensorSource(int4.Source, Protocol):
    """A folder or file that tensors are read from."""

    @property
    def path(self) -> Path: ...

    def locate(self, name: str) -> tuple[Path, int] | None: ...

    def release(self) -> None: ...


class Computed:
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
        return self.compute(name, 0, self.tensors[name].shape[0], None)

    def read_block(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Array:
        return self.compute(name, start, stop, columns)

    def locate(self, name: str) -> None:
        """Return None: what is computed lies in no file."""

    def release(self) -> None:
        self.folder.release()


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows of a source tensor that make up a planned tensor, alone or below those of others.

    The source is transposed where it is stored as [in, out], then its first `skipped` rows are
    left out, then one of `num_shares` equal shares of the rows is taken; `added` is added to every
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
    added: float = 0.0
    is_row: bool = False
    num_matrices: int = 0
    sections: Callable[[ModelConfig], tuple[int, ...]] | None = None
    section: int = 0

    def is_alike(self, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        """Whether a source of one shape is taken where another is expected."""
        bounds = (shape[:1] + shape[-1:], expected[:1] + expected[-1:])
        is_row = self.is_row and {1} >= {*shape[:-1]} and len(shape) > 1
        return shape == expected or is_row and bounds[0] == bounds[1]

    def get_source_shape(
        self, num_rows: int, rest: tuple[int, ...], model: ModelConfig
    ) -> tuple[int, ...]:
        """Shape that the source must have for this part to have `num_rows` rows."""
        height = self.skipped + self.num_shares * num_rows
        if self.sections is not None:
            sizes = self.sections(model)
            height = num_rows // sizes[self.section] * sum(sizes)
        shape = (height, *rest)
        if self.num_matrices:
            shape = (self.num_matrices, height // self.num_matrices, *rest)
        return shape[::-1] if self.is_transposed else shape

    def list_runs(
        self, start: int, stop: int, height: int, model: ModelConfig
    ) -> Iterator[tuple[int, int]]:
        """Where rows [start, stop) of the part's `height` lie in the source, from row to row."""
        if self.sections is None:
            first = self.skipped + self.share * height
            yield first + start, first + stop
            return
        sizes = self.sections(model)
        own, others = sizes[self.section], sum(sizes) - sizes[self.section]
        for group in range(start // own, -(-stop // own)):
            first = group * others + sum(sizes[: self.section])
            yield first + max(start, group * own), first + min(stop, (group + 1) * own)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of one source tensor.

    is_transposed: the block is one of the transposed source. added: see `Part`.
    """

    source: TensorSource
    name: str
    block: Block
    is_transposed: bool = False
    added: float = 0.0

    def read(self, block: Block, dtype: str) -> Array:
        """Return a block of the source in another type, contiguous."""
        stored = self.source.tensors[self.name].dtype
        if self.is_transposed:
            return self._read_transposed(block, stored, dtype)
        rows = self.source.read_block(self.name, block.start, block.stop, block.columns)
        return self._finish(rows, stored, dtype)

    def locate(self, block: Block, dtype: str) -> tuple[Path, int] | None:
        """Return where a block's bytes lie in a file as they are wanted; None where they do not."""
        info = self.source.tensors[self.name]
        is_changed = self != Piece(self.source, self.name, self.block)
        if is_changed or info.dtype != dtype:
            return None
        place = self.source.locate(self.name)
        if place is None or block.columns not in (None, (0, *info.row_shape)):
            return None
        row_bytes = info.num_bytes // max(1, info.num_rows)
        return place[0], place[1] + block.start * row_bytes

    def _read_transposed(self, block: Block, stored: str, dtype: str) -> Array:
        """Read some stored rows at a time: every one of them holds a bit of each wanted row."""
        info = self.source.tensors[self.name]
        first, last = block.columns or (0, info.shape[0])
        result = np.empty((block.num_rows, last - first), DTYPES[dtype][1])
        row_bytes = info.num_bytes // max(1, info.shape[0])
        height = max(1, CHUNK_BYTES // max(1, row_bytes))
        for top in range(first, last, height):
            bottom = min(top + height, last)
            tile = self.source.read_block(self.name, top, bottom, (block.start, block.stop))
            result[:, top - first : bottom - first] = self._finish(tile, stored, dtype).T
        return result

    def _finish(self, rows: Array, stored: str, dtype: str) -> Array:
        if self.added:
            rows, stored = cast(rows, stored, "float32") + np.float32(self.added), "float32"
        return np.ascontiguousarray(cast(rows, stored, dtype))


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The next bytes of a tensor: `make` computes them.

    origin: the file and offset where they lie as they are, for a chunk that is merely copied.
    """

    num_bytes: int
    make: Callable[[], Array]
    origin: tuple[Path, int] | None = None


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
    """One rank's tensor: its pieces from the top, then zero rows up to its shape."""

    info: TensorInfo
    pieces: tuple[Piece, ...]

    def list_chunks(self) -> Iterator[Chunk]:
        """Yield the tensor's rows from the top, about CHUNK_BYTES at a time."""
        columns, num_wanted = self.info.row_shape, self.info.num_rows
        row_bytes = max(1, self.info.num_bytes // max(1, num_wanted))
        height = max(1, CHUNK_BYTES // row_bytes)
        num_rows = 0
        for piece in self.pieces:
            for start in range(piece.block.start, piece.block.stop, height):
                stop = min(start + height, piece.block.stop)
                block = Block(start, stop, piece.block.columns)
                yield self._cut_later(piece, block, (stop - start) * row_bytes)
                num_rows += stop - start
        for start in range(num_rows, num_wanted, height):
            rows = TensorInfo(self.info.dtype, (min(height, num_wanted - start), *columns))
            storage = DTYPES[rows.dtype][1]
            yield Chunk(rows.num_bytes, functools.partial(np.zeros, rows.shape, storage))

    def _cut_later(self, piece: Piece, block: Block, num_bytes: int) -> Chunk:
        dtype = self.info.dtype
        return Chunk(num_bytes, lambda: piece.read(block, dtype), piece.locate(block, dtype))


RankPlan = dict[str, PlannedTensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """A whole conversion: the config.json, each rank's tensors, and the files that are read.

    vocabulary: what the target's tokens mean, as `specdec.vocabulary` tells it.
    measure: finds the scales, where there are any to find, before the tensors can be written, by
        that many threads; returns what the quantization costs, where that was measured.
    origin: what the drafter's folder and the target's say of where the drafter belongs.
    """

    config: dict[str, Any]
    checkpoint: CheckpointConfig
    dtype: str
    ranks: tuple[RankPlan, ...]
    source_files: tuple[Path, ...]
    vocabulary: dict[str, Any] | None
    measure: Callable[[int], dict[str, Any] | None] | None = None
    origin: Origin | None = None


def plan_tensors(
    specs: Mapping[str, TensorSpec],
    parts: Mapping[str, tuple[Part, ...]],
    source: TensorSource,
    *,
    model: ModelConfig,
    dtype: str,
    ignored: Sequence[str],
    problems: Problems,
) -> list[RankPlan]:
    """Plan every rank's tensors from full source tensors, and append what is wrong to `problems`.

    `parts` maps a tensor of `specs` to the source rows that make it, one below the other.
    Source tensors that no output uses are problems, unless a pattern of `ignored` matches.
    """
    missing, misshapen, unreadable = [], [], []
    ranks: list[RankPlan] = [{} for _ in range(model.tp_size)]
    for canonical, spec in specs.items():
        heights = _list_heights(spec, model, len(parts[canonical]))
        stored = get_stored_dtype(canonical, dtype)
        whole = TensorInfo(stored, spec.shape)
        is_complete = True
        for part, num_rows in zip(parts[canonical], heights, strict=True):
            expected = part.get_source_shape(num_rows, whole.row_shape, model)
            info = source.tensors.get(part.name)
            if info is None:
                missing.append(part.name)
            elif not part.is_alike(info.shape, expected):
                misshapen.append(f"{part.name} has shape {list(info.shape)}, not {list(expected)}")
            elif info.dtype != stored and not {stored, info.dtype} <= set(CASTABLE):
                unreadable.append(f"{part.name} is {info.dtype}")
            else:
                continue
            is_complete = False
        if not is_complete:
            continue
        rank_info = TensorInfo(stored, get_rank_shape(spec, model))
        for rank, tensors in enumerate(ranks):
            pieces = [
                piece
                for block in list_blocks(spec, model, rank)
                for piece in _find_pieces(block, source, parts[canonical], heights, model)
            ]
            tensors[canonical] = PlannedTensor(rank_info, tuple(pieces))
    used = {part.name for several in parts.values() for part in several}
    unread = [
        name for name in source.tensors
        if name not in used and not any(fnmatch.fnmatchcase(name, p) for p in ignored)
    ]  # fmt: skip
    report_missing(source, missing, problems)
    if misshapen:
        problems.add(
            f"{source.path}: {join_names(list(dict.fromkeys(misshapen)))}",
            "its config.json and tensors disagree: take both from the same model",
        )
    if unreadable:
        problems.add(
            f"{source.path}: {join_names(unreadable)}, which cannot be converted to {dtype}",
            f"give a folder with {', '.join(CASTABLE)} weights",
        )
    report_unread(source, unread, problems)
    return ranks


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
    if found := [name for name in dict.fromkeys(names) if name in unplaced]:
        problems.add(
            f"{source.path}: a shard holds {count(len(found), 'tensor')} that the model needs and"
            f" no entry of the index names: {join_names(found)}",
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


def _list_heights(spec: TensorSpec, model: ModelConfig, num_parts: int) -> list[int]:
    """Rows of each of the source tensors that make up a tensor."""
    num_rows = TensorInfo(model.dtype, spec.shape).num_rows
    if num_parts == 1:
        return [num_rows]
    if spec.shard is Shard.QKV:
        model = spec.owner or model
        kv_size = model.num_key_value_heads * model.head_size
        q_size = model.num_attention_heads * model.head_size
        return [q_size, kv_size, kv_size, q_size][:num_parts]
    if spec.sections:  # the first part has those that the others leave
        num_first = len(spec.sections) - num_parts + 1
        return [sum(spec.sections[:num_first]), *spec.sections[num_first:]]
    return [num_rows // num_parts] * num_parts


def _find_pieces(
    block: Block, source: TensorSource, parts: Sequence[Part], heights: Sequence[int],
    model: ModelConfig,
) -> Iterator[Piece]:  # fmt: skip
    """Find the rows of a block in the source tensors that lie one below the other."""
    offset = 0
    for part, height in zip(parts, heights, strict=True):
        start, stop = max(block.start - offset, 0), min(block.stop - offset, height)
        for first, last in part.list_runs(start, stop, height, model) if start < stop else ():
            yield Piece(
                source,
                part.name,
                Block(first, last, block.columns),
                is_transposed=part.is_transposed and len(source.tensors[part.name].shape) > 1,
                added=part.added,
            )
        offset += height


def are_equal(source: TensorSource, one: str, other: str) -> bool:
    """Whether two tensors of a source hold the same numbers in float32; read some rows at a time.

    A tensor whose type cannot be cast equals no other.
    """
    infos = [source.tensors[name] for name in (one, other)]
    if infos[0].shape != infos[1].shape or not {info.dtype for info in infos} <= set(CASTABLE):
        return False
    num_rows = infos[0].num_rows
    height = max(1, CHUNK_BYTES * num_rows // max(1, infos[0].num_bytes))
    for start in range(0, num_rows, height):
        stop = min(start + height, num_rows)
        left, right = (
            cast(source.read_block(name, start, stop), info.dtype, "float32")
            for name, info in zip((one, other), infos, strict=True)
        )
        if not np.array_equal(left, right):
            return False
    return True


def get_infos(rank: RankPlan) -> dict[str, TensorInfo]:
    """Types and shapes of a rank's tensors."""
    return {name: tensor.info for name, tensor in rank.items()}


def merge_ranks(*plans: Iterable[RankPlan]) -> list[RankPlan]:
    """Combine plans for the same ranks, such as the target's and the drafter's."""
    merged = []
    for parts in zip(*plans, strict=True):
        rank: RankPlan = {}
        for part in parts:
            assert not rank.keys() & part.keys()
            rank |= part
        merged.append(rank)
    return merged
