"""Granite 3, the dense ones: a Llama that scales embeddings, scores, residuals and logits."""

from __future__ import annotations

import math
from typing import Any

from specdec.model.config import ModelConfig

from ..hf import ConfigReader
from . import llama
from .base import ROTARY_BUFFERS, Family, Layout, make_model, read_decoder


def read_config(reader: ConfigReader, layout: Layout) -> ModelConfig:
    """Read a Granite config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=2048)
    values |= {
        "attn_bias": reader.get_bool("attention_bias", False),
        "mlp_bias": reader.get_bool("mlp_bias", False),
        **read_multipliers(reader, values["head_size"]),
    }
    return make_model(reader, layout, "GraniteForCausalLM", values)


def read_multipliers(reader: ConfigReader, head_size: int) -> dict[str, float]:
    """Read the four multipliers as TensorRT-LLM has them: of scores beside 1 / sqrt(head_size).

    Its own converter takes an attention_multiplier of 1 for none, and scores are then divided.
    """
    return {
        "embedding_multiplier": reader.get_float("embedding_multiplier", 1.0),
        "attention_multiplier": reader.get_float("attention_multiplier", 1.0)
        * math.sqrt(head_size),
        "residual_multiplier": reader.get_float("residual_multiplier", 1.0),
        "output_multiplier_scale": 1.0 / reader.get_float("logits_scaling", 1.0),
    }


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Llama config with the multipliers."""
    return llama.describe(model, config) | {
        "embedding_multiplier": model.embedding_multiplier,
        "attention_multiplier": model.attention_multiplier,
        "residual_multiplier": model.residual_multiplier,
        "output_multiplier_scale": model.output_multiplier_scale,
    }


FAMILY = Family(
    name="granite",
    model_type="granite",
    architectures=("GraniteForCausalLM",),
    modules=llama.MODULES,
    ignored=ROTARY_BUFFERS,
    read_config=read_config,
    describe=describe,
)
