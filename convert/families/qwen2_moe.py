"""Qwen 1.5 MoE and Qwen2 MoE: Qwen2 with experts, one of which every token takes."""

from __future__ import annotations

from typing import Any

from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader

from . import llama, qwen2
from .base import Family, Layout, read_decoder, read_experts, refuse_unless

_SELF = "model.layers.{layer}.mlp."
_OURS = "transformer.layers.{layer}."
_EXPERT = _SELF + "experts.{expert}."
_SHARED = _SELF + "shared_expert"

# Of each expert what is multiplied, then what is activated.
EXPERTS = {
    _OURS + "mlp.router": (_SELF + "gate",),
    _OURS + "mlp.fc": (_EXPERT + "up_proj", _EXPERT + "gate_proj"),
    _OURS + "mlp.proj": (_EXPERT + "down_proj",),
}
SHARED = {
    _OURS + "mlp.shared_expert.fc": (_SHARED + ".up_proj", _SHARED + ".gate_proj"),
    _OURS + "mlp.shared_expert.proj": (_SHARED + ".down_proj",),
    _OURS + "mlp.shared_expert_gate": (_SHARED + "_gate",),
}


def refuse_uneven_layers(reader: ConfigReader) -> None:
    """Note a problem where the layers are not all alike, of which TensorRT-LLM knows nothing."""
    alike = "models are supported whose layers all have experts, and no sliding window"
    refuse_unless(reader, "decoder_sparse_step", 1, remedy=alike)
    refuse_unless(reader, "mlp_only_layers", [], remedy=alike)
    refuse_unless(reader, "use_sliding_window", False, remedy=alike)


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Qwen2-MoE config.json; an absent optional field has transformers' value."""
    values = read_decoder(
        reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=32768, num_kv_heads=16
    )
    refuse_uneven_layers(reader)
    refuse_unless(reader, "qkv_bias", True, remedy="Qwen2-MoE has attention biases")
    values |= read_experts(
        reader, layout, values, num=60, top_k=4,
        renormalizes=reader.get_bool("norm_topk_prob", False),
        inner=("moe_intermediate_size", 1408),
        shared_inner=("shared_expert_intermediate_size", 5632),
    )  # fmt: skip
    return values | {"attn_bias": True}


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Qwen config."""
    return qwen2.describe(model, config) | describe_sizes(model) | {"qwen_type": "qwen2_moe"}


def describe_sizes(model: ModelConfig) -> dict[str, Any]:
    """The sizes of experts, as TensorRT-LLM's Qwen config has them."""
    assert model.experts is not None
    return {
        "moe_intermediate_size": model.experts.inner,
        "moe_shared_expert_intermediate_size": model.experts.shared_inner,
    }


FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    modules={name: own for name, own in llama.MODULES.items() if ".mlp." not in name}
    | EXPERTS
    | SHARED,
    read_config=read_config,
    describe=describe,
)
