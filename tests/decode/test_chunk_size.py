"""How many tokens a step has that reads prompts, under simulated clocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdec.decode.chunk_size import (
    CHUNK_SHARE,
    LEAST_CHUNK,
    LEAST_READ,
    LEAST_TIMES,
    MOST_CHUNK,
    MOST_TIMES,
    UNIT,
    ChunkSize,
)

Clock = Callable[[int], float]
# Seconds of a step by its tokens, about as a model of 2 GB takes on two cores, and on many.
AMX: Clock = lambda size: max(0.060, 0.045 + 0.0014 * size)  # noqa: E731
AVX2: Clock = lambda size: max(0.049, 0.0118 * size)  # noqa: E731
MANY: Clock = lambda size: max(0.060, 0.055 + 0.0002 * size)  # noqa: E731


def read(
    chunk_size: ChunkSize, clock: Clock, num_active: int, num_waiting: int, steps: int
) -> list[int]:
    """The tokens of so many steps that all read prompts."""
    sizes = []
    for _ in range(steps):
        size = chunk_size.choose(num_active, num_active + num_waiting, is_reading=True)
        chunk_size.record(num_active, size, clock(size))
        sizes.append(size)
    return sizes


def test_where_nothing_is_known_the_requests_say() -> None:
    for number, wanted in ((1, LEAST_CHUNK), (16, CHUNK_SHARE * 16), (99, MOST_CHUNK)):
        assert ChunkSize().choose(number, number, is_reading=True) == wanted


@pytest.mark.parametrize("num_active", [1, 4, 15])
@pytest.mark.parametrize("has_plain", [True, False])
@pytest.mark.parametrize("clock", [AMX, AVX2, MANY], ids=["amx", "avx2", "many"])
def test_a_step_is_at_most_so_many_times_as_long_as_one_without_prompts(
    clock: Clock, has_plain: bool, num_active: int
) -> None:
    """Also where every step reads prompts, so that none without is ever seen."""
    chunk_size = ChunkSize()
    if has_plain:
        for _ in range(2):
            chunk_size.record(num_active, num_active, clock(num_active))
    sizes = read(chunk_size, clock, num_active, 16 - num_active, 60)
    least = num_active + max(num_active, LEAST_READ)
    assert min(sizes) >= least
    # Large sizes are told apart by UNIT tokens; plain steps that never were are a guess.
    most = MOST_TIMES * clock(num_active) * (1 if has_plain else 1.1)
    usual = sizes[10:]
    assert all(clock(size - UNIT) <= most or size == least for size in usual)
    # None is shorter than that, but the few by which small ones are measured again.
    longer = sorted(usual)[6]
    plain = clock(num_active)
    assert longer >= CHUNK_SHARE * 16 or clock(longer + UNIT) >= 0.8 * MOST_TIMES * plain


def test_what_costs_next_to_nothing_is_read() -> None:
    """At most twice the tokens that were tried, until a step takes twice as long as without."""
    chunk_size = ChunkSize()
    for _ in range(2):
        chunk_size.record(4, 4, MANY(4))
    sizes = read(chunk_size, MANY, 4, 0, 8)
    assert sizes[0] == LEAST_CHUNK
    assert sizes[:4] == sorted(sizes[:4])
    assert all(after <= 2 * before + 32 for before, after in zip(sizes, sizes[1:], strict=False))
    assert MANY(sizes[-1] - UNIT) <= LEAST_TIMES * MANY(4) <= MANY(sizes[-1] + UNIT)
    assert sizes[-1] > 4 * LEAST_CHUNK


def test_a_machine_that_gets_faster_is_found_out() -> None:
    """Others used it while it was measured first."""
    chunk_size = ChunkSize()
    slow: Clock = lambda size: 0.060 + 0.012 * size  # noqa: E731
    assert read(chunk_size, slow, 8, 8, 40)[-1] <= 80
    for _ in range(7):
        chunk_size.record(8, 8, AMX(8))
    assert AMX(read(chunk_size, AMX, 8, 8, 40)[-1]) > 0.75 * MOST_TIMES * AMX(8)
