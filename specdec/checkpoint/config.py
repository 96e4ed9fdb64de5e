"""Reader of a checkpoint's config.json, which is checked as a whole."""

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
from specdec.model.blocks import GGUF
from specdec.model.config import ModelConfig, list_layer_types
from specdec.model.experts import parse_experts
from specdec.model.layer_sizes import KEY as SIZES_KEY
from specdec.model.layer_sizes import LayerSizes
from specdec.model.linear_attention import KEY, LinearAttention
from specdec.model.mamba2 import KEY as MAMBA_KEY
from specdec.model.mamba2 import Mamba2Sizes
from specdec.model.quantization import Quantization, parse_quantization
from specdec.model.short_conv import KEY as CONV_KEY
from specdec.model.short_conv import ShortConvSizes

# Python type of a key's value, by the annotation of the field of ModelConfig that it fills.
KINDS: Mapping[str, type] = {
    "str": str, "int": int, "float": float, "bool": bool, "dict[str, Any]": dict,
    "tuple[str, ...]": list,
}  # fmt: skip
# Fields that are not read from a key of their name.
# Objects of fields of their own, by the key that each is read from.
OBJECTS: Mapping[str, type] = {
    KEY: LinearAttention, CONV_KEY: ShortConvSizes, MAMBA_KEY: Mamba2Sizes,
    SIZES_KEY: LayerSizes,
}  # fmt: skip
COMPUTED_FIELDS = (
    "architecture", "tp_size", "pp_size", "experts", "own_arithmetic", *OBJECTS,
)  # fmt: skip


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
    method = find_method(config)
    architecture, arithmetic = _find_target(config, method)
    tp_size, pp_size = _read_mapping(config)
    if pp_size != 1 and method is not None:
        raise SpecDecError(
            f"checkpoint has pp_size={pp_size} and a {method.name} drafter",
            "convert it without pipeline parallelism: speculative engines have none",
        )
    values = _read_model_fields(config, arithmetic)
    if arithmetic.has_experts:
        values["experts"] = parse_experts(config, tp_size)
    quantization = parse_quantization(config)
    if arithmetic.has_experts:
        _refuse_quantized_experts(quantization)
    is_named = arithmetic == ARCHITECTURES.get(architecture)
    model = ModelConfig(
        architecture=architecture, tp_size=tp_size, pp_size=pp_size,
        own_arithmetic=None if is_named else arithmetic, **values,
    )  # fmt: skip
    model.find_problems().raise_all()
    drafter = method.params.from_checkpoint(config) if method and method.params else None
    if drafter:
        drafter.find_problems(
            hidden_size=model.hidden_size, vocab_size=model.vocab_size, tp_size=model.tp_size
        ).raise_all()
    return CheckpointConfig(
        model=model, method=method, drafter=drafter, raw=dict(config), quantization=quantization
    )


def _find_target(config: Mapping[str, Any], method: Method | None) -> tuple[str, Architecture]:
    """Return the target's architecture and arithmetic; raise SpecDecError for an unknown one."""
    name = find_target_architecture(config) if method else config.get("architecture")
    arithmetic = find_arithmetic(config, name) if isinstance(name, str) else None
    if not isinstance(name, str) or arithmetic is None:
        supported = [*ARCHITECTURES, *(a for m in METHODS.values() for a in m.architectures)]
        raise SpecDecError(
            f"checkpoint architecture {name!r} is not supported{suggest(str(name), supported)}",
            f"the supported ones are {', '.join(supported)}",
        )
    return name, arithmetic


def _read_mapping(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return tp_size and pp_size."""
    mapping = _get_object(config, "mapping")
    sizes = {name: mapping.get(name, 1) for name in ("tp_size", "pp_size")}
    for name, size in sizes.items():
        if type(size) is not int:
            fact = f"checkpoint config: mapping.{name} is {size!r}"
            raise SpecDecError(fact, "give it as a whole number")
    return sizes["tp_size"], sizes["pp_size"]


def _read_model_fields(config: Mapping[str, Any], arithmetic: Architecture) -> dict[str, Any]:
    """Read the fields of ModelConfig, linear attention and layer types included."""
    problems = Problems()
    values = _read_fields(ModelConfig, config, _list_defaults(config, arithmetic), problems)
    for key, kind in OBJECTS.items():
        sizes = _get_object(config, key)
        for name in sorted(sizes.keys() - {field.name for field in dataclasses.fields(kind)}):
            problems.add(f"checkpoint config: {key} has {name!r}, which is not known", "remove it")
        if sizes:
            values[key] = kind(**_read_fields(kind, sizes, {}, problems))
    pattern = config.get("_sliding_window_pattern")
    if pattern is None:
        pattern = arithmetic.window_pattern
    elif type(pattern) is not int:
        problems.add(f"checkpoint config: _sliding_window_pattern is {pattern!r}", "give an int")
    problems += _find_lost_keys(config, arithmetic)
    problems.raise_all()
    types = values["layer_types"]
    if types is None and pattern is not None:
        types = list_layer_types(values["num_hidden_layers"], max(1, pattern))
    values["layer_types"] = None if types is None else tuple(types)
    return values


def _refuse_quantized_experts(quantization: Quantization) -> None:
    """Raise SpecDecError for quantized experts, but those in GGML's blocks."""
    is_blocks = quantization.quant_algo == GGUF and not quantization.kv_cache_quant_algo
    if quantization.is_quantized and not is_blocks:
        kind = quantization.quant_algo or quantization.kv_cache_quant_algo
        raise SpecDecError(
            f"the checkpoint is a mixture of experts, quantized with {kind}",
            "give one in float16, bfloat16 or float32: quantized experts are not supported yet",
        )


def _find_lost_keys(config: Mapping[str, Any], arithmetic: Architecture) -> Problems:
    """Find keys that writers lose and that loaders then replace by another value.

    ModelOpt under transformers 5 loses both rotary keys; every loader then takes 10000.
    TensorRT-LLM loses Gemma 2's window, which its user has to give the runtime.
    """
    lacks_window = arithmetic.window_pattern is not None and "sliding_window" not in config
    producer = config.get("producer")
    is_modelopt = isinstance(producer, dict) and producer.get("name") == "modelopt"
    lacks_base = arithmetic.positions == "rotary" and config.get("rotary_base") is None
    return Problems.from_table(
        (lacks_window,
         "checkpoint config: sliding_window is missing, as TensorRT-LLM's own converter leaves it"
         " out, and which tokens a layer sees is not known",
         "add sliding_window to the checkpoint's config.json, that of the model's own config.json"
         " (null where it has none)"),
        (is_modelopt and lacks_base and not lacks_window,
         "checkpoint config: rotary_base is missing, as ModelOpt leaves it out under transformers"
         " 5, and rotary_scaling with it",
         "add rotary_base and rotary_scaling to the checkpoint's config.json: rope_theta and"
         " rope_scaling of the model's own config.json (null where it has none)"),
    )  # fmt: skip


def _read_fields(
    kind: type, config: Mapping[str, Any], defaults: Mapping[str, Any], problems: Problems
) -> dict[str, Any]:
    """Read the fields of a dataclass from keys of their names; add wrong ones to `problems`."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name = field.name
        if name in COMPUTED_FIELDS:
            continue
        expected_type = KINDS[str(field.type).removesuffix(" | None")]
        is_needed = field.default is dataclasses.MISSING
        value = config.get(name)
        if value is None:
            value = defaults.get(name) if is_needed else field.default
        has_type = isinstance(value, (int, float) if expected_type is float else expected_type)
        is_stray_bool = isinstance(value, bool) and expected_type is not bool
        if is_stray_bool or (not has_type and (is_needed or value is not None)):
            fact = f"checkpoint config: {name} is {value!r}"
            problems.add(fact, f"give {name} as {expected_type.__name__}")
        values[name] = value
    return values


def _list_defaults(config: Mapping[str, Any], arithmetic: Architecture) -> dict[str, Any]:
    """List defaults of the sizes that TensorRT-LLM's own writers may leave out.

    A size that follows from a wrong one is 1, so that only the wrong one is told.
    """
    sizes = {name: config.get(name) for name in ("hidden_size", "num_attention_heads")}
    hidden_size, heads = (size if type(size) is int else 1 for size in sizes.values())
    defaults: dict[str, Any] = {
        "norm_epsilon": arithmetic.norm_epsilon,
        "num_key_value_heads": heads,
        "head_size": hidden_size // max(1, heads),
    }
    if arithmetic.mlp == "plain":
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
        fact = f"checkpoint config: {name} is {value!r}, not an object"
        raise SpecDecError(fact, "correct the key")
    return value
