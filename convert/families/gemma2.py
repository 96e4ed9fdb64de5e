"""Gemma 2: soft caps on scores and logits, norms on either side, a window in every other layer."""

from __future__ import annotations

from typing import Any

from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader

from ..plan import Part
from . import gemma
from .base import TANH_GELU, Family, Layout, get_window, read_decoder, read_windows, refuse_unless

_SELF, _OURS = "model.layers.{layer}.", "transformer.layers.{layer}."
MODULES: dict[str, tuple[str | Part, ...]] = {
    **gemma.MODULES,
    **{
        _OURS + name: (Part(_SELF + name, added=1.0),)
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    },
}


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Gemma 2 config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(
        reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=8192, num_kv_heads=4,
        head_dim=256, hidden_act="gelu_pytorch_tanh",
    ) | read_gemma(reader, logit_cap=30.0)  # fmt: skip
    window = get_window(reader, 4096)
    values |= read_windows(reader, values["num_hidden_layers"], window, pattern=2)
    return values | {"attn_logit_softcapping": read_cap(reader, "attn_logit_softcapping", 50.0)}


def read_gemma(reader: ConfigReader, logit_cap: float | None) -> dict[str, Any]:
    """Read what Gemma 2 and 3 have beside the first Gemma.

    logit_cap: where config.json does not say.
    """
    refuse_unless(
        reader, "hidden_activation", *TANH_GELU,
        remedy="Gemma's activation is the tanh form of gelu, gelu_pytorch_tanh",
    )  # fmt: skip
    gemma.refuse_two_directions(reader)
    return {
        "attn_bias": reader.get_bool("attention_bias", False),
        "query_pre_attn_scalar": reader.get_float("query_pre_attn_scalar", 256.0),
        "final_logit_softcapping": read_cap(reader, "final_logit_softcapping", logit_cap),
    }


def read_cap(reader: ConfigReader, name: str, default: float | None) -> float | None:
    """Read a soft cap; null means none, an absent one the default."""
    is_none = reader.config.get(name, default) is None
    return None if is_none else reader.get_float(name, default)


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Gemma 2 config."""
    scalar = model.query_pre_attn_scalar
    assert scalar is not None
    return gemma.describe(model, config) | {
        "inter_layernorms": True,
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "final_logit_softcapping": model.final_logit_softcapping,
        "attn_logit_softcapping": model.attn_logit_softcapping,
    }


FAMILY = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    modules=MODULES,
    is_tied_by_default=True,
    always_shares=True,
    read_config=read_config,
    describe=describe,
)
