"""Gemma 1, 2 and 3.

Gemma 2 has soft caps on scores and logits, norms on either side, and a window in every other layer.
Gemma 3's text model norms queries and keys, and layers with a window have a rotary base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.model.config import FULL, ModelConfig
from specdec.model.config_reader import ConfigReader

from ..plan import SourceRows
from .base import (
    ROTARY,
    TANH_GELU,
    Family,
    FieldReader,
    Layout,
    add_keys,
    backend_logger,
    decoder,
    get_window,
    read_windows,
    refuse_unless,
)
from .llama import HF_LAYER, MODULES, OUR_LAYER, Modules, window
from .qwen import HEAD_NORMS


def _add_one(modules: Modules) -> Modules:
    """Return modules whose weights are stored less one, as those of Gemma's norms are."""
    return {
        name: tuple(SourceRows(str(module), addend=1.0) for module in m)
        for name, m in modules.items()
    }


_NORMS = ("input_layernorm", "post_layernorm", "ln_f")
MODULES1 = MODULES | _add_one({n: m for n, m in MODULES.items() if n.endswith(_NORMS)})
_BEHIND = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
MODULES2 = MODULES1 | _add_one({OUR_LAYER + name: (HF_LAYER + name,) for name in _BEHIND})


def refuse_two_directions(reader: ConfigReader) -> None:
    """Note a problem where tokens see those after them, as in models of embeddings."""
    refuse_unless(
        reader, "use_bidirectional_attention", False,
        remedy="models that read text in both directions write none, and are not supported",
    )  # fmt: skip


def read_gemma1(reader: ConfigReader, _: Layout, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that the first Gemma has besides a decoder's."""
    refuse_two_directions(reader)
    # Gemma was trained with the tanh form, which its first configurations call gelu.
    activation = reader.get_text("hidden_activation", values["hidden_act"])
    if activation in ("gelu", *TANH_GELU):
        activation = "gelu"
    return {"hidden_act": activation, "attn_bias": reader.get_bool("attention_bias", False)}


describe = add_keys("attn_bias", "mlp_bias", *ROTARY, inter_layernorms=False)


def describe1(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Gemma config."""
    quantization = config["quantization"] | {"smoothquant_val": None}
    return describe(model, config) | {"quantization": quantization}


GEMMA = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    modules=MODULES1,
    is_tied_by_default=True,
    always_shares=True,
    read_config=decoder(
        read_gemma1, max_positions=8192, num_kv_heads=16, head_dim=256,
        hidden_act="gelu_pytorch_tanh",
    ),
    describe=describe1,
)  # fmt: skip


def gemma2(logit_cap: float | None) -> FieldReader:
    """Return a reader of the fields of Gemma 2 and 3. logit_cap: that of an absent field."""

    def read(reader: ConfigReader, _: Layout, __: Mapping[str, Any]) -> dict[str, Any]:
        refuse_unless(
            reader, "hidden_activation", *TANH_GELU,
            remedy="Gemma's activation is the tanh form of gelu, gelu_pytorch_tanh",
        )  # fmt: skip
        refuse_two_directions(reader)
        return {
            "attn_bias": reader.get_bool("attention_bias", False),
            "query_pre_attn_scalar": reader.get_float("query_pre_attn_scalar", 256.0),
            "final_logit_softcapping": read_cap(reader, "final_logit_softcapping", logit_cap),
        }

    return read


def read_cap(reader: ConfigReader, name: str, default: float | None) -> float | None:
    """Read a soft cap; null means none, an absent one the default."""
    is_none = reader.config.get(name, default) is None
    return None if is_none else reader.get_float(name, default)


def describe2(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Gemma 2 config."""
    scalar = model.query_pre_attn_scalar
    assert scalar is not None
    return describe1(model, config) | {
        "inter_layernorms": True,
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "final_logit_softcapping": model.final_logit_softcapping,
        "attn_logit_softcapping": model.attn_logit_softcapping,
    }


GEMMA2 = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    modules=MODULES2,
    is_tied_by_default=True,
    always_shares=True,
    read_config=decoder(
        gemma2(30.0), window(4096, pattern=2),
        lambda reader, *_: {
            "attn_logit_softcapping": read_cap(reader, "attn_logit_softcapping", 50.0)
        },
        max_positions=8192, num_kv_heads=4, head_dim=256, hidden_act="gelu_pytorch_tanh",
    ),
    describe=describe2,
)  # fmt: skip


def read_gemma3(reader: ConfigReader, _: Layout, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read Gemma 3's windows; note soft caps of scores."""
    refuse_unless(
        reader, "attn_logit_softcapping",
        remedy="no Gemma 3 caps its scores, and transformers takes no notice of it: give null",
    )  # fmt: skip
    old_key, new_key = "sliding_window_pattern", "_sliding_window_pattern"
    pattern = reader.get_int(old_key if old_key in reader.config else new_key, 6)
    size = get_window(reader, 4096)
    return read_windows(reader, values["num_hidden_layers"], size, pattern=pattern)


def describe3(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Gemma 3 config.

    It follows a pattern of windows, and reads a scaling of the rotary embedding from its checkpoint
    though its own converter looks for it under another name and loses it.
    """
    types = model.layer_types or ()
    full_layers = [number for number, kind in enumerate(types, 1) if kind == FULL]
    pattern = min(full_layers, default=len(types) + 1)
    if full_layers != list(range(pattern, len(types) + 1, pattern)):
        backend_logger.warning(
            "layer_types %s has no period: TensorRT-LLM would run other layers with the window;"
            " this checkpoint is for the torch backend",
            ", ".join(types),
        )
    config = describe2(model, config)
    del config["attn_logit_softcapping"]
    return config | {
        "_sliding_window_pattern": pattern,
        "rope_local_base_freq": model.rope_local_base_freq,
    }


GEMMA3 = Family(
    name="gemma3",
    model_type="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    modules=MODULES2 | _add_one(HEAD_NORMS),
    is_tied_by_default=True,
    read_config=decoder(
        gemma2(None), read_gemma3, max_positions=131072, num_kv_heads=4, head_dim=256,
        hidden_act="gelu", rotary_base=1e6, local_base=10000.0,
    ),
    describe=describe3,
)  # fmt: skip
