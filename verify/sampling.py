"""Sampled text against the model's exact distribution: chi-square over many seeds.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecDecError
from specdec.text.prompts import Prompt

from .chi_square import FALSE_ALARM_RATE, POWER, find_detectable_distance, fit_counts
from .greedy import compute_bound
from .reference import Reference
from .settings import VerifySettings

NUM_PROMPTS = 2
# The prompt's pass makes the first token, verify steps make the others: drafted or bonus tokens.
NUM_TOKENS = 3
EDGE = -1  # all tokens that nearly tie at the k-th place: top-k may cut off any of them
# Share of texts that rounding may change: in float32 it moves a boundary between two tokens across
# the random number for hardly one of a million tokens; in half precision too often for a bound.
ALLOWED_DIFFERENT = {"float32": 0.001}


@dataclasses.dataclass(frozen=True)
class Context:
    """Continuations of a text. probs: probabilities of next tokens and EDGE; edge: its tokens."""

    probs: dict[int, float]
    edge: frozenset[int]


def list_samples(settings: VerifySettings, prompts: Sequence[Sequence[int]]) -> list[Prompt]:
    """Return the sampled requests: every prompt --num-samples times, with consecutive seeds."""
    repeated = [prompt for prompt in prompts for _ in range(settings.num_samples)]
    return [
        Prompt(
            token_ids=prompt, max_output_len=NUM_TOKENS, temperature=settings.temperature,
            top_k=settings.top_k, seed=seed,
        )
        for seed, prompt in enumerate(repeated, settings.random_seed)
    ]  # fmt: skip


def list_contexts(
    reference: Reference, prompt: Sequence[int], settings: VerifySettings, dtype: str
) -> dict[tuple[int, ...], Context]:
    """Map every possible text of fewer than NUM_TOKENS tokens to its continuations."""
    contexts: dict[tuple[int, ...], Context] = {}
    texts: list[tuple[int, ...]] = [()]
    for _ in range(NUM_TOKENS):
        logits = reference.score_next([[*prompt, *text] for text in texts])
        next_contexts = read_contexts(logits, settings, dtype)
        contexts |= dict(zip(texts, next_contexts, strict=True))
        texts = [
            (*text, token)
            for text, context in zip(texts, next_contexts, strict=True)
            for token in context.probs
            if token != EDGE
        ]
    return contexts


def read_contexts(logits: Tensor, settings: VerifySettings, dtype: str) -> list[Context]:
    """Turn logits [R, V] into contexts; of equal logits at the k-th place, the first are kept."""
    scores = logits / float(settings.temperature)
    cut_tokens = logits.sort(dim=-1, descending=True, stable=True).indices[:, settings.top_k :]
    all_probs = scores.scatter(1, cut_tokens, -torch.inf).softmax(-1)
    contexts = []
    for row, bound, probs in zip(logits, compute_bound(logits, dtype), all_probs, strict=True):
        cutoff = row.topk(min(settings.top_k, len(row))).values[-1]
        near = ((row - cutoff).abs() <= bound).nonzero()[:, 0].tolist()
        edge = frozenset(near if any(probs[token] == 0 for token in near) else ())
        token_probs = {t: float(probs[t]) for t in probs.nonzero()[:, 0].tolist() if t not in edge}
        if edge:
            token_probs[EDGE] = 1 - sum(token_probs.values())
        contexts.append(Context(token_probs, edge))
    return contexts


def find_outcome(
    contexts: dict[tuple[int, ...], Context], tokens: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the cell in which a sampled text counts; None where the model cannot write it."""
    text: tuple[int, ...] = ()
    for token in tokens:
        context = contexts[text]
        if token in context.edge:
            return (*text, EDGE)
        if token not in context.probs:
            return None
        text = (*text, token)
    return text


def list_outcomes(contexts: dict[tuple[int, ...], Context]) -> dict[tuple[int, ...], float]:
    """Map every cell to its exact probability."""
    reach: dict[tuple[int, ...], float] = {(): 1.0}
    outcomes = {}
    for text, context in contexts.items():  # shorter texts first
        for token, prob in context.probs.items():
            longer = (*text, token)
            reach[longer] = reach[text] * prob
            if longer not in contexts:
                outcomes[longer] = reach[longer]
    return outcomes


def fit_prompt(
    reference: Reference,
    prompt: Sequence[int],
    texts: Sequence[Sequence[int]],
    *,
    settings: VerifySettings,
    dtype: str,
    false_alarm_rate: float,
) -> dict[str, Any]:
    """Return the test of one prompt's sampled texts."""
    contexts = list_contexts(reference, prompt, settings, dtype)
    outcomes = list_outcomes(contexts)
    counts = Counter(find_outcome(contexts, text) for text in texts)
    num_impossible = counts.pop(None, 0)
    fit = fit_counts([counts[outcome] for outcome in outcomes], list(outcomes.values()))
    p_value = 0.0 if num_impossible else fit.p_value if fit else None
    cells = [
        {"tokens": list(outcome), "expected": prob * len(texts), "count": counts[outcome]}
        for outcome, prob in sorted(outcomes.items(), key=lambda item: -item[1])
    ]
    return {
        "requests": len(texts),
        "num_cells": fit.num_cells if fit else 1,
        "statistic": fit.statistic if fit else None,
        "p_value": p_value,
        "impossible": num_impossible,
        "detectable_distance": fit
        and find_detectable_distance(fit.num_cells, len(texts), false_alarm_rate),
        "verdict": "untested" if p_value is None else
        "exact" if p_value >= false_alarm_rate else "differs",
        "cells": cells,
    }  # fmt: skip


def verify_sampling(
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    sampled: Sequence[Sequence[int]],
    unspeculated: Sequence[Sequence[int]] | None,
    *,
    settings: VerifySettings,
    dtype: str,
) -> dict[str, Any]:
    """Test sampled texts, in the order of `list_samples`; return the report's part on sampling.

    unspeculated: texts of equal requests without speculation, None where these may differ.
    """
    number = settings.num_samples
    rate = FALSE_ALARM_RATE / len(prompts)
    tests = [
        {"prompt": index}
        | fit_prompt(
            reference, prompt, sampled[index * number : (index + 1) * number],
            settings=settings, dtype=dtype, false_alarm_rate=rate,
        )
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip
    if all(test["verdict"] == "untested" for test in tests):
        raise SpecDecError(
            f"nothing to test: at temperature {settings.temperature:g} and top-k {settings.top_k}"
            f" the model's first {NUM_TOKENS} tokens are all but certain, or tie",
            "raise --temperature or --top-k, or give other --prompts",
        )
    seed_comparison = None
    if unspeculated is not None:
        seed_comparison = compare_seeds(sampled, unspeculated, dtype)
    differs = any(test["verdict"] == "differs" for test in tests)
    differs |= seed_comparison is not None and seed_comparison["verdict"] == "differs"
    return {
        "verdict": "differs" if differs else "exact",
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "num_tokens": NUM_TOKENS,
        "false_alarm_rate": FALSE_ALARM_RATE,
        "power": POWER,
        "tests": tests,
        "same_seeds": seed_comparison,
    }


def compare_seeds(
    sampled: Sequence[Sequence[int]], unspeculated: Sequence[Sequence[int]], dtype: str
) -> dict[str, Any]:
    """Compare texts of equal seeds with speculation and without: only rounding may differ."""
    number = sum(a != b for a, b in zip(sampled, unspeculated, strict=True))
    share = ALLOWED_DIFFERENT.get(dtype)
    num_allowed = None if share is None else max(1, int(share * len(sampled)))
    verdict = "untested" if num_allowed is None else "exact" if number <= num_allowed else "differs"
    return {"texts": len(sampled), "different": number, "allowed": num_allowed, "verdict": verdict}
