"""What a step of the target costs, by its tokens and requests."""

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

WARM_UPS = 2
# Written into a cache first: memory that nothing was written to is read faster than any other.
FILLING = 0.01


def list_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, ... and the largest size itself."""
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return [*sizes, largest] if largest > 1 else sizes


def make_step(past_len: int, size: int, batch_size: int = 1) -> Step:
    """A step over a chain of `size` tokens in every row, behind `past_len` others."""
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
    """Median seconds of a forward with logits and the choice of tokens, by tokens per request.

    Sizes take turns, after rounds that are not timed, each with other tokens: of a mixture they
    choose other experts.
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
    """`make_step` over and over, with random tokens."""
    step, generator = make_step(past_len, size, batch_size), np.random.default_rng(size)
    while True:
        tokens = generator.integers(decoder.model.vocab_size, size=step.tokens.shape)
        yield dataclasses.replace(step, tokens=tokens)


def take_turns(calls: dict[int, Callable[[], object]], repeat: int) -> dict[int, float]:
    """Median seconds of each call, made in turn after rounds that are not timed."""
    times: dict[int, list[float]] = {key: [] for key in calls}
    for index in range(repeat + WARM_UPS):
        for key, call in calls.items():
            began = time.perf_counter()
            call()
            if index >= WARM_UPS:
                times[key].append(time.perf_counter() - began)
    return {key: statistics.median(values) for key, values in times.items()}
