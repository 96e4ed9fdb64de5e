"""Qwen 1.5, 2, 2.5 and 3, and their mixtures of experts.

Qwen3 has no biases, norms its queries and keys, and its heads have a size of their own. In
Qwen2-MoE every token takes one of the experts, in Qwen3-MoE none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.model.config import FULL, ModelConfig
from specdec.model.config_reader import ConfigReader

from ..config import MOE_014
from .base import (
    BIASES,
    ROTARY,
    Family,
    Layout,
    add_keys,
    backend_logger,
    decoder,
    get_window,
    read_experts,
    read_windows,
    refuse_layer_types,
    refuse_unless,
)
from .llama import BESIDE_MLP, HF_LAYER, MODULES, OUR_LAYER, Modules


def read_window(reader: ConfigReader, _: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the sliding window."""
    window = None
    if reader.get_bool("use_sliding_window", False):
        window = get_window(reader, 4096)
    first_layer = reader.get_int("max_window_layers", 28, minimum=0)
    return read_windows(reader, values["num_hidden_layers"], window, first_layer=first_layer)


describe = add_keys(
    *BIASES, *ROTARY, disable_weight_only_quant_plugin=False,
    moe=MOE_014 | {"normalization_mode": 0}, qwen_type="qwen2", moe_intermediate_size=0,
    moe_shared_expert_intermediate_size=0,
)  # fmt: skip
QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM", "MiMoForCausalLM"),  # MiMo 7B is one with a head that drafts
    modules=MODULES,
    read_config=decoder(
        lambda *_: {"attn_bias": True}, read_window, max_positions=32768, num_kv_heads=32
    ),
    describe=describe,
)

# ---- Qwen2-MoE.

_MLP = HF_LAYER + "mlp."
_EXPERT, _SHARED_EXPERT = _MLP + "experts.{expert}.", _MLP + "shared_expert"
# The matrix of each expert whose output is multiplied, then the one that is activated.
EXPERTS: Modules = {
    OUR_LAYER + "mlp.router": (_MLP + "gate",),
    OUR_LAYER + "mlp.fc": (_EXPERT + "up_proj", _EXPERT + "gate_proj"),
    OUR_LAYER + "mlp.proj": (_EXPERT + "down_proj",),
}
SHARED_EXPERT: Modules = {
    OUR_LAYER + "mlp.shared_expert.fc": (
        _SHARED_EXPERT + ".up_proj",
        _SHARED_EXPERT + ".gate_proj",
    ),
    OUR_LAYER + "mlp.shared_expert.proj": (_SHARED_EXPERT + ".down_proj",),
    OUR_LAYER + "mlp.shared_expert_gate": (_SHARED_EXPERT + "_gate",),
}


def refuse_uneven_layers(reader: ConfigReader) -> None:
    """Note a problem where the layers are not all alike, which TensorRT-LLM cannot express."""
    alike = "models are supported whose layers all have experts, and no sliding window"
    refuse_unless(reader, "decoder_sparse_step", 1, remedy=alike)
    refuse_unless(reader, "mlp_only_layers", [], remedy=alike)
    refuse_unless(reader, "use_sliding_window", False, remedy=alike)


def read_moe2(reader: ConfigReader, layout: Layout, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that Qwen2-MoE has besides a decoder's."""
    refuse_uneven_layers(reader)
    refuse_layer_types(reader, FULL)
    refuse_unless(
        reader, "qkv_bias", True, remedy="Qwen2-MoE without attention biases is not supported"
    )
    return {"attn_bias": True} | read_experts(
        reader, layout, values, num=60, top_k=4,
        renormalizes=reader.get_bool("norm_topk_prob", False),
        inner=("moe_intermediate_size", 1408),
        shared_inner=("shared_expert_intermediate_size", 5632),
    )  # fmt: skip


def describe_sizes(model: ModelConfig) -> dict[str, Any]:
    """Return the sizes of experts, as TensorRT-LLM's Qwen config has them."""
    assert model.experts is not None
    return {
        "moe_intermediate_size": model.experts.inner,
        "moe_shared_expert_intermediate_size": model.experts.shared_inner,
    }


QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    modules=BESIDE_MLP | EXPERTS | SHARED_EXPERT,
    read_config=decoder(read_moe2, max_positions=32768, num_kv_heads=16),
    describe=lambda model, config: (
        describe(model, config) | describe_sizes(model) | {"qwen_type": "qwen2_moe"}
    ),
)

# ---- Qwen3 and Qwen3-MoE.

HEAD_NORMS: Modules = {
    f"{OUR_LAYER}attention.{projection}_layernorm": (f"{HF_LAYER}self_attn.{projection}_norm",)
    for projection in "qk"
}


def read_bias(reader: ConfigReader, *_: Any) -> dict[str, Any]:
    """Read whether attention has biases; warn where it has, which TensorRT-LLM ignores."""
    has_bias = reader.get_bool("attention_bias", False)
    if has_bias:
        backend_logger.warning(
            "%s: attention_bias is true; TensorRT-LLM has Qwen3 without biases, so the checkpoint"
            " is for the torch backend",
            reader.path,
        )
    return {"attn_bias": has_bias}


def read_moe3(reader: ConfigReader, layout: Layout, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that Qwen3-MoE has besides a decoder's."""
    refuse_uneven_layers(reader)
    bias = read_bias(reader)
    return bias | read_experts(
        reader, layout, values, num=128, top_k=8,
        renormalizes=reader.get_bool("norm_topk_prob", False),
        inner=("moe_intermediate_size", 768),
    )  # fmt: skip


# qwen_type tells TensorRT-LLM to norm queries and keys.
describe3 = add_keys(
    base=describe, qwen_type="qwen3", seq_length=8192, use_logn_attn=False, num_labels=1,
    tie_word_embeddings=False,  # the head is always written
)  # fmt: skip
QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    modules=MODULES | HEAD_NORMS,
    read_config=decoder(
        read_bias, read_window, max_positions=32768, num_kv_heads=32, absent_head_dim=128
    ),
    describe=describe3,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    modules=BESIDE_MLP | HEAD_NORMS | EXPERTS,
    read_config=decoder(read_moe3, max_positions=32768, num_kv_heads=4),
    describe=lambda model, config: (
        describe3(model, config) | describe_sizes(model) | {"qwen_type": "qwen3_moe"}
    ),
)
