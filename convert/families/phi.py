"""Phi-1, 1.5 and 2; Phi-3 and 3.5 mini and medium, Phi-4 and Phi-4 mini."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader
from specdec.model.rotary_scaling import get_kind

from ..plan import SourceRows
from .base import ROTARY, Family, Layout, add_keys, decoder, name_activation, refuse_unless
from .llama import BESIDE_MLP, HF_LAYER, OUR_LAYER, window


def read_phi(reader: ConfigReader, _: Layout, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read Phi's activation; note norms of queries and keys."""
    activation = name_activation(reader, values["hidden_act"])
    refuse_unless(
        reader, "qk_layernorm", False,
        remedy="Phi models that normalize queries and keys are not supported",
    )  # fmt: skip
    return {"hidden_act": activation}


# TensorRT-LLM's Phi config has a `partial_rotary_factor`, which is left out: no version since 0.14
# reads it, and its loader sets it to 0.4 for every model.
describe = add_keys(*ROTARY, "rotary_pct")
PHI = Family(
    name="phi",
    architectures=("PhiForCausalLM",),
    modules={name: m for name, m in BESIDE_MLP.items() if "post_layernorm" not in name} | {
        OUR_LAYER + "attention.dense": (HF_LAYER + "self_attn.dense",),
        OUR_LAYER + "mlp.fc": (HF_LAYER + "mlp.fc1",),
        OUR_LAYER + "mlp.proj": (HF_LAYER + "mlp.fc2",),
        "transformer.ln_f": ("model.final_layernorm",),
    },
    read_config=decoder(
        read_phi, norm_epsilon=("layer_norm_eps", 1e-5), max_positions=2048, rotary_fraction=0.5,
        hidden_act="gelu_new",
    ),
    describe=describe,
)  # fmt: skip


def read_phi3(reader: ConfigReader, _: Layout, values: Mapping[str, Any]) -> dict[str, Any]:
    """Name Phi-3's activation, and a scaling of the rotary embedding, as TensorRT-LLM does."""
    fields: dict[str, Any] = {}
    if values["hidden_act"] == "silu":
        fields["hidden_act"] = "swiglu"  # of the two halves of one product
    if values["rotary_scaling"] is not None:
        # TensorRT-LLM does not know the name that the first Phi-3 models used.
        fields["rotary_scaling"] = {
            key: "longrope" if key in ("type", "rope_type") and value == "su" else value
            for key, value in values["rotary_scaling"].items()
        }
    return fields


def describe3(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Phi-3 config."""
    config = describe(model, config)
    scaling = model.rotary_scaling
    if scaling is not None and get_kind(scaling) == "longrope":
        config |= {
            "position_embedding_type": "long_rope",
            "longrope_scaling_short_factors": scaling["short_factor"],
            "longrope_scaling_long_factors": scaling["long_factor"],
        }
    return config


def find_problem_014(model: ModelConfig) -> tuple[str, str] | None:
    """Return the problem that TensorRT-LLM 0.14 rotates whole heads of a Phi-3 model, or None."""
    if model.rotary_pct == 1:
        return None
    return (
        f"partial_rotary_factor is {model.rotary_pct:g}, which TensorRT-LLM 0.14's Phi-3 ignores",
        "convert for 1.2",
    )


_GATE_UP = HF_LAYER + "mlp.gate_up_proj"
PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    modules=BESIDE_MLP | {
        OUR_LAYER + "attention.qkv": (HF_LAYER + "self_attn.qkv_proj",),
        # The source is [gate; up], TensorRT-LLM's swiglu takes [up; gate].
        OUR_LAYER + "mlp.fc": (
            SourceRows(_GATE_UP, share=1, num_shares=2), SourceRows(_GATE_UP, num_shares=2),
        ),
        OUR_LAYER + "mlp.proj": (HF_LAYER + "mlp.down_proj",),
    },
    read_config=decoder(
        window(None, is_uniform=True), read_phi3, norm_epsilon=("rms_norm_eps", 1e-5),
        max_positions=4096, rotary_fraction=1.0, original_positions=4096,
    ),
    describe=describe3,
    find_problem_014=find_problem_014,
)  # fmt: skip
