"""Greedy text against the model's own: every difference found, and explained.

Legend: N new tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .reference import Reference

# Bits of a logit, and how many spacings of the largest one two logits may lie apart and still tie:
# the order of the sums, which differs between programs, moves logits by a few of them. A float32
# logit is the sum of many rounded terms, each of them rounded like it; one in half precision is
# summed in float32 and rounded at the end of every layer's steps.
BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
SPACINGS = {"bfloat16": 8, "float16": 8, "float32": 128}


def compute_bound(logits: Tensor, dtype: str) -> Tensor:
    """Return for logits [..., V] the margin [...] up to which two of them nearly tie."""
    bounds: Tensor = logits.abs().amax(-1) * (SPACINGS[dtype] / 2 ** BITS[dtype])
    return bounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """A token that is not the model's.

    position: of the output token. margin: how much higher the model's logit of its own token is
    than that of the engine's, in float32 where that was asked. cause: "rounding" for a near-tie;
    "choice" where the engine's own logits prefer another token, so its accept rule is at fault;
    else "logits": the engine computes others. is_first: the text was the model's up to here; later
    ones are those tokens that the model would not choose after the engine's text up to them.
    """

    prompt: int
    run: str  # "batch" or "alone"
    position: int
    engine_token: int
    model_token: int
    margin: float
    bound: float
    near_tie: bool
    cause: str
    is_first: bool

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def judge_token(*, margin: float, bound: float, is_choice: bool, **facts: Any) -> Divergence:
    """Tell a near-tie from a fault; is_choice: the engine's own logits prefer its token.

    facts: the other fields of a Divergence.
    """
    near_tie = is_choice and abs(margin) <= bound
    cause = "rounding" if near_tie else "logits" if is_choice else "choice"
    return Divergence(margin=margin, bound=bound, near_tie=near_tie, cause=cause, **facts)


def judge_again(found: Divergence, exact: Tensor) -> Divergence:
    """Judge by logits [V] of the same weights in float32: a near-tie where the engine's is one."""
    margin = float(exact[found.model_token] - exact[found.engine_token])
    if margin > found.bound:
        return found
    return dataclasses.replace(found, margin=margin, near_tie=True, cause="rounding")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One output against the model. logit_difference: the largest one; bound: where it is."""

    divergences: list[Divergence]
    logit_difference: float
    logit_bound: float


def compare_text(
    reference: Reference,
    prompt: Sequence[int],
    output: Sequence[int],
    own_logits: Tensor,
    *,
    index: int,
    run: str,
    dtype: str,
) -> Comparison:
    """Compare an engine's output with the text that the model itself writes.

    The first difference is that between the two texts. Behind it, and nowhere else, the model is
    asked what it would write after the engine's text. own_logits: [N, V], the engine's own.
    """
    known = reference.continue_greedily(prompt, len(output))
    logits = reference.score(prompt, output)  # [N, V]
    bounds = compute_bound(logits, dtype)
    wanted = logits.argmax(-1).tolist()
    length = len(output)
    first = next((i for i in range(length) if output[i] != known[i]), length)
    highest = own_logits.amax(-1)
    divergences = []
    for at, token in enumerate(output):
        expected = known[at] if at <= first else wanted[at]
        is_choice = bool(own_logits[at, token] == highest[at])
        if token == expected and is_choice:
            continue
        divergences.append(
            judge_token(
                prompt=index,
                run=run,
                position=at,
                engine_token=token,
                model_token=expected,
                margin=float(logits[at, expected] - logits[at, token]),
                bound=float(bounds[at]),
                is_choice=is_choice,
                is_first=at == first,
            )
        )
    differences = (own_logits - logits).abs().amax(-1)
    worst = int((differences / bounds.clamp(min=torch.finfo(torch.float32).tiny)).argmax())
    return Comparison(
        divergences=divergences,
        logit_difference=float(differences[worst]),
        logit_bound=float(bounds[worst]),
    )


def find_wrong_end(
    output: dict[str, Any], length: int, must_end: set[int], may_end: set[int]
) -> str | None:
    """Return what is wrong with the place at which an output ends, None where nothing is."""
    tokens, reason = output["output_ids"], output["finish_reason"]
    where = f"prompt {output['index']}"
    passed = next((i for i, token in enumerate(tokens[:-1]) if token in must_end), None)
    if passed is not None:
        return f"{where} goes on after the end token {tokens[passed]} at position {passed}"
    if reason == "eos":
        if tokens and tokens[-1] in may_end:
            return None
        return f"{where} ends at token {tokens[-1:]}, which is not one of the model's end tokens"
    if reason == "length" and len(tokens) == length:
        return None
    return f"{where} ends by {reason} after {len(tokens)} tokens, not at {length} or an end token"
