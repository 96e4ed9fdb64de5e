"""How much to draft and to verify in the next step, by what steps cost and drafts bring.

A drafter says how sure it is of each token. How often such tokens have been right turns that into
the chance that a token is accepted. A row's best nodes are those of the greatest chance from the
root on, as in EAGLE-2 (https://arxiv.org/abs/2406.16858, section 4.2); how many of them a step
verifies depends on what it costs here, for so many rows, as in Sequoia
(https://arxiv.org/abs/2402.12374, section 3.3), by a `CostTable` that was measured before.

Legend: B rows, T nodes of a row's tree, the root among them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from specdec.decode.cost_table import CostTable
from specdec.decode.drafters.account import TRIAL_SHARE, Account
from specdec.decode.drafters.calibration import Calibration, DrafterValue, Promise
from specdec.engine.transfers import Array
from specdec.files.acceptance import Acceptance

READ_SHARE = 0.04  # of the time of all steps, what drafters may take to read prompts
LEAST_GAIN = 1.03  # of speed, below which drafts are not believed to pay: tables err
HORIZON_STEPS = 64  # steps to come that count at most: the text may end before
COLD_SHARE = 0.15  # of a plain step, what the ones behind a draft take longer: caches are cold
PLAN_STEPS = 4  # steps by one plan that says drafts, since planning takes time
MIN_REST_STEPS = 8  # steps at least by one plan that says none
MAX_REST_STEPS = 24  # steps at most by one plan that says none
FEW_UNREAD_TOKENS = 64  # prompt tokens that cost a draft's pass next to nothing
KNOWN_DRAFTS = 8  # drafts of a chain's first drafter, before it may go on alone
TRIAL_CHUNK_TOKENS = 2 * FEW_UNREAD_TOKENS  # prompt tokens that are read for a trial


class Pace:
    """Decides for each step whether to draft, who drafts, what is verified, and what is read.

    A step of T nodes a row costs a draft and one pass over B x T tokens, since rows are padded to
    the largest tree. It emits a token per row, and what is accepted of the T - 1 best nodes. What
    those promise is kept as a mean over the newest drafts, by their number; so the best number and
    the tokens per second that it promises are known for any B before anything is drafted. Those
    tokens a second are the price of a second: of the drafts that then come, as many nodes are kept
    as promise more tokens than the time that verifying them takes would emit.

    Of a chain, the first drafter drafts alone while that promises more than all of them: what its
    drafts promise is known from every step, and the others are tried again after a while.

    An `Account` is kept: nothing is drafted that could lose more than it allows, if none of it were
    accepted. A plan serves for some steps, since it takes time. No clock is read: what everything
    costs stands in the table.
    """

    def __init__(
        self, max_tokens: int, costs: CostTable, *, is_whole: bool = False,
        is_planned: bool = False, max_depths: Sequence[int] = (),
        record: Acceptance | None = None, recorded_drafter: int = 0,
    ) -> None:  # fmt: skip
        """Begin with the costs and with the acceptance that is known before.

        max_tokens: of a row's draft. is_whole: whether all or nothing of it is verified.
        is_planned: whether it is a chain of as many tokens as `max_levels` says. max_depths: of
        each drafter of a chain. record: the acceptance of one drafter before. recorded_drafter: the
        place of that drafter in the chain.
        """
        self.max_tokens, self.is_whole, self.is_planned = max_tokens, is_whole, is_planned
        self.costs, self.account = costs, Account()
        self.calibration = Calibration(record, recorded_drafter)
        self.drafters = [DrafterValue(depth) for depth in max_depths or (max_tokens,)]
        self.left_out: frozenset[int] = frozenset()  # drafters that would have too much to read
        # Of the whole chain, and of its first drafter alone.
        self.chain_promise = Promise(max_tokens, is_chain=is_planned, record=record)
        self.first_promise = Promise(max_tokens, is_chain=False)
        self.promise = self.chain_promise  # of those who draft by the last plan
        self._num_first_drafts = 0  # of the first drafter, that are learned from
        self.max_levels = max_tokens  # of the step's draft
        self.max_read: int | None = None  # prompt tokens that the drafter may read for the step
        self.is_trial = False  # whether the step's drafts are believed not to pay
        self.is_brief = False  # whether they have one level, since more might lose too much
        self._num_rows = self._num_prompt_tokens = 0  # of the step that was planned last
        self._step_seconds = [0.0]  # of a step that verifies so many nodes a row
        self._expected_seconds = [0.0]  # of a step that may verify so many, if drafts are as usual
        self.drafts_on = False  # whether the last plan lets steps draft
        self._planless_steps = 0  # steps to come for which that plan holds
        self._rate = 0.0  # tokens per second that the plan promised
        self._gain = 1.0  # that rate by the rate of plain steps
        self._loss_allowance = math.inf  # seconds that the step may lose
        # Of drafts, still to be learned from: whose they are, requests, promised tokens, and nodes
        # of the largest.
        self._promises: list[tuple[Promise, int, list[float], int]] = []

    # ---- Before a step.

    def start(self, num_texts: int) -> None:
        """Expect of so many new texts what texts usually bring, not what the last ones brought."""
        self.learn()
        for promise in (self.chain_promise, self.first_promise):
            promise.start(min(1.0, num_texts / max(1, self._num_rows)))
        self._planless_steps = 0

    def plan(
        self, remaining: Sequence[int], num_prompt_tokens: int = 0,
        unread_counts: Sequence[int] = (0,), num_positions: int = 0,
    ) -> bool:  # fmt: skip
        """Return whether to draft.

        remaining: tokens that each request of the step may still emit. num_prompt_tokens: those of
        prompts that it reads, too. unread_counts: tokens that each drafter has to read before it
        drafts. num_positions: that the requests have in the cache.
        """
        num_rows = len(remaining)
        if self.rest_step(num_rows, num_prompt_tokens):
            return False
        is_kept = self._planless_steps > 1 and num_rows == self._num_rows and not num_prompt_tokens
        self.skip(num_rows, num_prompt_tokens)
        if max(remaining) <= 1 or not self.max_tokens:
            return False
        if is_kept and self.list_readers(unread_counts) <= self.left_out:
            return True
        self.learn()
        self.left_out, self.promise = frozenset(), self.chain_promise
        draft_seconds = self._price(num_positions)
        seconds_ahead = min(max(remaining), HORIZON_STEPS) * self._step_seconds[0]
        if not self._may_all_read(unread_counts, seconds_ahead):
            self.left_out = self.list_readers(unread_counts)
            draft_seconds = self._price(num_positions)
        draft_seconds = self._shorten_chain(draft_seconds, num_positions)
        self._decide(draft_seconds, self._count_unread(unread_counts), seconds_ahead)
        return self.drafts_on

    def _shorten_chain(self, draft_seconds: Array, num_positions: int) -> Array:
        """Let the first drafter draft alone where that promises more; return what drafts take.

        draft_seconds: of the whole chain, [sizes].
        """
        whole_left_out, whole_gain = self.left_out, self._gain
        is_known = self._num_first_drafts >= KNOWN_DRAFTS
        if not is_known or len(self.drafters) == 1 or 0 in whole_left_out:
            return draft_seconds
        self.left_out = frozenset(range(1, len(self.drafters)))
        self.promise = self.first_promise
        first_seconds = self._price(num_positions)
        if self._gain > whole_gain:
            self.chain_promise.forget()
            return first_seconds
        self.left_out, self.promise = whole_left_out, self.chain_promise
        return self._price(num_positions)

    def _decide(self, draft_seconds: Array, num_unread: int, seconds_ahead: float) -> None:
        """Decide whether to draft, and for how many steps that holds.

        draft_seconds: of drafts, [sizes]. seconds_ahead: seconds of plain decoding to come.
        """
        plain_seconds = self._step_seconds[0]
        repays_reading = self._repays_reading(num_unread, seconds_ahead)
        self.is_trial = self._gain <= LEAST_GAIN or not repays_reading
        limit = self.account.find_limit(seconds_ahead)
        if not self.account.spent_seconds:
            self.account.trial_allowance = limit
        size, price = self._choose_draft(draft_seconds, limit)
        self._loss_allowance = limit - price
        may_lose = self._step_seconds[size] - plain_seconds <= self._loss_allowance
        may_lose = may_lose and self._may_read(num_unread, seconds_ahead)
        gain = float(self.promise.gains[-1 if self.is_whole else size - 1])
        reading_price = self._price_reading(min(num_unread, TRIAL_CHUNK_TOKENS))
        expected_loss = price + self._expected_seconds[size] - plain_seconds * (1 + gain)
        expected_loss += COLD_SHARE * plain_seconds + reading_price
        was_on = self.drafts_on
        is_due = not self.is_trial or expected_loss <= self.account.trial_allowance
        self.drafts_on = may_lose and is_due
        if not self.drafts_on:
            if was_on:
                self.account.add(0.0, COLD_SHARE * plain_seconds, is_trial=self.is_trial)
            self._planless_steps = self._count_rest(expected_loss)
        elif not self.is_trial and PLAN_STEPS * (price + self._step_seconds[-1]) < limit:
            self._planless_steps = PLAN_STEPS

    def _price(self, num_positions: int) -> Array:
        """Find the seconds of steps, and the best tokens per second; return those of drafts.

        Those are [sizes], by what is verified of them.
        """
        rows, max_tokens = self._num_rows, self.max_tokens
        sizes = np.array([max_tokens]) if self.is_whole else np.arange(1, max_tokens + 1)
        seconds = self.costs.estimate_steps(
            rows, np.array([1, *(sizes + 1)]), self._num_prompt_tokens, num_positions
        )
        self._step_seconds = self._expected_seconds = seconds.tolist()
        if not self.is_whole:
            seconds = self.promise.expect_seconds(seconds)
            self._expected_seconds = seconds.tolist()
        if self.is_planned:
            draft_seconds = np.array([self._price_drafts(n) for n in sizes])
        else:
            draft_seconds = np.full(len(sizes), self._price_drafts())
        rates = rows * (1 + self.promise.gains[sizes - 1]) / (draft_seconds + seconds[1:])
        best_index = int(rates.argmax())
        plain_rate = rows / self._step_seconds[0]
        self._gain = float(rates[best_index]) / plain_rate
        self._rate = max(float(rates[best_index]), plain_rate)
        self.max_levels = int(sizes[best_index])
        return draft_seconds

    def _price_drafts(self, num_levels: float | None = None) -> float:
        """Return the seconds of a step's drafts, of so many levels or of as many as usual.

        In a chain, each drafter counts by its share of the requests.
        """
        total = 0.0
        for number, drafter in enumerate(self.drafters):
            if number not in self.left_out:
                levels = min(num_levels or drafter.num_levels, drafter.max_depth)
                rows = self._num_rows * drafter.share
                price = self.costs.estimate_draft(max(1.0, rows), levels, number)
                total += min(1.0, rows) * price
        return total

    def _choose_draft(self, draft_seconds: Array, limit: float) -> tuple[int, float]:
        """Return the least size that is verified, and what the draft costs at most."""
        plain_seconds, seconds = self._step_seconds[0], self._step_seconds
        if self.is_whole:
            return 1, float(draft_seconds[0])
        if self.is_planned:
            size = 1 if self.is_trial else self.max_levels
            while size > 1 and draft_seconds[size - 1] + seconds[size] - plain_seconds > limit:
                size -= 1
            self.max_levels = size
            return size, float(draft_seconds[size - 1])
        whole_price, level_price = self._price_drafts(math.inf), self._price_drafts(1)
        self.is_brief = whole_price > limit or self.is_trial
        price = level_price if self.is_brief else whole_price
        if self.is_trial:
            return 1, price
        # Fewer nodes than pay would only lose what is left of the limit.
        emitted_tokens = 1 + self.promise.gains[: len(seconds) - 1]
        repays = emitted_tokens * plain_seconds > price + np.array(self._expected_seconds[1:])
        return int(repays.argmax()) + 1, price

    def rest_step(self, num_rows: int, num_prompt_tokens: int) -> bool:
        """Count a step; return whether it drafts nothing, as the last plan says."""
        if not self.is_resting(num_rows):
            return False
        self.skip(num_rows, num_prompt_tokens)
        return True

    def is_resting(self, num_rows: int) -> bool:
        """Return whether the last plan lets the next step of so many requests rest."""
        return not self.drafts_on and self._planless_steps > 1 and num_rows == self._num_rows

    def _count_rest(self, price: float) -> int:
        """Return the steps until a trial of this price may be lost."""
        missing_seconds = price - self.account.trial_allowance if self.is_trial else 0.0
        num_steps = int(missing_seconds / (TRIAL_SHARE * self._step_seconds[0]))
        return min(max(MIN_REST_STEPS, num_steps), MAX_REST_STEPS)

    def skip(self, num_rows: int, num_prompt_tokens: int = 0) -> None:
        """Begin a step of so many requests; nothing is drafted for it unless that is recorded."""
        self._num_rows, self._planless_steps = num_rows, self._planless_steps - 1
        self._num_prompt_tokens = num_prompt_tokens
        self.account.add(self._step_seconds[0], 0.0, is_trial=self.is_trial)

    def list_readers(self, unread_counts: Sequence[int]) -> frozenset[int]:
        """Return the drafters that have much to read before they draft."""
        return frozenset(n for n, tokens in enumerate(unread_counts) if tokens > FEW_UNREAD_TOKENS)

    def _count_unread(self, unread_counts: Sequence[int]) -> int:
        return sum(tokens for n, tokens in enumerate(unread_counts) if n not in self.left_out)

    def _may_all_read(self, unread_counts: Sequence[int], seconds_ahead: float) -> bool:
        """Return whether no drafter of a chain is to be left out for what it has to read."""
        readers = self.list_readers(unread_counts)
        if not readers or len(readers) == len(self.drafters):
            return True
        num_unread = sum(unread_counts)
        worth = max(self.value_drafter(n, self._num_rows) for n in readers)
        is_repaid = self._price_reading(num_unread) <= seconds_ahead * worth / (1 + max(0.0, worth))
        return is_repaid and self._may_read(num_unread, seconds_ahead)

    def _price_reading(self, num_unread: int) -> float:
        return num_unread * self.costs.reading if num_unread > FEW_UNREAD_TOKENS else 0.0

    def _repays_reading(self, num_unread: int, seconds_ahead: float) -> bool:
        """Return whether drafts of the time ahead repay the drafter's reading."""
        return self._price_reading(num_unread) <= seconds_ahead * (1 - 1 / self._gain)

    def _may_read(self, num_unread: int, seconds_ahead: float) -> bool:
        """Return whether drafters may read unread tokens; `max_read` says how many.

        That is a share of all the time, and what drafts have won. seconds_ahead: seconds of plain
        decoding to come.
        """
        self.max_read = None
        price = self._price_reading(num_unread)
        account = self.account
        limit = READ_SHARE * (account.spent_seconds + seconds_ahead) - account.reading_seconds
        limit += max(0.0, -account.lost_seconds)
        if not price or self._num_rows == 1:
            return not price or price <= limit
        self.max_read = int(max(0.0, limit) / self.costs.reading)
        if self.is_trial:
            self.max_read = min(self.max_read, TRIAL_CHUNK_TOKENS)
        return self.max_read >= min(num_unread, TRIAL_CHUNK_TOKENS)

    def price_level(self) -> float:
        """Return the least gain of a draft's newest level for which another level is drafted.

        A level's gain is the tokens of it that are expected to be accepted, in all rows together
        and at most one in each.
        """
        if self.is_brief:
            return math.inf
        seconds = self._step_seconds[1:]  # that a draft is verified at all is paid for already
        token_seconds = (seconds[-1] - seconds[0]) / max(1, len(seconds) - 1)
        one_level, two_levels = (self.costs.estimate_draft(self._num_rows, n, -1) for n in (1, 2))
        return float(self._rate * (two_levels - one_level + token_seconds) / self.promise.gains[0])

    def value(self, chances: Array) -> Array:
        """Return the tokens that each row's draft promises beyond what its time would emit, [B].

        chances: [B, N] of each row's paths, best first, then zeros.
        """
        seconds = self._step_seconds
        token_seconds = (seconds[-1] - seconds[0]) / max(1, (len(seconds) - 1) * self._num_rows)
        worth = np.cumsum(chances - self._rate * token_seconds, axis=1)
        return np.asarray(worth.max(axis=1, initial=0.0))

    def value_drafter(self, drafter: int, num_left: int) -> float:
        """Return a drafter's value to each of so many requests in tokens, its time paid."""
        value = self.drafters[drafter]
        seconds = self.costs.estimate_draft(num_left, value.num_levels, drafter)
        return value.gain - self._rate * seconds / num_left

    def is_best(self, drafter: int, value: float, num_left: int) -> bool:
        """Return whether a draft in hand is worth more than one by later drafters of the chain."""
        later_drafters = {*range(drafter + 1, len(self.drafters))} - self.left_out
        values = [self.value_drafter(number, num_left) for number in later_drafters]
        return value > 0 and value >= max(values, default=0.0)

    def note_first(self, chances: Sequence[Sequence[float]]) -> None:
        """Take what drafts of the first drafter promise, of which another one's may take the place.

        chances: [B, N] of each row's paths, best first, then zeros.
        """
        if self.promise is not self.first_promise:
            totals = self._sum_chances(chances)
            gains, size = [*itertools.accumulate(totals)], sum(total > 0 for total in totals)
            self._promises.append((self.first_promise, len(chances), gains, size))

    def _sum_chances(self, chances: Sequence[Sequence[float]] | Array) -> list[float]:
        """Return the tokens that each node promises all rows together, [max_tokens]."""
        totals = [float(sum(column)) for column in zip(*chances, strict=True)][: self.max_tokens]
        return totals + [0.0] * (self.max_tokens - len(totals))

    def choose(self, chances: Sequence[Sequence[float]] | Array) -> int:
        """Return how many nodes of each row to verify besides the root.

        chances: [B, N] of each row's paths, best first, then zeros.
        """
        plain_seconds, *seconds = self._step_seconds
        totals = self._sum_chances(chances)
        promised_gains = list(itertools.accumulate(totals))
        size = sum(total > 0 for total in totals)
        best_size, best_worth = 0, -self._rate * plain_seconds
        prices = zip(promised_gains, seconds, strict=False)
        for number, (gain, step_seconds) in enumerate(prices, 1):
            worth = gain - self._rate * step_seconds
            if worth > best_worth and step_seconds - plain_seconds <= self._loss_allowance:
                best_size, best_worth = number, worth
        if self.is_brief:  # as if each further level were as good as the first
            num_rows = len(chances)
            rate = totals[0] / num_rows
            level_gains = (num_rows * rate**n for n in range(1, len(totals) + 1))
            usual_gains = itertools.accumulate(level_gains)
            promised_gains = [*map(max, promised_gains, usual_gains)]
        # What a draft of this kind promises, whatever is verified of it.
        self._promises.append((self.promise, len(chances), promised_gains, size))
        return max(best_size, int(self.is_trial))

    # ---- After it.

    def record(
        self, size: int, emitted_counts: Sequence[int], draft_calls: Sequence[tuple[int, int, int]],
        num_read: int = 0,
    ) -> None:  # fmt: skip
        """Take what came of a step's drafts, the largest of which has so many nodes.

        emitted_counts: tokens of each request. draft_calls: the drafters of the chain that drafted,
        for how many requests, and how many levels. num_read: prompt tokens that they read.
        """
        rows, plain_seconds = len(emitted_counts), self._step_seconds[0]
        estimate = self.costs.estimate_draft
        draft_seconds = sum(estimate(n, levels, drafter) for drafter, n, levels in draft_calls)
        if num_read > FEW_UNREAD_TOKENS:
            seconds = self._price_reading(num_read)
            self.account.reading_seconds += seconds
            self.account.trial_allowance -= seconds if self.is_trial else 0.0
            self.account.spent_seconds += seconds
        step_seconds = self._step_seconds[-1 if self.is_whole and size > 1 else size - 1]
        extra_seconds = draft_seconds + step_seconds - plain_seconds
        lost_seconds = draft_seconds + step_seconds - plain_seconds * sum(emitted_counts) / rows
        self.account.add(extra_seconds, lost_seconds, is_trial=self.is_trial)
        uses_by_drafter = {drafter: (n / rows, levels) for drafter, n, levels in draft_calls}
        for number, value in enumerate(self.drafters):
            if number not in self.left_out:
                value.ask(*uses_by_drafter.get(number, (0.0, None)))
        if size > 1 and (self.is_whole or self.is_planned):
            self.promise.take_emitted(emitted_counts, size)

    def learn(self) -> None:
        """Learn from the newest steps."""
        for promise, num_rows, promised_gains, size in self._promises:
            promise.take_promised(num_rows, promised_gains, size)
            self._num_first_drafts += num_rows if promise is self.first_promise else 0
        self._promises = []
        self.calibration.learn()
