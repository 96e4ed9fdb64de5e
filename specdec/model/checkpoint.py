"""What a checkpoint's config.json says, read once and checked as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import Problems, SpecDecError, suggest
from specdec.files.folders import CHECKPOINT, expect_folder
from specdec.files.reading import read_json
from specdec.files.tensor_file import TensorFile
from specdec.methods import METHODS, DrafterParams, Method, find_method
from specdec.model.architectures import ARCHITECTURES, Architecture, find_arithmetic
from specdec.model.config import ModelConfig, list_layer_types
from specdec.model.experts import parse_experts
from specdec.model.quantization import Quantization, parse_quantization


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """A checkpoint: the target, the drafter's parameters if it has one, and the raw config.json."""

    model: ModelConfig
    method: Method | None
    drafter: DrafterParams | None
    raw: dict[str, Any]
    quantization: Quantization = Quantization()

    @property
    def mode(self) -> str | None:
        return self.method.mode if self.method else None


def parse_checkpoint_config(config: Mapping[str, Any]) -> CheckpointConfig:
    """Read a checkpoint's config.json; raise SpecDecError that lists everything wrong with it."""
    architecture = config.get("architecture")
    method = find_method(config)
    base = find_target_architecture(config) if method else architecture
    known = [*ARCHITECTURES, *(a for m in METHODS.values() for a in m.architectures)]
    arithmetic = find_arithmetic(config, base) if isinstance(base, str) else None
    if not isinstance(base, str) or arithmetic is None:
        raise SpecDecError(
            f"checkpoint architecture {base!r} is not supported{suggest(str(base), known)}",
            f"the supported ones are {', '.join(known)}",
        )
    mapping = _get_object(config, "mapping")
    tp_size = mapping.get("tp_size", 1)
    if type(tp_size) is not int:
        raise SpecDecError(
            f"checkpoint config: mapping.tp_size is {tp_size!r}", "give it as a whole number"
        )
    pp_size = mapping.get("pp_size", 1)
    if type(pp_size) is not int:
        raise SpecDecError(
            f"checkpoint config: mapping.pp_size is {pp_size!r}", "give it as a whole number"
        )
    if pp_size != 1 and method is not None:
        raise SpecDecError(
            f"checkpoint has pp_size={pp_size} and a {method.name} drafter",
            "convert it without pipeline parallelism: speculative engines have none",
        )
    required = {
        "vocab_size": int, "hidden_size": int, "num_hidden_layers": int,
        "num_attention_heads": int, "norm_epsilon": float, "intermediate_size": int,
        "max_position_embeddings": int, "dtype": str,
    }  # fmt: skip
    values: dict[str, Any] = {}
    problems = Problems()
    defaults = _list_defaults(config, arithmetic)
    for name, kind in required.items():
        value = config.get(name)
        value = defaults.get(name) if value is None else value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            problems.add(
                f"checkpoint config: {name} is {value!r}", f"give {name} as {kind.__name__}"
            )
        values[name] = value
    problems.raise_all()
    heads = values["num_attention_heads"]
    optional: dict[str, tuple[type | tuple[type, ...], Any]] = {
        "num_key_value_heads": (int, heads),
        "head_size": (int, values["hidden_size"] // max(1, heads)),
        "hidden_act": (str, "silu"),
        "rotary_base": ((int, float), 10000.0),
        "rotary_scaling": (dict, None),
        "attn_bias": (bool, False),
        "mlp_bias": (bool, False),
        "rotary_pct": ((int, float), 1.0),
        "sliding_window": (int, None),
        "original_max_position_embeddings": (int, None),
        "use_parallel_embedding": (bool, False),
        "embedding_sharding_dim": (int, 0),
        "share_embedding_table": (bool, False),
        "layer_types": (list, None),
        "_sliding_window_pattern": (int, arithmetic.window_pattern),
        "rope_local_base_freq": ((int, float), None),
        "embedding_multiplier": ((int, float), 1.0),
        "attention_multiplier": ((int, float), 1.0),
        "residual_multiplier": ((int, float), 1.0),
        "output_multiplier_scale": ((int, float), 1.0),
        "query_pre_attn_scalar": ((int, float), None),
        "attn_logit_softcapping": ((int, float), None),
        "final_logit_softcapping": ((int, float), None),
    }
    for name, (kinds, default) in optional.items():
        value = config.get(name)
        is_stray_bool = isinstance(value, bool) and kinds is not bool
        if value is not None and (is_stray_bool or not isinstance(value, kinds)):
            problems.add(f"checkpoint config: {name} is {value!r}", "correct the key")
        values[name] = default if value is None else value
    problems += _find_lost_keys(config, arithmetic)
    problems.raise_all()
    types, pattern = values["layer_types"], values.pop("_sliding_window_pattern")
    if types is None and pattern is not None:
        types = list_layer_types(values["num_hidden_layers"], max(1, pattern))
    values["layer_types"] = None if types is None else tuple(types)
    own = None if arithmetic == ARCHITECTURES.get(base) else arithmetic
    if arithmetic.mlp == "experts":
        values["experts"] = parse_experts(config, tp_size)
        _refuse_quantized_experts(config)
    model = ModelConfig(
        architecture=base, tp_size=tp_size, pp_size=pp_size, own_arithmetic=own, **values
    )
    model.find_problems().raise_all()
    drafter = method.params.from_checkpoint(config) if method and method.params else None
    if drafter:
        drafter.find_problems(
            hidden_size=model.hidden_size, vocab_size=model.vocab_size, tp_size=model.tp_size
        ).raise_all()
    return CheckpointConfig(
        model=model,
        method=method,
        drafter=drafter,
        raw=dict(config),
        quantization=parse_quantization(config),
    )


def _refuse_quantized_experts(config: Mapping[str, Any]) -> None:
    quantization = parse_quantization(config)
    if quantization.is_quantized:
        kind = quantization.quant_algo or quantization.kv_cache_quant_algo
        raise SpecDecError(
            f"the checkpoint is a mixture of experts, quantized with {kind}",
            "give one in float16, bfloat16 or float32: quantized experts are not supported yet",
        )


def _find_lost_keys(config: Mapping[str, Any], arithmetic: Architecture) -> Problems:
    """What writers lose, and loaders then take another value for.

    ModelOpt under transformers 5 loses both rotary keys; every loader then takes 10000. Of Gemma 2
    TensorRT-LLM loses the window, which its user has to give the runtime.
    """
    if arithmetic.window_pattern is not None and "sliding_window" not in config:
        return Problems().add(
            "checkpoint config: sliding_window is missing, as TensorRT-LLM's own converter leaves"
            " it out, and which tokens a layer sees is not known",
            "add sliding_window to the checkpoint's config.json, that of the model's own"
            " config.json (null where it has none)",
        )
    producer = config.get("producer")
    is_modelopt = isinstance(producer, dict) and producer.get("name") == "modelopt"
    is_lost = arithmetic.positions == "rotary" and config.get("rotary_base") is None
    if not is_modelopt or not is_lost:
        return Problems()
    return Problems().add(
        "checkpoint config: rotary_base is missing, as ModelOpt leaves it out under"
        " transformers 5, and rotary_scaling with it",
        "add rotary_base and rotary_scaling to the checkpoint's config.json: rope_theta and"
        " rope_scaling of the model's own config.json (null where it has none)",
    )


def _list_defaults(config: Mapping[str, Any], arithmetic: Architecture) -> dict[str, Any]:
    """What TensorRT-LLM takes for keys that its own writers leave out for some architectures."""
    defaults: dict[str, Any] = {"norm_epsilon": arithmetic.norm_epsilon}
    hidden_size = config.get("hidden_size")
    if arithmetic.mlp == "plain" and type(hidden_size) is int:
        defaults["intermediate_size"] = 4 * hidden_size
    return defaults


def find_target_architecture(config: Mapping[str, Any]) -> Any:
    """Return the target's architecture in the config.json of a checkpoint with a drafter.

    ReDrafter's name it. ModelOpt's Medusa names the class that the heads make of the target's,
    TensorRT-LLM's own tells a Qwen target by its type only. All others are Llama's.
    """
    for key in ("base_model_architecture", "base_architecture"):
        if config.get(key) is not None:
            name = config[key]
            return name.removeprefix("Medusa") if isinstance(name, str) else name
    if any("qwen" in str(config.get(key)) for key in ("model_type", "qwen_type")):
        return "Qwen2ForCausalLM"
    return "LlamaForCausalLM"


def read_checkpoint_config(folder: Path) -> CheckpointConfig:
    """Read and check `config.json` of a checkpoint folder."""
    expect_folder(folder, CHECKPOINT)
    config = read_json(folder / "config.json")
    return parse_checkpoint_config(config | find_shared_head(folder, config))


def find_shared_head(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `share_embedding_table` as a key where config.json does not have it but it is so.

    1.x has no such key: there a head that is not stored is the embedding.
    """
    path = folder / "rank0.safetensors"
    has_stages = _get_object(config, "mapping").get("pp_size", 1) != 1
    if config.get("share_embedding_table") is not None or has_stages or not path.is_file():
        return {}
    stored = TensorFile(path).tensors
    is_shared = "transformer.vocab_embedding.weight" in stored and "lm_head.weight" not in stored
    return {"share_embedding_table": True} if is_shared else {}


def _get_object(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise SpecDecError(
            f"checkpoint config: {name} is {value!r}, not an object", "correct the key"
        )
    return value
