"""Phi-1, Phi-1.5 and Phi-2."""

from __future__ import annotations

from typing import Any

from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader

from .base import ROTARY, Family, Layout, list_keys, name_activation, read_decoder, refuse_unless

_SELF = "model.layers.{layer}."
_OURS = "transformer.layers.{layer}."

MODULES = {
    "transformer.vocab_embedding": ("model.embed_tokens",),
    _OURS + "input_layernorm": (_SELF + "input_layernorm",),
    _OURS + "attention.qkv": (
        _SELF + "self_attn.q_proj", _SELF + "self_attn.k_proj", _SELF + "self_attn.v_proj",
    ),
    _OURS + "attention.dense": (_SELF + "self_attn.dense",),
    _OURS + "mlp.fc": (_SELF + "mlp.fc1",),
    _OURS + "mlp.proj": (_SELF + "mlp.fc2",),
    "transformer.ln_f": ("model.final_layernorm",),
    "lm_head": ("lm_head",),
}  # fmt: skip


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Phi config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(
        reader, norm_epsilon=("layer_norm_eps", 1e-5), max_positions=2048, rotary_fraction=0.5,
        hidden_act="gelu_new",
    )  # fmt: skip
    values["hidden_act"] = name_activation(reader, values["hidden_act"])
    refuse_unless(
        reader, "qk_layernorm", False,
        remedy="TensorRT-LLM's Phi does not normalize queries and keys",
    )  # fmt: skip
    return values


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Phi config.

    Its `partial_rotary_factor` is left out: no version since 0.14 reads it, and its loader sets it
    to 0.4 for every model.
    """
    return config | list_keys(model, *ROTARY, "rotary_pct")


FAMILY = Family(
    name="phi",
    architectures=("PhiForCausalLM",),
    modules=MODULES,
    read_config=read_config,
    describe=describe,
)
