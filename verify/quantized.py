"""Comparison of an engine with its own arithmetic: with itself without drafts, and its distance.

Its text follows from its rounded weights, or from a GGUF file's weights with inputs that the
kernels round; no other program computes that text. So two questions remain: whether speculation
leaves the engine's text as it is, which decides the verdict; and how far its logits are from the
model's, which is reported and decides nothing.

Legend: N tokens of all texts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specdec.text.comparison import find_difference

from .greedy import Divergence, Text, compare_text
from .reference import Reference


def compare_with_plain(
    texts: Sequence[Text], plain: Sequence[Text], dtype: str
) -> tuple[list[Divergence], dict[str, Any]]:
    """Compare texts with those of the same engine without speculation, by prompt.

    Returns the differences up to the first one of each text, in which `model` stands for the engine
    without drafts, and facts of the report: `wrong_ends` are texts that differ in their ends alone.
    """
    divergences, wrong_ends = [], []
    by_prompt = {text.prompt: text for text in plain}
    for text in texts:
        output_ids, plain_ids = text.output_ids, by_prompt[text.prompt].output_ids
        length = min(len(output_ids), len(plain_ids))
        position = find_difference(output_ids[:length], plain_ids[:length])
        if position is None and len(output_ids) != len(plain_ids):
            wrong_ends.append(
                f"prompt {text.prompt} ends after {len(output_ids)} tokens, without drafts after"
                f" {len(plain_ids)}"
            )
        logits = by_prompt[text.prompt].logits[: length if position is None else position + 1]
        divergences += compare_text(text, plain_ids, logits, dtype)
    return divergences, {"lossy": True, "wrong_ends": wrong_ends, "sampling": None}


def measure_distance(
    reference: Reference, plain: Sequence[Text], dtype: str, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the distance of an engine's logits from the model's after equal tokens.

    KL(P || Q) in nats, P the model's distribution and Q the engine's, where both have the same
    most probable token, and the first token of each text that is not the model's.
    """
    divergences, agreements, first_divergences = [], [], []
    for number, text in enumerate(plain, 1):
        tell(f"text {number} of {len(plain)}")
        logits = reference.score(text.input_ids, text.output_ids)
        model_log_probs, engine_log_probs = logits.log_softmax(-1), text.logits.log_softmax(-1)
        divergences.append((model_log_probs.exp() * (model_log_probs - engine_log_probs)).sum(-1))
        agreements.append(logits.argmax(-1) == text.logits.argmax(-1))
        model_tokens = reference.continue_greedily(text.input_ids, len(text.output_ids))
        first_divergences += [
            d for d in compare_text(text, model_tokens, logits, dtype) if d.is_first
        ]
    divergence, agreement = torch.cat(divergences), torch.cat(agreements)
    fields = ("prompt", "position", "engine_token", "model_token", "margin")
    return {
        "num_tokens": len(divergence),
        "mean_divergence": float(divergence.mean()),
        "largest_divergence": float(divergence.max()),
        "same_choice": int(agreement.sum()),
        "same_texts": len(plain) - len(first_divergences),
        "first_differences": [
            {name: getattr(divergence, name) for name in fields} for divergence in first_divergences
        ],
    }
