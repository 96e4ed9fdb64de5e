"""Gemma (the first; Gemma 2 and 3 are other architectures)."""

from __future__ import annotations

from typing import Any

from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader

from ..plan import Part
from . import llama
from .base import ROTARY, TANH_GELU, Family, Layout, list_keys, read_decoder, refuse_unless

_NORMS = ("input_layernorm", "post_layernorm", "ln_f")

# Its norms multiply by one more than their weights.
MODULES: dict[str, tuple[str | Part, ...]] = {
    module: tuple(Part(name, added=1.0) for name in names)
    if module.rpartition(".")[2] in _NORMS
    else names
    for module, names in llama.MODULES.items()
}


def refuse_two_directions(reader: ConfigReader) -> None:
    """Note a problem where tokens see those behind them, as in models of embeddings."""
    refuse_unless(
        reader, "use_bidirectional_attention", False,
        remedy="a model that reads text in both directions writes none",
    )  # fmt: skip


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Gemma config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(
        reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=8192, num_kv_heads=16,
        head_dim=256, hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    refuse_two_directions(reader)
    # Gemma was trained with the tanh form, which its first configurations call gelu.
    activation = reader.get_text("hidden_activation", values["hidden_act"])
    if activation in ("gelu", *TANH_GELU):
        activation = "gelu"
    return values | {
        "hidden_act": activation, "attn_bias": reader.get_bool("attention_bias", False),
    }  # fmt: skip


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Gemma config."""
    return (
        config
        | list_keys(model, "attn_bias", "mlp_bias", *ROTARY)
        | {
            "inter_layernorms": False,
            "quantization": config["quantization"] | {"smoothquant_val": None},
        }
    )


FAMILY = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    modules=MODULES,
    is_tied_by_default=True,
    always_shares=True,
    read_config=read_config,
    describe=describe,
)
