"""Comparison of a training with the config.json of the drafter that it goes on from.

The sizes of tensors show most differences; here are the facts that no tensor has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import Problems
from specdec.files.reading import read_json
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
SECTIONS = ("eagle_config", "dflash_config")  # objects of config.json that hold such keys, too
# Target's layers, from 0, by whose outputs a drafter drafts. A target that was grown has others.
LAYER_KEYS = ("eagle_aux_hidden_state_layer_ids", "target_layer_ids")

logger = get_logger(__name__)


def compare_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise SpecDecError that names every fact in which a written drafter is another.

    folder: of the written drafter. config: this training's. Other layers of the target are learned,
    so they are a warning.
    """
    path = folder / "config.json"
    start_facts, facts = flatten_config(read_json(path)), flatten_config(config)
    problems = Problems()
    for key in (*SHARED_KEYS, *DEFAULTS):
        if key in DEFAULTS:
            values = [found.get(key, DEFAULTS[key]) for found in (start_facts, facts)]
        else:
            values = [found[key] for found in (start_facts, facts) if key in found]
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


def flatten_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with its sections' keys beside its own, rotary scalings in one form."""
    # P-EAGLE's config.json has the layers twice, vLLM's numbers outside of the section.
    facts = {key: value for key, value in config.items() if key != LAYER_KEYS[0]}
    for name in SECTIONS:
        section = config.get(name)
        facts |= section if isinstance(section, dict) else {}
    scaling = facts.get("rope_scaling")
    if isinstance(scaling, dict):
        scaling = {"rope_type" if key == "type" else key: scaling[key] for key in scaling}
        scaling = {
            key: value
            for key, value in scaling.items()
            if value is not None and key != "rope_theta"
        }
        facts["rope_scaling"] = None if scaling.get("rope_type") == "default" else scaling
    return facts
