"""Seed-OSS, SmolLM3, StableLM: Llama's tensor names, and no class in TensorRT-LLM.

So a checkpoint names what they compute. Seed-OSS may have biases on either side of the attention;
every fourth layer of SmolLM3 has no positions; StableLM (3B, 2 1.6B, Stable Code 3B) has layer
norms and rotates a part of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import shorten
from specdec.model.architectures import Architecture
from specdec.model.bounds import MAX_MODULES
from specdec.model.config import FULL
from specdec.model.config_reader import ConfigReader

from .base import Family, Layout, decoder, refuse_layer_types, refuse_unless
from .llama import MODULES


def read_seed_oss(reader: ConfigReader, _: Layout, __: Mapping[str, Any]) -> dict[str, Any]:
    """Read Seed-OSS's biases."""
    arithmetic = Architecture(
        qkv_bias=reader.get_bool("attention_bias", True),
        dense_bias=reader.get_bool("attention_out_bias", False),
        mlp_bias=reader.get_bool("mlp_bias", False),
    )
    return {"own_arithmetic": arithmetic}


SEED_OSS = Family(
    name="seed_oss",
    architectures=("SeedOssForCausalLM",),
    modules=MODULES,
    read_config=decoder(
        read_seed_oss, max_positions=524288, num_kv_heads=8, absent_head_dim=128
    ),
)  # fmt: skip


def read_smollm3(reader: ConfigReader, _: Layout, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read SmolLM3's biases and its layers without positions; note windows."""
    num_layers = values["num_hidden_layers"]
    interval = reader.get_int("no_rope_layer_interval", 4)
    listed_layers = reader.config.get(
        "no_rope_layers"
    )  # which says of each layer whether it has them
    has_positions = [bool((i + 1) % interval) for i in range(min(num_layers, MAX_MODULES))]
    if (
        isinstance(listed_layers, list)
        and len(listed_layers) == num_layers
        and set(listed_layers) <= {0, 1}
    ):
        has_positions = [bool(flag) for flag in listed_layers]
    elif listed_layers is not None:
        reader.refuse(
            f"no_rope_layers is {shorten(listed_layers)}, not 0 or 1 for each of"
            f" {num_layers} layers",
            "correct no_rope_layers",
        )
    refuse_layer_types(reader, FULL)
    if reader.config.get("sliding_window") is not None:
        refuse_unless(
            reader, "use_sliding_window", False,
            remedy="SmolLM3 with a window in some layers is not supported",
        )  # fmt: skip
    attn_bias = reader.get_bool("attention_bias", False)
    arithmetic = Architecture(
        qkv_bias=attn_bias,
        dense_bias=attn_bias,
        mlp_bias=reader.get_bool("mlp_bias", False),
        layers_without_positions=tuple(i for i, has in enumerate(has_positions) if not has),
    )
    return {"own_arithmetic": arithmetic}


SMOLLM3 = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    modules=MODULES,
    is_tied_by_default=True,
    read_config=decoder(read_smollm3, max_positions=32768, num_kv_heads=4, rotary_base=2e6),
)


def read_stablelm(reader: ConfigReader, _: Layout, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read StableLM's biases, and whether attention and MLP are side by side."""
    size = values["hidden_size"] // values["num_attention_heads"]
    refuse_unless(
        reader, "head_dim", size,
        remedy=f"StableLM has heads of {size} dimensions: remove head_dim",
    )  # fmt: skip
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
    return {"own_arithmetic": arithmetic}


STABLELM = Family(
    name="stablelm",
    architectures=("StableLmForCausalLM",),
    modules=MODULES,
    read_config=decoder(
        read_stablelm, norm_epsilon=("layer_norm_eps", 1e-5), max_positions=4096, num_kv_heads=32,
        rotary_fraction=0.25,
    ),
)  # fmt: skip
