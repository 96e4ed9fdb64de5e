"""A checkpoint's config.json for either line of TensorRT-LLM.

The keys of `mapping`, `quantization` and `moe` are those that the line's own loader accepts: it
builds objects from them and fails on an unknown one. Unknown keys at the top level do no harm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from specdec.checkpoint.config import CheckpointConfig
from specdec.errors import SpecDecError
from specdec.model.architectures import ARCHITECTURES, KEY, list_flags
from specdec.model.config import ModelConfig
from specdec.model.experts import describe_experts, name_shared, parse_experts
from specdec.trtllm.facts import DEFAULT_LABEL, load_facts
from specdec.trtllm.lacks import find_layout_problems

if TYPE_CHECKING:
    from .families.base import Family

# Keys that 1.x takes no more. There a head that is left out is the embedding; and 1.x renamed keys
# of `moe` and refuses the old ones, while a dense model may go without.
KEYS_014_ONLY = ("share_embedding_table", "moe")
# The mixture-of-experts settings of a dense model.
MOE_014 = {
    "num_experts": 0,
    "moe_intermediate_size": 0,
    "num_shared_experts": 0,
    "top_k": 0,
    "normalization_mode": None,
    "sparse_mixer_epsilon": 0.01,
    "tp_mode": 0,
}
# Keys of a plain checkpoint with values that every loader takes by default.
PLAIN_DEFAULTS = {
    "mlp_bias": False,
    "attn_bias": False,
    "residual_mlp": False,
    "disable_weight_only_quant_plugin": False,
    "moe": MOE_014,
    "remove_duplicated_kv_heads": False,
}
# `quantization` of a plain checkpoint.
PLAIN_QUANTIZATION = {
    "quant_algo": None, "kv_cache_quant_algo": None, "group_size": 128, "smoothquant_val": 0.5,
    "clamp_val": None, "has_zero_point": False, "pre_quant_scale": False, "exclude_modules": None,
}  # fmt: skip


def describe_target(model: ModelConfig, family: Family, version: str) -> dict[str, Any]:
    """Return the config.json of a plain checkpoint."""
    problem = family.find_problem_014(model) if version == "0.14" else None
    if problem is not None:
        raise SpecDecError(*problem)
    _check_architecture(model.architecture, version)
    config: dict[str, Any] = {
        "architecture": model.architecture,
        "dtype": model.dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "hidden_act": model.hidden_act,
        "logits_dtype": "float32",
        "norm_epsilon": model.norm_epsilon,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": model.max_position_embeddings,
        "num_key_value_heads": model.num_key_value_heads,
        "intermediate_size": model.intermediate_size,
        "mapping": {
            "world_size": model.tp_size * model.pp_size,
            "gpus_per_node": 8,
            "cp_size": 1,
            "tp_size": model.tp_size,
            "pp_size": model.pp_size,
            "moe_tp_size": model.tp_size if model.experts is None else model.experts.tp_size,
            "moe_ep_size": 1 if model.experts is None else model.experts.ep_size,
        },
        "quantization": dict(PLAIN_QUANTIZATION),
        "use_parallel_embedding": model.use_parallel_embedding,
        "embedding_sharding_dim": model.embedding_sharding_dim,
        "share_embedding_table": model.share_embedding_table,
        "head_size": model.head_size,
        "qk_layernorm": False,
    }
    config |= _describe_positions(model)
    config = family.describe(model, config)
    if model.own_arithmetic is not None and model.architecture not in ARCHITECTURES:
        config[KEY] = list_flags(model.own_arithmetic)
    if version != "0.14":
        config = {key: value for key, value in config.items() if key not in KEYS_014_ONLY}
    if model.experts is not None:
        config["moe"] = describe_experts(model.experts, version)
    return config


def _describe_positions(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of windows and of longrope, for models that have them."""
    keys: dict[str, Any] = {}
    # Which TensorRT-LLM takes when it runs an engine.
    if model.sliding_window is not None or model.usual_layer_types is not None:
        keys["sliding_window"] = model.sliding_window
    if model.layer_types is not None and model.layer_types != model.usual_layer_types:
        keys["layer_types"] = list(model.layer_types)
    if model.original_max_position_embeddings is not None:
        keys["original_max_position_embeddings"] = model.original_max_position_embeddings
    return keys


def _check_architecture(architecture: str, version: str) -> None:
    """Raise SpecDecError where a line of TensorRT-LLM that was asked for lacks an architecture.

    The default line is not asked for: its checkpoints are our own engine's too.
    """
    if version != DEFAULT_LABEL and architecture not in load_facts(version).architectures:
        raise SpecDecError(
            f"TensorRT-LLM {version} has no {architecture}",
            "leave --trtllm-version out: the checkpoint is then for the torch backend",
        )


def refuse_layout(checkpoint: CheckpointConfig, version: str) -> None:
    """Raise SpecDecError where a line that was asked for cannot load the checkpoint's matrices."""
    if version != DEFAULT_LABEL:
        find_layout_problems(version, checkpoint.quantization, checkpoint.model).raise_all()


def adapt_config(config: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return an existing checkpoint's config.json with the keys of the wanted line.

    A key that the line does not know is left out where its value changes nothing; where it does,
    SpecDecError is raised.
    """
    adapted = dict(config)
    adapted.pop("rank", None)  # ModelOpt leaves its last rank's number there
    if adapted.get("architecture") == "Qwen2ForCausalLM":
        adapted.setdefault("qwen_type", "qwen2")  # which it leaves out, and the loader reads
    _adapt_moe(adapted, version)
    if version != "0.14":
        adapted.pop("share_embedding_table", None)
        return adapted
    if "share_embedding_table" in adapted:
        adapted["share_embedding_table"] = False  # the head is always written
    facts = load_facts(version)
    _cut_section(adapted, "mapping", facts.mapping_keys)
    _cut_section(adapted, "quantization", facts.quantization_keys)
    return adapted


def _adapt_moe(adapted: dict[str, Any], version: str) -> None:
    """Give `moe` the keys of a line; a dense model has none in 1.x."""
    moe = adapted.get("moe")
    if not isinstance(moe, dict):
        return
    if moe.get("num_experts"):
        adapted["moe"] = _adapt_experts(adapted, version)
    elif version == "0.14":
        adapted["moe"] = dict(MOE_014)
    else:
        del adapted["moe"]


def _cut_section(adapted: dict[str, Any], section: str, known_keys: Collection[str]) -> None:
    """Leave out the keys of a section that TensorRT-LLM 0.14 does not know."""
    values = adapted.get(section)
    if not isinstance(values, dict):
        return
    telling = {
        key: value
        for key, value in values.items()
        if key not in known_keys and not _says_nothing(key, value, values)
    }
    if telling:
        raise SpecDecError(
            f"the checkpoint's {section} has {telling}, which TensorRT-LLM 0.14 cannot express",
            "convert for 1.2, or make the checkpoint without it",
        )
    adapted[section] = {key: value for key, value in values.items() if key in known_keys}


def _adapt_experts(config: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return `moe` in a line's keys; SpecDecError where tensors have the other line's names."""
    mapping = config.get("mapping")
    tp_size = mapping.get("tp_size", 1) if isinstance(mapping, dict) else 1
    experts = parse_experts(config, tp_size)
    if experts.shared_inner and experts.shared_name != name_shared(version):
        raise SpecDecError(
            f"the checkpoint's shared experts are named {experts.shared_name}, which TensorRT-LLM"
            f" {version} does not read",
            f"convert the target again with --trtllm-version {version}",
        )
    return describe_experts(experts, version)


def _says_nothing(key: str, value: Any, section: Mapping[str, Any]) -> bool:
    """Return whether the value of a key that only 1.x has is what 0.14 does without it."""
    if key == "mamba_ssm_cache_dtype":  # Llama-like models have no such cache
        return True
    if isinstance(value, bool) or not value:
        return not value
    neutral = [1, -1] + [section.get("tp_size")] * (key == "attn_tp_size")
    return value in neutral


def drop_default_keys(config: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the keys that hold these values."""
    return {k: v for k, v in config.items() if k not in keys or v != keys[k]}
