"""Llama 1 to 3.x, Vicuna, TinyLlama."""

from __future__ import annotations

from typing import Any

from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader

from ..config import MOE_014
from .base import BIASES, ROTARY, Family, Layout, list_keys, read_decoder

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


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Llama config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=2048)
    return values | {
        "attn_bias": reader.get_bool("attention_bias", False),
        "mlp_bias": reader.get_bool("mlp_bias", False),
    }


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Llama config."""
    return (
        config
        | list_keys(model, *BIASES, *ROTARY)
        | {
            "residual_mlp": False,
            "disable_weight_only_quant_plugin": False,
            "moe": dict(MOE_014),
            "remove_duplicated_kv_heads": False,
        }
    )


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    modules=MODULES,
    read_config=read_config,
    describe=describe,
)
