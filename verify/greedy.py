"""Comparison of greedy texts with the model's, which explains every difference.

Legend: N new tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.system import logs
from specdec.text.comparison import DIFFERS, NEAR_TIE, find_difference, judge_margin

from .reference import Reference

logger = logs.get_logger(__name__)

# Bits of a logit, and how many spacings of the largest one two logits may lie apart and still tie:
# the order of the sums, which differs between programs, moves logits by a few of them. A float32
# logit is the sum of many rounded terms, each of them rounded like it; one in half precision is
# summed in float32 and rounded at the end of every layer's steps.
BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
SPACINGS = {"bfloat16": 8, "float16": 8, "float32": 128}
MAX_DOUBT = 4  # near-tie bounds that the model's own rounding may add up to


def compute_bound(logits: Tensor, dtype: str) -> Tensor:
    """Return the margin [...] up to which two of the logits [..., V] nearly tie."""
    bounds: Tensor = logits.abs().amax(-1) * (SPACINGS[dtype] / 2 ** BITS[dtype])
    return bounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Text that the engine wrote. run: "batch" or "alone". logits: [N, V], of its choices."""

    run: str
    prompt: int
    input_ids: list[int]
    output_ids: list[int]
    logits: Tensor
    finish_reason: str | None = "length"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """Token of an engine's text that the model would not write.

    position: number of the output token. margin: the model's logit of its own token minus that of
    the engine's token, in float32 where `judge_in_float32` asked. cause: "rounding" for a near-tie;
    "choice" where the engine's own logits prefer another token, so that its accept rule is at
    fault; else "logits": the engine computes other logits. is_first: whether the text was the
    model's up to here; later divergences are tokens that the model would not choose after the
    engine's text up to them.
    """

    prompt: int
    run: str  # "batch" or "alone"
    position: int
    engine_token: int
    model_token: int
    margin: float
    bound: float
    cause: str
    is_first: bool

    @property
    def near_tie(self) -> bool:
        return self.cause == "rounding"

    @property
    def kind(self) -> str:
        """Kind of difference, in the words of `specdec.text.comparison`."""
        return NEAR_TIE if self.near_tie else DIFFERS

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"near_tie": self.near_tie}


def compare_text(
    text: Text, model_tokens: Sequence[int], logits: Tensor, dtype: str
) -> list[Divergence]:
    """Compare an engine's text with the tokens that the model writes by itself.

    logits: [n, V], by which the model would choose each of the first n tokens after the engine's
    text. The first difference is between the two texts. After it, tokens are compared with the
    model's choices after the engine's text.
    """
    output = text.output_ids[: len(logits)]
    bounds, choices = compute_bound(logits, dtype), logits.argmax(-1).tolist()
    first_position = find_difference(output, model_tokens[: len(output)])
    divergences = []
    for position, token in enumerate(output):
        expected = (
            model_tokens[position]
            if first_position is None or position <= first_position
            else choices[position]
        )
        is_choice = bool(text.logits[position, token] == text.logits[position].max())
        if token == expected and is_choice:
            continue
        margin, bound = (
            float(logits[position, expected] - logits[position, token]),
            float(bounds[position]),
        )
        near_tie = judge_margin(margin, bound) == NEAR_TIE
        divergences.append(
            Divergence(
                prompt=text.prompt, run=text.run, position=position, engine_token=token,
                model_token=expected, margin=margin, bound=bound,
                is_first=position == first_position,
                cause="choice" if not is_choice else "rounding" if near_tie else "logits",
            )
        )  # fmt: skip
    return divergences


def compare_logits(engine_logits: Tensor, logits: Tensor, dtype: str) -> tuple[float, float]:
    """Return the largest difference of an engine's logits [N, V] from the model's, and its bound.

    The largest difference is the one that exceeds its near-tie bound most.
    """
    differences, bounds = (engine_logits - logits).abs().amax(-1), compute_bound(logits, dtype)
    worst = int((differences / bounds.clamp(min=torch.finfo(torch.float32).tiny)).argmax())
    return float(differences[worst]), float(bounds[worst])


def judge_in_float32(
    reference: Reference, divergences: Sequence[Divergence], texts: Sequence[Text]
) -> list[Divergence]:
    """Compute the model again, in float32, where the engine seems to compute other logits.

    The model rounds in half precision too, and may be the wrong side. It stays in float32, which
    takes twice the memory; so it is not computed again where a margin exceeds MAX_DOUBT bounds.
    """
    doubtful = [divergence for divergence in divergences if divergence.cause == "logits"]
    if not doubtful or any(
        divergence.margin > MAX_DOUBT * divergence.bound for divergence in doubtful
    ):
        return list(divergences)
    doubtful_texts = {(divergence.run, divergence.prompt) for divergence in doubtful}
    label = "running the model in float32, where its logits differ from the engine's"
    with logs.show_waiting(label, logger):
        reference.widen()
        exact = {
            (text.run, text.prompt): reference.score(text.input_ids, text.output_ids)
            for text in texts
            if (text.run, text.prompt) in doubtful_texts
        }

    def judge(divergence: Divergence) -> Divergence:
        logits = exact[divergence.run, divergence.prompt][divergence.position]
        margin = float(logits[divergence.model_token] - logits[divergence.engine_token])
        if margin > divergence.bound:
            return divergence
        return dataclasses.replace(divergence, margin=margin, cause="rounding")

    return [
        judge(divergence) if divergence.cause == "logits" else divergence
        for divergence in divergences
    ]


def find_wrong_end(text: Text, length: int, must_end: set[int], may_end: set[int]) -> str | None:
    """Return the fault of a text's end as a sentence, None for a right end."""
    tokens, reason, label = text.output_ids, text.finish_reason, f"prompt {text.prompt}"
    passed = next((i for i, token in enumerate(tokens[:-1]) if token in must_end), None)
    if passed is not None:
        return f"{label} goes on after the end token {tokens[passed]} at position {passed}"
    if reason == "eos":
        if tokens and tokens[-1] in may_end:
            return None
        return f"{label} ends at token {tokens[-1:]}, which is not one of the model's end tokens"
    if reason == "length" and len(tokens) == length:
        return None
    return f"{label} ends by {reason} after {len(tokens)} tokens, not at {length} or an end token"
