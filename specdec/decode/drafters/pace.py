"""How much to draft and to verify in the next step, by what steps cost and drafts bring.

A drafter says how sure it is of each token. How often such tokens have been right turns that into
the chance that a token is accepted. A row's best nodes are those of the greatest chance from the
root on, as in EAGLE-2 (https://arxiv.org/abs/2406.16858, section 4.2); how many of them a step
verifies depends on what it costs here, for so many rows, as in Sequoia
(https://arxiv.org/abs/2402.12374, section 3.3), by a `CostTable` that was measured before.

Legend: B rows, T nodes of a row's tree, the root among them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence

import numpy as np

from specdec.decode.cost_table import CostTable
from specdec.decode.drafters.account import TRIAL_SHARE, Account
from specdec.decode.drafters.calibration import Calibration, sum_chances
from specdec.decode.drafters.forecast import Credit, DrafterSet, Forecast, forecast_steps
from specdec.decode.drafters.prices import DraftCall, Prices
from specdec.decode.drafters.promise import PRIOR_DRAFTS, DrafterValue, Promise
from specdec.files.acceptance import Acceptance

LEAST_GAIN = 1.03  # of speed, below which drafts are not believed to pay: tables err
SURE_GAIN = 1.1  # of speed, from which a plan that says drafts is kept for some steps
HORIZON_STEPS = 64  # steps to come that count at most: the text may end before
COLD_SHARE = 0.15  # of a plain step, what the ones after a draft take longer: caches are cold
MAX_PLAN_STEPS = 4  # steps by one plan that says drafts, if it is sure: planning takes time
MIN_REST_STEPS = 8  # steps at least by one plan that says none
MAX_REST_STEPS = 24  # steps at most by one plan that says none
FEW_UNREAD_TOKENS = 64  # unread tokens of a drafter, up to which it is no reader of a prompt
TRIAL_CHUNK_TOKENS = 2 * FEW_UNREAD_TOKENS  # prompt tokens that are read for a trial


class Pace:
    """Decides for each step whether to draft, who drafts, what is verified, and what is read.

    A step of T nodes a row costs a draft and one pass over B x T tokens, since rows are padded to
    the largest tree. It emits a token per row, and what is accepted of the T - 1 best nodes. What
    those promise is kept as a mean over the newest drafts, by their number; so the best number and
    the tokens per second that it promises are known for any B before anything is drafted. Those
    tokens a second are the price of a second: of the drafts that then come, as many nodes are kept
    as promise more tokens than the time that verifying them takes would emit.

    Of a chain, each drafter is asked in turn, if it is expected to bring so much more than the
    drafts in hand that its time is paid.

    An `Account` is kept: no draft may lose more than it allows, if no more of it is accepted than
    the drafts before have shown. A plan serves for some steps, since it takes time. `Prices` are
    what everything costs.
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
        records = {recorded_drafter: record}
        self.drafters = [
            DrafterValue(depth, records.get(number))
            for number, depth in enumerate(max_depths or (max_tokens,))
        ]
        self.chain = DrafterSet(Promise(max_tokens, is_chain=is_planned, record=record))
        later_drafters = frozenset(range(1, len(self.drafters)))
        self.first = DrafterSet(Promise(max_tokens, is_chain=False), later_drafters)
        self.credit = Credit()
        self._num_recorded = 0.0 if record is None else PRIOR_DRAFTS
        self.forecast = Forecast(self.chain)  # that the last plan goes by
        self.max_levels = max_tokens  # of the step's draft
        self.max_read: int | None = None  # prompt tokens that the drafter may read for the step
        self.is_trial = False  # whether the step's drafts are believed not to pay
        self.is_brief = False  # whether they have one level, since more might lose too much
        # Sizes that a plan chooses between: drafted nodes of a row.
        self._sizes = [max_tokens] if is_whole else [*range(1, max_tokens + 1)]
        self.prices = Prices(costs, self._sizes, self.drafters)
        self.drafts_on = False  # whether the last plan lets steps draft
        self._plan_steps = 0  # steps to come for which that plan holds, while it may lose
        # Of that plan: the least size that is verified, and the seconds of drafting at most.
        self._draft = (0, 0.0)
        self._seconds_ahead = 0.0  # of plain decoding, after that plan
        self._level_price: float | None = None  # of that plan, once it is asked for
        self._promised_tokens = 0.0  # by the drafted nodes that the step verifies
        self._loss_allowance = math.inf  # seconds that the step may lose
        # Drafts to be learned from: their set, requests, promised tokens, nodes of the largest.
        self._promises: list[tuple[DrafterSet, int, list[float], int]] = []

    # ---- Before a step.

    def start(self, num_texts: int) -> None:
        """Expect of so many new texts what texts usually bring, not what the last ones brought."""
        self.learn()
        for drafter_set in (self.chain, self.first):
            drafter_set.promise.start(min(1.0, num_texts / max(1, self.prices.num_rows)))
        self._plan_steps = 0

    def is_resting(self, num_rows: int) -> bool:
        """Return whether the last plan lets the next step of so many requests rest."""
        return not self.drafts_on and self._keeps_plan(num_rows)

    def _keeps_plan(self, num_rows: int) -> bool:
        """Return whether the last plan holds for the next step, of so many requests."""
        return self._plan_steps > 1 and num_rows == self.prices.num_rows

    def begin_step(self, num_rows: int) -> None:
        """Begin a step of so many requests; nothing is drafted for it unless that is recorded."""
        self.prices.num_rows = num_rows
        self._plan_steps -= 1
        self._promised_tokens = 0.0
        self.account.add(self.prices.plain_seconds, 0.0, is_trial=self.is_trial)

    def rest_step(self, num_rows: int) -> bool:
        """Count a step; return whether it drafts nothing, as the last plan says."""
        if not self.is_resting(num_rows):
            return False
        self.begin_step(num_rows)
        return True

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
        if self.rest_step(num_rows):
            return False
        is_kept = self._keeps_plan(num_rows) and not num_prompt_tokens
        self.begin_step(num_rows)
        if max(remaining) <= 1 or not self.max_tokens:
            return False
        readers = frozenset(n for n, few in enumerate(unread_counts) if few > FEW_UNREAD_TOKENS)
        if is_kept and readers <= self.forecast.left_out and self._may_lose():
            self.max_read = None  # who drafts has read all but a few tokens
            return True
        self._level_price = None
        self.learn()
        self.prices.plan(num_prompt_tokens, num_positions)
        seconds_ahead = min(max(remaining), HORIZON_STEPS) * self.prices.plain_seconds
        self.forecast = self._choose_drafters(readers, sum(unread_counts), seconds_ahead)
        left_out = self.forecast.left_out
        num_unread = sum(n for number, n in enumerate(unread_counts) if number not in left_out)
        self._decide(num_unread, seconds_ahead)
        return self.drafts_on

    def _choose_drafters(
        self, readers: frozenset[int], num_unread: int, seconds_ahead: float
    ) -> Forecast:
        """Return the forecast of all drafters; without readers where reading is not repaid.

        readers: those that have much to read before they draft. num_unread: tokens to read.
        """
        chain = self._forecast(self.chain)
        if not 0 < len(readers) < len(self.drafters):
            return chain
        if readers == self.first.left_out and self.first.is_known:
            self.forecast = without = self._forecast(self.first)
            gain_without = max(1.0, without.gain)
            gain = gain_without * self._expect_advantage()
        else:
            without = self._forecast(dataclasses.replace(self.chain, left_out=readers))
            gain, gain_without = chain.gain, 1.0
        is_repaid = num_unread * self.costs.reading <= seconds_ahead * (1 / gain_without - 1 / gain)
        return chain if is_repaid and self._may_read(num_unread, seconds_ahead) else without

    def _expect_advantage(self) -> float:
        """Return the speed of all drafters over that of the first alone, by its newest drafts.

        So both are judged by one text, which may be easier than those before.
        """
        num_rows, later_drafters = self.prices.num_rows, range(1, len(self.drafters))
        tokens = self.drafters[0].average(
            lambda gain: max(self.value_drafter(n, num_rows, gain) for n in later_drafters)
        )
        return 1 + tokens / (1 + self.forecast.gains[self.forecast.best_size - 1])

    def _forecast(self, drafter_set: DrafterSet) -> Forecast:
        """Return the forecast of the step's plan if these drafters draft."""
        prices, left_out = self.prices, drafter_set.left_out
        step_seconds = np.array(prices.step_seconds)
        if not self.is_whole:
            step_seconds = drafter_set.promise.expect_seconds(step_seconds)
        if self.is_planned:
            draft_seconds = [prices.price_drafts(left_out, size) for size in self._sizes]
        else:
            draft_seconds = [prices.price_drafts(left_out)] * len(self._sizes)
        return forecast_steps(
            drafter_set, self.credit, prices.num_rows, prices.plain_seconds,
            step_seconds[1:].tolist(), draft_seconds,
        )  # fmt: skip

    def _decide(self, num_unread: int, seconds_ahead: float) -> None:
        """Decide whether to draft, and for how many steps that holds.

        num_unread: tokens to read before. seconds_ahead: seconds of plain decoding to come.
        """
        plain_seconds, forecast = self.prices.plain_seconds, self.forecast
        repaid_seconds = seconds_ahead * (1 - 1 / forecast.gain)
        self.is_trial = (
            forecast.gain <= LEAST_GAIN or num_unread * self.costs.reading > repaid_seconds
        )
        if not self.account.spent_seconds:
            self.account.trial_allowance = self.account.find_limit(seconds_ahead)
            self.account.lost_seconds -= self._value_record()
        self._seconds_ahead = seconds_ahead
        size, price = self._draft = self._choose_draft(self._find_limit())
        may_lose = self._may_lose() and self._may_read(num_unread, seconds_ahead)
        expected_loss = price + forecast.expected_seconds[size - 1]
        expected_loss -= plain_seconds * (1 + forecast.gains[size - 1])
        reading_price = min(num_unread, TRIAL_CHUNK_TOKENS) * self.costs.reading
        expected_loss += COLD_SHARE * plain_seconds + reading_price
        was_on = self.drafts_on
        is_due = not self.is_trial or expected_loss <= self.account.trial_allowance
        self.drafts_on = may_lose and is_due
        if not self.drafts_on:
            if was_on:
                self.account.add(0.0, COLD_SHARE * plain_seconds, is_trial=self.is_trial)
            self._plan_steps = self._count_rest(expected_loss)
        elif not self.is_trial and forecast.gain > SURE_GAIN:
            self._plan_steps = round(MAX_PLAN_STEPS * forecast.drafter_set.promise.trust)

    def _find_limit(self) -> float:
        """Return the seconds that the next draft may lose."""
        won_seconds = 0.0 if self.is_trial else self.prices.plain_seconds * self.forecast.sure_gain
        return self.account.find_limit(self._seconds_ahead) + won_seconds

    def _may_lose(self) -> bool:
        """Return whether the plan's drafts may fail; note the seconds that verifying may lose."""
        size, price = self._draft
        self._loss_allowance = self._find_limit() - price
        return self.prices.step_seconds[size] - self.prices.plain_seconds <= self._loss_allowance

    def _value_record(self) -> float:
        """Return the seconds that drafts of the drafter's record have won, if these cost this."""
        share = (1 + self.forecast.sure_gain) * max(0.0, 1 - 1 / self.forecast.gain)
        return self._num_recorded / self.prices.num_rows * self.prices.plain_seconds * share

    def _choose_draft(self, limit: float) -> tuple[int, float]:
        """Return the least size that is verified, and what the draft costs at most."""
        forecast, (plain_seconds, *seconds) = self.forecast, self.prices.step_seconds
        draft_seconds, self.max_levels = forecast.draft_seconds, forecast.best_size
        if self.is_whole:
            return 1, draft_seconds[0]
        if self.is_planned:
            size = 1 if self.is_trial else self.max_levels
            while size > 1 and draft_seconds[size - 1] + seconds[size - 1] - plain_seconds > limit:
                size -= 1
            self.max_levels = size
            return size, draft_seconds[size - 1]
        whole_price = self.prices.price_drafts(forecast.left_out, math.inf)
        self.is_brief = whole_price > limit or self.is_trial
        price = self.prices.price_drafts(forecast.left_out, 1) if self.is_brief else whole_price
        if self.is_trial:
            return 1, price
        # Fewer nodes than pay would only lose what is left of the limit.
        expected = zip(forecast.gains, forecast.expected_seconds, strict=True)
        repays = ((1 + gain) * plain_seconds > price + step for gain, step in expected)
        return next((size for size, pays in enumerate(repays, 1) if pays), 1), price

    def _count_rest(self, price: float) -> int:
        """Return the steps until a trial of this price may be lost."""
        missing_seconds = price - self.account.trial_allowance if self.is_trial else 0.0
        num_steps = int(missing_seconds / (TRIAL_SHARE * self.prices.plain_seconds))
        return min(max(MIN_REST_STEPS, num_steps), MAX_REST_STEPS)

    def _may_read(self, num_unread: int, seconds_ahead: float) -> bool:
        """Return whether drafters may read unread tokens; `max_read` says how many."""
        self.max_read = None
        price = num_unread * self.costs.reading
        limit = self.account.find_reading_limit(seconds_ahead)
        if not price or self.prices.num_rows == 1:
            return price <= limit
        self.max_read = int(limit / self.costs.reading)
        if self.is_trial:
            self.max_read = min(self.max_read, TRIAL_CHUNK_TOKENS)
        return self.max_read >= min(num_unread, TRIAL_CHUNK_TOKENS)

    # ---- While it is drafted for.

    def price_level(self) -> float:
        """Return the least gain of a draft's newest level for which another level is drafted.

        A level's gain is the tokens of it that are expected to be accepted, in all rows together
        and at most one in each.
        """
        if self.is_brief:
            return math.inf
        if self._level_price is None:
            self._level_price = self._find_level_price()
        return self._level_price

    def _find_level_price(self) -> float:
        # That a draft is verified at all is paid for already. Up to the best size, a level's token
        # costs what one of these does on average: beyond it costs may rise far more steeply.
        prices, step_seconds = self.prices, self.prices.step_seconds
        size = min(max(2, self.forecast.best_size), len(step_seconds) - 1)
        token_seconds = (step_seconds[size] - step_seconds[1]) / max(1, size - 1)
        one_level, two_levels = (prices.price_draft(-1, prices.num_rows, n) for n in (1, 2))
        price = self.forecast.rate * (two_levels - one_level + token_seconds)
        return float(price / self.forecast.drafter_set.promise.gains[0])

    def value(self, chances: Sequence[Sequence[float]]) -> list[float]:
        """Return the tokens that each row's paths promise beyond what their time emits, [B].

        chances: as in `choose`. Of each row's best paths as many count as are worth the most.
        """
        plain_seconds, *seconds = self.prices.step_seconds
        row_rate = self.forecast.rate / self.prices.num_rows
        prices = [row_rate * (step - plain_seconds) for step in seconds]
        if self.is_whole:
            prices *= self.max_tokens
        worths = (map(operator.sub, itertools.accumulate(row), prices) for row in chances)
        return [max([0.0, *row_worths]) for row_worths in worths]

    def value_drafter(self, drafter: int, num_rows: int, gain: float = 0.0) -> float:
        """Return the tokens that a drafter's draft adds to each of so many requests, its time paid.

        gain: tokens that the draft in hand promises.
        """
        value = self.drafters[drafter]
        seconds = self.prices.price_draft(drafter, num_rows, value.num_levels)
        return value.expect_more(gain) - self.forecast.rate * seconds / num_rows

    def _value_later(self, drafter: int, num_rows: int, gain: float = 0.0) -> float:
        """Return the most that a later drafter's draft adds, as `value_drafter` has it."""
        later_drafters = {*range(drafter + 1, len(self.drafters))} - self.forecast.left_out
        values = [self.value_drafter(number, num_rows, gain) for number in later_drafters]
        return max(values, default=0.0)

    def is_worth_asking(self, drafter: int, gains: Sequence[float]) -> bool:
        """Return whether a drafter adds to what the drafts in hand promise, or later ones would.

        gains: tokens that the drafts in hand promise, [B].
        """
        if drafter in self.forecast.left_out:
            return False
        num_rows = len(gains)
        later_value = max(0.0, self._value_later(drafter, num_rows))
        more = (self.value_drafter(drafter, num_rows, max(gain, later_value)) for gain in gains)
        return sum(more) > 0

    def is_best(self, drafter: int, gain: float, num_rows: int) -> bool:
        """Return whether a draft in hand is worth more than one by later drafters of the chain."""
        return gain > 0 and self._value_later(drafter, num_rows, gain) <= 0

    def note_first(self, chances: Sequence[Sequence[float]]) -> None:
        """Take what drafts of the first drafter promise, in whose place others' may come.

        chances: of each row's paths, [B] of any length, best first.
        """
        if self.forecast.drafter_set is not self.first:  # else `choose` takes them
            promised = sum_chances(chances, self.max_tokens)
            self._promises.append((self.first, len(chances), *promised))

    def choose(self, chances: Sequence[Sequence[float]]) -> int:
        """Return how many nodes of each row to verify besides the root.

        chances: of each row's paths, [B] of any length, best first.
        """
        plain_seconds, *seconds = self.prices.step_seconds
        promised_gains, num_nodes = sum_chances(chances, self.max_tokens)
        # Beside a brief draft stand plain steps: a longer one might lose too much.
        rate = len(chances) / plain_seconds if self.is_brief else self.forecast.rate
        best_size, best_worth = 0, -rate * plain_seconds
        for size, (gain, step_seconds) in enumerate(zip(promised_gains, seconds, strict=False), 1):
            worth = gain - rate * step_seconds
            if worth > best_worth and step_seconds - plain_seconds <= self._loss_allowance:
                best_size, best_worth = size, worth
        chosen_size = max(best_size, int(self.is_trial))
        self._promised_tokens = promised_gains[chosen_size - 1] if chosen_size else 0.0
        if self.is_brief:  # as if each further level were as good as the first
            num_rows = len(chances)
            first_rate = promised_gains[0] / num_rows
            level_gains = (num_rows * first_rate**n for n in range(1, self.max_tokens + 1))
            promised_gains = [*map(max, promised_gains, itertools.accumulate(level_gains))]
        # The promise of a draft of this kind, whatever is verified of it.
        self._promises.append((self.forecast.drafter_set, len(chances), promised_gains, num_nodes))
        return chosen_size

    # ---- After it.

    def record(
        self, size: int, emitted_counts: Sequence[int], draft_calls: Sequence[DraftCall],
        num_read: int = 0, *, verified_size: int | None = None,
    ) -> None:  # fmt: skip
        """Take what came of a step's drafts, the largest of which has so many nodes.

        emitted_counts: tokens of each request. draft_calls: the drafters of the chain that drafted,
        for how many requests, and how many levels. num_read: prompt tokens that they read.
        verified_size: nodes of the largest draft as grammars have left it; None is all of them.
        """
        rows, plain_seconds = len(emitted_counts), self.prices.plain_seconds
        seconds = self.prices.price_calls(draft_calls)
        seconds += self.prices.price_step(verified_size or size)
        lost_seconds = seconds - plain_seconds * sum(emitted_counts) / rows
        self.account.read(num_read * self.costs.reading, is_trial=self.is_trial)
        self.account.add(seconds - plain_seconds, lost_seconds, is_trial=self.is_trial)
        uses_by_drafter = {drafter: (n / rows, levels) for drafter, n, levels in draft_calls}
        for number, value in enumerate(self.drafters):
            if number not in self.forecast.left_out:
                value.ask(*uses_by_drafter.get(number, (0.0, None)))
                if number not in uses_by_drafter:
                    price = self.prices.price_draft(number, rows, value.num_levels)
                    value.rest(TRIAL_SHARE * plain_seconds, price)
        if size > 1 and self._promised_tokens:
            self.credit.judge(self._promised_tokens, sum(emitted_counts) - rows)
        if size > 1 and (self.is_whole or self.is_planned):
            self.forecast.drafter_set.promise.take_emitted(emitted_counts, size)

    def learn(self) -> None:
        """Learn from the newest steps."""
        for drafter_set, num_rows, promised_gains, size in self._promises:
            drafter_set.promise.take_promised(num_rows, promised_gains, size)
            drafter_set.num_drafts += num_rows
        self._promises = []
        self.calibration.learn()
