"""The metadata of a GGUF file as the config.json of a Hugging Face folder.

The meaning of keys is llama.cpp's at 0c1e57098 (src/llama-model.cpp and src/models/). A key of the
architecture that is not read here is an error, since it may change what the model computes.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specdec.errors import SpecDecError, shorten
from specdec.model.bounds import MAX_MODULES, MAX_SIZE
from specdec.model.config import CONV, FULL, LINEAR, MAMBA, SLIDING, list_layer_types
from specdec.model.rotary_scaling import find_scaling_problems

from .file import PLAIN, StoredTensor
from .gemma4 import read_gemma4, read_gemma4_sizes
from .metadata import Metadata
from .names import GRANITE_DENSE, GRANITE_SHARED, MISTRAL, MIXTRAL, READ, GgufArchitecture

CONVOLVING = ("lfm2", "lfm2moe")  # architectures of which some layers have a short convolution
STATEFUL = (*CONVOLVING, "granitehybrid")  # whose layers without keys have no heads of them
# Whose config.json means a part of each head where it does not say how much is rotated.
PARTIAL = ("stablelm", "qwen35", "qwen35moe", "qwen3next")
ASSISTANT = "gemma4-assistant"
# The converter writes them for a Granite 4 whose layers all attend, too, and then none reads them.
MAMBA_KEYS = tuple(
    f"ssm.{name}"
    for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
)
SIGMOID = 2  # llama.cpp's number of a function of the router's outputs
TOLERANCE = 1e-5  # of the factors that a llama3 scaling gives, which were computed in float32


def find_architecture(data: Metadata) -> GgufArchitecture:
    """Find the architecture of a file's model; raise SpecDecError for one that is not read."""
    kind = data.values.get("general.type", "model")
    if kind != "model":
        raise SpecDecError(
            f"{data.path} is no model but what goes with one: {data.name} ({shorten(kind)})",
            "take the model's own file; specdec-convert --lora-dir merges a LoRA adapter as PEFT"
            " writes it",
        )
    if data.name == ASSISTANT:
        raise SpecDecError(
            f"{data.path} holds a Gemma 4's assistant ({ASSISTANT}), which is read from its Hugging"
            " Face folder alone",
            "give that folder as specdec-convert's --mtp-assistant-model-dir; llama.cpp's converter"
            " leaves out the centroids of E2B's and E4B's",
        )
    if data.name not in READ:
        raise SpecDecError(
            f"{data.path} holds an architecture that is not read: {data.name}",
            f"these are: {', '.join(READ)}",
        )
    return _find_variant(data) or READ[data.name]


def _find_variant(data: Metadata) -> GgufArchitecture | None:
    """Find the architecture of a file whose name has several; None for the usual one."""
    if data.name == "llama" and data.get("expert_count", 0):
        return MIXTRAL
    if data.name == "llama" and data.get("attention.sliding_window"):
        return MISTRAL
    if data.name == "granitemoe" and data.get("expert_shared_feed_forward_length"):
        return GRANITE_SHARED
    if data.name == "granitehybrid" and not data.get("expert_count", 0):
        return GRANITE_DENSE
    marks = ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier")
    if data.name == "mistral3" and not any(data.get(key) for key in marks):
        return MISTRAL  # Mistral Small 3
    return None


def read_config(data: Metadata, architecture: GgufArchitecture) -> dict[str, Any]:
    """Return a config.json without the ids of special tokens."""
    embedding = data.tensors.get("token_embd.weight")
    if embedding is None:
        raise SpecDecError(
            f"{data.path} holds no token_embd.weight", "take a file of a whole model"
        )
    hidden, num_heads = data.count("embedding_length"), data.count("attention.head_count")
    num_layers = data.count("block_count", maximum=MAX_MODULES)
    config: dict[str, Any] = {
        "architectures": [architecture.architecture],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": data.count("context_length"),
        "rope_theta": data.positive("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in data.tensors,
        "dtype": choose_dtype(data.tensors),
    }
    if data.name == "gemma4":
        config |= read_gemma4_sizes(data, num_layers)
    else:
        config |= _read_sizes(data, architecture, max(1, hidden // num_heads), num_heads)
    if data.name == "stablelm":
        config["layer_norm_eps"] = data.need("attention.layer_norm_epsilon")
    else:
        name = "norm_eps" if data.name in CONVOLVING else "rms_norm_eps"
        config[name] = data.need("attention.layer_norm_rms_epsilon")
    head_dim = config.get("global_head_dim", config["head_dim"])
    rotated = data.count("rope.dimension_count", head_dim)
    if rotated != head_dim or data.name in PARTIAL:
        config["partial_rotary_factor"] = rotated / head_dim
    if scaling := read_scaling(data, config, rotated):
        config["rope_scaling"] = scaling
    if (read_extra := EXTRA_READERS.get(architecture.model_type)) is not None:
        config |= read_extra(data, config)
    data.check_rest()
    return config


def _read_sizes(
    data: Metadata, architecture: GgufArchitecture, head_dim: int, num_heads: int
) -> dict[str, Any]:
    """Read the sizes of heads and MLPs of layers that are alike.

    head_dim: what the size of a head is where no key says it.
    """
    head_dim = data.count("attention.key_length", head_dim)
    if data.get("attention.value_length", head_dim) != head_dim:
        data.refuse("its keys and values differ in size")
    sizes = {"num_key_value_heads": _count_kv_heads(data, num_heads), "head_dim": head_dim}
    if data.get("feed_forward_length") or "ffn_gate_exps" not in architecture.modules:
        sizes["intermediate_size"] = data.count("feed_forward_length")
    return sizes


def _count_kv_heads(data: Metadata, num_heads: int) -> int:
    """Return the heads of keys of each layer; those of a layer with a state, 0, do not count."""
    key = "attention.head_count_kv"
    counts = data.get(key, all_layers=True)
    if data.name not in STATEFUL or not isinstance(counts, list):
        return data.count(key, num_heads)
    different_counts = {count for count in counts if count != 0} or {1}
    count = different_counts.pop()
    if different_counts or type(count) is not int or not 1 <= count <= MAX_SIZE:
        data.refuse(f"{data.name}.{key} is {shorten(counts)}")
    return count


def choose_dtype(tensors: Mapping[str, StoredTensor]) -> str:
    """Choose the type that most numbers have; bfloat16 where most are in blocks."""
    sizes = collections.Counter[str]()
    for stored in tensors.values():
        sizes[PLAIN.get(stored.kind, "bfloat16")] += math.prod(stored.shape)
    return sizes.most_common(1)[0][0]


# ---- The rotary embedding.


def read_scaling(data: Metadata, config: Mapping[str, Any], rotated: int) -> dict[str, Any] | None:
    """Read the scaling of rotary frequencies as transformers has it, None where there is none."""
    kind = data.get("rope.scaling.type", "linear")
    factor = data.get("rope.scaling.factor", data.get("rope.scale_linear", 0.0)) or 1.0
    scalings: list[dict[str, Any]] = []
    if "rope_freqs.weight" in data.tensors:
        scalings += _fit_factors(data, config["rope_theta"], rotated)
    if "rope_factors_long.weight" in data.tensors:
        scalings.append(_read_longrope(data, config))
    elif kind == "yarn":
        scalings.append({"rope_type": "yarn", "factor": factor} | {
            field: data.get(key) for field, key in {
                "original_max_position_embeddings": "rope.scaling.original_context_length",
                "beta_fast": "rope.scaling.yarn_beta_fast",
                "beta_slow": "rope.scaling.yarn_beta_slow",
            }.items() if data.get(key) is not None
        })  # fmt: skip
    elif kind == "linear" and factor != 1:
        scalings.append({"rope_type": "linear", "factor": factor})
    elif kind not in ("linear", "none"):
        data.refuse(f"rope.scaling.type is {shorten(kind)}")
    if len(scalings) > 1:
        data.refuse(f"it scales rotary frequencies in {len(scalings)} ways: {shorten(scalings)}")
    return scalings[0] if scalings else None


def _read_longrope(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    original = data.count("rope.scaling.original_context_length")
    # In the three fields that transformers 4 asks for; the length is alongside, see _read_phi3.
    scaling: dict[str, Any] = {"type": "longrope"}
    for kind in ("short", "long"):
        factors = data.read_factors(f"rope_factors_{kind}.weight").astype(np.float32)
        scaling[f"{kind}_factor"] = [float(str(factor)) for factor in factors]
    attention_factor = data.positive("rope.scaling.attn_factor", 1.0)
    ratio = config["max_position_embeddings"] / original
    usual_factor = math.sqrt(1 + math.log(ratio) / math.log(max(2, original))) if ratio > 1 else 1.0
    return (
        scaling
        if abs(attention_factor - usual_factor) < 1e-6 * usual_factor
        else scaling | {"attention_factor": attention_factor}
    )


def _fit_factors(data: Metadata, base: float, rotated: int) -> list[dict[str, Any]]:
    """Compute the llama3 scaling that divides the frequencies by the file's rope_freqs.

    Those of Gemma 4 are but its layers' of full attention, see `read_gemma4`.

    Between the two ends a factor tells the frequency's place: 1 / factor is linear in it.
    """
    if data.name == "gemma4":
        return []
    factors = data.read_factors("rope_freqs.weight")
    if 2 * len(factors) != rotated:
        data.refuse(f"rope_freqs has {len(factors)} factors for {rotated} rotated dimensions")
    if np.all(factors == 1):
        return []
    lengths = 2 * math.pi * base ** (np.arange(0, rotated, 2) / rotated)
    factor = factors.max()
    is_between = (factors > 1 + TOLERANCE) & (factors < factor * (1 - TOLERANCE))
    if is_between.sum() < 2:
        data.refuse("rope_freqs has fewer than two factors between 1 and the largest")
    fractions = (1 / factors[is_between] - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(1 / lengths[is_between], fractions, 1)
    original, high = round(-slope / offset), round((1 - 1 / offset) * 1e4) / 1e4
    scaling = {
        "rope_type": "llama3", "factor": round(float(factor), 4), "low_freq_factor": 1.0,
        "high_freq_factor": float(high), "original_max_position_embeddings": int(original),
    }  # fmt: skip
    fraction = np.clip((original / lengths - 1.0) / (high - 1.0), 0, 1)
    computed = 1 / ((1 - fraction) / scaling["factor"] + fraction)
    if find_scaling_problems(scaling, rotary_size=rotated, rotary_base=base, max_positions=1 << 30):
        data.refuse("rope_freqs is no scaling that is known")
    if not np.allclose(computed, factors, rtol=TOLERANCE, atol=0):
        data.refuse("rope_freqs is no scaling of the kind llama3")
    return [scaling]


# ---- What an architecture has besides.

ExtraReader = Callable[[Metadata, dict[str, Any]], dict[str, Any]]


def _has_bias(data: Metadata, module: str, layer: int = 0) -> bool:
    fused = "attn_qkv" if module == "attn_q" else module  # --fuse-qkv of llama.cpp's converter
    return any(f"blk.{layer}.{name}.bias" in data.tensors for name in (module, fused))


def _read_biases(data: Metadata, _: object) -> dict[str, Any]:
    return {"attention_bias": _has_bias(data, "attn_q"), "mlp_bias": _has_bias(data, "ffn_gate")}


def _read_experts(data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    count, top = data.count("expert_count"), data.count("expert_used_count")
    if config["model_type"] == "mixtral":
        return {"num_local_experts": count, "num_experts_per_tok": top}
    inner = data.count(
        "expert_feed_forward_length", max(1, config.get("intermediate_size", 1) // top)
    )
    fields = {
        "num_experts": count, "num_experts_per_tok": top, "moe_intermediate_size": inner,
        "norm_topk_prob": data.name != "qwen2moe", "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    if data.name not in ("qwen3moe", "qwen3vlmoe"):
        size = data.get("expert_shared_feed_forward_length", config.get("intermediate_size"))
        return fields | {"shared_expert_intermediate_size": size}
    return fields | {"attention_bias": _has_bias(data, "attn_q")}


def _read_gpt_oss(data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Read gpt-oss's experts, window and scaling, of which a file does not tell `truncate`."""
    data.get("feed_forward_length")  # what experts have a key of their own for
    if data.positive("rope.freq_base_swa", config["rope_theta"]) != config["rope_theta"]:
        data.refuse("its layers differ in rope.freq_base")
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling = {**scaling, "truncate": False}
    return _read_pattern(data, config, 2) | {
        "num_local_experts": data.count("expert_count"),
        "rope_scaling": scaling,
        "num_experts_per_tok": data.count("expert_used_count"),
        "intermediate_size": data.count("expert_feed_forward_length"),
        "sliding_window": data.count("attention.sliding_window"),
        "attention_bias": _has_bias(data, "attn_q"),
    }


def _read_pattern(data: Metadata, config: dict[str, Any], period: int) -> dict[str, Any]:
    """Read which layers have the window: all but one of `period`, if nothing else is said."""
    pattern = data.get("attention.sliding_window_pattern", period, all_layers=True)
    layers = range(config["num_hidden_layers"])
    if not isinstance(pattern, list) and (type(pattern) is not int or pattern < 0):
        data.refuse(f"attention.sliding_window_pattern is {shorten(pattern)}")
    # All layers have it where the pattern is 0.
    slides = (
        pattern
        if isinstance(pattern, list)
        else [not pattern or (layer + 1) % pattern for layer in layers]
    )
    return {"layer_types": [SLIDING if is_sliding else FULL for is_sliding in slides]}


def _read_gemma(data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    fields = {
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
        "tie_word_embeddings": True,
    }  # fmt: skip
    if data.name == "gemma":
        return fields | {"hidden_act": "gelu_pytorch_tanh"}
    # llama.cpp takes the hidden size over the heads in the models of 27B alone.
    is_largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[data.name]
    over_heads = config["hidden_size"] // config["num_attention_heads"]
    fields["query_pre_attn_scalar"] = over_heads if is_largest else config["head_dim"]
    if data.name == "gemma2":
        return fields | _read_pattern(data, config, 2) | {
            "attn_logit_softcapping": data.get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": data.get("final_logit_softcapping", 30.0),
            "sliding_window": data.get("attention.sliding_window", 4096),
        }  # fmt: skip
    if not (window := data.get("attention.sliding_window")):
        data.refuse("a Gemma 3 without a window is not read")
    return fields | _read_pattern(data, config, 6) | {
        "final_logit_softcapping": data.get("final_logit_softcapping"),
        "rope_local_base_freq": data.get("rope.freq_base_swa", 10000.0), "sliding_window": window,
    }  # fmt: skip


def _read_phi3(data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    original = data.get("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {
        "sliding_window": data.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
    }


def _read_ministral3(data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    scaling = dict(config.get("rope_scaling") or {"rope_type": "default"})
    if (multiplier := data.get("rope.scaling.yarn_log_multiplier")) and len(scaling) > 1:
        scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    if data.get("attention.temperature_scale"):
        beta = np.float32(data.positive("attention.temperature_scale", 1.0))
        scaling["llama_4_scaling_beta"] = float(str(beta))
    length = "original_max_position_embeddings"
    key, whole_length = "rope.scaling.original_context_length", config["max_position_embeddings"]
    return {"rope_scaling": {length: data.count(key, whole_length), **scaling}}


def _read_granite(data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    if data.get("rope.scaling.finetuned", True) is False:
        data.refuse("a Granite without rotary embedding is not read")
    data.used_keys.update((*MAMBA_KEYS, "expert_shared_feed_forward_length"))
    return _read_biases(data, config) | _read_multipliers(data, config)


def _read_logit_scale(data: Metadata) -> float:
    """Read the divisor of logits, which a file of Granite 4 need not have, or as 0."""
    if data.name == "granitehybrid" and data.get("logit_scale") in (None, 0):
        return 1.0
    data.need("logit_scale")
    return data.positive("logit_scale", 1.0)


def _read_multipliers(data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Read the factors of Granite's embeddings, scores, residuals and logits."""
    return {
        "embedding_multiplier": data.get("embedding_scale") or 1.0,
        "residual_multiplier": data.get("residual_scale") or 1.0,
        "logits_scaling": _read_logit_scale(data),
        "attention_multiplier": data.get("attention.scale") or 1 / math.sqrt(config["head_dim"]),
    }


def _read_hybrid(data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Read the layers of linear attention, and how many layers that draft follow the others."""
    heads, key_heads = data.count("ssm.time_step_rank"), data.count("ssm.group_count")
    if heads % key_heads:
        data.refuse(f"ssm.time_step_rank {heads} is no multiple of ssm.group_count {key_heads}")
    if (width := data.count("ssm.inner_size")) % heads:
        data.refuse(f"ssm.inner_size {width} is no multiple of ssm.time_step_rank {heads}")
    drafting = data.get("nextn_predict_layers", 0) and data.count("nextn_predict_layers")
    num_layers = config["num_hidden_layers"] - drafting
    interval = data.count("full_attention_interval", 4)
    recurrent_layers = data.get("attention.recurrent_layers", all_layers=True)
    types = [*list_layer_types(num_layers, interval, kind=LINEAR)]
    if isinstance(recurrent_layers, list):
        types = [LINEAR if is_recurrent else FULL for is_recurrent in recurrent_layers[:num_layers]]
    fields = {
        "num_hidden_layers": num_layers, "layer_types": types, "mtp_num_hidden_layers": drafting,
        "attention_bias": False,
        "linear_conv_kernel_dim": data.count("ssm.conv_kernel"),
        "linear_key_head_dim": data.count("ssm.state_size"),
        "linear_value_head_dim": width // heads,
        "linear_num_key_heads": key_heads, "linear_num_value_heads": heads,
    }  # fmt: skip
    return fields if data.name == "qwen35" else fields | _read_experts(data, config)


def _read_stateful(data: Metadata, num_layers: int, kind: str) -> list[str]:
    """Read which layers have keys; the others, which have no heads of them, are of a kind."""
    counts = data.get("attention.head_count_kv", all_layers=True)
    counts = counts if isinstance(counts, list) else [1] * num_layers
    if len(counts) != num_layers:
        data.refuse(f"attention.head_count_kv has {len(counts)} numbers for {num_layers} layers")
    return [FULL if count else kind for count in counts]


def _read_granite_moe(data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Read a mixture's experts, and the size of the one that every token takes."""
    shared_inner = data.get("expert_shared_feed_forward_length", 0)
    data.used_keys.update(MAMBA_KEYS)
    if data.name == "granitehybrid" and not data.get("expert_count", 0):
        experts = {"num_local_experts": 0}
        shared_inner = data.count("feed_forward_length")
    else:
        experts = {
            "num_local_experts": data.count("expert_count"),
            "num_experts_per_tok": data.count("expert_used_count"),
        }
    if shared_inner or data.name == "granitehybrid":
        experts["shared_intermediate_size"] = shared_inner
    return (
        _read_multipliers(data, config)
        | experts
        | {
            "attention_bias": any(
                _has_bias(data, "attn_q", n) for n in range(config["num_hidden_layers"])
            )
        }
    )


def _read_granite_hybrid(data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Read the sizes of Mamba-2, and which layers attend."""
    heads, width = data.count("ssm.time_step_rank"), data.count("ssm.inner_size")
    expand = width // config["hidden_size"]
    if width != expand * config["hidden_size"]:
        data.refuse(f"ssm.inner_size {width} is no multiple of {config['hidden_size']} numbers")
    types = _read_stateful(data, config["num_hidden_layers"], MAMBA)
    first = types.index(MAMBA) if MAMBA in types else 0
    is_rotated = data.get("rope.scaling.finetuned", True)
    return _read_granite_moe(data, config) | {
        "layer_types": types, "position_embedding_type": "rope" if is_rotated else "nope",
        "mamba_n_heads": heads, "mamba_d_head": width // heads, "mamba_expand": expand,
        "mamba_n_groups": data.count("ssm.group_count"),
        "mamba_d_state": data.count("ssm.state_size"),
        "mamba_d_conv": data.count("ssm.conv_kernel"),
        "mamba_conv_bias": f"blk.{first}.ssm_conv1d.bias" in data.tensors,
        "mamba_proj_bias": f"blk.{first}.ssm_in.bias" in data.tensors,
    }  # fmt: skip


def _read_lfm2(data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Read which layers have a short convolution, and how a mixture's experts are chosen."""
    num_layers = config["num_hidden_layers"]
    fields = {
        "layer_types": _read_stateful(data, num_layers, CONV), "conv_bias": False,
        "conv_L_cache": data.count("shortconv.l_cache"),
    }  # fmt: skip
    if data.name == "lfm2":
        return fields | {"block_auto_adjust_ff_dim": False}
    if data.need("expert_gating_func") != SIGMOID:
        data.refuse(f"expert_gating_func is {shorten(data.need('expert_gating_func'))}")
    num_dense = data.get("leading_dense_block_count", 0)
    if type(num_dense) is not int or not 0 <= num_dense <= num_layers:
        data.refuse(f"leading_dense_block_count is {shorten(num_dense)}")
    return fields | {
        "num_experts": data.count("expert_count"),
        "num_dense_layers": num_dense,
        "num_experts_per_tok": data.count("expert_used_count"),
        "moe_intermediate_size": data.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "use_expert_bias": True,
    }


def _read_stablelm(data: Metadata, _: object) -> dict[str, Any]:
    # llama.cpp looks for the norm; its converter writes `true` where config.json does not say.
    data.used_keys.add("use_parallel_residual")
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in data.tensors,
        "use_qkv_bias": _has_bias(data, "attn_q"),
    }


EXTRA_READERS: dict[str, ExtraReader] = {
    "llama": _read_biases,
    "mistral": lambda data, _: {"sliding_window": data.get("attention.sliding_window")},
    "ministral3": _read_ministral3,
    "mixtral": lambda data, config: _read_experts(data, config) | {
        "sliding_window": data.get("attention.sliding_window") or None
    },
    "qwen3": lambda data, _: {"attention_bias": _has_bias(data, "attn_q")},
    "qwen2_moe": _read_experts,
    "qwen3_moe": _read_experts,
    "gemma": _read_gemma,
    "gemma2": _read_gemma,
    "gemma3_text": _read_gemma,
    "gemma4_text": read_gemma4,
    "phi3": _read_phi3,
    "granite": _read_granite,
    "granitemoe": _read_granite_moe,
    "granitemoeshared": _read_granite_moe,
    "granitemoehybrid": _read_granite_hybrid,
    "stablelm": _read_stablelm,
    "smollm3": lambda data, _: _read_biases(data, _) | {"no_rope_layer_interval": 4},
    "seed_oss": lambda data, _: _read_biases(data, _) | {
        "attention_out_bias": _has_bias(data, "attn_output")
    },
    "gpt_oss": _read_gpt_oss,
    "lfm2": _read_lfm2,
    "lfm2_moe": _read_lfm2,
    "qwen3_5_text": _read_hybrid,
    "qwen3_5_moe_text": _read_hybrid,
}  # fmt: skip
