"""Granite 3, the dense ones: a Llama that scales embeddings, scores, residuals and logits."""

from __future__ import annotations

import math
from typing import Any

from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader

from . import llama
from .base import Family, Layout, list_keys, read_decoder


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Granite config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=2048)
    # TensorRT-LLM has that of scores beside 1 / sqrt(head_size). Its own converter takes an
    # attention_multiplier of 1 for none, and scores are then divided.
    attention = reader.get_float("attention_multiplier", 1.0) * math.sqrt(values["head_size"])
    return values | {
        "attn_bias": reader.get_bool("attention_bias", False),
        "mlp_bias": reader.get_bool("mlp_bias", False),
        "embedding_multiplier": reader.get_float("embedding_multiplier", 1.0),
        "attention_multiplier": attention,
        "residual_multiplier": reader.get_float("residual_multiplier", 1.0),
        "output_multiplier_scale": 1.0 / reader.get_float("logits_scaling", 1.0),
    }


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Llama config with the multipliers."""
    return llama.describe(model, config) | list_keys(
        model, "embedding_multiplier", "attention_multiplier", "residual_multiplier",
        "output_multiplier_scale",
    )  # fmt: skip


FAMILY = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    modules=llama.MODULES,
    read_config=read_config,
    describe=describe,
)
