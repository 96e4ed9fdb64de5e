"""Numbers of models and drafters, out of config.json and the headers of weight files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import CheckpointConfig
from specdec.errors import SpecDecError
from specdec.files.acceptance import Acceptance
from specdec.files.reading import read_json
from specdec.files.tensor_file import TensorFile, TensorInfo
from specdec.methods.dflash import DFlashParams
from specdec.methods.eagle import EagleParams
from specdec.model.tensors import OFFSETS, list_target_tensors

# Number -> the keys of config.json, in whatever object, that give it.
KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "exit_dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_draft_layers"),
    "num_heads": ("medusa_num_heads",),
    "feature_layers": (
        "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids",
    ),
    "vocab_size": ("vocab_size",),
    "draft_vocab_size": ("draft_vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions"),
    "dtype": ("dtype", "torch_dtype"),
    "quantization": ("quant_method", "quant_algo"),
}  # fmt: skip
WEIGHT_FILES = ("model.safetensors", "medusa_lm_head.safetensors")
TREE_SIZES = (1, 2, 4, 8)  # verified tokens for which a promise is told


def describe_model(checkpoint: CheckpointConfig) -> dict[str, Any]:
    """Return the numbers of a model that converts."""
    model, quantization = checkpoint.model, checkpoint.quantization
    shapes = (spec.shape for spec in list_target_tensors(model).values())
    return {
        "architecture": model.architecture, "hidden_size": model.hidden_size,
        "num_layers": model.num_hidden_layers, "vocab_size": model.vocab_size,
        "max_positions": model.max_position_embeddings, "dtype": model.dtype,
        "quantization": quantization.quant_algo, "num_parameters": sum(map(math.prod, shapes)),
    }  # fmt: skip


def describe_folder(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers that a folder's config.json and headers give, None for absent ones."""
    numbers = {name: _find_value(config, keys) for name, keys in KEYS.items()}
    tensors = _read_header(path)
    if numbers["draft_vocab_size"] is None and OFFSETS in tensors:
        numbers["draft_vocab_size"] = math.prod(tensors[OFFSETS].shape)
    if numbers["dtype"] is None and tensors:
        largest = max(tensors.values(), key=lambda info: math.prod(info.shape))
        numbers["dtype"] = largest.dtype
    return numbers


def _read_header(path: Path) -> Mapping[str, TensorInfo]:
    """Return the tensors of a folder's one weight file, none of what cannot be read."""
    for name in WEIGHT_FILES:
        if (path / name).is_file():
            with contextlib.suppress(SpecDecError):  # for which the conversion refuses it
                return TensorFile(path / name).tensors
    return {}


def describe_drafter(params: Any) -> tuple[str | None, dict[str, Any]]:
    """Return the form of a drafter that fits, and the numbers that its conversion knows better."""
    if isinstance(params, EagleParams):
        if params.eagle3 is None:
            return "EAGLE-1", {}
        form = "EAGLE-3" if params.eagle3.mask_token_id is None else "P-EAGLE"
        aux_layers = params.eagle3.aux_layers
    elif isinstance(params, DFlashParams):
        form, aux_layers = "DSpark" if params.markov_rank else "DFlash", params.aux_layers
    else:
        return None, {}
    return form, {
        "feature_layers": list(aux_layers), "draft_vocab_size": params.draft_vocab_size,
    }  # fmt: skip


def describe_acceptance(acceptance: Acceptance) -> dict[str, Any]:
    """Return what a drafter's counts promise: emitted tokens of a step, by the verified ones."""
    sizes = [size for size in TREE_SIZES if size <= len(acceptance.gains)]
    return {
        "tokens_per_step": {str(n): round(1 + acceptance.gains[n - 1], 3) for n in sizes},
        "num_drafts": acceptance.num_drafts,
        "about": dict(acceptance.about),
    }


def read_trained_length(folder: Path) -> int | None:
    """Return the tokens of the longest rows that specdec-train trained a drafter on, if it says."""
    try:
        length = read_json(folder / "manifest.json")["compute"]["model_max_length"]
    except (SpecDecError, OSError, KeyError, TypeError):
        return None
    return length if type(length) is int else None


def _find_value(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """Return the first plain value of some keys, in the outer objects before the inner ones."""
    objects = [config]
    for section in objects:
        for key in keys:
            if not isinstance(value := section.get(key), (dict, type(None))):
                return value
        objects += [value for value in section.values() if isinstance(value, dict)]
    return None
