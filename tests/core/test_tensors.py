"""The tensor inventory, and that the ranks' parts make up the whole."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specdec.methods.medusa import MedusaParams
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.architectures import Architecture
from specdec.model.config import ModelConfig
from specdec.model.experts import Experts
from specdec.model.inventory import list_tensors
from specdec.model.linear_attention import LinearAttention
from specdec.model.sharding import join, split
from specdec.model.tensors import Shard, TensorSpec, get_rank_shape

MODEL = ModelConfig(
    architecture="LlamaForCausalLM", dtype="float32", vocab_size=131, hidden_size=64,
    num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_size=24,
    intermediate_size=112, norm_epsilon=1e-5, max_position_embeddings=64,
)  # fmt: skip
DRAFTER = ReDrafterParams(
    num_layers=2, hidden_size=64, exit_dim=96, is_rnn=True, num_beams=4, draft_len_per_beam=5,
    greedy_search=True,
)  # fmt: skip


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("embedding", [None, 0, 1])
def test_rank_shapes_make_up_the_whole(tp_size: int, kv_heads: int, embedding: int | None) -> None:
    model = dataclasses.replace(
        MODEL,
        tp_size=tp_size,
        num_key_value_heads=kv_heads,
        attn_bias=True,
        mlp_bias=True,
        use_parallel_embedding=embedding is not None,
        embedding_sharding_dim=embedding or 0,
    )
    fused = dataclasses.replace(model, architecture="Phi3ForCausalLM", hidden_act="swiglu")
    experts = Experts(num=3, top_k=1, inner=40, tp_size=tp_size)
    mixture = dataclasses.replace(
        model, architecture="MixtralForCausalLM", hidden_act="swiglu", experts=experts
    )
    linear = LinearAttention(
        num_key_heads=8, num_value_heads=16, key_size=6, value_size=4, num_taps=4
    )
    types = ("linear_attention",) * model.num_hidden_layers
    gated = Architecture(gates_attention=True)
    hybrid = dataclasses.replace(
        model, linear_attention=linear, layer_types=types, own_arithmetic=gated
    )
    assert model.find_problems() == fused.find_problems() == mixture.find_problems() == []
    assert hybrid.find_problems() == []
    seen = set()
    tensors = [
        (name, spec, owner)
        for owner, drafter in ((model, DRAFTER), (fused, None), (mixture, None), (hybrid, None))
        for name, spec in list_tensors(owner, drafter).items()
    ]
    axes = {Shard.COLUMNS: 1, Shard.EXPERT_PAIRS: 1, Shard.EXPERT_COLUMNS: 2}
    for name, spec, owner in tensors:
        part = get_rank_shape(spec, owner)
        seen.add(spec.shard)
        axis = axes.get(spec.shard, 0)
        total = part[axis] * tp_size
        others = [n for i, n in enumerate(part) if i != axis]
        assert others == [n for i, n in enumerate(spec.shape) if i != axis], name
        if spec.shard is Shard.WHOLE:
            assert part == spec.shape, name
        elif spec.shard is Shard.VOCAB:
            assert 131 <= total < 131 + tp_size, name
        elif spec.shard is Shard.QKV:
            # Every rank has at least one K and one V head, so few of them are duplicated.
            kv_copies = max(1, tp_size // kv_heads)
            query_heads = 16 if owner is hybrid else 8
            assert total == (query_heads + 2 * kv_heads * kv_copies) * 24, name
        else:
            assert total == spec.shape[axis], name
    assert seen == set(Shard)


def test_inventory_of_a_plain_target() -> None:
    tensors = list_tensors(MODEL, None)
    assert len(tensors) == 3 * 7 + 3
    assert tensors["transformer.layers.2.attention.qkv.weight"] == TensorSpec(
        ((8 + 2 * 2) * 24, 64), Shard.QKV
    )
    assert tensors["transformer.layers.0.attention.dense.weight"].shape == (64, 8 * 24)
    assert tensors["lm_head.weight"] == TensorSpec((131, 64), Shard.VOCAB)
    assert tensors["transformer.vocab_embedding.weight"].shard is Shard.WHOLE
    biased = dataclasses.replace(MODEL, attn_bias=True, mlp_bias=True)
    added = set(list_tensors(biased, None)) - set(tensors)
    assert len(added) == 3 * 5
    assert all(name.endswith(".bias") for name in added)


@pytest.mark.parametrize(
    ("exit_dim", "is_rnn", "num_layers", "count"),
    [(96, True, 2, 2 + 4 + 1 + 3), (128, True, 2, 4 + 1 + 3), (128, False, 0, 1)],
)
def test_inventory_of_a_drafter(exit_dim: int, is_rnn: bool, num_layers: int, count: int) -> None:
    drafter = dataclasses.replace(DRAFTER, exit_dim=exit_dim, is_rnn=is_rnn, num_layers=num_layers)
    tensors = drafter.list_tensors(dataclasses.replace(MODEL, vocab_size=131))
    assert len(tensors) == count
    assert tensors["drafter.lm_head.weight"] == TensorSpec((131, exit_dim), Shard.VOCAB)
    assert ("drafter.input_proj.weight" in tensors) == (exit_dim == 96)
    assert ("drafter.rnn_w.weight" in tensors) == is_rnn
    together = list_tensors(MODEL, drafter)
    assert len(together) == count + 24
    assert tensors.items() <= together.items()


@pytest.mark.parametrize("num_layers", [0, 1, 2])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_the_ranks_make_up_medusas_heads(tp_size: int, num_layers: int) -> None:
    """131 tokens, which no tp_size divides."""
    model = dataclasses.replace(MODEL, tp_size=tp_size)
    params = MedusaParams(num_heads=3, num_layers=num_layers, max_draft_len=9)
    tensors = params.list_tensors(model)
    assert len(tensors) == 3 * (2 * num_layers + 1)
    assert tensors["medusa_heads.2.lm_head.weight"] == TensorSpec((131, 64), Shard.VOCAB)
    for name, spec in tensors.items():
        whole = np.random.default_rng(0).standard_normal(spec.shape, dtype=np.float32)
        parts = [split(whole, spec, model, rank) for rank in range(tp_size)]
        height = -(-131 // tp_size) if name.endswith("lm_head.weight") else 64 // tp_size
        assert {part.shape[0] for part in parts} == {height}
        assert np.array_equal(join(parts, spec, model), whole), name
