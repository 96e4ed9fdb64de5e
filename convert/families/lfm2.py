"""LFM2 and LFM2.5, and their mixtures of experts: most layers have a short convolution.

The others norm and rotate queries and keys. The first layers of a mixture have an MLP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specdec.errors import shorten
from specdec.model.architectures import Architecture
from specdec.model.bounds import MAX_MODULES
from specdec.model.config import CONV, FULL, ModelConfig
from specdec.model.config_reader import ConfigReader
from specdec.model.short_conv import KEY, ShortConvSizes

from ..hf import HfFolder
from .base import Family, Layout, describe_rotary, read_decoder, read_experts
from .convolutions import flatten_convolutions
from .llama import HF_LAYER, OUR_LAYER, Modules

_MLP, _CONV, _OUR_CONV = HF_LAYER + "feed_forward.", HF_LAYER + "conv.", OUR_LAYER + "short_conv."
_EXPERT = _MLP + "experts.{expert}."
BESIDE_MLP: Modules = {
    "transformer.vocab_embedding": ("model.embed_tokens",),
    OUR_LAYER + "input_layernorm": (HF_LAYER + "operator_norm",),
    OUR_LAYER + "attention.qkv": tuple(f"{HF_LAYER}self_attn.{name}_proj" for name in "qkv"),
    OUR_LAYER + "attention.dense": (HF_LAYER + "self_attn.out_proj",),
    OUR_LAYER + "attention.q_layernorm": (HF_LAYER + "self_attn.q_layernorm",),
    OUR_LAYER + "attention.k_layernorm": (HF_LAYER + "self_attn.k_layernorm",),
    _OUR_CONV + "in_proj": (_CONV + "in_proj",),
    _OUR_CONV + "conv": (_CONV + "conv",),
    _OUR_CONV + "dense": (_CONV + "out_proj",),
    OUR_LAYER + "post_layernorm": (HF_LAYER + "ffn_norm",),
    "transformer.ln_f": ("model.embedding_norm",),
    "lm_head": ("lm_head",),
}
MODULES: Modules = BESIDE_MLP | {
    OUR_LAYER + "mlp.fc": (_MLP + "w1",),
    OUR_LAYER + "mlp.gate": (_MLP + "w3",),
    OUR_LAYER + "mlp.proj": (_MLP + "w2",),
}
MIXTURE_MODULES: Modules = BESIDE_MLP | {
    OUR_LAYER + "mlp.dense.fc": (_MLP + "w1", _MLP + "w3"),
    OUR_LAYER + "mlp.dense.proj": (_MLP + "w2",),
    OUR_LAYER + "mlp": (_MLP.removesuffix("."),),  # of the bias of the experts' scores
    OUR_LAYER + "mlp.router": (_MLP + "gate",),
    # The matrix of each expert whose output is multiplied, then the one that is activated.
    OUR_LAYER + "mlp.fc": (_EXPERT + "w3", _EXPERT + "w1"),
    OUR_LAYER + "mlp.proj": (_EXPERT + "w2",),
}
SUM_EPSILON = 1e-6  # of the weights of a token's experts, before they are divided by their sum


def read_layers(reader: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Read which layers attend: `layer_types`, or their numbers, or else all."""
    types, indices = reader.config.get("layer_types"), reader.config.get("full_attn_idxs")
    layers = range(min(num_layers, MAX_MODULES))
    if types is None and isinstance(indices, list):
        types = [FULL if layer in indices else CONV for layer in layers]
    elif types is None:
        types = [FULL for _ in layers]
    is_known = isinstance(types, list) and all(kind in (FULL, CONV) for kind in types)
    if not is_known or len(types) != num_layers:
        reader.refuse(
            f"layer_types is {shorten(types)} for {num_layers} layers",
            f"hybrids are supported whose layers are {CONV} or {FULL}",
        )
        types = [FULL for _ in layers]
    return tuple(types)


def read_inner(reader: ConfigReader) -> int:
    """Read the size of an MLP, which is made of another by default.

    Of two names for that one the older is taken, as transformers takes it.
    """
    name = "block_ff_dim" if "block_ff_dim" in reader.config else "intermediate_size"
    size = reader.get_int(name, 12288)
    if not reader.get_bool("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    multiplier = reader.config.get("block_ffn_dim_multiplier", 1.0)
    if multiplier is None:
        return size
    size = int(reader.get_float("block_ffn_dim_multiplier", 1.0) * size)
    multiple = reader.get_int("block_multiple_of", 256)
    return multiple * -(-size // multiple)


def read_hybrid(reader: ConfigReader, inner: int, arithmetic: Architecture) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that dense models and mixtures have alike.

    inner: the size of an MLP.
    """
    values = read_decoder(
        reader.enter({**reader.config, "intermediate_size": inner}), num_kv_heads=8,
        norm_epsilon=("norm_eps", 1e-5), max_positions=128000, rotary_base=1e6,
    )  # fmt: skip
    types, conv = read_layers(reader, values["num_hidden_layers"]), None
    if CONV in types:
        conv = ShortConvSizes(
            num_channels=values["hidden_size"],
            num_taps=reader.get_int("conv_L_cache", 3),
            has_bias=reader.get_bool("conv_bias", False),
        )
    return {
        **values, "hidden_act": arithmetic.activations[0], "own_arithmetic": arithmetic,
        "short_conv": conv, "layer_types": types if conv is not None else None,
    }  # fmt: skip


def read_dense(reader: ConfigReader, _: Layout) -> dict[str, Any]:
    """Read a dense model's config.json."""
    arithmetic = Architecture(qk_norm=True, qkv_bias=False, dense_bias=False, mlp_bias=False)
    return read_hybrid(reader, read_inner(reader), arithmetic)


def read_mixture(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a mixture's config.json."""
    arithmetic = Architecture(
        qk_norm=True, qkv_bias=False, dense_bias=False, mlp="experts", activations=("swiglu",)
    )
    values = read_hybrid(reader, reader.get_int("intermediate_size", 7168), arithmetic)
    fields = read_experts(
        reader, layout, values | {"hidden_act": "silu"}, num=32, top_k=4,
        renormalizes=reader.get_bool("norm_topk_prob", True),
        inner=("moe_intermediate_size", 1792),
    )  # fmt: skip
    num_layers, num_dense = values["num_hidden_layers"], reader.get_int(
        "num_dense_layers", 2, minimum=0
    )  # fmt: skip
    experts = dataclasses.replace(
        fields["experts"], scores="sigmoid", sum_epsilon=SUM_EPSILON,
        has_score_bias=reader.get_bool("use_expert_bias", True),
        weight_scale=reader.get_float("routed_scaling_factor", 1.0),
        num_dense_layers=min(num_layers, num_dense),
    )  # fmt: skip
    return values | fields | {"experts": experts}


def prepare(folder: HfFolder, dtype: str) -> HfFolder:
    """Return the folder with its convolutions as vectors.

    The mark of a tied head stands under the first name that is there, as in transformers.
    """
    prepared = flatten_convolutions(folder, ".conv.conv.weight")
    if "tie_embedding" in folder.config:
        prepared.config = folder.config | {"tie_word_embeddings": folder.config["tie_embedding"]}
    return prepared


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the sizes of convolutions and of experts to a checkpoint's config.json."""
    config = describe_rotary(model, config)
    if model.short_conv is not None:
        config[KEY] = vars(model.short_conv)
    if model.experts is not None:
        config["moe_intermediate_size"] = model.experts.inner
    return config


_COMMON: Mapping[str, Any] = {
    "prepare": prepare, "describe": describe, "is_tied_by_default": True,
}  # fmt: skip
LFM2 = Family(
    name="lfm2", architectures=("Lfm2ForCausalLM",), modules=MODULES, read_config=read_dense,
    **_COMMON,
)  # fmt: skip
LFM2_MOE = Family(
    name="lfm2_moe", architectures=("Lfm2MoeForCausalLM",), modules=MIXTURE_MODULES,
    read_config=read_mixture, **_COMMON,
)  # fmt: skip
