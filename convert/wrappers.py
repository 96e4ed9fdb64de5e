"""Models that hold a text model alongside a vision tower: the text model is taken out.

Without an image they compute what the text model computes. Only the wrappers named here are known
to; others attend otherwise (PaliGemma), or have positions of their own (Qwen2-VL).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.model.wrappers import NAMES, WRAPPERS
from specdec.system import logs

from .hf import HfFolder

logger = logs.get_logger(__name__)

# Modules that only images pass through.
VISION = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "image_newline",
    "model.vision_tower.", "model.vision_model.", "model.multi_modal_projector.",
    "model.image_newline", "model.visual.", "visual.",
)  # fmt: skip
# Operations on logits of a text model's training, which classes of wrappers leave out.
LOGITS = {"final_logit_softcapping": None, "logits_scaling": 1.0}
USUAL_CAPS = {("gemma2", "final_logit_softcapping"): 30.0}  # where config.json does not say
# Keys of a wrapper's own config.json where its text_config does not say.
INHERITED = ("dtype", "torch_dtype", "quantization_config")
# A text_config leaves out what its class in transformers takes by default; these are the sizes that
# the families here do not know by themselves.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
DEFAULTS = {
    "llama": dict(zip(_SIZES, (32000, 4096, 11008, 32, 32), strict=True)),
    "mistral": dict(zip(_SIZES, (32000, 4096, 14336, 32, 32), strict=True)),
    "gemma3_text": dict(zip(_SIZES, (262208, 2304, 9216, 26, 8), strict=True)),
    "qwen3_5_text": dict(zip(_SIZES, (248320, 4096, 12288, 32, 16), strict=True)),
    "qwen3_5_moe_text": dict(zip(_SIZES, (248320, 2048, 512, 40, 16), strict=True)),
}


def unwrap(folder: HfFolder) -> None:
    """Let a folder of a known wrapper show its text model alone; leave any other as it is."""
    architectures, text = folder.config.get("architectures"), folder.config.get("text_config")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name not in WRAPPERS or not isinstance(text, dict):
        return
    left_out = sorted(name for name in folder.tensors if name.startswith(VISION))
    folder.rename(_name_alone(folder), left_out=left_out)
    _warn_of_logits(folder, text, name)
    outer = {key: folder.config[key] for key in INHERITED if key in folder.config}
    if "lm_head.weight" not in folder.tensors and folder.config.get("tie_word_embeddings") is True:
        # transformers 5 ties by the wrapper's own key, earlier versions by the text model's.
        text = text | {"tie_word_embeddings": True}
    folder.config = outer | DEFAULTS.get(str(text.get("model_type")), {}) | text
    logger.info(
        "%s: the text model of %s is taken; %d vision tensors are left out",
        folder.path, name, len(left_out),
    )  # fmt: skip


def _name_alone(folder: HfFolder) -> dict[str, str]:
    """Map the text model's tensors to the names that they have where it is alone."""
    return {
        name: prefix + name.removeprefix(wrapper_prefix)
        for name in folder.tensors
        for wrapper_prefix, prefix in NAMES
        if name.startswith(wrapper_prefix)
    }


def _warn_of_logits(folder: HfFolder, text: Mapping[str, Any], wrapper: str) -> None:
    """Warn of operations on logits that are computed here and that a wrapper's class leaves out."""
    for key, plain in LOGITS.items():
        value = text.get(key, USUAL_CAPS.get((str(text.get("model_type")), key), plain))
        if value not in (None, plain):
            logger.warning(
                "%s: %s %s of the text model is computed; %s of transformers leaves it out, which"
                " changes the probabilities of sampling but no greedy text",
                folder.path, key, value, wrapper,
            )  # fmt: skip
