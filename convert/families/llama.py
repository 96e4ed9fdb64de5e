"""Llama 1 to 3.x, Vicuna, TinyLlama."""

from __future__ import annotations

import dataclasses
from typing import Any

from specdec.schema import ModelConfig

from ..hf import ConfigReader
from .base import Family, Layout, read_rotary

_SELF = "model.layers.{layer}."
_OURS = "transformer.layers.{layer}."

MODULES = {
    "transformer.vocab_embedding": ("model.embed_tokens",),
    _OURS + "input_layernorm": (_SELF + "input_layernorm",),
    _OURS + "attention.qkv": (
        _SELF + "self_attn.q_proj", _SELF + "self_attn.k_proj", _SELF + "self_attn.v_proj",
    ),
    _OURS + "attention.dense": (_SELF + "self_attn.o_proj",),
    _OURS + "post_layernorm": (_SELF + "post_attention_layernorm",),
    _OURS + "mlp.fc": (_SELF + "mlp.gate_proj",),
    _OURS + "mlp.gate": (_SELF + "mlp.up_proj",),
    _OURS + "mlp.proj": (_SELF + "mlp.down_proj",),
    "transformer.ln_f": ("model.norm",),
    "lm_head": ("lm_head",),
}  # fmt: skip


def read_config(reader: ConfigReader, layout: Layout) -> ModelConfig:
    """Read a Llama config.json; an absent optional field has the value transformers gives it."""
    num_heads = reader.get_int("num_attention_heads")
    hidden_size = reader.get_int("hidden_size")
    if reader.config.get("head_dim") is None and hidden_size % num_heads:
        reader.refuse(
            f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}",
            "give head_dim",
        )
    rotary_base, rotary_scaling = read_rotary(reader, 10000.0)
    for place in (reader.config, reader.get_object("rope_parameters")):
        fraction = place.get("partial_rotary_factor")
        if fraction not in (None, 1):
            reader.refuse(
                f"partial_rotary_factor is {fraction!r}",
                "Llama models rotate whole heads; this one is not supported",
            )
    model: dict[str, Any] = {
        "vocab_size": reader.get_int("vocab_size"),
        "hidden_size": hidden_size,
        "num_hidden_layers": reader.get_int("num_hidden_layers"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.get_int("num_key_value_heads", num_heads),
        "head_size": reader.get_int("head_dim", max(1, hidden_size // num_heads)),
        "intermediate_size": reader.get_int("intermediate_size"),
        "norm_epsilon": reader.get_float("rms_norm_eps", 1e-6),
        "max_position_embeddings": reader.get_int("max_position_embeddings", 2048),
        "hidden_act": reader.get_text("hidden_act", "silu"),
        "attn_bias": reader.get_bool("attention_bias", False),
        "mlp_bias": reader.get_bool("mlp_bias", False),
    }
    reader.finish()
    return ModelConfig(
        architecture="LlamaForCausalLM",
        rotary_base=rotary_base,
        rotary_scaling=rotary_scaling,
        **model,
        **dataclasses.asdict(layout),
    )


def describe(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of TensorRT-LLM's Llama config."""
    return {
        "mlp_bias": model.mlp_bias,
        "attn_bias": model.attn_bias,
        "rotary_base": model.rotary_base,
        "rotary_scaling": model.rotary_scaling,
        "residual_mlp": False,
        "disable_weight_only_quant_plugin": False,
        "remove_duplicated_kv_heads": False,
    }


FAMILY = Family(
    name="llama",
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    modules=MODULES,
    # Old checkpoints store the rotary frequencies, which every loader computes.
    ignored=("*.rotary_emb.inv_freq",),
    read_config=read_config,
    describe=describe,
)
