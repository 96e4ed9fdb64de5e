"""Canonical tensor names (TensorRT-LLM's), their shapes, and how each splits over ranks."""

from __future__ import annotations

import dataclasses
from enum import Enum

from specdec.methods import ReDrafterParams
from specdec.schema import ModelConfig


class Shard(Enum):
    """How a tensor is divided over tensor-parallel ranks."""

    WHOLE = "whole"  # every rank holds all of it
    ROWS = "rows"  # dimension 0, evenly
    COLUMNS = "columns"  # dimension 1, evenly
    QKV = "qkv"  # dimension 0 = [q; k; v], each by heads; few K/V heads are duplicated
    VOCAB = "vocab"  # dimension 0, ceil(V / tp) rows a rank, zero rows at the end


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor of the whole model. shape: [out, in] for a matrix, [size] for a vector."""

    shape: tuple[int, ...]
    shard: Shard


def get_rank_shape(spec: TensorSpec, model: ModelConfig) -> tuple[int, ...]:
    """Shape of one rank's part; the same on every rank."""
    tp_size, first, rest = model.tp_size, spec.shape[0], spec.shape[1:]
    if spec.shard is Shard.ROWS:
        return (first // tp_size, *rest)
    if spec.shard is Shard.COLUMNS:
        return (first, spec.shape[1] // tp_size)
    if spec.shard is Shard.VOCAB:
        return (-(-first // tp_size), *rest)
    if spec.shard is Shard.QKV:
        heads = model.num_attention_heads // tp_size + 2 * model.get_num_kv_heads()
        return (heads * model.head_size, *rest)
    return spec.shape


def list_target_tensors(model: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the target, whole, by canonical name."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q_size = model.num_attention_heads * model.head_size
    qkv_size = q_size + 2 * model.num_key_value_heads * model.head_size
    embedding_shard = Shard.WHOLE
    if model.use_parallel_embedding:
        embedding_shard = Shard.COLUMNS if model.embedding_sharding_dim == 1 else Shard.VOCAB
    tensors = {
        "transformer.vocab_embedding.weight": TensorSpec(
            (model.vocab_size, hidden), embedding_shard
        )
    }
    for layer in range(model.num_hidden_layers):
        prefix = f"transformer.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": TensorSpec((hidden,), Shard.WHOLE),
            prefix + "attention.qkv.weight": TensorSpec((qkv_size, hidden), Shard.QKV),
            prefix + "attention.dense.weight": TensorSpec((hidden, q_size), Shard.COLUMNS),
            prefix + "post_layernorm.weight": TensorSpec((hidden,), Shard.WHOLE),
            prefix + "mlp.fc.weight": TensorSpec((inner, hidden), Shard.ROWS),
            prefix + "mlp.gate.weight": TensorSpec((inner, hidden), Shard.ROWS),
            prefix + "mlp.proj.weight": TensorSpec((hidden, inner), Shard.COLUMNS),
        }
        if model.attn_bias:
            tensors |= {
                prefix + "attention.qkv.bias": TensorSpec((qkv_size,), Shard.QKV),
                prefix + "attention.dense.bias": TensorSpec((hidden,), Shard.WHOLE),
            }
        if model.mlp_bias:
            tensors |= {
                prefix + "mlp.fc.bias": TensorSpec((inner,), Shard.ROWS),
                prefix + "mlp.gate.bias": TensorSpec((inner,), Shard.ROWS),
                prefix + "mlp.proj.bias": TensorSpec((hidden,), Shard.WHOLE),
            }
    tensors |= {
        "transformer.ln_f.weight": TensorSpec((hidden,), Shard.WHOLE),
        "lm_head.weight": TensorSpec((model.vocab_size, hidden), Shard.VOCAB),
    }
    return tensors


def list_redrafter_tensors(drafter: ReDrafterParams, vocab_size: int) -> dict[str, TensorSpec]:
    """Every tensor of a ReDrafter drafter, whole, by canonical name; all split on dimension 0."""
    hidden, exit_dim = drafter.hidden_size, drafter.exit_dim
    tensors: dict[str, TensorSpec] = {}
    if drafter.has_input_proj:
        tensors |= {
            "drafter.input_proj.weight": TensorSpec((exit_dim, 2 * hidden), Shard.ROWS),
            "drafter.input_proj.bias": TensorSpec((exit_dim,), Shard.ROWS),
        }
    for layer in range(drafter.num_layers):
        tensors |= {
            f"drafter.layers.{layer}.linear.weight": TensorSpec((exit_dim, exit_dim), Shard.ROWS),
            f"drafter.layers.{layer}.linear.bias": TensorSpec((exit_dim,), Shard.ROWS),
        }
    tensors["drafter.lm_head.weight"] = TensorSpec((vocab_size, exit_dim), Shard.VOCAB)
    if drafter.is_rnn:
        tensors |= {
            "drafter.rnn_u.weight": TensorSpec((hidden, hidden), Shard.ROWS),
            "drafter.rnn_u.bias": TensorSpec((hidden,), Shard.ROWS),
            "drafter.rnn_w.weight": TensorSpec((hidden, hidden), Shard.ROWS),
        }
    return tensors


def list_tensors(model: ModelConfig, drafter: ReDrafterParams | None) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint, whole, by canonical name."""
    tensors = list_target_tensors(model)
    if drafter is not None:
        tensors |= list_redrafter_tensors(drafter, model.vocab_size)
    return tensors
