"""Files of the drafter that a training goes on from, and the facts of its config.json.

The sizes of tensors show most differences; here are the facts that no tensor has. Those of its
layers, a training follows; the others must be its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import Problems, SpecDecError, join_names
from specdec.files.reading import read_json
from specdec.files.tensor_file import TensorFile
from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader, read_rotary
from specdec.model.rotary_scaling import STEADY_SCALINGS, get_kind, unify_scaling
from specdec.system.logs import get_logger

# Keys that are compared where both have them.
SHARED_KEYS = (
    "hidden_act", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "rope_theta", "rope_scaling", "layer_types", "mask_token_id",
)  # fmt: skip
# Keys that mean something where they are missing, too.
DEFAULTS: Mapping[str, Any] = {
    "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False,
    "norm_output": False, "input_embedding_scale": 1,
}  # fmt: skip
LAYERS_SECTION = "transformer_layer_config"  # of speculators, which describes the layers
# Objects of config.json that hold such keys, too.
SECTIONS = ("eagle_config", "dflash_config", LAYERS_SECTION)
# Target's layers, from 0, by whose outputs a drafter drafts. A target that was grown has others.
LAYER_KEYS = ("eagle_aux_hidden_state_layer_ids", "target_layer_ids")

# Facts of a drafter's layers that are followed: fields of ModelConfig -> keys of config.json.
LAYER_FACTS = {
    "num_attention_heads": "num_attention_heads", "num_key_value_heads": "num_key_value_heads",
    "head_size": "head_dim", "intermediate_size": "intermediate_size",
    "norm_epsilon": "rms_norm_eps", "rotary_base": "rope_theta", "rotary_scaling": "rope_scaling",
}  # fmt: skip
ROTARY_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")

logger = get_logger(__name__)


def open_start(folder: Path, weights_name: str) -> TensorFile:
    """Open the weights of a written drafter; SpecDecError where they are not there.

    Others may give its only safetensors file another name.
    """
    path = folder / weights_name
    if not path.is_file() and len(paths := [*folder.glob("*.safetensors")]) == 1:
        path = paths[0]
    if not path.is_file():
        files = join_names(sorted(entry.name for entry in folder.iterdir())) or "no file"
        raise SpecDecError(
            f"--start-from: {folder} has no {weights_name}; it has {files}",
            "give a drafter of the same --method; weights of a .bin or .pt file must be saved anew,"
            f" as {weights_name}, by safetensors.torch.save_file",
        )
    return TensorFile(path)


def follow_layers(
    folder: Path | None, model: ModelConfig, *, has_given_size: bool = False
) -> ModelConfig:
    """Return layers with the heads, MLP, norms and rotary embedding of a written drafter.

    folder: of the drafter that is trained further, None for a fresh one. model: layers by the
    target, which has the facts that its config.json lacks. has_given_size: whether an option gave
    the MLP's size, which then stays.
    """
    if folder is None or not (folder / "config.json").is_file():
        return model
    config = read_json(folder / "config.json")
    inner = config.get(LAYERS_SECTION)
    config = config | inner if isinstance(inner, dict) else config
    reader = ConfigReader(config, folder / "config.json")
    values = _read_heads(reader, model)
    if "intermediate_size" in config and not has_given_size:
        values["intermediate_size"] = reader.get_int("intermediate_size")
    if "rms_norm_eps" in config:
        values["norm_epsilon"] = reader.get_float("rms_norm_eps")
    if any(key in config for key in ROTARY_KEYS):
        values |= _read_rotary(reader, model)
    reader.finish()
    followed = dataclasses.replace(model, **values)
    followed.find_scaling_problems().raise_all()
    changed = [
        f"{key} {getattr(followed, name)} (the target has {getattr(model, name)})"
        for name, key in LAYER_FACTS.items() if getattr(followed, name) != getattr(model, name)
    ]  # fmt: skip
    if changed:
        logger.info("--start-from: %s keeps its own %s", folder, join_names(changed))
    return followed


def _read_heads(reader: ConfigReader, model: ModelConfig) -> dict[str, Any]:
    """Read the heads of attention, as transformers reads a Llama's; nothing where none are told."""
    if "num_attention_heads" not in reader.config:
        return {}
    heads = reader.get_int("num_attention_heads")
    kv_heads = reader.get_int("num_key_value_heads", heads)
    size = reader.get_int("head_dim", max(1, model.hidden_size // heads))
    if heads % kv_heads or size % 2:
        reader.refuse(
            f"{heads} heads of {size} with {kv_heads} of keys and values",
            "correct num_attention_heads, num_key_value_heads and head_dim",
        )
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_size": size}


def _read_rotary(reader: ConfigReader, model: ModelConfig) -> dict[str, Any]:
    """Read the rotary embedding; note what a drafter's layers do not compute."""
    rotary = read_rotary(reader)
    kind = get_kind(rotary.scaling or {})
    if rotary.scaling and kind not in STEADY_SCALINGS:
        reader.refuse(
            f"its rotary scaling is {kind}, and drafters are trained with none or with"
            f" {join_names(STEADY_SCALINGS)}",
            "train a fresh drafter, without --start-from",
        )
    if rotary.by_layer_type or rotary.fraction not in (None, 1):
        reader.refuse(
            "its rotary embedding is of a part of each head, or of each layer's own kind",
            "train a fresh drafter, without --start-from",
        )
    return {"rotary_base": rotary.base or model.rotary_base, "rotary_scaling": rotary.scaling}


def compare_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise SpecDecError that names every fact in which a written drafter is another.

    folder: of the written drafter. config: this training's. Other layers of the target are learned,
    so they are a warning.
    """
    path = folder / "config.json"
    start_facts, facts = flatten_config(read_json(path), path), flatten_config(config, path)
    both_facts = start_facts, facts
    problems = Problems()
    for key in (*SHARED_KEYS, *DEFAULTS):
        if key in DEFAULTS:
            values = [one.get(key, DEFAULTS[key]) for one in both_facts]
        else:
            values = [one[key] for one in both_facts if key in one]
        if len(values) == 2 and values[0] != values[1]:
            problems.add(
                f"--start-from: {key} in {path} is {values[0]!r}, of this training {values[1]!r}",
                "give the target and the options that the drafter was trained with",
            )
    problems.raise_all()
    for key in LAYER_KEYS:
        layers, start_layers = facts.get(key), start_facts.get(key)
        if start_layers is not None and layers is not None and start_layers != layers:
            logger.warning(
                "--start-from: %s reads the outputs of the target's layers %s, this training those"
                " of %s: it has to learn them anew", folder, start_layers, layers,
            )  # fmt: skip


def flatten_config(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a config.json with its sections' keys beside its own, rotary embeddings in one form.

    path: that of the file, or where it would be, for an error.
    """
    # P-EAGLE's config.json has the layers twice, vLLM's numbers outside of the section.
    facts = {key: value for key, value in config.items() if key != LAYER_KEYS[0]}
    for name in SECTIONS:
        section = config.get(name)
        facts |= section if isinstance(section, dict) else {}
    if any(key in facts for key in ROTARY_KEYS):
        reader = ConfigReader(facts, path)
        rotary = read_rotary(reader)
        reader.finish()
        base = {} if rotary.base is None else {"rope_theta": rotary.base}
        scaling = unify_scaling(rotary.scaling) if rotary.scaling else None
        facts |= base | {"rope_scaling": scaling}
    return facts
