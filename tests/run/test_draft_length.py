"""`--draft-len auto` under a simulated clock: finds what pays; what does not pay costs little."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specdec.decode.drafters.pacing import (
    FIRST_CHUNK,
    HORIZON,
    LOSS_SHARE,
    MAX_AGE,
    Costs,
    DraftLength,
    DraftPlan,
    limit_prefill,
)


@dataclasses.dataclass
class Machine:
    """A target, a draft model and the time that both take; acceptance is a coin for each token.

    verify: seconds of a step by its tokens. draft: seconds of a pass by requests. prefill: seconds
    of the draft model for each further token, and piece: for each time that it reads some. noise:
    by how much seconds differ from these. beside: prompt tokens that each step reads, too.
    """

    verify: Callable[[int], float]
    draft: Callable[[int], float]
    prefill: float
    rate: float
    prompt_len: int = 60
    noise: float = 0.0
    piece: float = 0.0
    beside: int = 0

    def run(
        self, length: DraftLength, batch_size: int, output_lens: Sequence[int]
    ) -> tuple[float, list[int]]:
        """Decode requests in `batch_size` rows; return the seconds and all lengths drafted."""
        dice, clock = random.Random(4), random.Random(5)
        waiting = list(output_lens)
        rows: list[list[int]] = []  # tokens that the draft model lacks, and that are to come
        seconds, chosen = 0.0, []
        while waiting or rows:
            while waiting and len(rows) < batch_size:
                rows.append([self.prompt_len, waiting.pop()])
            unread, remaining = [row[0] for row in rows], [row[1] for row in rows]
            plan = length.plan(unread, remaining, self.beside)
            counts = [min(n, left - 1) for n, left in zip(plan.counts, remaining, strict=True)]
            chosen += [max(counts)]
            prefilled = sum(size for size, n in zip(unread, counts, strict=True) if n)
            for at, count in plan.prefill.items():
                assert not counts[at]
                assert 0 < count <= unread[at]
                rows[at][0] -= count
                prefilled += count
            draft_seconds = (
                prefilled * self.prefill
                + self.piece * bool(prefilled)
                + sum(self.draft(sum(n > depth for n in counts)) for depth in range(max(counts)))
            )
            verify_seconds = self.verify(len(rows) * (max(counts) + 1) + self.beside)
            draft_seconds *= 1 + self.noise * clock.uniform(-1, 1)
            verify_seconds *= 1 + self.noise * clock.uniform(-1, 1)
            drafts = []
            for row, count in zip(rows, counts, strict=True):
                accepted = 0
                while accepted < count and dice.random() < self.rate:
                    accepted += 1
                drafts.append((count, accepted))
                row[0] = 0 if count else row[0] + 1
                row[1] -= accepted + 1
            length.record_step(
                num_rows=len(rows), num_tokens=max(counts) + 1, num_passes=max(counts),
                num_prefilled=prefilled, draft_seconds=draft_seconds,
                verify_seconds=verify_seconds, drafts=drafts,
            )  # fmt: skip
            rows = [row for row in rows if row[1] > 0]
            seconds += draft_seconds + verify_seconds
        return seconds, chosen


PLAIN = DraftLength(0)
# Seconds of a verify step by its tokens: bound by memory for a while, or by arithmetic at once.
FLAT: Callable[[int], float] = lambda tokens: 1.0 + 0.02 * tokens  # noqa: E731
STEEP: Callable[[int], float] = lambda tokens: 0.3 + 0.2 * tokens  # noqa: E731
KNEE: Callable[[int], float] = lambda tokens: 1.0 + 0.3 * max(0, tokens - 8)  # noqa: E731
CHEAP: Callable[[int], float] = lambda requests: 0.05 + 0.01 * requests  # noqa: E731
DEAR: Callable[[int], float] = lambda requests: 0.4 + 0.05 * requests  # noqa: E731


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("verify", [FLAT, STEEP, KNEE])
@pytest.mark.parametrize("draft", [CHEAP, DEAR])
@pytest.mark.parametrize(("prompt_len", "noise"), [(60, 0.0), (512, 0.0), (60, 0.1)])
def test_never_slower_than_plain(
    batch_size: int,
    rate: float,
    verify: Callable[[int], float],
    draft: Callable[[int], float],
    prompt_len: int,
    noise: float,
) -> None:
    """Whatever steps cost and drafts bring, 5 % at most (2 % for 16 requests), prompts included.

    Clocks that are off by up to 10 % deceive it, and differ between the two runs, by 1 % more.
    """
    machine = Machine(verify, draft, draft(1) / 20, rate, prompt_len, noise)
    plain, _ = machine.run(PLAIN, batch_size, [128] * batch_size)
    auto, _ = machine.run(DraftLength(8, is_auto=True), batch_size, [128] * batch_size)
    assert auto <= (1.02 if batch_size == 16 else 1.05) * plain + (0.01 * plain if noise else 0)


def test_texts_that_end_early_lose_no_more_than_was_staked() -> None:
    """2000 tokens may come, and 20 do: the share is taken of 128 steps at most."""

    class Hopeful(DraftLength):
        def plan(
            self, unread: Sequence[int], remaining: Sequence[int], num_prompt_tokens: int = 0
        ) -> DraftPlan:
            plan: DraftPlan = super().plan(unread, [n + 1980 for n in remaining])
            return plan

    for draft in (CHEAP, DEAR):
        for prompt_len in (60, 512):
            machine = Machine(FLAT, draft, draft(1) / 20, 0.0, prompt_len)
            plain, _ = machine.run(PLAIN, 1, [20])
            auto, _ = machine.run(Hopeful(8, is_auto=True), 1, [20])
            staked = LOSS_SHARE * (plain + HORIZON * FLAT(1)) + FIRST_CHUNK * machine.prefill
            assert plain < auto <= plain + staked


@pytest.mark.parametrize("rate", [0.3, 0.6])
def test_what_few_requests_won_pays_for_no_drafts_of_many(rate: float) -> None:
    machine, length = Machine(KNEE, CHEAP, 0.002, rate), DraftLength(8, is_auto=True)
    alone = [400] * 8
    assert machine.run(length, 1, alone)[0] < 0.85 * machine.run(PLAIN, 1, alone)[0]
    many = [48] * 16
    assert machine.run(length, 16, many)[0] < 1.02 * machine.run(PLAIN, 16, many)[0]


def test_a_drafter_that_fails_loses_what_it_won_and_the_share() -> None:
    """All drafts are right for 60 steps, none after."""
    length = DraftLength(4, is_auto=True)
    plain, lost = FLAT(1), 0.0
    for step in range(400):
        (count,) = length.plan([0], [1000]).counts
        accepted = count if step < 60 else 0
        draft_seconds = count * CHEAP(1)
        verify_seconds = FLAT(count + 1)
        lost += draft_seconds + verify_seconds - (accepted + 1) * plain
        length.record_step(
            num_rows=1, num_tokens=count + 1, num_passes=count, num_prefilled=0,
            draft_seconds=draft_seconds, verify_seconds=verify_seconds,
            drafts=[(count, accepted)],
        )  # fmt: skip
        if step == 59:
            won = -lost
    assert won > 60 * plain
    assert lost <= -0.7 * won, "it stopped long before all was lost"


def test_a_prompt_is_run_by_pieces_until_its_price_is_known() -> None:
    """The first is small; then as much as the account allows, at the price of the piece before."""
    length = DraftLength(4, is_auto=True)
    size, pieces = 600, []
    for _ in range(40):
        plan = length.plan([size], [100])
        assert plan.counts in ([0], [1])
        prefilled = size if plan.counts[0] else plan.prefill.get(0, 0)
        if prefilled:
            pieces.append(prefilled)
        size += 1 - prefilled
        length.record_step(
            num_rows=1, num_tokens=1 + plan.counts[0], num_passes=plan.counts[0],
            num_prefilled=prefilled, draft_seconds=prefilled * 0.01, verify_seconds=1.0,
            drafts=[(plan.counts[0], 0)],
        )  # fmt: skip
        if plan.counts[0]:
            break
    assert pieces[0] == FIRST_CHUNK
    assert pieces[1] == int((LOSS_SHARE * (3 + 100) - 0.16) / 0.01)
    assert len(pieces) > 2, "what is won back by plain steps is staked again"
    assert FIRST_CHUNK <= min(pieces)
    assert sum(pieces) * 0.01 <= LOSS_SHARE * (40 + 100) + FIRST_CHUNK * 0.01


@pytest.mark.parametrize(
    ("rate", "verify", "draft", "batch_size"),
    [(0.9, FLAT, CHEAP, 1), (0.7, FLAT, CHEAP, 4), (0.8, FLAT, CHEAP, 16), (0.8, STEEP, CHEAP, 1)],
)
def test_what_pays_is_drafted(
    rate: float,
    verify: Callable[[int], float],
    draft: Callable[[int], float],
    batch_size: int,
) -> None:
    """Nearly as fast as the best fixed length, where that is faster than plain decoding.

    What may be lost for many requests is little, so that it takes longer until all are drafted for.
    """
    machine = Machine(verify, draft, draft(1) / 20, rate)
    work = (batch_size, [128] * 2 * batch_size)
    fixed = [machine.run(DraftLength(n), *work)[0] for n in range(9)]
    assert min(fixed) < 0.9 * fixed[0]
    auto, chosen = machine.run(DraftLength(8, is_auto=True), *work)
    assert auto < (1.2 if batch_size == 16 else 1.1) * min(fixed)
    assert max(chosen) > 1


def test_many_short_requests_win_by_drafts_before_they_end() -> None:
    """Times of a 986M model and its draft model: reading a small piece is dear by the token."""
    machine = Machine(
        lambda tokens: 0.085 + 0.0011 * (tokens - 16), lambda requests: 0.002 + 5e-5 * requests,
        1.5e-5, 0.85, prompt_len=60, piece=0.0015,
    )  # fmt: skip
    plain, _ = machine.run(PLAIN, 16, [64] * 16)
    seconds, chosen = machine.run(DraftLength(8, is_auto=True), 16, [64] * 16)
    assert seconds < 0.7 * plain
    assert sum(count > 0 for count in chosen[:10]) >= 5


def test_a_stopped_draft_is_tried_on_one_request_only() -> None:
    """And on fewer and fewer steps; the others' prompts are never run through the draft model."""
    length = DraftLength(8, is_auto=True)
    plans: list[list[int]] = []
    honest = length.plan

    def watch(
        unread: Sequence[int], remaining: Sequence[int], num_prompt_tokens: int = 0
    ) -> DraftPlan:
        plan = honest(unread, remaining, num_prompt_tokens)
        plans.append(plan.counts)
        return plan

    length.plan = watch  # type: ignore[method-assign]
    Machine(STEEP, CHEAP, 0.01, 0.1).run(length, 8, [400] * 8)
    assert plans[:2] == [[0] * 8] * 2, "plain steps first"
    assert all(sum(n > 0 for n in plan) <= 1 for plan in plans if len(plan) > 1)
    tried = [step for step, plan in enumerate(plans) if any(plan)]
    assert 2 < len(tried) < 40
    assert max(b - a for a, b in zip(tried, tried[1:], strict=False)) > 10


def test_drafting_starts_again_when_the_batch_empties() -> None:
    """What a full batch cannot use, its last request can."""
    machine = Machine(STEEP, CHEAP, 0.002, 0.9)
    length = DraftLength(4, is_auto=True)
    _, chosen = machine.run(length, 16, [200] + [100] * 15)
    num_plain = 95  # steps while all run
    assert max(chosen[:num_plain]) <= 1
    assert statistics.median(chosen[num_plain + 5 :]) >= 2


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_next_run_begins_with_what_the_last_has_measured(batch_size: int) -> None:
    machine, length = Machine(FLAT, CHEAP, 0.001, 0.9), DraftLength(8, is_auto=True)
    (first, tried), (second, chosen) = (
        machine.run(length, batch_size, [64] * batch_size) for _ in range(2)
    )
    assert tried[:2] == [0, 0]
    assert min(chosen[:4]) >= 6
    assert second < 0.9 * first


def test_plain_steps_are_not_measured_again_where_drafts_win_clearly() -> None:
    """They are where drafts win little: there a plain step's time decides."""
    shares = []
    for rate in (0.9, 0.45):
        _, chosen = Machine(FLAT, CHEAP, 0.001, rate).run(DraftLength(8, is_auto=True), 1, [400])
        drafted = chosen[8:-1]
        assert statistics.median(drafted) >= 1
        shares.append(drafted.count(0) / len(drafted))
    assert shares[0] == 0
    assert shares[1] > 0.02


def test_one_disturbed_draft_does_not_end_them() -> None:
    """The first is timed at 50 times what drafts cost."""
    length, chosen = DraftLength(8, is_auto=True), list[int]()
    for _ in range(20):
        (count,) = length.plan([0], [100]).counts
        disturbed = 50 if count and not any(chosen) else 1
        chosen.append(count)
        length.record_step(
            num_rows=1, num_tokens=count + 1, num_passes=count, num_prefilled=0,
            draft_seconds=disturbed * count * CHEAP(1), drafts=[(count, count)],
            verify_seconds=FLAT(count + 1),
        )  # fmt: skip
    assert chosen[:2] == [0, 0]
    assert min(chosen[5:]) >= 6


def test_fixed_length() -> None:
    assert DraftLength(3).plan([9, 9], [1, 50]) == DraftPlan([3, 3])


def test_costs() -> None:
    costs = Costs()
    assert costs.estimate(4) is None
    costs.record(8, 2.0)
    assert [costs.estimate(n) for n in (1, 8, 99)] == [2.0, 2.0, 2.0]
    for seconds in (9.0, 4.0, 4.0):
        costs.record(16, seconds)
    assert costs.estimate(12) == 3.0
    assert costs.estimate(24) == 6.0
    costs.record(32, 3.0)  # nothing smaller costs more
    assert [costs.estimate(n) for n in (8, 12, 16, 20, 32, 64)] == [2.0, 2.5, 3.0, 3.0, 3.0, 3.0]
    assert (costs.largest, Costs().largest) == (32, 0)


def test_a_size_that_was_last_measured_in_a_slow_minute_may_be_hoped_to_cost_less() -> None:
    costs, sizes = Costs(), np.array([1, 2, 4, 6, 8, 12])
    for size in (8, 6, 4, 2, 1):
        for _ in range(3):
            costs.record(size, 2 * FLAT(size))
    for _ in range(MAX_AGE // 2):
        for size in (2, 4):
            costs.record(size, FLAT(size))
    assert costs.estimate(6) == costs.predict(sizes)[3] == 2 * FLAT(6)
    hoped = costs.predict(sizes, is_hopeful=True)
    assert np.allclose(hoped[1:5], [FLAT(size) for size in (2, 4, 6, 8)])
    assert hoped[0] == hoped[1], "what is smaller costs no more"
    costs.record(6, 1.5)  # what was measured before counts no more
    assert costs.estimate(6) == 1.5
    assert costs.predict(sizes, is_hopeful=True)[3] == 1.5
    assert 1.5 <= costs.predict(sizes, is_hopeful=True)[4] < costs.estimate(8) == 2 * FLAT(8)


def test_what_is_far_larger_than_what_was_measured_lately_is_not_hoped_for() -> None:
    costs = Costs()
    for size in (16, 64, 16, 32, *[1] * MAX_AGE):
        costs.record(size, FLAT(size))
    costs.record(2, FLAT(2))
    assert costs.predict(np.array([16, 32, 64]), is_hopeful=True).tolist() == [
        FLAT(size) for size in (16, 32, 64)
    ]


def test_steps_that_read_prompts_too_change_nothing_for_the_others() -> None:
    found = []
    for shared in ([], [3, 5, 6, 9, 14]):
        length, step = DraftLength(4, is_auto=True), 0
        plans: list[int] = []
        while len(plans) < 20:
            beside = 40 if step in shared else 0
            (count,) = length.plan([0], [100], beside).counts
            length.record_step(
                num_rows=1, num_tokens=count + 1, num_passes=count, num_prefilled=0,
                draft_seconds=count * CHEAP(1), drafts=[(count, count)],
                verify_seconds=FLAT(count + 1 + beside),
            )  # fmt: skip
            if not beside:
                plans.append(count)
            step += 1
        found.append(plans)
    assert max(found[0]) == max(found[1]) == 4
    assert found[0][:3] == found[1][:3]


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_where_every_step_reads_prompts_too_drafts_begin_if_they_pay(
    batch_size: int, noise: float
) -> None:
    """As under a load that never ends: by what tokens cost beside those of the prompts."""
    lens = [100] * 3 * batch_size
    for verify, rate, pays in ((FLAT, 0.9, True), (STEEP, 0.3, False)):
        machine = Machine(verify, CHEAP, 0.001, rate, noise=noise, beside=70)
        plain, _ = machine.run(PLAIN, batch_size, lens)
        seconds, chosen = machine.run(DraftLength(4, is_auto=True), batch_size, lens)
        if pays:
            assert max(chosen[:14]) > 1
            assert seconds < 0.75 * plain
        else:
            assert seconds < 1.05 * plain


def test_tokens_of_prompts_pay_what_a_token_more_costs() -> None:
    """So a step's own tokens cost what they would alone, where costs lie on a line."""
    costs = Costs()
    for size in (1, 16, 80, 144):
        costs.record(size, 3.0 + 0.5 * size)
    sizes = np.array([4, 8, 16])
    assert np.allclose(costs.predict_mixed(sizes, 64), 3.0 + 0.5 * sizes)
    assert np.allclose(costs.predict_mixed(sizes, 0), 3.0 + 0.5 * sizes)
    bent = Costs()
    for size, seconds in ((16, 1.0), (80, 1.0), (96, 9.0)):
        bent.record(size, seconds)
    assert (bent.predict_mixed(sizes, 80) > 0).all()


def test_catching_up_is_bounded_and_begins_with_those_that_lack_least() -> None:
    plan = limit_prefill(DraftPlan([4, 4, 0, 4], most=6), [50, 3, 9, 10], 20)
    assert plan == DraftPlan([0, 4, 0, 4], {0: 7}, most=6)
    plan = limit_prefill(DraftPlan([0, 0], {0: 30}), [50, 3], 20)
    assert plan == DraftPlan([0, 0], {0: 20})
