"""Qwen3 MoE: Qwen3 with experts, none of which every token takes."""

from __future__ import annotations

from typing import Any

from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader

from . import llama, qwen2_moe, qwen3
from .base import Family, Layout, read_decoder, read_experts


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Qwen3-MoE config.json; an absent optional field has transformers' value."""
    values = read_decoder(
        reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=32768, num_kv_heads=4
    )
    qwen2_moe.refuse_uneven_layers(reader)
    values["attn_bias"] = qwen3.read_bias(reader)
    return values | read_experts(
        reader, layout, values, num=128, top_k=8,
        renormalizes=reader.get_bool("norm_topk_prob", False),
        inner=("moe_intermediate_size", 768),
    )  # fmt: skip


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Qwen config."""
    config = qwen3.describe(model, config)
    return config | qwen2_moe.describe_sizes(model) | {"qwen_type": "qwen3_moe"}


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    modules={name: own for name, own in llama.MODULES.items() if ".mlp." not in name}
    | qwen3.HEAD_NORMS
    | qwen2_moe.EXPERTS,
    read_config=read_config,
    describe=describe,
)
