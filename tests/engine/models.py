"""Configurations of made-up models."""

from __future__ import annotations

from typing import Any

from specdec.model.config import ModelConfig


def make_model(**changes: Any) -> ModelConfig:
    """A small Llama, changed."""
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM", "dtype": "float32", "vocab_size": 128,
        "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_size": 64, "intermediate_size": 512, "norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    return ModelConfig(**{**values, **changes})
