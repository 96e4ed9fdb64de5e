"""Full tensor -> one rank's part, and back: every rule as a list of blocks of the full tensor.

A rank's part is its blocks laid one below the other, then zero rows where the vocabulary ends
before the last rank does. Toy case of Shard.QKV: 4 query and 2 K/V heads of size 1 over 4 ranks
are rows [q0 q1 q2 q3 k0 k1 v0 v1]; rank 2 takes [q2 k1 v1], since 2 * 2 // 4 = 1.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from specdec.files.reading import Array
from specdec.model.config import ModelConfig
from specdec.model.tensors import Shard, TensorSpec, get_rank_shape


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows [start, stop) of a tensor, all columns or columns [first, last).

    The rows of a tensor of three dimensions are those of its matrices, one below the other; one of
    no dimensions is a row.
    """

    start: int
    stop: int
    columns: tuple[int, int] | None = None

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def view_in(self, array: Array) -> Array:
        """Return the block as a view of `array`, of two dimensions at most."""
        rows = view_rows(array)[self.start : self.stop]
        return rows if self.columns is None else rows[:, self.columns[0] : self.columns[1]]


def list_blocks(spec: TensorSpec, model: ModelConfig, rank: int) -> list[Block]:
    """List the blocks of the full tensor that make up one rank's part, from the top."""
    model = spec.owner or model
    tp_size, num_rows = model.tp_size, spec.shape[0]
    if spec.shard is Shard.COLUMNS:
        width = spec.shape[1] // tp_size
        return [Block(0, num_rows, (rank * width, (rank + 1) * width))]
    if spec.shard in (Shard.EXPERT_PAIRS, Shard.EXPERT_COLUMNS):
        return _list_expert_blocks(spec, model, rank)
    if spec.shard is Shard.QKV:
        return _list_qkv_blocks(model, rank)
    if spec.shard is Shard.REPLICATED:
        return [Block(0, num_rows)]
    if spec.shard is Shard.SECTIONS:
        sections = spec.sections or (num_rows // 2,) * 2
        ends = itertools.accumulate(sections)
        return [
            Block(end - rows, end) if number < spec.num_whole else Block(
                end - rows + rank * (rows // tp_size), end - rows + (rank + 1) * (rows // tp_size)
            )
            for number, (rows, end) in enumerate(zip(sections, ends, strict=True))
        ]  # fmt: skip
    height = -(-num_rows // tp_size)  # ROWS divide evenly, VOCAB rounds up
    start, stop = min(rank * height, num_rows), min((rank + 1) * height, num_rows)
    return [Block(start, stop)] if start < stop else []


def _list_qkv_blocks(model: ModelConfig, rank: int) -> list[Block]:
    size, num_kv_heads = model.head_size, model.num_key_value_heads
    num_heads = model.num_attention_heads // model.tp_size
    first_kv_head = rank * num_kv_heads // model.tp_size
    k_start = model.num_attention_heads
    groups: tuple[tuple[int, int], ...] = (
        (rank * num_heads, num_heads),
        (k_start + first_kv_head, model.get_num_kv_heads()),
        (k_start + num_kv_heads + first_kv_head, model.get_num_kv_heads()),
    )
    if model.arithmetic.gates_attention:
        groups += ((k_start + 2 * num_kv_heads + rank * num_heads, num_heads),)
    return [Block(first_head * size, (first_head + count) * size) for first_head, count in groups]


def _list_expert_blocks(spec: TensorSpec, model: ModelConfig, rank: int) -> list[Block]:
    experts = model.experts
    assert experts is not None
    _, height, width = spec.shape
    rank_experts, part_index = experts.list_rank_experts(rank), experts.get_part(rank)
    if spec.shard is Shard.EXPERT_COLUMNS:
        size = width // experts.tp_size
        return [
            Block(
                rank_experts.start * height,
                rank_experts.stop * height,
                (part_index * size, (part_index + 1) * size),
            )
        ]
    size = height // 2 // experts.tp_size
    starts = [
        row + part_index * size
        for e in rank_experts
        for row in (e * height, e * height + height // 2)
    ]
    return [Block(start, start + size) for start in starts]


def view_rows(array: Array) -> Array:
    """Return a tensor of three dimensions as the rows of its matrices, any other as it is."""
    return array.reshape(-1, array.shape[-1]) if array.ndim > 2 else array


def split(tensor: Array, spec: TensorSpec, model: ModelConfig, rank: int) -> Array:
    """Return one rank's part of a full tensor, padding included."""
    rank_tensor = np.zeros(get_rank_shape(spec, model), tensor.dtype)
    position = 0
    for block in list_blocks(spec, model, rank):
        rows = block.view_in(tensor)
        view_rows(rank_tensor)[position : position + len(rows)] = rows
        position += len(rows)
    return rank_tensor


def join(rank_tensors: Sequence[Array], spec: TensorSpec, model: ModelConfig) -> Array:
    """Return the full tensor that `split` made the ranks' parts of."""
    tensor = np.empty(spec.shape, rank_tensors[0].dtype)
    for rank, rank_tensor in enumerate(rank_tensors):
        position = 0
        for block in list_blocks(spec, model, rank):
            rows = block.view_in(tensor)
            rows[...] = view_rows(rank_tensor)[position : position + len(rows)]
            position += len(rows)
    return tensor
