"""What `Pace` decides before a step, by what steps cost and by what those before it brought."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from specdec.decode.cost_table import CostTable, Grid, read_table, smooth
from specdec.decode.drafters.account import Account
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.pace import MIN_REST_STEPS, SURE_GAIN, TRIAL_CHUNK_TOKENS, Pace
from specdec.decode.drafters.promise import PRIOR_DRAFTS, TRUSTED_DRAFTS, Promise
from specdec.decode.prompt_chunks import (
    CHUNK_SHARE,
    LEAST_CHUNK,
    LEAST_READ,
    LEAST_TIMES,
    MOST_CHUNK,
    MOST_TIMES,
    choose_chunk,
)
from specdec.files.acceptance import Acceptance
from tests.costs import SIZES, make_costs, make_grid

Clock = Callable[[int], float]
FLAT: Clock = lambda tokens: 1.0 + 0.02 * tokens  # noqa: E731


def record(
    pace: Pace, size: int, emitted: Sequence[int], num_levels: int = 1, num_read: int = 0
) -> None:
    """Take a drafted step of one drafter."""
    pace.record(size, emitted, [(0, len(emitted), num_levels)], num_read)


def run(pace: Pace, rate: float, num_steps: int, num_rows: int = 1) -> list[int]:
    """The nodes of each step, where every token is right as often and the drafter is as sure."""
    sizes, chances = [], np.cumprod([[rate] * pace.max_tokens] * num_rows, axis=1).tolist()
    for at in range(num_steps):
        size = 1
        if pace.plan([1000] * num_rows):
            size += pace.choose(chances)
            right = [(at * 37 + n * 61) % 100 < 100 * rate for n in range(size - 1)]
            record(pace, size, [1 + [*right, False].index(False)] * num_rows)
        sizes.append(size)
    return sizes


def test_the_first_step_drafts_and_the_last_does_not() -> None:
    pace = Pace(4, make_costs())
    assert pace.plan([50, 50])
    record(pace, 2, [2, 2])
    assert pace.plan([50])
    assert not pace.plan([1])


def test_a_curve() -> None:
    """Nothing smaller costs more; beyond the largest, costs rise as in the half before it."""
    curve = smooth({8: 2.0, 16: 4.0, 32: 3.0})
    sizes = np.array([1, 8, 12, 16, 20, 32, 64])
    assert curve.estimate(sizes).tolist() == [2.0, 2.0, 2.5, 3.0, 3.0, 3.0, 3.0]
    assert smooth({1: 1.0, 4: 2.0, 8: 4.0}).estimate(np.array([12])).tolist() == [6.0]


def test_between_two_numbers_of_requests_costs_lie_on_a_line() -> None:
    grid = Grid(((1, smooth({1: 1.0, 8: 8.0})), (5, smooth({1: 5.0, 8: 16.0}))))
    for rows, seconds in ((1, 8.0), (3, 12.0), (5, 16.0), (10, 32.0)):
        assert grid.estimate(rows, np.array([8])).tolist() == [seconds]
    table = CostTable(steps=grid)
    assert table.estimate_steps(10, np.array([4])).tolist() == [16.0], "as many tokens"


@pytest.mark.parametrize("num_rows", [1, 2.5, 4, 9])
def test_one_size_costs_what_it_costs_among_others(num_rows: float) -> None:
    grid = Grid(((1, smooth({2: 1.0, 8: 8.0})), (4, smooth({1: 5.0, 3: 5.0, 8: 16.0, 20: 19.0}))))
    sizes = np.array([0.5, 1, 2, 2.5, 3, 7, 8, 8.25, 20, 64])
    alone = [grid.estimate_one(num_rows, size) for size in sizes.tolist()]
    assert alone == pytest.approx(grid.estimate(num_rows, sizes).tolist(), rel=1e-12)


def test_a_table_is_read_as_it_was_written() -> None:
    table = make_costs(2, reading=0.1, prompts=FLAT)
    document = table.write()
    assert read_table(document, 2) == table
    changes: list[dict[str, Any]] = [
        {"reading": "much"}, {"steps": {"curves": []}},
        {"context": {"sizes": [1], "seconds": [-1.0]}}, {"context": 1.0},
        {"drafts": [{"curves": [[1, {"sizes": [2, 1], "seconds": [1.0, 2.0]}]]}]},
        {"drafts": [{"curves": [[1, {"sizes": [1, 2], "seconds": [2.0, 1.0]}]]}]},
        {"prompts": {"sizes": [1], "seconds": [float("nan")]}},
        {"drafts": document["drafts"][:1]}, {"drafts": []},
        {"steps": {"curves": [[1, {"sizes": [1, 2], "seconds": [0, 1.0]}]]}},
        {"steps": {"curves": [[1, {"sizes": [1, 10**30], "seconds": [1.0, 2.0]}]]}},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises((ValueError, TypeError, KeyError)):
            read_table(document | change, 2)


def test_what_was_won_pays_for_no_trials_of_what_is_believed_not_to_pay() -> None:
    account = Account()
    account.add(10.0, -100.0, is_trial=False)
    assert account.find_limit(5.0) > 100
    assert account.trial_allowance == 0
    account.add(10.0, 0.0, is_trial=True)
    assert 0 < account.trial_allowance < 0.5


@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_the_same_table_and_drafts_give_the_same_sizes(num_rows: int) -> None:
    """No clock is read: a run can be repeated, whatever else the machine does."""
    costs = make_costs(step=lambda tokens: 1.0 + 0.005 * tokens)
    first, second = (run(Pace(4, costs), 0.8, 80, num_rows) for _ in range(2))
    assert first == second
    assert min(first) > 1


@pytest.mark.parametrize(("rate", "level", "least", "most"), [
    (0.9, 0.05, 6, 8), (0.6, 0.2, 1, 3), (0.1, 0.4, 1, 1),
])  # fmt: skip
def test_a_planned_draft_is_as_long_as_is_worth_its_time(
    rate: float, level: float, least: int, most: int
) -> None:
    pace = Pace(8, make_costs(draft=lambda n: level * n), is_planned=True)
    for at in range(200):
        length = pace.max_levels if pace.plan([1000]) else 0
        accepted = 0
        while accepted < length and (at * 37 + accepted * 61) % 100 < 100 * rate:
            accepted += 1
        if length:
            record(pace, length + 1, [accepted + 1], length)
    assert least <= pace.max_levels <= most


def test_a_step_costs_what_it_usually_verifies() -> None:
    """Half of the drafts are empty, as lookups are: half of the steps cost what plain ones do."""
    promise, seconds = Promise(4, is_chain=False), np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert promise.expect_seconds(seconds).tolist() == seconds.tolist()
    for step in range(400):
        promised, size = ([0.0] * 4, 0) if step % 2 else ([0.9, 1.8, 1.8, 1.8], 2)
        promise.take_promised(1, promised, size)
    assert promise.expect_seconds(seconds) == pytest.approx([1, 1.5, 2, 2, 2], abs=0.05)


def test_levels_end_where_another_is_not_worth_its_price() -> None:
    """What every draft costs, and its first token's verifying, are no price of a level."""
    prices = []
    for first in (0.1, 0.3):
        pace = Pace(8, make_costs(draft=lambda n, first=first: first + 0.05 * n))  # type: ignore[misc]
        assert pace.plan([100])
        record(pace, 2, [2], 1)
        pace.account.lost_seconds = -9.0
        assert pace.plan([100])
        prices.append(pace.price_level())
        pace.is_brief = True
        assert np.isinf(pace.price_level())
    assert 0 < prices[1] < prices[0] < 0.3


def test_large_steps_that_never_pay_make_no_small_draft_dear() -> None:
    """Up to 4 tokens a step costs next to nothing, beyond them what a plain one does for each."""

    def cost(tokens: int) -> float:
        return 1.0 + 0.01 * min(tokens, 4) + 1.0 * max(0, tokens - 4)

    pace = Pace(16, make_costs(step=cost, draft=lambda levels: 0.01 * levels))
    assert pace.plan([100])
    assert pace.forecast.best_size == 3
    assert pace.price_level() < 0.1
    likely, unlikely = [0.5, 0.3, 0.2, 0.1], [0.01, 0.005]
    values = pace.value([likely, unlikely, []])
    assert values[0] == pytest.approx(1.0 - 0.03 * pace.forecast.rate, abs=0.01), "three of them"
    assert values[1:] == [pytest.approx(0, abs=0.01), 0.0]


def test_positions_of_the_context_have_their_price_for_each_node() -> None:
    """Beside 1,000 of them here a node costs as much as a plain step; without, next to nothing."""
    costs = make_costs(step=lambda tokens: 1.0 + 0.01 * tokens)
    costs = dataclasses.replace(costs, context=smooth({1: 0.001, 8: 0.008}))
    sizes = []
    for num_positions in (0, 1000):
        pace = Pace(8, costs)
        pace.plan([100], num_positions=num_positions)
        sizes.append(pace.forecast.best_size)
    assert sizes[0] > 2 > sizes[1], sizes


def test_a_brief_draft_is_verified_where_that_beats_a_plain_step() -> None:
    """Longer drafts would promise more a second, and are not allowed yet: one level is."""
    costs = make_costs(
        step=lambda tokens: 1.0 + (tokens > 1) * (0.2 + 0.03 * tokens),
        draft=lambda levels: 0.05 + 0.2 * levels,
    )
    pace = Pace(4, costs)
    assert pace.plan([64])
    pace.account.lost_seconds = 0.5  # of the 1.28 that may be lost
    pace.learn()
    assert pace.plan([64])
    assert pace.is_brief
    assert pace.forecast.rate > 1.2, "of longer drafts"
    assert pace.choose([[0.29]]) == 1
    assert pace.choose([[0.25]]) == 0, "it costs 0.26 of a step"


def test_reading_prompts_is_no_price_of_a_draft() -> None:
    """It has an account of its own."""
    pace = Pace(4, make_costs(reading=0.001))
    assert not pace.plan([2] * 4, 0, [2000]), "more than can be won"
    for _ in range(MIN_REST_STEPS - 1):
        pace.plan([2] * 4, 0, [2000])
    assert pace.plan([100] * 4, 0, [2000])
    assert pace.max_read is not None
    assert pace.max_read >= TRIAL_CHUNK_TOKENS
    record(pace, 1, [1] * 4, num_read=1000)
    assert pace.account.reading_seconds == pytest.approx(1.0)
    assert pace.account.lost_seconds < 0.5
    assert pace.plan([100] * 4)
    assert pace.max_read is None


def test_a_trial_that_has_much_to_read_is_planned_step_by_step() -> None:
    """However much it promises: what trials may lose is asked before each."""
    pace = Pace(4, make_costs(reading=1.0))
    assert pace.plan([64])
    for _ in range(20):
        pace.chain.promise.take_promised(1, [0.3, 0.4, 0.45, 0.48], 4)
    assert pace.plan([64])
    pace.account.spent_seconds, pace.account.trial_allowance = 1000.0, 100.0
    pace.start(1)
    assert pace.plan([64], 0, [30])
    assert pace.is_trial
    assert pace.forecast.gain > SURE_GAIN
    pace.account.trial_allowance = 0.0
    assert not pace.plan([64], 0, [30])


@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_it_drafts_where_every_step_reads_prompts_too(num_rows: int) -> None:
    """As under a load that never ends; not where tokens are dear."""
    for clock, rate in ((FLAT, 0.9), (lambda tokens: 0.3 + 0.2 * tokens, 0.05)):
        pace, sizes = Pace(8, make_costs(step=clock)), []
        for _ in range(60):
            size = 1
            if pace.plan([100] * num_rows, 70):
                size += pace.choose(np.cumprod([[rate] * 8] * num_rows, axis=1).tolist())
                emitted = 1 + round(sum(rate**n for n in range(1, size)))
                record(pace, size, [emitted] * num_rows)
            sizes.append(size)
        drafted = sum(size > 1 for size in sizes)
        assert drafted > 40 if clock is FLAT else drafted < 20


def count_trials(num_unread: int) -> tuple[int, float]:
    """How often drafts that bring nothing are tried in 3,000 steps, and the share that they lose.

    But for the first hundred steps, the drafter has so many tokens of a prompt to read each time.
    """
    pace, trials, lost, num_steps = (
        Pace(4, make_costs(draft=lambda _: 0.3, reading=0.002)),
        0,
        0.0,
        3000,
    )
    for at in range(num_steps):
        unread = num_unread if at > 100 else 0
        if pace.plan([1000], 0, [unread]):
            size = 1 + pace.choose([[0.05] * 4])
            trials, lost = trials + 1, lost + 0.3 + 0.002 * unread + FLAT(size) - FLAT(1)
            record(pace, size, [1], num_read=unread)
    return trials, lost / num_steps


def test_what_is_read_for_a_trial_counts_as_its_loss() -> None:
    often, seldom = count_trials(0), count_trials(200)
    assert 0 < seldom[0] < often[0] / 1.3
    assert max(often[1], seldom[1]) < 0.02


def test_a_drafter_reads_within_a_limit() -> None:
    """Those first that lack least."""
    drafter = Drafter()
    drafter.max_prefill = 20
    assert drafter._plan_prefill([50, 3, 0, 10]) == ([1, 2, 3], {0: 7})
    assert drafter.num_prefilled == 20
    assert drafter._plan_prefill([50]) == ([0], {}), "or nothing would ever be drafted for it"
    drafter.max_prefill = None
    assert drafter._plan_prefill([50, 3]) == ([0, 1], {})
    assert drafter.num_prefilled == 53


# ---- Prompts.

# Seconds of a step by its tokens, about as a model of 2 GB takes on two cores, and on many.
AMX: Clock = lambda size: max(0.060, 0.045 + 0.0014 * size)  # noqa: E731
AVX2: Clock = lambda size: max(0.049, 0.0118 * size)  # noqa: E731
MANY: Clock = lambda size: max(0.060, 0.055 + 0.0002 * size)  # noqa: E731


def test_where_nothing_is_known_the_requests_say() -> None:
    for number, tokens in ((1, LEAST_CHUNK), (16, CHUNK_SHARE * 16), (99, MOST_CHUNK)):
        assert choose_chunk(None, number, number) == tokens


@pytest.mark.parametrize("num_active", [1, 4, 15])
@pytest.mark.parametrize("clock", [AMX, AVX2, MANY], ids=["amx", "avx2", "many"])
def test_a_step_is_at_most_so_many_times_as_long_as_one_without_prompts(
    clock: Clock, num_active: int
) -> None:
    steps = tuple((rows, smooth({n: clock(rows * n) for n in SIZES})) for rows in (1, 4, 15))
    prompts = smooth({size: clock(size) for size in range(1, 1024)})
    size = choose_chunk(CostTable(steps=Grid(steps), prompts=prompts), num_active, 16)
    least, plain = num_active + max(num_active, LEAST_READ), clock(num_active)
    assert size >= least
    assert clock(size) <= MOST_TIMES * plain or size == least
    assert size >= CHUNK_SHARE * 16 or clock(size + 1) >= MOST_TIMES * plain


def test_what_costs_next_to_nothing_is_read() -> None:
    """Until a step takes twice as long as without."""
    size = choose_chunk(make_costs(step=MANY, prompts=MANY), 1, 1)
    assert MANY(size) <= LEAST_TIMES * MANY(1) <= MANY(size + 1)
    assert make_grid(MANY).estimate(1, np.array([1])).tolist() == [MANY(1)]


def make_pair(price: float) -> Pace:
    """A pace of two drafters, of which the second takes so many seconds."""
    drafts = make_grid(lambda _: 0.02), make_grid(lambda _: price)
    costs = CostTable(steps=make_grid(lambda tokens: 1.0 + 0.02 * tokens), drafts=drafts)
    return Pace(4, costs, max_depths=(4, 4))


def ask_later(pace: Pace, rates: tuple[float, float], num_steps: int) -> float:
    """Return the share of steps that ask the second drafter. rates: of right tokens, of both."""
    chances = [np.cumprod([rate] * 4)[None].tolist() for rate in rates]
    drafting, asked = 0, 0
    for step in range(num_steps):
        if not pace.plan([1000], unread_counts=(0, 0)):
            continue
        pace.note_first(chances[0])
        gains = [pace.value(row)[0] for row in chances]
        pace.drafters[0].record(gains[:1])
        is_asked = not pace.is_best(0, gains[0], 1) and pace.is_worth_asking(1, gains[:1])
        if is_asked:
            pace.drafters[1].record(gains[1:])
        drafter = int(is_asked and gains[1] > gains[0])
        size = 1 + pace.choose(chances[drafter])
        right = [(step * 37 + n * 61) % 100 < 100 * rates[drafter] for n in range(size - 1)]
        calls = [(0, 1, 1), (1, 1, 1)][: 1 + is_asked]
        pace.record(size, [1 + [*right, False].index(False)], calls)
        drafting += 1
        asked += is_asked
    assert drafting > 0.8 * num_steps
    return asked / drafting


@pytest.mark.parametrize(
    ("price", "rate", "least", "most"), [(0.3, 0.3, 0.005, 0.1), (0.1, 0.9, 0.9, 1.0)]
)
def test_a_later_drafter_is_asked_where_it_adds_more_than_its_time(
    price: float, rate: float, least: float, most: float
) -> None:
    """And is tried again, where it does not, as often as trials may cost."""
    assert least <= ask_later(make_pair(price), (0.5, rate), 1200) <= most


def test_a_later_drafter_comes_back_after_a_text_that_was_hard_for_it() -> None:
    """Though the first one drafts better than either did before."""
    pace = make_pair(0.3)
    assert ask_later(pace, (0.5, 0.3), 200) < 0.2
    pace.start(1)
    assert ask_later(pace, (0.6, 0.95), 400) > 0.5


def make_chain_pace() -> Pace:
    """A pace of two drafters: the first is cheap, the second is asked for three of ten requests."""
    drafts = make_grid(lambda _: 0.02), make_grid(lambda _: 1.0)
    pace = Pace(4, CostTable(steps=make_grid(FLAT), drafts=drafts, reading=0.01), max_depths=(4, 4))
    for drafter_set, gains in (
        (pace.chain, [0.8, 1.4, 1.8, 2.0]),
        (pace.first, [0.5, 0.7, 0.8, 0.8]),
    ):
        for _ in range(1000):
            drafter_set.promise.take_promised(1, gains, 4)
        drafter_set.num_drafts = 50
    pace.drafters[1].share = 0.3
    pace.drafters[0].record([0.0] * 3 + [1.0] * 7)
    pace.drafters[1].record([3.0] * 50)
    return pace


@pytest.mark.parametrize(("num_unread", "left_out"), [(800, set()), (1000, {1})])
def test_prompts_are_read_where_all_drafters_save_more_than_that_takes(
    num_unread: int, left_out: set[int]
) -> None:
    """However dear one draft of the second is: it is asked where the first has nothing."""
    pace = make_chain_pace()
    pace.account.lost_seconds = -100.0  # what was won may be spent on reading
    assert pace.plan([64], unread_counts=(0, num_unread))
    assert pace.forecast.left_out == left_out


def test_drafters_without_the_first_are_asked_for_all_requests() -> None:
    pace = make_chain_pace()
    pace.plan([64], unread_counts=(0, 0))
    assert pace.prices.price_drafts(frozenset()) == pytest.approx(0.02 + 0.3)
    assert pace.prices.price_drafts(frozenset({0})) == pytest.approx(1.0)


def count_failures(gains: Sequence[float] | None) -> int:
    """Return how many drafts that bring nothing are made in a row, by the gains of a record."""
    rows = ((60,) * 10,) * 12
    record_of = None if gains is None else Acceptance(
        right=rows, seen=((100,) * 10,) * 12, gains=(*gains,), num_drafts=500, about={}
    )  # fmt: skip
    costs = make_costs(step=lambda tokens: 1.0 + 0.4 * (tokens > 1), draft=lambda _: 0.4)
    pace, num_drafts = Pace(4, costs, record=record_of), 0
    while pace.plan([64]):
        num_drafts += 1
        record(pace, 1 + pace.choose([[0.6, 0.36, 0.2, 0.1]]), [1])
    return num_drafts


def test_the_drafts_of_a_record_have_won_what_the_first_may_lose() -> None:
    """By one that does not pay nothing was won."""
    assert count_failures([0.6, 0.9, 1.1, 1.2]) > count_failures([0.6, 0.7, 0.7, 0.7])
    assert count_failures([0.6, 0.9, 1.1, 1.2]) >= count_failures(None) + 2


def test_a_record_is_trusted_as_so_many_drafts() -> None:
    gains = (0.6, 0.9)
    known = Promise(2, is_chain=False, record=Acceptance(
        right=((0,) * 10,) * 12, seen=((0,) * 10,) * 12, gains=gains, num_drafts=9, about={}
    ))  # fmt: skip
    assert known.trust == PRIOR_DRAFTS / (PRIOR_DRAFTS + TRUSTED_DRAFTS)
    assert Promise(2, is_chain=False).trust == 0
    assert known.gains.tolist() == pytest.approx(gains)
