"""Models that hold a text model alongside a vision tower, from which the text model is taken."""

from __future__ import annotations

WRAPPERS = (
    "Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration", "Mistral3ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip
# How transformers has named the text model's tensors, and what they are called where it is alone.
NAMES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
