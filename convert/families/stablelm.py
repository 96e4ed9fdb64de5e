"""StableLM 3B, StableLM 2 1.6B, Stable Code 3B: Llama's names, layer norm, part of a head rotated.

TensorRT-LLM has no class for them, so the checkpoint tells what they compute.
"""

from __future__ import annotations

from typing import Any

from specdec.model.architectures import Architecture
from specdec.model.config_reader import ConfigReader

from . import llama
from .base import Family, Layout, read_decoder, refuse_unless


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a StableLM config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(
        reader, norm_epsilon=("layer_norm_eps", 1e-5), max_positions=4096, num_kv_heads=32,
        rotary_fraction=0.25,
    )  # fmt: skip
    size = values["hidden_size"] // values["num_attention_heads"]
    refuse_unless(reader, "head_dim", size, remedy=f"StableLM has heads of {size} dimensions")
    refuse_unless(
        reader, "qk_layernorm", False,
        remedy="StableLM that normalizes queries and keys (StableLM 2 12B) is not supported",
    )  # fmt: skip
    arithmetic = Architecture(
        norm="layer",
        is_parallel=reader.get_bool("use_parallel_residual", False),
        qkv_bias=reader.get_bool("use_qkv_bias", False),
        dense_bias=False,
        mlp_bias=False,
    )
    return values | {"own_arithmetic": arithmetic}


FAMILY = Family(
    name="stablelm",
    architectures=("StableLmForCausalLM",),
    modules=llama.MODULES,
    read_config=read_config,
)
