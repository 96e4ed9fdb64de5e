"""Mistral 7B, Mistral Nemo."""

from __future__ import annotations

from typing import Any

from specdec.model.config_reader import ConfigReader

from . import llama
from .base import Family, Layout, get_window, read_decoder, read_windows


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Mistral config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(
        reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=131072, num_kv_heads=8
    )
    return values | read_windows(reader, values["num_hidden_layers"], get_window(reader, 4096))


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    modules=llama.MODULES,
    read_config=read_config,
    describe=llama.describe,
)
