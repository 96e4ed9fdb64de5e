"""The measure of a step's cost: sizes, steps, turns and medians by a clock of the test's own."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec.measure import steps


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (9, [1, 2, 4, 8, 9])],
)
def test_sizes_are_powers_of_two_and_the_largest(largest: int, sizes: list[int]) -> None:
    assert steps.list_sizes(largest) == sizes


def test_a_step_is_a_chain_in_every_row() -> None:
    step = steps.make_step(7, 3, 2)
    assert step.rows.tolist() == [0, 1]
    assert step.positions.tolist() == [[7, 8, 9]] * 2
    assert step.tree_mask.tolist() == [[[True, False, False], [True, True, False], [True] * 3]] * 2
    assert step.tokens.shape == (2, 3)


def test_steps_have_other_tokens_each_time() -> None:
    """And the same ones in every measurement, all of them in the vocabulary."""
    decoder: Any = SimpleNamespace(model=SimpleNamespace(vocab_size=5))
    drawn = list(itertools.islice(steps.draw_steps(decoder, 7, 3, 4), 9))
    again = list(itertools.islice(steps.draw_steps(decoder, 7, 3, 4), 9))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(drawn, again, strict=True))
    assert not np.array_equal(drawn[0].tokens, drawn[1].tokens)
    assert {token for step in drawn for token in step.tokens.flatten().tolist()} == {0, 1, 2, 3, 4}
    assert drawn[5].positions.tolist() == [[7, 8, 9]] * 4


class Clock:
    """Time that only what is measured takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: self.seconds))


def test_calls_take_turns_and_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds are not timed; of the others the median counts."""
    clock, order = Clock(monkeypatch), []
    durations = {1: iter([99, 99, 3, 1, 8]), 2: iter([99, 99, 5, 5, 20])}

    def call(key: int) -> None:
        order.append(key)
        clock.seconds += next(durations[key])

    medians = steps.take_turns({key: lambda key=key: call(key) for key in (1, 2)}, 3)
    assert medians == {1: 3.0, 2: 5.0}
    assert order == [1, 2] * 5


def test_a_verify_step_is_timed_behind_a_filled_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of n tokens in 2 rows takes 2 n seconds here, and logits one."""
    clock, caches = Clock(monkeypatch), []

    class Decoder:
        model = SimpleNamespace(vocab_size=5)

        def make_cache(self, num_rows: int, num_positions: int) -> Any:
            cache = SimpleNamespace(blocks=torch.zeros(1, 2, num_rows, 1, num_positions, 1), past=0)
            cache.fill = lambda length: setattr(cache, "past", length)
            caches.append(cache)
            return cache

        def forward(self, step: Any, cache: Any) -> torch.Tensor:
            assert step.positions[:, 0].tolist() == [cache.past] * 2
            clock.seconds += step.tokens.size
            return torch.zeros(*step.tokens.shape, 3)

        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            clock.seconds += 1
            return torch.zeros(*hidden.shape[:-1], 5)

    decoder: Any = Decoder()
    times = steps.time_steps(decoder, [1, 4], past_len=6, repeat=2, batch_size=2)
    assert times == {1: 3.0, 4: 9.0}
    (cache,) = caches
    assert cache.blocks.shape == (1, 2, 2, 1, 10, 1), "room for the longest step"
    assert (cache.blocks == np.float32(steps.FILLING)).all()
    assert cache.past == 6
