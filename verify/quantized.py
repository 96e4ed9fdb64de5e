"""An engine with quantized weights: compared with itself without drafts; its distance is told.

Its text is that of its own rounded weights, which no other program runs. So two things are asked:
does speculation leave the engine's own text as it is, which decides the verdict; and how far are
its logits from the model's, which is told and decides nothing.

Legend: N tokens of all texts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecDecError

from .greedy import Divergence, compute_bound, judge_token
from .reference import Reference
from .settings import VerifySettings

# (run, index of the prompt, entry of specdec-run's `outputs`, its logits)
Text = tuple[str, int, dict[str, Any], Tensor]


def refuse_sampling(settings: VerifySettings, quantization: str) -> None:
    """Raise SpecDecError for --sampling: there is no distribution to test against."""
    if settings.sampling:
        raise SpecDecError(
            f"{settings.engine_dir} has {quantization} weights: its sampled text follows its own"
            " distribution, which transformers does not run",
            "leave --sampling out, or verify an engine built without --quantization",
        )


def compare_with_plain(
    texts: Sequence[Text], plain: Mapping[int, Text], dtype: str
) -> tuple[list[Divergence], list[str]]:
    """Compare texts with those of the same engine without speculation, by prompt.

    Returns the first difference of each, in which `model` stands for the engine without drafts, and
    what is wrong with the ends of texts that are equal up to there.
    """
    divergences, wrong_ends = [], []
    for run, index, output, logits in texts:
        tokens, (_, _, plain_output, plain_logits) = output["output_ids"], plain[index]
        expected = plain_output["output_ids"]
        length = min(len(tokens), len(expected))
        at = next((i for i in range(length) if tokens[i] != expected[i]), None)
        if at is None:
            if len(tokens) != len(expected):
                wrong_ends.append(
                    f"prompt {index} ends after {len(tokens)} tokens, without drafts after"
                    f" {len(expected)}"
                )
            continue
        divergences.append(
            judge_token(
                prompt=index,
                run=run,
                position=at,
                engine_token=tokens[at],
                model_token=expected[at],
                margin=float(plain_logits[at, expected[at]] - plain_logits[at, tokens[at]]),
                bound=float(compute_bound(plain_logits[at], dtype)),
                is_choice=bool(logits[at, tokens[at]] == logits[at].max()),
                is_first=True,
            )
        )
    return divergences, wrong_ends


def measure_distance(
    reference: Reference, plain: Sequence[Text], tell: Callable[[str], None]
) -> dict[str, Any]:
    """How far the logits of an engine's own texts are from the model's after the same tokens.

    Of the model's distribution P and the engine's Q: KL(P || Q) in nats, where both have the same
    most probable token, and the first token of each text that is not the model's.
    """
    divergences, agreements, num_same = [], [], 0
    first_differences = []
    for number, (_, index, output, own) in enumerate(plain, 1):
        tell(f"text {number} of {len(plain)}")
        prompt, tokens = output["input_ids"], output["output_ids"]
        logits = reference.score(prompt, tokens)
        wanted, found = logits.log_softmax(-1), own.log_softmax(-1)
        divergences.append((wanted.exp() * (wanted - found)).sum(-1))
        agreements.append(logits.argmax(-1) == own.argmax(-1))
        known = reference.continue_greedily(prompt, len(tokens))
        at = next((i for i, token in enumerate(tokens) if token != known[i]), None)
        if at is None:
            num_same += 1
        else:
            first_differences.append(
                {
                    "prompt": index,
                    "position": at,
                    "engine_token": tokens[at],
                    "model_token": known[at],
                    "margin": float(logits[at, known[at]] - logits[at, tokens[at]]),
                }
            )
    divergence, agreement = torch.cat(divergences), torch.cat(agreements)
    return {
        "num_tokens": len(divergence),
        "mean_divergence": float(divergence.mean()),
        "largest_divergence": float(divergence.max()),
        "same_choice": int(agreement.sum()),
        "same_texts": num_same,
        "first_differences": first_differences,
    }
