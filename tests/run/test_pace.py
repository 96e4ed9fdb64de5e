"""What `Pace` decides before a step, by what steps before it took and brought."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.pace import (
    CHUNK_SHARE,
    FIRST_PIECE,
    LEAST_CHUNK,
    LEAST_READ,
    LEAST_TIMES,
    MOST_CHUNK,
    MOST_TIMES,
    PROMPT_UNIT,
    REST_STEPS,
    Account,
    Costs,
    Pace,
)

Clock = Callable[[int], float]
FLAT: Clock = lambda tokens: 1.0 + 0.02 * tokens  # noqa: E731


def step(
    pace: Pace, size: int, seconds: float, emitted: Sequence[int], draft: float | None = None,
    num_levels: int = 1, num_prefilled: int = 0,
) -> None:  # fmt: skip
    """One step that was planned."""
    pace.record_drafts(draft, size, emitted, num_levels, num_prefilled)
    pace.record_step(len(emitted), len(emitted) * size, 0, seconds)


def test_the_first_steps_are_plain_and_so_is_the_first_of_half_as_many_requests() -> None:
    pace = Pace(4)
    for _ in range(2):
        assert not pace.plan([50, 50])
        step(pace, 1, 1.0, [1, 1])
    assert pace.plan([50, 50])
    step(pace, 2, 1.1, [2, 2], 0.1)
    assert pace.plan([50, 50])
    assert not pace.plan([50, 50, 50])
    assert not pace.plan([50])
    step(pace, 1, 1.0, [1])
    assert pace.plan([50])
    assert not pace.plan([1])


def test_costs() -> None:
    costs = Costs()
    assert costs.estimate(4) == costs.largest == costs.smallest == 0
    costs.record(8, 2.0)
    assert [costs.estimate(n) for n in (1, 8, 99)] == [2.0, 2.0, 2.0]
    for seconds in (9.0, 4.0, 4.0):
        costs.record(16, seconds)
    assert costs.estimate(12) == 3.0
    assert costs.estimate(24) == 6.0
    costs.record(32, 3.0)  # nothing smaller costs more
    assert [costs.estimate(n) for n in (8, 12, 16, 20, 32, 64)] == [2.0, 2.5, 3.0, 3.0, 3.0, 3.0]
    costs.record(64, 50.0, guess=5.0)
    assert costs.estimate(64) == 5.0, "it may have been disturbed"
    for _ in range(2):
        costs.record(64, 50.0)
    assert costs.estimate(64) == 50.0
    assert (costs.count(64), costs.count(63)) == (3, 0)


def test_what_was_won_pays_for_no_trials_of_what_is_known_not_to_pay() -> None:
    account = Account()
    account.add(10.0, -100.0, is_trial=False)
    assert account.find_limit(5.0) > 100
    assert account.for_trials == 0
    account.add(10.0, 0.0, is_trial=True)
    assert 0 < account.for_trials < 0.5


def test_a_machine_that_is_slow_for_a_while_changes_nothing() -> None:
    """The sizes that nobody has measured since are as dear as others are."""
    pace, sizes = Pace(4), []
    chances = np.cumprod([[0.9] * 4], axis=1)
    for at in range(90):
        size = 1 + pace.choose(chances) if pace.plan([100]) else 1
        slow = 3.0 if 20 < at < 50 else 1.0
        step(pace, size, FLAT(size) * slow, [1 + size // 2], 0.01 * slow if size > 1 else None)
        sizes.append(size)
    assert set(sizes[10:]) <= {4, 5}


def test_what_is_known_of_steps_does_not_drift_away_where_all_are_alike() -> None:
    """Else nothing that was measured long ago could be compared with it."""
    pace, chance = Pace(), random.Random(1)
    for _ in range(3000):
        pace.record_step(1, 1, 0, 1 + 0.1 * chance.expovariate(1))
    assert pace.even_out(1.0) == pytest.approx(1.0, rel=0.1)


def test_a_close_decision_waits_for_plain_steps_that_no_draft_has_slowed_down() -> None:
    """Drafts lose 4 %, and the two plain steps behind one are 8 % slower than others."""
    pace, warm, drafted = Pace(1, is_whole=True), 0, 0
    for at in range(300):
        drafts = pace.plan([1000])
        took = 1.3 if drafts else 1.0 if warm > 1 else 1.08
        step(pace, 1 + drafts, took, [1 + (drafts and at % 2)], 0.2624 if drafts else None)
        warm, drafted = 0 if drafts else warm + 1, drafted + drafts * (at >= 100)
    assert drafted < 40


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("slow", [1.6, 3.0])
def test_one_disturbed_step_does_not_end_drafting(num_rows: int, slow: float) -> None:
    """The first drafts are verified while another program runs, and seem dear."""
    pace, sizes = Pace(4), list[int]()
    chances = np.cumprod([[0.9] * 4] * num_rows, axis=1)
    for _ in range(60):
        size = 1 + pace.choose(chances) if pace.plan([100] * num_rows) else 1
        disturbed = slow if size > 1 and max(sizes) == 1 else 1.0
        seconds = (1.0 + 0.005 * num_rows * size) * disturbed
        drafting = 0.01 if size > 1 else None
        step(pace, size, seconds, [size - size // 4] * num_rows, drafting)
        sizes.append(size)
    assert min(sizes[-20:]) > 1


def test_plain_steps_are_measured_again_where_drafts_win_little() -> None:
    for rate, most in ((0.9, 0), (0.35, 12)):
        pace, plain = Pace(4), 0
        for at in range(100):
            size = 1 + pace.choose(np.cumprod([[rate] * 4], axis=1)) if pace.plan([100]) else 1
            right = [at * 7 % 20 < 20 * rate, at * 11 % 20 < 20 * rate**2]
            emitted = 1 + int(right[0]) * (1 + int(right[1])) if size > 1 else 1
            step(pace, size, FLAT(size), [emitted], 0.06 if size > 1 else None)
            plain += at >= 8 and size == 1
        assert bool(most) * 2 <= plain <= most


def test_a_drafter_of_one_pass_is_seldom_asked_for_all_its_levels() -> None:
    """It has no more, so drafts of one level are no reason to try what more would cost."""
    pace, deep = Pace(4, max_depths=(3,)), 0
    for at in range(400):
        size = 1
        if pace.plan([1000]):
            deep += at >= 100 and pace.price_level() == -np.inf
            size += pace.choose(np.cumprod([[0.9] * 4], axis=1))
        step(pace, size, FLAT(size), [size], 0.06 if size > 1 else None)
    assert 1 <= deep <= 5


def test_a_planned_draft_is_as_long_as_is_worth_its_time() -> None:
    for rate, level, least, most in ((0.9, 0.05, 6, 8), (0.6, 0.2, 1, 3), (0.1, 0.4, 1, 1)):
        pace = Pace(8, is_planned=True)
        pace.record_prompt(200, FLAT(200))
        for at in range(200):
            length = pace.max_levels if pace.plan([1000]) else 0
            accepted = 0
            while accepted < length and (at * 37 + accepted * 61) % 100 < 100 * rate:
                accepted += 1
            draft = length * level if length else None
            step(pace, length + 1, FLAT(length + 1), [accepted + 1], draft, length)
        assert least <= pace.max_levels <= most


def test_levels_end_where_another_is_not_worth_its_price() -> None:
    """What every draft costs, and its first token's verifying, are no price of a level."""
    prices = []
    for plain in (1.0, 0.8):
        pace = Pace(8)
        for _ in range(2):
            assert not pace.plan([100])
            step(pace, 1, plain, [1])
        for size in (2, 4, 8):
            assert pace.plan([100])
            # A draft of one level first, then one of all, which tells what a level costs.
            price = pace.price_level()
            assert price == {2: np.inf, 4: -np.inf, 8: price}[size]
            levels = {2: 1, 4: 8}.get(size, 2)
            step(pace, size, 1.0 + 0.01 * size, [size], 0.1 + 0.05 * levels, num_levels=levels)
        assert pace.plan([100])
        prices.append(pace.price_level())
    assert prices[0] == pytest.approx(prices[1], rel=0.05)
    assert 0 < prices[0] < 0.3


def test_reading_prompts_is_no_price_of_a_draft() -> None:
    """It has an account of its own, and its price is learned from the first piece."""
    pace = Pace(4)
    for _ in range(2):
        pace.plan([100] * 4)
        step(pace, 1, 1.0, [1] * 4)
    assert pace.plan([100] * 4, 0, 2000)
    assert pace.max_read == FIRST_PIECE
    step(pace, 1, 1.0, [1] * 4, 0.128, num_prefilled=128)
    assert not pace.plan([2] * 4, 0, 2000), "more than can be won"
    for _ in range(REST_STEPS - 1):
        pace.plan([2] * 4, 0, 2000)
        step(pace, 1, 1.0, [1] * 4)
    assert pace.plan([100] * 4, 0, 1872)
    assert pace.max_read is not None
    assert pace.max_read >= 1872
    step(pace, 2, 1.02, [2] * 4, 1.9, num_prefilled=1872)
    assert pace.plan([100] * 4)
    assert pace.account.read == pytest.approx(2.028)
    assert np.isinf(pace.price_level()), "what a draft costs is not known yet"
    step(pace, 2, 1.02, [2] * 4, 0.05)
    assert pace.plan([100] * 4)
    assert pace.price_level() < 1


@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_it_drafts_where_every_step_reads_prompts_too(num_rows: int) -> None:
    """As under a load that never ends; not where tokens are dear."""
    for clock, rate in ((FLAT, 0.9), (lambda tokens: 0.3 + 0.2 * tokens, 0.05)):
        pace, sizes = Pace(8), []
        for _ in range(60):
            size = 1
            if pace.plan([100] * num_rows, 70):
                size += pace.choose(np.cumprod([[rate] * 8] * num_rows, axis=1))
            emitted = 1 + round(sum(rate**n for n in range(1, size)))
            pace.record_drafts(0.06 if size > 1 else None, size, [emitted] * num_rows)
            pace.record_step(num_rows, num_rows * size, 70, clock(num_rows * size + 80))
            sizes.append(size)
        drafted = sum(size > 1 for size in sizes)
        assert drafted > 40 if clock is FLAT else drafted < 20


def count_trials(num_unread: int) -> tuple[int, float]:
    """How often drafts that bring nothing are tried in 3,000 steps, and the share that they lose.

    But for the first hundred steps, the drafter has so many tokens of a prompt to read each time.
    """
    pace, trials, lost, num_steps = Pace(4), 0, 0.0, 3000
    for at in range(num_steps):
        size, draft, num_read, unread = 1, 0.0, 0, num_unread if at > 100 else 0
        if pace.plan([1000], 0, unread):
            size, num_read = 1 + pace.choose(np.full((1, 4), 0.05)), unread
            draft = 0.3 + 0.002 * num_read
        if draft and pace.is_trial:
            trials, lost = trials + 1, lost + draft + FLAT(size) - FLAT(1)
        step(pace, size, FLAT(size), [1], draft or None, num_prefilled=num_read)
    return trials, lost / num_steps


def test_what_is_read_for_a_trial_counts_as_its_loss() -> None:
    often, seldom = count_trials(0), count_trials(200)
    assert 0 < seldom[0] < often[0] / 1.5
    assert max(often[1], seldom[1]) < 0.02


def test_a_drafter_reads_within_a_limit() -> None:
    """Those first that lack least."""
    drafter = Drafter()
    drafter.max_prefill = 20
    assert drafter._plan_reading([50, 3, 0, 10]) == ([1, 2, 3], {0: 7})
    assert drafter.num_prefilled == 20
    assert drafter._plan_reading([50]) == ([0], {}), "or nothing would ever be drafted for it"
    drafter.max_prefill = None
    assert drafter._plan_reading([50, 3]) == ([0, 1], {})
    assert drafter.num_prefilled == 53


# ---- Prompts.

# Seconds of a step by its tokens, about as a model of 2 GB takes on two cores, and on many.
AMX: Clock = lambda size: max(0.060, 0.045 + 0.0014 * size)  # noqa: E731
AVX2: Clock = lambda size: max(0.049, 0.0118 * size)  # noqa: E731
MANY: Clock = lambda size: max(0.060, 0.055 + 0.0002 * size)  # noqa: E731


def read(pace: Pace, clock: Clock, num_active: int, num_waiting: int, steps: int) -> list[int]:
    """The tokens of so many steps that all read prompts."""
    sizes = []
    for _ in range(steps):
        size = pace.choose_chunk(num_active, num_active + num_waiting, is_reading=True)
        pace.record_step(num_active, num_active, size - num_active, clock(size))
        sizes.append(size)
    return sizes


def test_where_nothing_is_known_the_requests_say() -> None:
    for number, wanted in ((1, LEAST_CHUNK), (16, CHUNK_SHARE * 16), (99, MOST_CHUNK)):
        assert Pace().choose_chunk(number, number, is_reading=True) == wanted


@pytest.mark.parametrize("num_active", [1, 4, 15])
@pytest.mark.parametrize("has_plain", [True, False])
@pytest.mark.parametrize("clock", [AMX, AVX2, MANY], ids=["amx", "avx2", "many"])
def test_a_step_is_at_most_so_many_times_as_long_as_one_without_prompts(
    clock: Clock, has_plain: bool, num_active: int
) -> None:
    """Also where every step reads prompts, so that none without is ever seen."""
    pace = Pace()
    for _ in range(2 * has_plain):
        pace.record_step(num_active, num_active, 0, clock(num_active))
    sizes = read(pace, clock, num_active, 16 - num_active, 60)
    least = num_active + max(num_active, LEAST_READ)
    assert min(sizes) >= least
    # Sizes are told apart by PROMPT_UNIT tokens; plain steps that never were are a guess.
    most = MOST_TIMES * clock(num_active) * (1 if has_plain else 1.1)
    usual = sizes[10:]
    assert all(clock(size - PROMPT_UNIT) <= most or size == least for size in usual)
    # None is shorter than that, but the few by which small ones are measured again.
    longer, plain = sorted(usual)[6], clock(num_active)
    assert longer >= CHUNK_SHARE * 16 or clock(longer + PROMPT_UNIT) >= 0.7 * MOST_TIMES * plain


def test_what_costs_next_to_nothing_is_read() -> None:
    """At most twice the tokens that were tried, until a step takes twice as long as without."""
    pace = Pace()
    for _ in range(2):
        pace.record_step(4, 4, 0, MANY(4))
    sizes = read(pace, MANY, 4, 0, 8)
    assert sizes[0] == LEAST_CHUNK
    assert sizes[:4] == sorted(sizes[:4])
    assert all(after <= 2 * before + 32 for before, after in zip(sizes, sizes[1:], strict=False))
    assert MANY(sizes[-1] - PROMPT_UNIT) <= LEAST_TIMES * MANY(4) <= MANY(sizes[-1] + PROMPT_UNIT)


def test_a_machine_that_gets_faster_is_found_out() -> None:
    """Others used it while it was measured first."""
    pace = Pace()
    assert read(pace, lambda size: 0.060 + 0.012 * size, 8, 8, 40)[-1] <= 90
    for _ in range(7):
        pace.record_step(8, 8, 0, AMX(8))
    assert AMX(read(pace, AMX, 8, 8, 600)[-1]) > 0.5 * MOST_TIMES * AMX(8)
