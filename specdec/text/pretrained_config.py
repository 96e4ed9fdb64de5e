"""Corrections of configurations of transformers, which then say what our own reader finds.

transformers 4.57 knows nothing of the names that 5 writes, and takes its defaults without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, join_names, shorten
from specdec.model.config import FULL, ModelConfig
from specdec.model.config_reader import (
    EXPERT_COUNTS,
    ConfigReader,
    Rotary,
    count_experts,
    drop_query_scale,
    read_rotary,
)

NEWER = "install a newer transformers: pip install 'transformers>=5'"
# transformers 4's names of what 5 has in rope_parameters; of each line the first that a class has.
ROTARY_NAMES = {
    "base": ("rope_theta", "rotary_emb_base"),
    "fraction": ("partial_rotary_factor", "rotary_pct"),
    "local_base": ("rope_local_base_freq",),
}
# Fields that classes of transformers 4.57 have not yet, with what these compute.
LATER_FIELDS = {
    "use_bidirectional_attention": (None, False), "swiglu_alpha": (None, 1.702),
    "swiglu_limit": (None, 7.0),
}  # fmt: skip
SCALES_QUERIES = "ministral3"  # a model whose class scales queries by their positions
TOLERANCE = 1e-4  # of a frequency; versions compute them in other orders


def adapt_config(config: Any, document: Mapping[str, Any], path: Path) -> Rotary:
    """Let the text part of a configuration say what its config.json says.

    Return the rotary embedding of config.json. Raise SpecDecError where the class that transformers
    has for the model takes no notice of a field.
    """
    import transformers

    text = config.get_text_config()
    text_document = _find_text(config, text, document)
    default_config = type(text)()
    if text.model_type == SCALES_QUERIES:
        text_document = drop_query_scale(text_document)
    reader = ConfigReader(text_document, path)
    rotary, is_old = read_rotary(reader), transformers.__version__.startswith("4.")
    translates = is_old and text_document.get("rope_parameters")
    lost_fields = _translate_rotary(text, default_config, rotary) if translates else []
    _set_num_experts(text, default_config, reader)
    reader.finish()
    if is_old:
        lost_fields += _list_later_fields(text_document, default_config)
    if lost_fields:
        raise SpecDecError(
            f"{path}: transformers {transformers.__version__} takes no notice of"
            f" {join_names(lost_fields)} in a {text.model_type} model",
            NEWER,
        )
    return rotary


def _set_num_experts(text: Any, default_config: Any, reader: ConfigReader) -> None:
    """Set the number of experts under the name that a configuration's class has for it."""
    for name, other_name in (EXPERT_COUNTS, EXPERT_COUNTS[::-1]):
        is_foreign = not hasattr(default_config, name) and hasattr(default_config, other_name)
        if is_foreign and reader.config.get(name) is not None:
            setattr(text, other_name, count_experts(reader))


def _list_later_fields(text_document: Mapping[str, Any], default_config: Any) -> list[str]:
    """List the values of fields that a class of transformers 4.57 has not yet, nor computes."""
    later_fields = LATER_FIELDS | {
        "layer_types": (None, [FULL] * len(text_document.get("layer_types") or ()))
    }
    return [
        f"{name} {shorten(text_document[name])}" for name, computed in later_fields.items()
        if name in text_document and not hasattr(default_config, name)
        and text_document[name] not in computed
    ]  # fmt: skip


def _find_text(config: Any, text: Any, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the object of a config.json that describes the text model."""
    if text is config:
        return document
    inner = (value for name, value in document.items() if getattr(config, name, None) is text)
    return next(
        (value for value in inner if isinstance(value, dict)), document
    )  # which may be flat


def _translate_rotary(text: Any, default_config: Any, rotary: Rotary) -> list[str]:
    """Set a configuration's fields of transformers 4; return the values without a field there."""
    lost_fields = []
    for field, names in ROTARY_NAMES.items():
        value = getattr(rotary, field)
        field_name = next((name for name in names if hasattr(default_config, name)), None)
        if field_name is not None and value is not None:
            setattr(text, field_name, value)
        elif value not in (None, {"fraction": 1.0, "local_base": rotary.base}.get(field)):
            lost_fields.append(f"{names[0]} {value:g}")
    local_scaling = _find_local_scaling(rotary, default_config)
    if local_scaling is not None:
        lost_fields.append(f"rope_parameters of sliding layers {shorten(local_scaling)}")
    if rotary.scaling:
        text.rope_scaling = dict(rotary.scaling)
        original = rotary.scaling.get("original_max_position_embeddings")
        if original is not None and hasattr(default_config, "original_max_position_embeddings"):
            text.original_max_position_embeddings = original
    return lost_fields


def _find_local_scaling(rotary: Rotary, default_config: Any) -> Mapping[str, Any] | None:
    """Return the scaling of sliding layers where transformers 4 has no field for it."""
    if not rotary.by_layer_type or hasattr(default_config, "rope_local_base_freq"):
        return rotary.local_scaling
    return None if rotary.local_scaling == rotary.scaling else rotary.local_scaling or {}


def check_rotary(model: Any, config: Any, rotary: Rotary, name: str) -> None:
    """Raise SpecDecError where a model rotates by other frequencies than its config.json says."""
    import torch
    import transformers

    from specdec.engine.rotary import compute_frequencies

    text = config.get_text_config()
    document = text.to_dict()
    if text.model_type == SCALES_QUERIES:
        document = drop_query_scale(document)
    config_rotary = read_rotary(ConfigReader(document, Path(name)))
    for key, buffer in model.named_buffers():
        if not key.endswith("inv_freq") or "original" in key or "vis" in key:
            continue
        is_local = "local" in key or "sliding" in key
        base, scaling = _choose_rotary(rotary, config_rotary, is_local=is_local)
        expected = _describe_rotary(text, 2 * len(buffer), base or 10000.0, scaling)
        if base is None or expected.find_scaling_problems():
            continue  # of a kind that only transformers knows
        frequencies, factor = compute_frequencies(expected, 1)
        owner, _, buffer_name = key.rpartition(".")
        scale_name = buffer_name.replace("inv_freq", "attention_scaling")
        scale = getattr(model.get_submodule(owner), scale_name, factor)
        ratios = torch.cat((buffer.float().cpu() / frequencies, torch.tensor([scale / factor])))
        if float((ratios - 1).abs().max()) > TOLERANCE:
            raise SpecDecError(
                f"{name}: transformers {transformers.__version__} rotates by frequencies, or scales"
                f" what it rotates, {ratios.min():.3g} to {ratios.max():.3g} times as config.json"
                " says",
                NEWER,
            )


def _choose_rotary(
    rotary: Rotary, config_rotary: Rotary, *, is_local: bool
) -> tuple[float | None, dict[str, Any] | None]:
    """Return base and scaling of a layer: config.json's, the base else of the configuration."""
    if is_local:
        return rotary.local_base or config_rotary.local_base, rotary.local_scaling
    return rotary.base or config_rotary.base, rotary.scaling


def _describe_rotary(
    text: Any, head_size: int, base: float, scaling: dict[str, Any] | None
) -> ModelConfig:
    """Return a model of one layer that rotates as a text model's configuration says."""
    return ModelConfig(
        architecture="LlamaForCausalLM", dtype="float32", vocab_size=1, hidden_size=1,
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_size=head_size, intermediate_size=1, norm_epsilon=1e-6,
        max_position_embeddings=text.max_position_embeddings,
        rotary_base=base, rotary_scaling=scaling,
        original_max_position_embeddings=getattr(text, "original_max_position_embeddings", None),
    )  # fmt: skip
