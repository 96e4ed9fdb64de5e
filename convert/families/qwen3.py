"""Qwen3: a Qwen2 without biases that norms its queries and keys; heads have their own size."""

from __future__ import annotations

from typing import Any

from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader

from ..plan import Part
from . import llama, qwen2
from .base import Family, Layout, logger, read_decoder

_SELF, _OURS = "model.layers.{layer}.self_attn.", "transformer.layers.{layer}.attention."
HEAD_NORMS: dict[str, tuple[str | Part, ...]] = {
    _OURS + f"{part}_layernorm": (_SELF + f"{part}_norm",) for part in "qk"
}


def read_bias(reader: ConfigReader) -> bool:
    """Whether attention has biases; warn where it has, of which TensorRT-LLM knows nothing."""
    has_bias = reader.get_bool("attention_bias", False)
    if has_bias:
        logger.warning(
            "%s: attention_bias is true; TensorRT-LLM has Qwen3 without biases, so the checkpoint"
            " is for the torch backend",
            reader.path,
        )
    return has_bias


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Qwen3 config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(
        reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=32768, num_kv_heads=32,
        head_dim=None if "head_dim" in reader.config else 128,  # null: by the number of heads
    )  # fmt: skip
    return values | {"attn_bias": read_bias(reader), **qwen2.read_window(reader, values)}


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Qwen config; qwen_type tells it to norm queries and keys."""
    return qwen2.describe(model, config) | {
        "qwen_type": "qwen3",
        "seq_length": 8192,
        "use_logn_attn": False,
        "num_labels": 1,
        "tie_word_embeddings": False,  # the head is always written
    }


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    modules={**llama.MODULES, **HEAD_NORMS},
    read_config=read_config,
    describe=describe,
)
