"""Seed-OSS: a Llama whose attention may have biases on either side of it.

TensorRT-LLM's engines have no class for it, so the checkpoint tells what it computes.
"""

from __future__ import annotations

from typing import Any

from specdec.model.architectures import Architecture
from specdec.model.config_reader import ConfigReader

from . import llama
from .base import Family, Layout, read_decoder


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Seed-OSS config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(
        reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=524288, num_kv_heads=8,
        head_dim=None if "head_dim" in reader.config else 128,  # null: by the number of heads
    )  # fmt: skip
    arithmetic = Architecture(
        qkv_bias=reader.get_bool("attention_bias", True),
        dense_bias=reader.get_bool("attention_out_bias", False),
        mlp_bias=reader.get_bool("mlp_bias", False),
    )
    return values | {"own_arithmetic": arithmetic}


FAMILY = Family(
    name="seed_oss",
    architectures=("SeedOssForCausalLM",),
    modules=llama.MODULES,
    read_config=read_config,
)
