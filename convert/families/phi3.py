"""Phi-3 and Phi-3.5 mini and medium, Phi-4 and Phi-4 mini."""

from __future__ import annotations

from typing import Any

from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader
from specdec.model.rotary_scaling import get_kind

from ..plan import Part
from .base import ROTARY, Family, Layout, get_window, list_keys, read_decoder, read_windows

_SELF = "model.layers.{layer}."
_OURS = "transformer.layers.{layer}."
_GATE_UP = _SELF + "mlp.gate_up_proj"

MODULES: dict[str, tuple[str | Part, ...]] = {
    "transformer.vocab_embedding": ("model.embed_tokens",),
    _OURS + "input_layernorm": (_SELF + "input_layernorm",),
    _OURS + "attention.qkv": (_SELF + "self_attn.qkv_proj",),
    _OURS + "attention.dense": (_SELF + "self_attn.o_proj",),
    _OURS + "post_layernorm": (_SELF + "post_attention_layernorm",),
    # The source is [gate; up], TensorRT-LLM's swiglu takes [up; gate].
    _OURS + "mlp.fc": (Part(_GATE_UP, share=1, num_shares=2), Part(_GATE_UP, num_shares=2)),
    _OURS + "mlp.proj": (_SELF + "mlp.down_proj",),
    "transformer.ln_f": ("model.norm",),
    "lm_head": ("lm_head",),
}


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Phi-3 config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(
        reader, norm_epsilon=("rms_norm_eps", 1e-5), max_positions=4096, rotary_fraction=1.0
    )
    window = get_window(reader, None)
    values |= read_windows(reader, values["num_hidden_layers"], window)
    if values["hidden_act"] == "silu":
        values["hidden_act"] = "swiglu"  # of the two halves of one product
    scaling = values["rotary_scaling"]
    if scaling is not None:
        # TensorRT-LLM does not know the name that the first Phi-3 models used.
        values["rotary_scaling"] = {
            key: "longrope" if key in ("type", "rope_type") and value == "su" else value
            for key, value in scaling.items()
        }
    return values


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Phi-3 config."""
    config |= list_keys(model, *ROTARY, "rotary_pct")
    scaling = model.rotary_scaling
    if scaling is not None and get_kind(scaling) == "longrope":
        config |= {
            "position_embedding_type": "long_rope",
            "longrope_scaling_short_factors": scaling["short_factor"],
            "longrope_scaling_long_factors": scaling["long_factor"],
        }
    return config


def find_problem_014(model: ModelConfig) -> tuple[str, str] | None:
    """That line rotates whole heads of a Phi-3 model."""
    if model.rotary_pct == 1:
        return None
    return (
        f"partial_rotary_factor is {model.rotary_pct:g}, which TensorRT-LLM 0.14's Phi-3 ignores",
        "convert for 1.2",
    )


FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    modules=MODULES,
    read_config=read_config,
    describe=describe,
    find_problem_014=find_problem_014,
)
