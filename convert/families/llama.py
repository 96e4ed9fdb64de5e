"""Llama and models with its tensor names: Mistral, Ministral 1 and 3, Mixtral, Granite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from specdec.model.architectures import Architecture
from specdec.model.config import FULL, SLIDING
from specdec.model.config_reader import BETA, ConfigReader, drop_query_scale

from ..config import MOE_014
from ..hf import HfFolder
from ..plan import SourceRows
from .base import (
    BIASES,
    ROTARY,
    Family,
    FieldReader,
    Layout,
    add_keys,
    decoder,
    describe_rotary,
    get_window,
    read_biases,
    read_decoder,
    read_experts,
    read_windows,
    refuse_layer_types,
)

HF_LAYER, OUR_LAYER = "model.layers.{layer}.", "transformer.layers.{layer}."
Modules = dict[str, tuple[str | SourceRows, ...]]
BESIDE_MLP: Modules = {
    "transformer.vocab_embedding": ("model.embed_tokens",),
    OUR_LAYER + "input_layernorm": (HF_LAYER + "input_layernorm",),
    OUR_LAYER + "attention.qkv": tuple(
        f"{HF_LAYER}self_attn.{projection}_proj" for projection in "qkv"
    ),
    OUR_LAYER + "attention.dense": (HF_LAYER + "self_attn.o_proj",),
    OUR_LAYER + "post_layernorm": (HF_LAYER + "post_attention_layernorm",),
    "transformer.ln_f": ("model.norm",),
    "lm_head": ("lm_head",),
}
MODULES: Modules = BESIDE_MLP | {
    OUR_LAYER + "mlp.fc": (HF_LAYER + "mlp.gate_proj",),
    OUR_LAYER + "mlp.gate": (HF_LAYER + "mlp.up_proj",),
    OUR_LAYER + "mlp.proj": (HF_LAYER + "mlp.down_proj",),
}
describe = add_keys(
    *BIASES, *ROTARY, residual_mlp=False, disable_weight_only_quant_plugin=False,
    moe=dict(MOE_014), remove_duplicated_kv_heads=False,
)  # fmt: skip

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    modules=MODULES,
    read_config=decoder(read_biases, max_positions=2048),
    describe=describe,
)


def window(
    default: int | None, pattern: int | None = None, *, is_uniform: bool = False
) -> FieldReader:
    """Return a reader of a window; default: an absent field's; pattern: see `read_windows`.

    is_uniform: transformers gives it to all layers, whatever `layer_types` says.
    """

    def read(reader: ConfigReader, _: Layout, values: Mapping[str, Any]) -> dict[str, Any]:
        size, num_layers = get_window(reader, default), values["num_hidden_layers"]
        if is_uniform:
            refuse_layer_types(reader, FULL if size is None else SLIDING)
        return read_windows(reader, num_layers, size, pattern=pattern)

    return read


MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    modules=MODULES,
    read_config=decoder(window(4096), max_positions=131072, num_kv_heads=8),
    describe=describe,
)
# Its layers may differ in their window.
MINISTRAL = dataclasses.replace(
    MISTRAL, name="ministral", architectures=("MinistralForCausalLM",),
    written_as="MistralForCausalLM",
)  # fmt: skip


# Absent fields of Ministral 3's rotary embedding.
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, BETA: 0.1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16384,
}  # fmt: skip


def read_ministral3(reader: ConfigReader, _: Layout) -> dict[str, Any]:
    """Read Ministral 3's fields, of which some are in its rotary embedding.

    Its queries are scaled by their positions, which no other family's are.
    """
    name = "rope_parameters" if reader.get_object("rope_parameters") else "rope_scaling"
    rotary = reader.enter(reader.get_object(name) or YARN)
    values = read_decoder(
        reader.enter(drop_query_scale({**reader.config, name: rotary.config})),
        norm_epsilon=("rms_norm_eps", 1e-5), max_positions=262144, num_kv_heads=8,
        absent_head_dim=128,
    )  # fmt: skip
    values |= window(None, is_uniform=True)(reader, _, values)
    values["own_arithmetic"] = Architecture()
    if rotary.config.get(BETA) not in (None, 0):
        values["query_scaling_beta"] = rotary.get_float(BETA)
        length = "original_max_position_embeddings"
        scaling = values["rotary_scaling"] or {}
        # transformers gives YaRN without a length that of the model.
        is_yarn = scaling.get("rope_type") == "yarn"
        whole_length = values["max_position_embeddings"] if is_yarn else None
        absent_length = scaling.get(length, whole_length)  # which may stand outside of the scaling
        values[length] = rotary.get_int(length, absent_length, minimum=2)
    return values


MINISTRAL_3 = Family(
    name="ministral3",
    architectures=("Ministral3ForCausalLM",),
    modules=MODULES,
    read_config=read_ministral3,
    describe=add_keys("query_scaling_beta", base=describe_rotary),
)


def experts(**defaults: Any) -> FieldReader:
    """Return a reader of a mixture of experts; see `read_experts`."""
    return lambda reader, layout, values: read_experts(reader, layout, values, **defaults)


def restore_names(folder: HfFolder, dtype: str) -> HfFolder:
    """Give Mixtral's experts their stored names, which transformers 5 changes in memory."""
    names = {name: name.replace(".mlp.", ".block_sparse_moe.") for name in folder.tensors}
    folder.rename(names, left_out=())
    return folder


_EXPERTS = HF_LAYER + "block_sparse_moe."
_EXPERT = _EXPERTS + "experts.{expert}."
MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    modules=BESIDE_MLP | {
        OUR_LAYER + "mlp.router": (_EXPERTS + "gate",),
        # The matrix of each expert whose output is multiplied, then the one that is activated.
        OUR_LAYER + "mlp.fc": (_EXPERT + "w3", _EXPERT + "w1"),
        OUR_LAYER + "mlp.proj": (_EXPERT + "w2",),
    },
    prepare=restore_names,
    read_config=decoder(
        window(None, is_uniform=True), experts(num=8, top_k=2, renormalizes=True),
        norm_epsilon=("rms_norm_eps", 1e-5), max_positions=131072, num_kv_heads=8, rotary_base=1e6,
    ),
    describe=describe,
)  # fmt: skip


def read_multipliers(
    reader: ConfigReader, _: Layout, values: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Read the factors of Granite's embeddings, scores, residuals and logits."""
    for name in ("attention_multiplier", "embedding_multiplier", "residual_multiplier",
                 "logits_scaling"):  # fmt: skip
        if reader.config.get(name, 1.0) is None:
            reader.refuse(f"{name} is null", f"give the model's {name}")
    # TensorRT-LLM has that of scores alongside 1 / sqrt(head_size). Its own converter takes an
    # attention_multiplier of 1 for none, and scores are then divided.
    attention = reader.get_float("attention_multiplier", 1.0) * math.sqrt(values["head_size"])
    return {
        "embedding_multiplier": reader.get_float("embedding_multiplier", 1.0),
        "attention_multiplier": attention,
        "residual_multiplier": reader.get_float("residual_multiplier", 1.0),
        "output_multiplier_scale": 1.0 / reader.get_float("logits_scaling", 1.0),
    }


MULTIPLIERS = (
    "embedding_multiplier", "attention_multiplier", "residual_multiplier",
    "output_multiplier_scale",
)  # fmt: skip
GRANITE = Family(  # the dense ones of Granite 3
    name="granite",
    architectures=("GraniteForCausalLM",),
    modules=MODULES,
    read_config=decoder(read_biases, read_multipliers, max_positions=2048),
    describe=add_keys(*MULTIPLIERS, base=describe),
)  # fmt: skip
