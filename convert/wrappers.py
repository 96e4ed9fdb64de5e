"""Models that hold a text model alongside a vision tower: the text model is taken out.

Without an image they compute what the text model computes. Only the wrappers that are listed are
known to; others attend otherwise (PaliGemma). In those of Qwen a token has three positions
(M-RoPE), which are one in a text.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec.errors import SpecDecError, shorten
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo
from specdec.model.rotary_scaling import TYPE_KEYS
from specdec.model.wrappers import WRAPPERS, name_alone
from specdec.system import logs

from .hf import HfFolder
from .plan import CASTABLE, ComputedTensors

logger = logs.get_logger(__name__)

# Modules that only images and sounds pass through, with the first part of their names.
VISION = re.compile(
    r"(?:(?:model|language_model)\.)*"
    r"(?:visual|vision_tower|vision_model|multi_modal_projector|image_newline|embed_vision"
    r"|audio_tower|embed_audio)(?:\.[^.]+|$)"
)
# Operations on logits of a text model's training, which classes of most wrappers leave out.
LOGITS = {"final_logit_softcapping": None, "logits_scaling": 1.0}
CAPPED = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
USUAL_CAPS = {("gemma2", "final_logit_softcapping"): 30.0}  # where config.json does not say
# Keys of a wrapper's own config.json where its text_config does not say.
INHERITED = ("dtype", "torch_dtype", "quantization_config")
# The first wrappers of these classes have the text model's keys among their own.
FLAT = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
}
# Text models that compute what a family here does, where that has another name.
KINDS = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe", "gemma4_unified_text": "gemma4_text",
}  # fmt: skip
# A text_config leaves out what its class in transformers takes by default; these are the values
# that the families here do not know by themselves.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
_QWEN2_VL = dict(zip(_SIZES, (152064, 8192, 29568, 80, 64), strict=True)) | {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80,
}  # fmt: skip
_QWEN3_VL = {"max_position_embeddings": 128000, "rope_theta": 5e5}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": dict(zip(_SIZES, (32000, 4096, 11008, 32, 32), strict=True)),
    "mistral": dict(zip(_SIZES, (32000, 4096, 14336, 32, 32), strict=True)),
    "ministral3": dict(zip(_SIZES, (131072, 4096, 14336, 34, 32), strict=True)),
    "gemma4_text": dict(zip(_SIZES, (262144, 2304, 9216, 30, 8), strict=True)),
    "gemma4_unified_text": dict(zip(_SIZES, (262144, 2304, 9216, 30, 8), strict=True)) | {
        "max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
    },
    "lfm2": dict(zip(_SIZES, (65536, 2560, 12288, 32, 32), strict=True)),
    "gemma3_text": dict(zip(_SIZES, (262208, 2304, 9216, 26, 8), strict=True)),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": dict(zip(_SIZES, (151936, 4096, 22016, 32, 32), strict=True)) | _QWEN3_VL,
    "qwen3_vl_moe_text": dict(zip(_SIZES, (151936, 2048, 5632, 24, 16), strict=True)) | {
        **_QWEN3_VL, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
    },
    "qwen3_5_text": dict(zip(_SIZES, (248320, 4096, 12288, 32, 16), strict=True)),
    "qwen3_5_moe_text": dict(zip(_SIZES, (248320, 2048, 512, 40, 16), strict=True)),
}  # fmt: skip
# Values that classes take whatever a text_config says.
FIXED = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
WITHOUT_WINDOW = ("qwen3_vl_text", "qwen3_vl_moe_text")  # where the text model alone may have one


def unwrap(folder: HfFolder) -> HfFolder:
    """Return a folder of a known wrapper as its text model alone, and any other as it is.

    A wrapper may hold another one.
    """
    names: list[str] = []
    text, is_tied = folder.config, False
    while (name := _get_wrapper(text, is_inner=bool(names))) is not None:
        names.append(name)
        is_tied |= text.get("tie_word_embeddings") is True
        outer = {key: text[key] for key in INHERITED if key in text}
        text = outer | _find_text(text, name)
    if not names:
        return folder
    _leave_vision(folder)
    _warn_of_logits(folder, text, names[0])
    if is_tied and "lm_head.weight" not in folder.tensors:
        # transformers 5 ties by the wrapper's own key, earlier versions by the text model's.
        text["tie_word_embeddings"] = True
    kind, folder.config = text.get("model_type"), _complete(text)
    if kind in WITHOUT_WINDOW and text.get("use_sliding_window"):
        raise SpecDecError(
            f"{folder.path}: use_sliding_window is {shorten(text['use_sliding_window'])}, and"
            f" models of type {kind} have no window",
            "remove the wrong one",
        )
    groups = ", ".join(f"{group} {count}" for group, count in folder.left_out.items())
    logger.info(
        "%s: the text model of %s is taken; %d vision tensors are left out%s",
        folder.path, names[0], sum(folder.left_out.values()), groups and f": {groups}",
    )  # fmt: skip
    return _turn_experts(folder) if kind == "qwen3_vl_moe_text" else folder


def _complete(text: dict[str, Any]) -> dict[str, Any]:
    """Return a text model's configuration with its class's defaults, and the family's name.

    transformers goes by the model_type, whatever class is named beside it.
    """
    kind = str(text.get("model_type"))
    if kind in DEFAULTS:
        text = {key: value for key, value in text.items() if key != "architectures"}
    defaults = dict(DEFAULTS.get(kind, {}))
    if kind in KINDS:
        rotary = {key: drop_sections(text.get(key)) for key in ("rope_parameters", "rope_scaling")}
        text = text | rotary
        if any("rope_theta" in (values or ()) for values in rotary.values()):
            defaults.pop("rope_theta", None)
    if "num_local_experts" in text:
        defaults.pop("num_experts", None)
    model_type = KINDS.get(kind, text.get("model_type"))
    return defaults | text | FIXED.get(kind, {}) | {"model_type": model_type}


def drop_sections(rotary: Any) -> Any:
    """Return a rotary embedding without the sections of the three positions (M-RoPE).

    A token of a text has one position, so that the dimensions of each section are rotated alike.
    """
    if not isinstance(rotary, dict):
        return rotary
    return {
        key: value for key, value in rotary.items()
        if not key.startswith("mrope_") and not (key in TYPE_KEYS and value == "mrope")
    }  # fmt: skip


def _turn_experts(folder: HfFolder) -> HfFolder:
    """Return the folder with its experts' matrices as [out, in], which Qwen3-VL has as [in, out].

    As transformers reads them, those whose sizes fit either way are taken as [out, in].
    """
    num_columns = {
        "gate_up_proj": folder.config.get("hidden_size"),
        "down_proj": folder.config.get("moe_intermediate_size"),
    }
    infos: dict[str, TensorInfo] = {}
    for name, info in folder.tensors.items():
        width = num_columns.get(name.rpartition(".experts.")[2])
        shape, is_cast = info.shape, info.dtype in CASTABLE
        if is_cast and len(shape) == 3 and shape[1] == width and shape[2] != width:
            infos[name] = TensorInfo(info.dtype, (shape[0], shape[2], shape[1]))

    def compute(name: str, start: int, stop: int, columns: tuple[int, int] | None) -> Array:
        num_matrices, height, width = infos[name].shape
        first_column, last_column = columns or (0, width)
        parts = []
        for matrix in range(start // height, min(num_matrices, math.ceil(stop / height))):
            top = matrix * height
            rows = max(start, top) - top, min(stop, top + height) - top
            stored_rows = matrix * width + first_column, matrix * width + last_column
            parts.append(folder.read_block(name, *stored_rows, rows).T)
        return np.concatenate(parts)

    return folder.substitute(ComputedTensors(folder, infos, compute), ())


def _leave_vision(folder: HfFolder) -> None:
    """Leave a wrapper's vision tensors out, counted by module; name the others as if alone."""
    modules = {name: match[0] for name in folder.tensors if (match := VISION.match(name))}
    folder.left_out = dict(sorted(collections.Counter(modules.values()).items()))
    folder.rename({name: name_alone(name) for name in folder.tensors}, left_out=modules)


def _get_wrapper(config: Mapping[str, Any], *, is_inner: bool) -> str | None:
    """Return the class of a wrapper that a configuration is of; None for any other.

    is_inner: it is a wrapper's text_config, which need not name its class.
    """
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    has_text = isinstance(config.get("text_config"), dict)
    if name is None and is_inner and has_text:
        return str(config.get("model_type"))
    return name if name in WRAPPERS and (has_text or name in FLAT) else None


def _find_text(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the configuration of a wrapper's text model, which names no wrapper's class."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        text = {**config, "model_type": FLAT[name], "text_config": None}
    if not isinstance(text.get("text_config"), dict) and text.get("architectures") == [name]:
        text = {**text, "architectures": None}
    return text


def _warn_of_logits(folder: HfFolder, text: Mapping[str, Any], wrapper: str) -> None:
    """Warn of operations on logits that are computed here and that a wrapper's class leaves out."""
    if wrapper in CAPPED:
        return
    for key, plain in LOGITS.items():
        value = text.get(key, USUAL_CAPS.get((str(text.get("model_type")), key), plain))
        if value not in (None, plain):
            logger.warning(
                "%s: %s %s of the text model is computed; %s of transformers leaves it out, which"
                " changes the probabilities of sampling but no greedy text",
                folder.path, key, value, wrapper,
            )  # fmt: skip
