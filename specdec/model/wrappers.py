"""Models that hold a text model alongside a vision tower, from which the text model is taken."""

from __future__ import annotations

import re

WRAPPERS = (
    "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration", "Lfm2VlForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration", "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip
# How transformers has named the text model's tensors, and what they are called where it is alone.
NAMES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_PREFIX = re.compile(r"(?:model\.)*language_model\.(?:(?:model|language_model)\.)*")


def name_alone(name: str) -> str:
    """Return the name that a wrapper's tensor has in its text model, however often it is wrapped.

    Names of other tensors stay.
    """
    prefix = _PREFIX.match(name)
    if prefix is None:
        return name
    rest = name[prefix.end() :]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"
