"""The plan: which rows and columns of which source tensors make each tensor of each rank.

It is checked as a whole before a byte is written, then executed as a stream of chunks, so that
memory depends neither on the model's size nor on a tensor's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specdec.errors import SpecDecError
from specdec.schema import CheckpointConfig, ModelConfig
from specdec.storage import DTYPES, Array, TensorInfo, cast
from specdec.tensors import Shard, TensorSpec, get_rank_shape

from .sharding import Block, list_blocks

CHUNK_BYTES = 8 << 20
MAX_NAMES = 10  # in one message
CASTABLE = ("float64", "float32", "float16", "bfloat16")

Problems = list[tuple[str, str]]


class TensorSource(Protocol):
    """A folder or file that tensors are read from."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Array: ...

    def release(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of one source tensor; None is all of a tensor that has no dimensions."""

    source: TensorSource
    name: str
    block: Block | None


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
    """One rank's tensor: its pieces from the top, then zero rows up to its shape."""

    info: TensorInfo
    pieces: tuple[Piece, ...]

    def list_chunks(self) -> Iterator[Callable[[], Array]]:
        """Yield functions that each make the next rows, about CHUNK_BYTES of them."""
        columns = self.info.shape[1:]
        num_wanted = self.info.shape[0] if self.info.shape else 0
        row_bytes = max(1, self.info.num_bytes // max(1, num_wanted))
        height = max(1, CHUNK_BYTES // row_bytes)
        num_rows = 0
        for piece in self.pieces:
            if piece.block is None:
                yield self._cut_later(piece, None)
                return
            for start in range(piece.block.start, piece.block.stop, height):
                stop = min(start + height, piece.block.stop)
                yield self._cut_later(piece, Block(start, stop, piece.block.columns))
                num_rows += stop - start
        for start in range(num_rows, num_wanted, height):
            shape = (min(height, num_wanted - start), *columns)
            yield _fill_later(shape, DTYPES[self.info.dtype][1])

    def release(self) -> None:
        """Let go of the sources' memory after a chunk has been used."""
        for source in {id(piece.source): piece.source for piece in self.pieces}.values():
            source.release()

    def _cut_later(self, piece: Piece, block: Block | None) -> Callable[[], Array]:
        dtype = piece.source.tensors[piece.name].dtype

        def make() -> Array:
            whole = piece.source.read(piece.name)
            rows = whole if block is None else block.cut(whole)
            return np.ascontiguousarray(cast(rows, dtype, self.info.dtype))

        return make


def _fill_later(shape: tuple[int, ...], dtype: Any) -> Callable[[], Array]:
    return lambda: np.zeros(shape, dtype)


RankPlan = dict[str, PlannedTensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole conversion: the config.json, each rank's tensors, and the files that are read."""

    config: dict[str, Any]
    checkpoint: CheckpointConfig
    dtype: str
    ranks: tuple[RankPlan, ...]
    source_files: tuple[Path, ...]


def plan_tensors(
    specs: Mapping[str, TensorSpec],
    names: Mapping[str, tuple[str, ...]],
    source: TensorSource,
    *,
    model: ModelConfig,
    dtype: str,
    ignored: Sequence[str],
    problems: Problems,
) -> list[RankPlan]:
    """Plan every rank's tensors from full source tensors, and append what is wrong to `problems`.

    `names` maps a tensor of `specs` to the source tensors that make it, one below the other.
    Source tensors that no output uses are problems, unless a pattern of `ignored` matches.
    """
    missing, misshapen, unreadable = [], [], []
    ranks: list[RankPlan] = [{} for _ in range(model.tp_size)]
    for canonical, spec in specs.items():
        parts = names[canonical]
        is_complete = True
        for name, num_rows in zip(parts, _list_heights(spec, model, len(parts)), strict=True):
            expected = (num_rows, *spec.shape[1:])
            info = source.tensors.get(name)
            if info is None:
                missing.append(name)
            elif info.shape != expected:
                misshapen.append(f"{name} has shape {list(info.shape)}, not {list(expected)}")
            elif info.dtype != dtype and info.dtype not in CASTABLE:
                unreadable.append(f"{name} is {info.dtype}")
            else:
                continue
            is_complete = False
        if not is_complete:
            continue
        rank_info = TensorInfo(dtype, get_rank_shape(spec, model))
        for rank, tensors in enumerate(ranks):
            pieces = [
                piece
                for block in list_blocks(spec, model, rank)
                for piece in _find_pieces(block, source, parts)
            ]
            tensors[canonical] = PlannedTensor(rank_info, tuple(pieces))
    used = {name for parts in names.values() for name in parts}
    unread = [
        name for name in source.tensors
        if name not in used and not any(fnmatch.fnmatchcase(name, p) for p in ignored)
    ]  # fmt: skip
    report_missing(source, missing, problems)
    if misshapen:
        problems.append(
            (
                f"{source.path}: {join_names(misshapen)}",
                "its config.json and tensors disagree: take both from the same model",
            )
        )
    if unreadable:
        problems.append(
            (
                f"{source.path}: {join_names(unreadable)}, which cannot be converted to {dtype}",
                f"give a folder with {', '.join(CASTABLE)} weights",
            )
        )
    report_unread(source, unread, problems)
    return ranks


@contextlib.contextmanager
def collect(problems: Problems) -> Iterator[None]:
    """Append an error raised in the body to `problems`, so that others are still looked for."""
    try:
        yield
    except SpecDecError as error:
        problems.append((error.message, error.hint))


def check_num_layers(num_layers: int, source: TensorSource) -> None:
    """Raise SpecDecError for more layers than tensors, before a list of them fills the memory."""
    if num_layers > len(source.tensors):
        raise SpecDecError(
            f"{source.path} is said to have {num_layers} layers, but holds"
            f" {count(list(source.tensors), 'tensor')}",
            "its config.json and tensors disagree: take both from the same model",
        )


def report_missing(source: TensorSource, names: Sequence[str], problems: Problems) -> None:
    """Append a problem that names the tensors which a source lacks, if there are any."""
    names = list(dict.fromkeys(names))
    if names:
        problems.append(
            (
                f"{source.path} lacks {count(names, 'tensor')}: {join_names(names)}",
                "copy or download the folder again, and check its config.json",
            )
        )


def report_unread(source: TensorSource, names: Sequence[str], problems: Problems) -> None:
    """Append a problem that names the tensors which no output would use, if there are any."""
    if names:
        problems.append(
            (
                f"{source.path} holds {count(names, 'tensor')} that the conversion would not use:"
                f" {join_names(names)}",
                "its config.json must describe every tensor; an unread one would be lost",
            )
        )


def _list_heights(spec: TensorSpec, model: ModelConfig, num_parts: int) -> list[int]:
    """Rows of each of the source tensors that make up a tensor."""
    if num_parts == 1:
        return [spec.shape[0]]
    if spec.shard is Shard.QKV:
        kv_size = model.num_key_value_heads * model.head_size
        return [model.num_attention_heads * model.head_size, kv_size, kv_size]
    return [spec.shape[0] // num_parts] * num_parts


def _find_pieces(block: Block, source: TensorSource, names: Sequence[str]) -> Iterator[Piece]:
    """Find the rows of a block in the source tensors that lie one below the other."""
    offset = 0
    for name in names:
        height = source.tensors[name].shape[0]
        start, stop = max(block.start - offset, 0), min(block.stop - offset, height)
        if start < stop:
            yield Piece(source, name, Block(start, stop, block.columns))
        offset += height


def join_names(names: Sequence[str]) -> str:
    """Return the names as one text, the first few and how many more there are."""
    shown = ", ".join(names[:MAX_NAMES])
    return f"{shown} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else shown


def count(items: Sequence[Any], noun: str) -> str:
    """Return `1 tensor`, `2 tensors`."""
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


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


def count_elements(info: TensorInfo) -> int:
    """Elements of a tensor."""
    return math.prod(info.shape)
