"""Gemma 3's text model: normed queries and keys, layers of a window with a rotary base."""

from __future__ import annotations

from typing import Any

from specdec.model.config import FULL, ModelConfig
from specdec.model.config_reader import ConfigReader

from ..plan import Part
from . import gemma2
from .base import Family, Layout, get_window, logger, read_decoder, read_windows, refuse_unless
from .qwen3 import HEAD_NORMS

MODULES: dict[str, tuple[str | Part, ...]] = {
    **gemma2.MODULES,
    **{ours: (Part(str(name), added=1.0),) for ours, (name,) in HEAD_NORMS.items()},
}


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Gemma 3 config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(
        reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=131072, num_kv_heads=4,
        head_dim=256, hidden_act="gelu", rotary_base=1e6, local_base=10000.0,
    ) | gemma2.read_gemma(reader, logit_cap=None)  # fmt: skip
    refuse_unless(
        reader, "attn_logit_softcapping",
        remedy="no Gemma 3 caps its scores, and transformers takes no notice of it: give null",
    )  # fmt: skip
    old, new = "sliding_window_pattern", "_sliding_window_pattern"
    pattern = reader.get_int(old if old in reader.config else new, 6)
    window = get_window(reader, 4096)
    return values | read_windows(reader, values["num_hidden_layers"], window, pattern=pattern)


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's Gemma 3 config.

    It follows a pattern of windows, and reads a scaling of the rotary embedding from its checkpoint
    though its own converter looks for it under another name and loses it.
    """
    types = model.layer_types or ()
    pattern = next((at for at, kind in enumerate(types, 1) if kind == FULL), len(types) + 1)
    if any((kind == FULL) != (at % pattern == 0) for at, kind in enumerate(types, 1)):
        logger.warning(
            "layer_types %s has no period: TensorRT-LLM would run other layers with the window;"
            " this checkpoint is for the torch backend",
            ", ".join(types),
        )
    config = gemma2.describe(model, config)
    del config["attn_logit_softcapping"]
    return config | {
        "_sliding_window_pattern": pattern,
        "rope_local_base_freq": model.rope_local_base_freq,
    }


FAMILY = Family(
    name="gemma3",
    model_type="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    modules=MODULES,
    is_tied_by_default=True,
    read_config=read_config,
    describe=describe,
)
