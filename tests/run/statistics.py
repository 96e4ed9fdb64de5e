"""Chi-square tests against known distributions, with a stated false-alarm rate."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import torch

# Seeds are fixed, so a test passes always or never; with other seeds a right program would fail
# one test in this many.
FALSE_ALARM_RATE = 1e-4
MIN_EXPECTED = 5.0  # cells below are merged, as the chi-square approximation asks


def compute_p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Probability of counts at least this far from `probs`, were they drawn from it."""
    total = counts.sum()
    assert np.isclose(probs.sum(), 1), probs.sum()
    assert counts[probs == 0].sum() == 0, "an impossible outcome occurred"
    expected = probs * total
    order = np.argsort(expected)[::-1]
    large = order[expected[order] >= MIN_EXPECTED]
    small = order[expected[order] < MIN_EXPECTED]
    groups = [[i] for i in large]
    if len(small) and expected[small].sum() >= MIN_EXPECTED:
        groups.append(list(small))
    elif len(small):
        groups[-1] += list(small)
    observed = np.array([counts[g].sum() for g in groups])
    wanted = np.array([expected[g].sum() for g in groups])
    assert len(groups) > 2, "too few cells to tell anything"
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    half = torch.tensor([(len(groups) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


NUM_TEXTS = 1500  # that `check_first_tokens` draws


def check_first_tokens(engine: Any, drafter: Any, prompt: list[int]) -> tuple[float, int]:
    """Draw three tokens after a prompt with many seeds, temperature 1.5 and the best four tokens.

    Returns the p-value of the texts against the target's own distribution, and how many drafts were
    accepted in all; two tokens of each text can be drafts.
    """
    from specdec.decode.loop import Options, generate
    from specdec.decode.requests import Request
    from specdec.decode.sampling import SamplingParams, process_logits

    params = SamplingParams(temperature=1.5, top_k=4)
    requests = [
        Request(
            index=seed, input_ids=prompt, max_output_len=3, end_ids=frozenset(),
            sampling=dataclasses.replace(params, seed=seed),
        )
        for seed in range(NUM_TEXTS)
    ]  # fmt: skip
    results = generate(engine.decoder, drafter, requests, Options(max_batch_size=250))
    counts = Counter(tuple(result.output_ids) for result in results)
    probs: dict[tuple[int, ...], float] = {}

    def expand(text: tuple[int, ...], probability: float) -> None:
        if len(text) == 3:
            probs[text] = probability
            return
        left = process_logits(compute_logits(engine, [*prompt, *text])[None], [params])[0]
        for token in left.nonzero()[:, 0].tolist():
            expand((*text, token), probability * float(left[token]))

    expand((), 1.0)
    assert set(counts) <= set(probs)
    texts, total = sorted(probs), sum(probs.values())
    p_value = compute_p_value(
        np.array([counts[text] for text in texts]), np.array([probs[t] / total for t in texts])
    )
    return p_value, sum(r.stats.num_accepted for r in results)


@torch.inference_mode()
def compute_logits(engine: Any, text: list[int]) -> torch.Tensor:
    """The logits [V] of an engine's model after a text."""
    from specdec.decode.prefill import fill_cache

    cache = engine.decoder.make_cache(1, len(text))
    hidden = fill_cache(engine.decoder, cache, [0], [text], 8192)
    logits: torch.Tensor = engine.decoder.compute_logits(hidden)[0]
    return logits
