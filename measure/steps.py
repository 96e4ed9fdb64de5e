"""Measurement of a target step's cost by its tokens and requests."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from specdec.engine.decoder import Decoder
from specdec.engine.ranking import find_best
from specdec.engine.step import Step

WARM_UPS = 2  # rounds that are not timed
FILLING = 0.01  # value that fills a cache first: unwritten memory would be read faster


def list_sizes(max_size: int) -> list[int]:
    """Return 1, 2, 4, 8, ... and the largest size itself."""
    sizes = [1]
    while sizes[-1] * 2 < max_size:
        sizes.append(sizes[-1] * 2)
    return [*sizes, max_size] if max_size > 1 else sizes


def make_step(past_len: int, size: int, batch_size: int = 1) -> Step:
    """Make a step over a chain of `size` tokens in every row, after `past_len` cached ones."""
    causal = np.tril(np.ones((size, size), np.bool_))
    return Step(
        rows=np.arange(batch_size),
        tokens=np.full((batch_size, size), 5, np.int64),
        positions=np.tile(past_len + np.arange(size), (batch_size, 1)),
        tree_mask=np.tile(causal, (batch_size, 1, 1)),
    )


@torch.inference_mode()
def time_steps(
    decoder: Decoder, sizes: Sequence[int], *, past_len: int, repeat: int, batch_size: int = 1
) -> dict[int, float]:
    """Return the median seconds of a verify step by tokens per request.

    A step computes logits and chooses tokens. Sizes take turns, after rounds that are not timed.
    Each step has other tokens, so that they choose other experts of a mixture.
    """
    cache = decoder.make_cache(batch_size, past_len + max(sizes))
    cache.blocks.fill_(FILLING)
    cache.fill(past_len)
    steps = {size: draw_steps(decoder, past_len, size, batch_size) for size in sizes}

    def verify(size: int) -> None:
        step = next(steps[size])
        find_best(decoder.compute_logits(decoder.forward(step, cache))).cpu()

    return take_turns({size: functools.partial(verify, size) for size in sizes}, repeat)


def draw_steps(decoder: Decoder, past_len: int, size: int, batch_size: int) -> Iterator[Step]:
    """Yield the steps of `make_step` without end, each with random tokens."""
    step, generator = make_step(past_len, size, batch_size), np.random.default_rng(size)
    while True:
        tokens = generator.integers(decoder.model.vocab_size, size=step.tokens.shape)
        yield dataclasses.replace(step, tokens=tokens)


def take_turns(calls: dict[int, Callable[[], object]], repeat: int) -> dict[int, float]:
    """Return the median seconds of each call; calls take turns, after rounds that warm up."""
    times: dict[int, list[float]] = {key: [] for key in calls}
    for index in range(repeat + WARM_UPS):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            if index >= WARM_UPS:
                times[key].append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in times.items()}
