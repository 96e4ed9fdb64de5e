"""Qwen 1.5, 2 and 2.5."""

from __future__ import annotations

from typing import Any

from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader

from ..config import MOE_014
from . import llama
from .base import BIASES, ROTARY, Family, Layout, get_window, list_keys, read_decoder, read_windows


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Qwen2 config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(
        reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=32768, num_kv_heads=32
    )
    return values | {"attn_bias": True, **read_window(reader, values)}


def read_window(reader: ConfigReader, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that tell of the sliding window."""
    window = None
    if reader.get_bool("use_sliding_window", False):
        window = get_window(reader, 4096)
    first_layer = reader.get_int("max_window_layers", 28, minimum=0)
    return read_windows(reader, values["num_hidden_layers"], window, first_layer=first_layer)


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Qwen config."""
    return (
        config
        | list_keys(model, *BIASES, *ROTARY)
        | {
            "disable_weight_only_quant_plugin": False,
            "moe": MOE_014 | {"normalization_mode": 0},
            "qwen_type": "qwen2",
            "moe_intermediate_size": 0,
            "moe_shared_expert_intermediate_size": 0,
        }
    )


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    modules=llama.MODULES,
    read_config=read_config,
    describe=describe,
)
