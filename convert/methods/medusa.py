"""Medusa: a folder of heads -> the `medusa_heads.*` tensors and Medusa's keys of a checkpoint.

Legend: H a head, L a residual layer of it, N residual layers a head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.files.tensor_file import TensorInfo
from specdec.methods.medusa import METHOD, MedusaConvert, MedusaParams
from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader
from specdec.options import as_options

from ..config import PLAIN_DEFAULTS, PLAIN_QUANTIZATION, drop_default_keys
from ..hf import HfFolder
from ..plan import SourceRows, check_num_layers
from .base import Config, DrafterConverter, check_sizes, exclude_modules, take_naming

# Before `H.L.linear.weight`, `H.L.linear.bias` and the head's `H.N.weight` stand: nothing in the
# heads that FasterDecoding publishes alone, a name where trainers save the target with its heads
# (ModelOpt; Medusa 1.0 and 2).
PREFIXES = ("", "medusa_heads.", "medusa_head.")
_HEAD_NAME = re.compile(r"(medusa_heads\.|medusa_head\.|)(\d{1,9})\.")

# Names of the numbers in config.json, at its top level or in ModelOpt's `medusa` object.
NUM_HEADS = ("medusa_num_heads", "num_medusa_heads")
NUM_LAYERS = ("medusa_num_layers", "num_medusa_layers")

# Names by which 1.x picks the target's class; 0.14 has Llama's alone.
MODEL_TYPES_1X = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
}  # fmt: skip


def _read_number(reader: ConfigReader, names: Sequence[str], *, minimum: int) -> int | None:
    """Return a number that goes by several names, or None where config.json has none of them."""
    numbers = {}
    for section in (reader.config, reader.get_object("medusa")):
        for name in names:
            if section.get(name) is not None:
                numbers[name] = reader.enter(section).get_int(name, minimum=minimum)
    if len(set(numbers.values())) > 1:
        reader.refuse(
            f"config.json says {' and '.join(f'{k} {v}' for k, v in numbers.items())}",
            "remove the wrong one",
        )
    return next(iter(numbers.values()), None)


def _check_sizes(reader: ConfigReader, info: TensorInfo | None, model: ModelConfig) -> None:
    """Note a first head whose last matrix was made for another target."""
    if info is None or len(info.shape) != 2:
        return  # planning the tensors names it
    sizes = dict(zip(("vocab_size", "hidden_size"), info.shape, strict=True))
    check_sizes(reader, "the Medusa heads'", sizes, model)


def find_prefix(folder: HfFolder) -> str:
    """Return the text before a head's number; more than one naming in a folder is an error."""
    present_prefixes = {
        match.group(1) for name in folder.tensors if (match := _HEAD_NAME.match(name))
    }
    return take_naming(
        folder, present_prefixes, {prefix: f"{prefix}0.*" for prefix in PREFIXES}, "a Medusa head",
        "Medusa heads, or of a model saved with them",
    )  # fmt: skip


def list_heads(folder: HfFolder) -> list[int]:
    """Return the numbers of the heads in the folder, as its tensors are named."""
    return sorted(
        {int(match.group(2)) for name in folder.tensors if (match := _HEAD_NAME.match(name))}
    )


def _drop_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the keys whose values every loader takes by default."""
    tp_size = (config.get("mapping") or {}).get("tp_size", 1)
    defaults = PLAIN_DEFAULTS | {
        "qk_layernorm": False,
        "head_size": config["hidden_size"] // config["num_attention_heads"],
    }
    if config["architecture"] == "Qwen2ForCausalLM":
        del defaults["attn_bias"]  # which TensorRT-LLM takes for true here
    combined = drop_default_keys(dict(config), defaults)
    sections = {
        "mapping": {"gpus_per_node": 8, "cp_size": 1, "moe_tp_size": tp_size, "moe_ep_size": 1},
        "quantization": {k: v for k, v in PLAIN_QUANTIZATION.items() if "quant_algo" not in k},
    }
    for section, values in sections.items():
        if isinstance(combined.get(section), dict):
            combined[section] = drop_default_keys(combined[section], values)
    return combined


def list_modules(params: MedusaParams) -> list[str]:
    """Return the heads' modules that have weights."""
    modules = []
    for head in range(params.num_heads):
        layers = [f"medusa_layers.{layer}.linear" for layer in range(params.num_layers)]
        modules += [f"medusa_heads.{head}.{module}" for module in (*layers, "lm_head")]
    return modules


class MedusaConverter(DrafterConverter):
    """Converter of a folder of heads, alone or with their target."""

    METHOD = METHOD
    IN_TARGET = tuple(f"{prefix}*" for prefix in PREFIXES if prefix)
    params: MedusaParams

    def read_params(self) -> MedusaParams:
        """Return the heads' parameters; raise SpecDecError where they do not suit the target."""
        folder, options = self.folder, as_options(self.settings, MedusaConvert)
        reader = ConfigReader(folder.config, folder.path)
        config_heads = _read_number(reader, NUM_HEADS, minimum=1)
        num_layers = self._read_num_layers(reader, options.num_medusa_layers)
        prefix = find_prefix(folder)
        folder_heads = list_heads(folder)[-1] + 1
        num_heads = options.num_medusa_heads or config_heads or folder_heads
        if options.num_medusa_heads is not None and num_heads > folder_heads:
            reader.refuse(
                f"--num-medusa-heads is {num_heads}, the folder holds {folder_heads}",
                f"give {folder_heads} or less",
            )
        elif options.num_medusa_heads is None and num_heads < folder_heads:
            reader.refuse(
                f"config.json says {config_heads} Medusa heads, the folder holds {folder_heads}",
                f"give --num-medusa-heads, at most {folder_heads}: config.json may be out of date",
            )
        _check_sizes(reader, folder.tensors.get(f"{prefix}0.{num_layers}.weight"), self.model)
        reader.finish()
        check_num_layers(num_heads * max(1, num_layers), folder)
        return MedusaParams(
            num_heads=num_heads,
            num_layers=num_layers,
            max_draft_len=options.max_medusa_token_len or 63,
        )

    def _read_num_layers(self, reader: ConfigReader, option: int | None) -> int:
        """Return the residual layers of each head; option: --num-medusa-layers."""
        config_layers = _read_number(reader, NUM_LAYERS, minimum=0)
        reader.finish()
        num_layers = option if config_layers is None else config_layers
        if num_layers is None:
            reader.refuse(
                f"config.json names no {' or '.join(NUM_LAYERS)}",
                "give --num-medusa-layers, the residual layers of each head",
            )
        elif option not in (None, num_layers):
            reader.refuse(
                f"--num-medusa-layers is {option}, the heads have {num_layers}",
                "leave the flag out",
            )
        reader.finish()
        assert num_layers is not None
        return num_layers

    def find_source_rows(self, canonical: Sequence[str]) -> dict[str, tuple[SourceRows, ...]]:
        prefix = find_prefix(self.folder)
        sources: dict[str, tuple[SourceRows, ...]] = {}
        for name in canonical:
            head, _, inner_name = name.removeprefix("medusa_heads.").partition(".")
            inner_name = inner_name.removeprefix("medusa_layers.")
            if inner_name == "lm_head.weight":
                inner_name = f"{self.params.num_layers}.weight"
            sources[name] = (SourceRows(f"{prefix}{head}.{inner_name}"),)
        return sources

    def list_ignored(self) -> list[str]:
        """Return patterns of heads beyond those asked for, and of the target beside its heads."""
        prefix, heads = find_prefix(self.folder), list_heads(self.folder)
        ignored = [f"{prefix}{head}.*" for head in heads if head >= self.params.num_heads]
        return [*ignored, "model.*", "lm_head.*"] if prefix else ignored

    def add_to_config(self, config: Config, *, is_head_quantized: bool) -> Config:
        """Return a target's config.json with the heads, without keys that have default values."""
        target = config["architecture"]
        pair = self.choose_pair(target)
        if pair is None:
            (architecture,) = METHOD.own_architectures
            combined = dict(config) | {"base_architecture": target}
        else:
            architecture, combined = pair[1], _drop_defaults(config)
            if self.settings.line != "0.14":
                combined |= {"base_architecture": target, "model_type": MODEL_TYPES_1X[target]}
        combined |= {"architecture": architecture, **self.params.to_checkpoint()}
        modules = list_modules(self.params)
        return exclude_modules(combined, modules, is_head_quantized=is_head_quantized)


CONVERTER = MedusaConverter
