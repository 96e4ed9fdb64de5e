"""Gemma 4: dense ones, a mixture of experts, and E2B and E4B, whose layers read tables of tokens.

Layers of full attention have larger heads, fewer keys, and values that may be the keys before they
are normed and rotated. The last layers of E2B and E4B read the keys and values of earlier ones.
"""

from __future__ import annotations

import re
from typing import Any

from specdec.errors import shorten
from specdec.model.architectures import Architecture
from specdec.model.config import FULL, SLIDING, ModelConfig, list_layer_types
from specdec.model.config_reader import ConfigReader
from specdec.model.experts import Experts
from specdec.model.layer_sizes import LayerSizes

from ..hf import HfFolder
from .base import (
    Family,
    Layout,
    describe_rotary,
    get_window,
    read_decoder,
    refuse_unless,
)
from .gemma import read_cap, refuse_two_directions
from .llama import HF_LAYER, MODULES, OUR_LAYER, Modules
from .qwen import HEAD_NORMS, describe_sizes

ACTIVATION = "gelu_pytorch_tanh"
# Absent rotary embeddings.
ROTARY = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_BEHIND = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_INPUTS: Modules = {
    "transformer.layer_inputs": ("model.embed_tokens_per_layer",),
    "transformer.layer_input_proj": ("model.per_layer_model_projection",),
    "transformer.layer_input_norm": ("model.per_layer_projection_norm",),
    OUR_LAYER + "input_gate": (HF_LAYER + "per_layer_input_gate",),
    OUR_LAYER + "input_proj": (HF_LAYER + "per_layer_projection",),
    OUR_LAYER + "post_input_layernorm": (HF_LAYER + "post_per_layer_input_norm",),
}
_OUR_MLP, _EXPERT = OUR_LAYER + "mlp.", HF_LAYER + "experts.{expert}."
_MIXTURE: Modules = {
    _OUR_MLP + "post_layernorm": (HF_LAYER + "post_feedforward_layernorm_1",),
    _OUR_MLP + "router": (HF_LAYER + "router",),
    # The matrix of each expert whose output is multiplied, then the one that is activated.
    _OUR_MLP + "experts.fc": (_EXPERT + "up_proj", _EXPERT + "gate_proj"),
    _OUR_MLP + "experts.proj": (_EXPERT + "down_proj",),
    _OUR_MLP + "experts.pre_layernorm": (HF_LAYER + "pre_feedforward_layernorm_2",),
    _OUR_MLP + "experts.post_layernorm": (HF_LAYER + "post_feedforward_layernorm_2",),
}
MODULES4: Modules = {
    **MODULES, **HEAD_NORMS, **_INPUTS, **_MIXTURE,
    **{OUR_LAYER + name: (HF_LAYER + name,) for name in _BEHIND},
    OUR_LAYER + "scalar": (HF_LAYER + "layer_scalar",),
    OUR_LAYER + "attention.q": (HF_LAYER + "self_attn.q_proj",),
}  # fmt: skip
# Modules that layers with earlier ones' keys are stored with, and that no class reads.
_TENSOR = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(\w+)\.")
UNREAD = ("k_proj", "v_proj", "k_norm", "v_norm")


def read_layer_types(reader: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Read the types of layers: the last sees all tokens, and by default every sixth."""
    types = list_layer_types(num_layers, 6)
    if isinstance(listed_types := reader.config.get("layer_types"), list):
        types = tuple(str(kind) for kind in listed_types)
    return (*types[:-1], FULL)


def read_rotary_values(reader: ConfigReader, types: tuple[str, ...]) -> dict[str, Any]:
    """Read the rotary embeddings of both kinds of layers, as fields of `ModelConfig`.

    Each kind that there is has an object of its own; no other key says anything of it.
    """
    refuse_unless(
        reader, "rope_scaling", remedy=f"give rope_parameters an object for {FULL} and {SLIDING}"
    )
    parameters = reader.get_object("rope_parameters") or ROTARY
    objects = {
        kind: reader.enter(parameters).get_object(kind) if kind in types else ROTARY[kind]
        for kind in (FULL, SLIDING)
    }
    for kind, values in objects.items():
        if values.get("rope_theta") is None:
            reader.refuse(
                f"rope_parameters has no rope_theta of {kind}: {shorten(parameters)}",
                "copy or download the model's config.json again",
            )
    kinds = {kind: values.get("rope_type", "default") for kind, values in objects.items()}
    if kinds[SLIDING] != "default" or kinds[FULL] not in ("default", "proportional"):
        reader.refuse(
            f"rope_parameters has the types {shorten(kinds)}",
            f"layers of {SLIDING} are supported as default, of {FULL} as proportional",
        )
    full, local = (reader.enter(objects[kind]) for kind in (FULL, SLIDING))
    scaling = None
    if kinds[FULL] == "proportional":
        scaling = {"rope_type": "proportional"} | {
            name: full.get_float(name, 1.0) for name in ("partial_rotary_factor", "factor")
        }
    return {
        "rotary_base": full.get_float("rope_theta", 1e6), "rotary_scaling": scaling,
        "rope_local_base_freq": local.get_float("rope_theta", 10000.0), "rotary_pct": 1.0,
    }  # fmt: skip


def read_full_heads(reader: ConfigReader, types: tuple[str, ...], kv_heads: int) -> tuple[int, int]:
    """Read the size of the heads of full attention, and the number of their keys.

    transformers 5 saves them as overrides of each layer, and no longer under their own names.
    """
    overrides = reader.get_object("per_layer_config")
    if reader.config.get("per_layer_config") is None:
        has_own_number = reader.get_bool("attention_k_eq_v", False)
        name = "num_global_key_value_heads" if has_own_number else "num_key_value_heads"
        return reader.get_int("global_head_dim", 512), reader.get_int(name, kv_heads)
    size = reader.get_int("head_dim", 256)
    if not overrides:  # all layers are alike
        return size, kv_heads
    full_layers = [layer for layer, kind in enumerate(types) if kind == FULL]
    names = {"head_dim", "num_key_value_heads"}
    first_key = next(iter(overrides))
    first = reader.enter(overrides).get_object(first_key)
    layers = sorted(int(key) for key in overrides if key.isdecimal())  # with zeros before some
    is_even = layers == full_layers and all(other == first for other in overrides.values())
    if not is_even or not first.keys() <= names:
        reader.refuse(
            f"per_layer_config is {shorten(overrides)}",
            f"models are supported whose layers of {FULL} have heads of their own, all alike",
        )
        return 1, 1
    inner = reader.enter(first)
    return (
        inner.get_int("head_dim", size),
        inner.get_int("num_key_value_heads", kv_heads),
    )


def read_mixture(reader: ConfigReader, layout: Layout) -> Experts | None:
    """Read the experts beside the MLP of each layer; None where there are none."""
    if not reader.get_bool("enable_moe_block", False):
        return None
    tp_size, ep_size = layout.split_experts()
    return Experts(
        num=reader.get_int("num_experts"), top_k=reader.get_int("top_k_experts"),
        inner=reader.get_int("moe_intermediate_size"), tp_size=tp_size, ep_size=ep_size,
    )  # fmt: skip


def read_gemma4(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read Gemma 4's fields as `ModelConfig` names them."""
    refuse_unless(
        reader,
        "hidden_activation",
        ACTIVATION,
        remedy="Gemma's activation is the tanh form of gelu, gelu_pytorch_tanh",
    )
    if reader.config.get("use_bidirectional_attention") != "vision":  # of images' tokens alone
        refuse_two_directions(reader)
    has_tables = reader.config.get("model_type") != "gemma4_unified_text"  # that of 12B has none
    plain = {**reader.config, "hidden_act": ACTIVATION, "rope_parameters": None}
    values = read_decoder(
        reader.enter(plain),
        max_positions=131072 if has_tables else 262144,
        num_kv_heads=4,
        head_dim=256,
    )
    num_layers, kv_heads = values["num_hidden_layers"], values["num_key_value_heads"]
    types = read_layer_types(reader, num_layers)
    values |= read_rotary_values(reader, types)
    head_size, full_kv_heads = read_full_heads(reader, types, kv_heads)
    num_reusing = reader.get_int("num_kv_shared_layers", 0, minimum=0)
    is_wide = reader.get_bool("use_double_wide_mlp", False)
    input_size = reader.get_int("hidden_size_per_layer_input", 256 if has_tables else 0, minimum=0)
    if input_size and not has_tables:
        reader.refuse(
            f"hidden_size_per_layer_input is {input_size}, and models of type"
            f" {reader.config['model_type']} have no such tables",
            "remove the wrong one",
        )
    experts = read_mixture(reader, layout)
    bias = reader.get_bool("attention_bias", False)
    if bias:
        reader.refuse("attention_bias is true", "Gemma 4 is supported without biases")
    return values | {
        "layer_sizes": LayerSizes(
            full_head_size=head_size, full_num_kv_heads=full_kv_heads, num_reusing=num_reusing,
            reusing_inner=values["intermediate_size"] * (2 if is_wide else 1) if num_reusing else 0,
            input_size=input_size,
            input_vocab_size=reader.get_int("vocab_size_per_layer_input", 262144, minimum=0)
            if input_size else 0,
        ),
        "layer_types": types,
        "sliding_window": get_window(reader, 512 if has_tables else 1024),
        "query_pre_attn_scalar": 1.0,
        "final_logit_softcapping": read_cap(reader, "final_logit_softcapping", None),
        "experts": experts,
        "own_arithmetic": Architecture(
            scales_embedding=True, activations=(ACTIVATION,), inner_norms=True, qk_norm=True,
            qkv_bias=False, dense_bias=False, mlp_bias=False, norms_values=True, scales_layers=True,
            adds_experts=experts is not None,
        ),
    }  # fmt: skip


def prepare(folder: HfFolder, dtype: str) -> HfFolder:
    """Give values that are the keys a name of their own, and leave out what no layer reads."""
    config = folder.config
    num_layers, num_reusing = config.get("num_hidden_layers"), config.get("num_kv_shared_layers")
    if type(num_layers) is not int or type(num_reusing) not in (int, type(None)):
        return folder  # which is told when the fields are read
    unread, values = _find_unread(folder, num_layers, num_layers - (num_reusing or 0))
    folder.rename({name: _name_tensor(name) for name in folder.tensors}, left_out=unread)
    folder.repeat(values)
    return folder


def _find_unread(
    folder: HfFolder, num_layers: int, first_reader: int
) -> tuple[set[str], dict[str, str]]:
    """Find tensors that no layer reads, and those of keys that are values, by these' names.

    first_reader: the first layer that reads the keys and values of earlier ones.
    """
    types = read_layer_types(ConfigReader(folder.config, folder.path), num_layers)
    has_equal = folder.config.get("attention_k_eq_v") is True
    unread, values = set(), dict[str, str]()
    for name in folder.tensors:
        if (match := _TENSOR.search(name)) is None or int(match[1]) >= num_layers:
            continue
        layer, module = int(match[1]), match[2]
        is_equal, is_reader = has_equal and types[layer:][:1] == (FULL,), layer >= first_reader
        if (is_reader and module in UNREAD) or (is_equal and module == "v_proj"):
            unread.add(name)
        elif is_equal and module == "k_proj":
            values[name.replace("k_proj", "v_proj")] = name
    return unread, values


def _name_tensor(name: str) -> str:
    """Return a tensor's name, of one module and its kind of number."""
    if name.endswith(".layer_scalar"):
        return f"{name}.weight"
    return name.replace(".router.proj.", ".router.")


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the sizes of layers, and what a checkpoint of a Gemma has."""
    config = describe_rotary(model, config) | {
        "layer_sizes": vars(model.layer_sizes),
        "query_pre_attn_scalar": model.query_pre_attn_scalar,
        "final_logit_softcapping": model.final_logit_softcapping,
        "rope_local_base_freq": model.rope_local_base_freq,
    }
    return config if model.experts is None else config | describe_sizes(model)


GEMMA4 = Family(
    name="gemma4",
    model_type="gemma4_text",
    architectures=("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"),
    modules=MODULES4,
    is_tied_by_default=True,
    prepare=prepare,
    read_config=read_gemma4,
    describe=describe,
)
