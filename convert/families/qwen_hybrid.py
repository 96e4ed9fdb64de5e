"""Qwen3.5 and 3.6, their mixtures of experts, and Qwen3-Next: three of four layers are linear.

The others attend with a gate for each head and rotate a quarter of it. All norms but the gated one
are stored less one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from specdec.errors import shorten
from specdec.model.architectures import Architecture
from specdec.model.config import FULL, LINEAR, ModelConfig, list_layer_types
from specdec.model.config_reader import ConfigReader
from specdec.model.linear_attention import LinearAttention

from ..hf import HfFolder
from ..plan import SourceRows
from .base import (
    Family,
    Layout,
    describe_rotary,
    read_decoder,
    read_experts,
    refuse_unless,
)
from .convolutions import flatten_convolutions
from .llama import BESIDE_MLP, HF_LAYER, MODULES, OUR_LAYER, Modules
from .qwen import EXPERTS, HEAD_NORMS, SHARED_EXPERT, describe_sizes, refuse_uneven_layers

_ATTENTION, _LINEAR = HF_LAYER + "self_attn.", HF_LAYER + "linear_attn."
_OUR_LINEAR = OUR_LAYER + "linear_attention"
Sections = Callable[[ModelConfig], tuple[int, ...]]


def _deal(name: str, sections: Sections, count: int) -> tuple[SourceRows, ...]:
    """Return the sections that each head's rows of a module are divided into."""
    return tuple(SourceRows(name, sections=sections, section=number) for number in range(count))


def _list_strengths(model: ModelConfig) -> tuple[int, ...]:
    """Return the sections of each key head of Qwen3-Next's in_proj_ba."""
    sizes = model.linear_attention
    assert sizes is not None
    return (sizes.num_value_heads // sizes.num_key_heads,) * 2


def _list_projections(model: ModelConfig) -> tuple[int, ...]:
    """Return the sections of each key head of Qwen3-Next's in_proj_qkvz."""
    sizes = model.linear_attention
    assert sizes is not None
    width = sizes.sections[2] // sizes.num_key_heads
    return sizes.key_size, sizes.key_size, width, width


_QUERIES, _GATES = _deal(_ATTENTION + "q_proj", lambda model: (model.head_size,) * 2, 2)
_SHARED_MODULES: Modules = {
    OUR_LAYER + "attention.qkv": (_QUERIES, _ATTENTION + "k_proj", _ATTENTION + "v_proj", _GATES),
    _OUR_LINEAR: (_LINEAR.removesuffix("."),),  # of A_log and dt_bias
    _OUR_LINEAR + ".qkvz": (_LINEAR + "in_proj_qkv", _LINEAR + "in_proj_z"),
    _OUR_LINEAR + ".ba": (_LINEAR + "in_proj_b", _LINEAR + "in_proj_a"),
    _OUR_LINEAR + ".conv": (_LINEAR + "conv1d",),
    _OUR_LINEAR + ".norm": (_LINEAR + "norm",),
    _OUR_LINEAR + ".dense": (_LINEAR + "out_proj",),
}
_NEXT_MODULES: Modules = {
    _OUR_LINEAR + ".qkvz": _deal(_LINEAR + "in_proj_qkvz", _list_projections, 4),
    _OUR_LINEAR + ".ba": _deal(_LINEAR + "in_proj_ba", _list_strengths, 2),
}


def read_hybrid(
    reader: ConfigReader, activation: str = "silu", num_kv_heads: int = 4
) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that all of these models have.

    The fields of images' positions (M-RoPE) change nothing where there is text alone.
    """
    rotary = {
        name: {k: v for k, v in reader.get_object(name).items() if not k.startswith("mrope_")}
        for name in ("rope_parameters", "rope_scaling")
    }
    values = read_decoder(
        reader.enter({**reader.config, **rotary}), max_positions=32768,
        num_kv_heads=num_kv_heads, head_dim=256, rotary_fraction=0.25,
    )  # fmt: skip
    refuse_unless(reader, "hidden_act", "silu", remedy="hybrids are supported with silu")
    bias, num_layers = reader.get_bool("attention_bias", False), values["num_hidden_layers"]
    types: tuple[Any, ...] = list_layer_types(
        num_layers, reader.get_int("full_attention_interval", 4), kind=LINEAR
    )
    if isinstance(listed_types := reader.config.get("layer_types"), list):
        types = tuple(listed_types)
    if not set(types) <= {LINEAR, FULL} or len(types) != num_layers:
        reader.refuse(
            f"layer_types is {shorten(list(types))} for {num_layers} layers",
            f"hybrids are supported whose layers are {LINEAR} or {FULL}",
        )
    linear_attention = None
    if LINEAR in types:
        linear_attention = LinearAttention(
            num_key_heads=reader.get_int("linear_num_key_heads", 16),
            num_value_heads=reader.get_int("linear_num_value_heads", 32),
            key_size=reader.get_int("linear_key_head_dim", 128),
            value_size=reader.get_int("linear_value_head_dim", 128),
            num_taps=reader.get_int("linear_conv_kernel_dim", 4),
        )
    return {
        **values,
        "linear_attention": linear_attention,
        "layer_types": types if linear_attention is not None else None,
        "own_arithmetic": Architecture(
            qk_norm=True, adds_one=True, qkv_bias=bias, dense_bias=bias, gates_attention=True,
            activations=(activation,), mlp="gated" if activation == "silu" else "experts",
        ),
    }  # fmt: skip


def read_mixture(
    reader: ConfigReader, layout: Layout, *, num: int = 256, top_k: int = 8, is_next: bool = False
) -> dict[str, Any]:
    """Read a mixture's config.json, which need not tell the size of a dense MLP.

    num, top_k: transformers' defaults. is_next: whether it is Qwen3-Next's.
    """
    if not is_next:
        refuse_unless(
            reader, "norm_topk_prob", True,
            remedy="Qwen3.5's mixtures always normalize the weights of the chosen experts: remove"
            " norm_topk_prob",
        )  # fmt: skip
    refuse_uneven_layers(reader)
    inner = reader.get_int("moe_intermediate_size", 512)
    values = read_hybrid(reader.enter({"intermediate_size": inner, **reader.config}), "swiglu", 2)
    return values | read_experts(
        reader, layout, values, num=num, top_k=top_k, inner=("moe_intermediate_size", 512),
        shared_inner=("shared_expert_intermediate_size", 512),
        renormalizes=reader.get_bool("norm_topk_prob", True),
    )  # fmt: skip


def prepare(folder: HfFolder, dtype: str) -> HfFolder:
    """Return the folder with its convolutions as vectors."""
    return flatten_convolutions(folder, ".conv1d.weight")


def describe_hybrid(model: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Add the sizes of linear attention and of experts to a checkpoint's config.json."""
    config = describe_rotary(model, config)
    if model.linear_attention is not None:
        config["linear_attention"] = vars(model.linear_attention)
    return config if model.experts is None else config | describe_sizes(model)


_COMMON: Mapping[str, Any] = {
    "prefixes": ("model.", "model.language_model.", ""), "prepare": prepare,
    "describe": describe_hybrid,
}  # fmt: skip
_MIXTURE_MODULES = BESIDE_MLP | HEAD_NORMS | EXPERTS | SHARED_EXPERT | _SHARED_MODULES
QWEN3_5 = Family(
    name="qwen3_5", model_type="qwen3_5_text", architectures=("Qwen3_5ForCausalLM",),
    modules=MODULES | HEAD_NORMS | _SHARED_MODULES,
    read_config=lambda reader, _: read_hybrid(reader), **_COMMON,
)  # fmt: skip
QWEN3_5_MOE = Family(
    name="qwen3_5_moe", model_type="qwen3_5_moe_text", architectures=("Qwen3_5MoeForCausalLM",),
    modules=_MIXTURE_MODULES, read_config=read_mixture, **_COMMON,
)  # fmt: skip
QWEN3_NEXT = Family(
    name="qwen3_next", architectures=("Qwen3NextForCausalLM",),
    modules=_MIXTURE_MODULES | _NEXT_MODULES, **_COMMON,
    read_config=functools.partial(read_mixture, num=512, top_k=10, is_next=True),
)  # fmt: skip
