"""SmolLM3: a Llama in which every fourth layer has no positions.

TensorRT-LLM has no class for it, so the checkpoint tells what it computes.
"""

from __future__ import annotations

from typing import Any

from specdec.errors import shorten
from specdec.model.architectures import Architecture
from specdec.model.bounds import MAX_MODULES
from specdec.model.config_reader import ConfigReader

from . import llama
from .base import Family, Layout, read_decoder, refuse_unless


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a SmolLM3 config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(
        reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=32768, num_kv_heads=4,
        rotary_base=2e6,
    )  # fmt: skip
    num_layers = values["num_hidden_layers"]
    interval = reader.get_int("no_rope_layer_interval", 4)
    told = reader.config.get("no_rope_layers")  # which says of each layer whether it has them
    has_positions = [bool((i + 1) % interval) for i in range(min(num_layers, MAX_MODULES))]
    if isinstance(told, list) and len(told) == num_layers and set(told) <= {0, 1}:
        has_positions = [bool(each) for each in told]
    elif told is not None:
        reader.refuse(
            f"no_rope_layers is {shorten(told)}, not 0 or 1 for each of {num_layers} layers",
            "correct no_rope_layers",
        )
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
    return values | {"own_arithmetic": arithmetic}


FAMILY = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    modules=llama.MODULES,
    is_tied_by_default=True,
    read_config=read_config,
)
