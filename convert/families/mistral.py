"""Mistral 7B, Mistral Nemo."""

from __future__ import annotations

from specdec.model.config import ModelConfig

from ..hf import ConfigReader
from . import llama
from .base import (
    ROTARY_BUFFERS,
    Family,
    Layout,
    get_window,
    make_model,
    read_decoder,
    read_windows,
)


def read_config(reader: ConfigReader, layout: Layout) -> ModelConfig:
    """Read a Mistral config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(
        reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=131072, num_kv_heads=8
    )
    window = get_window(reader, 4096)
    values |= read_windows(reader, values["num_hidden_layers"], window)
    return make_model(reader, layout, "MistralForCausalLM", values)


FAMILY = Family(
    name="mistral",
    model_type="mistral",
    architectures=("MistralForCausalLM",),
    modules=llama.MODULES,
    ignored=ROTARY_BUFFERS,
    read_config=read_config,
    describe=llama.describe,
)
