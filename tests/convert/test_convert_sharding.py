"""Splitting over ranks: against an independent description, and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.convert import plan as plan_module
from specdec.convert.plan import PlannedTensor, SourceRows, SourceSlice, plan_tensors
from specdec.errors import Problems
from specdec.files.tensor_file import TensorFile, TensorInfo, write_tensor_file
from specdec.model.config import ModelConfig
from specdec.model.experts import Experts
from specdec.model.sharding import Block, join, list_blocks, split
from specdec.model.tensors import Shard, TensorSpec, get_rank_shape


def make_model(tp_size: int, heads: int = 8, kv_heads: int = 8, head_size: int = 2) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM", dtype="float32", vocab_size=16, hidden_size=16,
        num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_size=head_size, intermediate_size=16, norm_epsilon=1e-5, max_position_embeddings=8,
        tp_size=tp_size,
    )  # fmt: skip


@st.composite
def draw_cases(draw: Any) -> tuple[ModelConfig, TensorSpec]:
    """A rule, a tp_size that it allows, and a tensor's shape."""
    tp_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    shard = draw(st.sampled_from(list(Shard)))
    rest = draw(st.sampled_from([(), (1,), (5,)]))
    n = draw(st.integers(1, 4))
    model = make_model(tp_size)
    if shard is Shard.QKV:
        # Either every rank has K/V heads of its own, or several ranks have the same one.
        kv_heads = draw(
            st.sampled_from([k for k in range(1, 25) if not (k % tp_size and tp_size % k)])
        )
        heads = np.lcm(kv_heads, tp_size).item() * draw(st.integers(1, 2))
        model = make_model(tp_size, heads, kv_heads, head_size=2 * n)
        return model, TensorSpec(((heads + 2 * kv_heads) * 2 * n, *rest), shard)
    if shard is Shard.COLUMNS:
        return model, TensorSpec((n, tp_size * draw(st.integers(1, 4))), shard)
    if shard is Shard.ROWS:
        return model, TensorSpec((tp_size * n, *rest), shard)
    if shard is Shard.SECTIONS and n == 1:  # two halves
        return model, TensorSpec((2 * tp_size * draw(st.integers(1, 3)), *rest), shard)
    if shard is Shard.SECTIONS:
        sections = tuple(tp_size * draw(st.integers(1, 3)) for _ in range(n))
        return model, TensorSpec((sum(sections), *rest), shard, sections=sections)
    if shard in (Shard.EXPERT_PAIRS, Shard.EXPERT_COLUMNS):
        ep_size = draw(st.sampled_from([k for k in range(1, tp_size + 1) if tp_size % k == 0]))
        experts = Experts(
            num=ep_size * draw(st.integers(1, 3)), top_k=1, inner=tp_size // ep_size * n,
            tp_size=tp_size // ep_size, ep_size=ep_size,
        )  # fmt: skip
        width = draw(st.integers(1, 4))
        shape = (
            (2 * experts.inner, width) if shard is Shard.EXPERT_PAIRS else (width, experts.inner)
        )
        model = dataclasses.replace(model, architecture="MixtralForCausalLM", experts=experts)
        return model, TensorSpec((experts.num, *shape), shard)
    return model, TensorSpec((draw(st.integers(1, 30)), *rest), shard)


def make_tensor(spec: TensorSpec) -> Any:
    return np.arange(1, np.prod(spec.shape) + 1, dtype=np.float32).reshape(spec.shape)


@given(draw_cases())
def test_joined_parts_are_the_tensor(case: tuple[ModelConfig, TensorSpec]) -> None:
    model, spec = case
    whole = make_tensor(spec)
    parts = [split(whole, spec, model, rank) for rank in range(model.tp_size)]
    assert {part.shape for part in parts} == {get_rank_shape(spec, model)}
    assert np.array_equal(join(parts, spec, model), whole)


@given(draw_cases())
def test_parts_are_what_the_rule_says(case: tuple[ModelConfig, TensorSpec]) -> None:
    """The rules again, head by head and row by row, without blocks."""
    model, spec = case
    whole, tp_size = make_tensor(spec), model.tp_size
    for rank in range(tp_size):
        part = split(whole, spec, model, rank)
        if spec.shard is Shard.REPLICATED:
            expected = whole
        elif spec.shard is Shard.ROWS:
            expected = np.split(whole, tp_size, axis=0)[rank]
        elif spec.shard is Shard.SECTIONS:
            sections = np.split(whole, np.cumsum(spec.sections)[:-1] if spec.sections else 2)
            expected = np.concatenate([np.split(section, tp_size)[rank] for section in sections])
        elif spec.shard is Shard.COLUMNS:
            expected = np.split(whole, tp_size, axis=1)[rank]
        elif spec.shard in (Shard.EXPERT_PAIRS, Shard.EXPERT_COLUMNS):
            assert model.experts is not None
            groups, parts = model.experts.ep_size, model.experts.tp_size
            own = np.split(whole, groups)[rank % groups]
            if spec.shard is Shard.EXPERT_COLUMNS:
                expected = np.split(own, parts, axis=2)[rank // groups]
            else:
                halves = [np.split(h, parts, axis=1)[rank // groups] for h in np.split(own, 2, 1)]
                expected = np.concatenate(halves, axis=1)
        elif spec.shard is Shard.VOCAB:
            num_rows = -(-len(whole) // tp_size) * tp_size
            padded = np.zeros((num_rows, *whole.shape[1:]), np.float32)
            padded[: len(whole)] = whole
            expected = np.split(padded, tp_size)[rank]
        else:
            heads = whole.reshape(-1, model.head_size, *whole.shape[1:])
            q, k, v = np.split(
                heads,
                [model.num_attention_heads, model.num_attention_heads + model.num_key_value_heads],
            )
            copies = max(1, tp_size // model.num_key_value_heads)
            k, v = k.repeat(copies, axis=0), v.repeat(copies, axis=0)
            mine = [np.split(group, tp_size)[rank] for group in (q, k, v)]
            expected = np.concatenate(mine).reshape(-1, *whole.shape[1:])
        assert np.array_equal(part, expected)


def test_documented_toy_case() -> None:
    model = make_model(4, heads=4, kv_heads=2, head_size=1)
    spec = TensorSpec((8,), Shard.QKV)
    names = np.array(["q0", "q1", "q2", "q3", "k0", "k1", "v0", "v1"])
    rows = [names[block.start : block.stop].tolist() for block in list_blocks(spec, model, 2)]
    assert rows == [["q2"], ["k1"], ["v1"]]


class ArraySource:
    """Tensors in memory in place of a file."""

    def __init__(self, **arrays: Any) -> None:
        from pathlib import Path

        self.path = Path("memory")
        self.arrays = arrays
        self.tensors = {n: TensorInfo(str(a.dtype), a.shape) for n, a in arrays.items()}

    def read(self, name: str) -> Any:
        return self.arrays[name]

    def read_block(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Any:
        rows = self.arrays[name][start:stop]
        return rows if columns is None else rows[:, columns[0] : columns[1]]

    def locate(self, name: str) -> None:
        return None

    def release(self) -> None:
        self.arrays = dict(self.arrays)


def store(arrays: dict[str, Any], change: str) -> tuple[dict[str, Any], tuple[SourceRows, ...]]:
    """Return source tensors and the parts of them that are the arrays."""
    if change == "transposed":
        stored = {name: np.ascontiguousarray(array.T) for name, array in arrays.items()}
        return stored, tuple(SourceRows(name, is_transposed=True) for name in arrays)
    if change == "skipped":
        stored = {n: np.concatenate([0 * a[:1], 0 * a[:1], a]) for n, a in arrays.items()}
        return stored, tuple(SourceRows(name, skipped=2) for name in arrays)
    if change == "added":
        stored = {name: array - 1 for name, array in arrays.items()}
        return stored, tuple(SourceRows(name, addend=1.0) for name in arrays)
    if change == "swapped" and [*arrays] == ["only"] and len(arrays["only"]) % 2 == 0:
        halves = np.split(arrays["only"], 2)
        parts = (SourceRows("only", share=1, num_shares=2), SourceRows("only", num_shares=2))
        return {"only": np.concatenate(halves[::-1])}, parts
    if change == "dealt":  # a row of another tensor before each one or two
        sizes = {name: 2 - len(array) % 2 for name, array in arrays.items()}
        groups = {n: a.reshape(-1, sizes[n], *a.shape[1:]) for n, a in arrays.items()}
        stored = {
            n: np.concatenate([0 * g[:, :1], g], axis=1).reshape(-1, *g.shape[2:])
            for n, g in groups.items()
        }  # fmt: skip
        return stored, tuple(
            SourceRows(name, sections=lambda _, size=size: (1, size), section=1)
            for name, size in sizes.items()
        )
    return arrays, tuple(SourceRows(name) for name in arrays)


@given(
    draw_cases(),
    st.sampled_from([1, 16, 64, 1 << 20]),
    st.sampled_from(["", "transposed", "skipped", "added", "swapped", "dealt"]),
)
def test_planned_chunks_laid_end_to_end_are_the_part(
    case: tuple[ModelConfig, TensorSpec], chunk_bytes: int, change: str
) -> None:
    """Also where slices come from several tensors, and chunks are smaller than slices."""
    model, spec = case
    whole = make_tensor(spec)
    arrays = {"only": whole}
    if spec.shard is Shard.QKV:
        q = model.num_attention_heads * model.head_size
        kv = model.num_key_value_heads * model.head_size
        arrays = {"q": whole[:q], "k": whole[q : q + kv], "v": whole[q + kv :]}
    elif whole.ndim == 3:
        arrays = {f"expert {number}": matrix for number, matrix in enumerate(whole)}
    if change == "swapped" and spec.sections:
        change = ""  # no family stores the sections of one tensor in another order
    stored, parts = store(arrays, change)
    source = ArraySource(**stored)
    problems = Problems()
    ranks = plan_tensors(
        {"name": spec}, {"name": parts}, source, model=model, dtype="float32",
        ignored=(), problems=problems,
    )  # fmt: skip
    assert problems == []
    patch = pytest.MonkeyPatch()
    patch.setattr(plan_module, "OUTPUT_BLOCK_BYTES", chunk_bytes)
    try:
        for rank, tensors in enumerate(ranks):
            planned = tensors["name"]
            chunks = [chunk.make() for chunk in planned.list_output_blocks()]
            joined = np.concatenate([chunk.reshape(-1) for chunk in chunks])
            part = split(whole, spec, model, rank)
            assert np.array_equal(joined.reshape(planned.info.shape), part)
            row_bytes = 4 * int(np.prod(part.shape[1:][-1:]))
            assert max(chunk.nbytes for chunk in chunks) <= max(chunk_bytes, row_bytes)
    finally:
        patch.undo()


def test_a_tensor_without_dimensions_is_one_chunk(tmp_path: Path) -> None:
    info, path = TensorInfo("float32", ()), tmp_path / "file.safetensors"
    write_tensor_file(path, {"scale": info}, lambda _: np.array(2.5, np.float32))
    source = TensorFile(path)
    planned = PlannedTensor(info, (SourceSlice(source, "scale", Block(0, 1)),))
    (chunk,) = planned.list_output_blocks()
    assert (chunk.make().item(), chunk.num_bytes) == (2.5, 4)
    assert chunk.origin == source.locate("scale")
