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

READ_SHARE = 0.04  # of the same, what drafters may take to read prompts
LEAST_GAIN = 1.03  # of speed, below which drafts are not believed to pay: tables err
HORIZON = 64  # steps to come that count at most: the text may end before
COLD_SHARE = 0.15  # of a plain step, what the ones behind a draft take longer: caches are cold
KEPT_STEPS = 4  # steps by one plan that says drafts, since planning takes time
REST_STEPS = 8  # steps at least by one plan that says none
MOST_REST = 24  # the same at most
FEW_UNREAD = 64  # prompt tokens that cost a draft's pass next to nothing
FIRST_PIECE = 2 * FEW_UNREAD  # prompt tokens that are read for a trial


class Pace:
    """Decides for each step whether to draft, who drafts, what is verified, and what is read.

    A step of T nodes a row costs a draft and one pass over B x T tokens, since rows are padded to
    the largest tree. It emits a token per row, and what is accepted of the T - 1 best nodes. What
    those promise is kept as a mean over the newest drafts, by their number; so the best number and
    the tokens per second that it promises are known for any B before anything is drafted. Those
    tokens a second are the price of a second: of the drafts that then come, as many nodes are kept
    as promise more tokens than the time that verifying them takes would emit.

    An `Account` is kept: nothing is drafted that could lose more than it allows, if none of it were
    accepted. A plan serves for some steps, since it takes time. No clock is read: what everything
    costs stands in the table.
    """

    def __init__(
        self, max_tokens: int, costs: CostTable, *, is_whole: bool = False,
        is_planned: bool = False, max_depths: Sequence[int] = (),
        record: Acceptance | None = None, recorded: int = 0,
    ) -> None:  # fmt: skip
        """Begin with the costs and with the acceptance that is known before.

        max_tokens: of a row's draft. is_whole: whether all or nothing of it is verified.
        is_planned: whether it is a chain of as many tokens as `max_levels` says. max_depths: of
        each drafter of a chain. record: what was accepted before of the one that `recorded` names
        by its place.
        """
        self.max_tokens, self.is_whole, self.is_planned = max_tokens, is_whole, is_planned
        self.costs, self.account = costs, Account()
        self.calibration = Calibration(record, recorded)
        self.drafters = [DrafterValue(depth) for depth in max_depths or (max_tokens,)]
        self.left_out: frozenset[int] = frozenset()  # drafters that have too much to read first
        self.promise = Promise(max_tokens, is_chain=is_planned, record=record)
        self.max_levels = max_tokens  # of the step's draft
        self.max_read: int | None = None  # prompt tokens that the drafter may read for the step
        self.is_trial = False  # whether the step's drafts are believed not to pay
        self.is_brief = False  # whether they have one level, since more might lose too much
        self._num_rows = self._num_prompt_tokens = 0  # of the step that was planned last
        self._seconds = [0.0]  # of a step by nodes a row, by the newest plan
        self._expected = [0.0]  # the same of one that may verify so many, if drafts are as usual
        self._rest, self.drafts_on = 0, False  # steps to come without a plan; what it decided
        self._rate = 0.0  # tokens per second that the plan promised
        self._gain = 1.0  # the same by that of plain steps
        self._allowance = math.inf  # seconds that the step may lose
        # Of drafts, still to be learned from: requests, promised tokens, nodes of the largest.
        self._promises: list[tuple[int, list[float], int]] = []

    # ---- Before a step.

    def start(self, num_texts: int) -> None:
        """Expect of so many new texts what texts usually bring, not what the last ones brought."""
        self.learn()
        self.promise.start(min(1.0, num_texts / max(1, self._num_rows)))
        self._rest = 0

    def plan(
        self, remaining: Sequence[int], num_prompt_tokens: int = 0, unread: Sequence[int] = (0,),
        num_positions: int = 0,
    ) -> bool:  # fmt: skip
        """Return whether to draft.

        remaining: tokens that each request of the step may still emit. num_prompt_tokens: those of
        prompts that it reads, too. unread: tokens that each drafter has to read before it drafts.
        num_positions: that the requests have in the cache.
        """
        num_rows = len(remaining)
        if self.rest(num_rows, num_prompt_tokens):
            return False
        is_kept = self._rest > 1 and num_rows == self._num_rows and not num_prompt_tokens
        self.skip(num_rows, num_prompt_tokens)
        if max(remaining) <= 1 or not self.max_tokens:
            return False
        if is_kept and self.list_readers(unread) <= self.left_out:
            return True
        self.learn()
        self.left_out = frozenset()
        draft = self._price(num_positions)
        ahead = min(max(remaining), HORIZON) * self._seconds[0]
        if not self._may_all_read(unread, ahead):
            self.left_out = self.list_readers(unread)
            draft = self._price(num_positions)
        self._decide(draft, self._count_unread(unread), ahead)
        return self.drafts_on

    def _decide(self, draft: Array, num_unread: int, ahead: float) -> None:
        """Decide whether to draft, and for how many steps that holds.

        draft: seconds of drafts, [sizes]. ahead: seconds of plain decoding to come.
        """
        plain = self._seconds[0]
        self.is_trial = self._gain <= LEAST_GAIN or not self._repays_reading(num_unread, ahead)
        limit = self.account.find_limit(ahead)
        if not self.account.spent:
            self.account.for_trials = limit
        size, price = self._choose_draft(draft, limit)
        self._allowance = limit - price
        may_lose = self._seconds[size] - plain <= self._allowance
        may_lose = may_lose and self._may_read(num_unread, ahead)
        brings = float(self.promise.gains[-1 if self.is_whole else size - 1])
        expected = price + self._expected[size] - plain * (1 + brings)
        expected += COLD_SHARE * plain + self._price_reading(min(num_unread, FIRST_PIECE))
        was_on = self.drafts_on
        is_due = not self.is_trial or expected <= self.account.for_trials
        self.drafts_on = may_lose and is_due
        if not self.drafts_on:
            if was_on:
                self.account.add(0.0, COLD_SHARE * plain, is_trial=self.is_trial)
            self._rest = self._count_rest(expected)
        elif not self.is_trial and KEPT_STEPS * (price + self._seconds[-1]) < limit:
            self._rest = KEPT_STEPS

    def _price(self, num_positions: int) -> Array:
        """Find the seconds of steps, and the best tokens per second; return those of drafts.

        Those are [sizes], by what is verified of them.
        """
        rows, most = self._num_rows, self.max_tokens
        sizes = np.array([most]) if self.is_whole else np.arange(1, most + 1)
        seconds = self.costs.estimate_steps(
            rows, np.array([1, *(sizes + 1)]), self._num_prompt_tokens, num_positions
        )
        self._seconds = self._expected = seconds.tolist()
        if not self.is_whole:
            seconds = self.promise.expect_seconds(seconds)
            self._expected = seconds.tolist()
        if self.is_planned:
            draft = np.array([self._price_drafts(n) for n in sizes])
        else:
            draft = np.full(len(sizes), self._price_drafts())
        rates = rows * (1 + self.promise.gains[sizes - 1]) / (draft + seconds[1:])
        best = int(rates.argmax())
        plain = rows / self._seconds[0]
        self._gain = float(rates[best]) / plain
        self._rate = max(float(rates[best]), plain)
        self.max_levels = int(sizes[best])
        return draft

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

    def _choose_draft(self, draft: Array, limit: float) -> tuple[int, float]:
        """Return the least size that is verified, and what the draft costs at most."""
        plain, seconds = self._seconds[0], self._seconds
        if self.is_whole:
            return 1, float(draft[0])
        if self.is_planned:
            size = 1 if self.is_trial else self.max_levels
            while size > 1 and draft[size - 1] + seconds[size] - plain > limit:
                size -= 1
            self.max_levels = size
            return size, float(draft[size - 1])
        whole, level = self._price_drafts(math.inf), self._price_drafts(1)
        self.is_brief = whole > limit or self.is_trial
        price = level if self.is_brief else whole
        if self.is_trial:
            return 1, price
        # Fewer nodes than pay would only lose what is left of the limit.
        emitted = 1 + self.promise.gains[: len(seconds) - 1]
        pays = emitted * plain > price + np.array(self._expected[1:])
        return int(pays.argmax()) + 1, price

    def rest(self, num_rows: int, num_prompt_tokens: int) -> bool:
        """Count a step; return whether it drafts nothing, as the last plan says."""
        if not self.is_resting(num_rows):
            return False
        self.skip(num_rows, num_prompt_tokens)
        return True

    def is_resting(self, num_rows: int) -> bool:
        """Return whether the last plan lets the next step of so many requests rest."""
        return not self.drafts_on and self._rest > 1 and num_rows == self._num_rows

    def _count_rest(self, price: float) -> int:
        """Return the steps until a trial of this price may be lost."""
        missing = price - self.account.for_trials if self.is_trial else 0.0
        return min(max(REST_STEPS, int(missing / (TRIAL_SHARE * self._seconds[0]))), MOST_REST)

    def skip(self, num_rows: int, num_prompt_tokens: int = 0) -> None:
        """Begin a step of so many requests; nothing is drafted for it unless that is recorded."""
        self._num_rows, self._rest = num_rows, self._rest - 1
        self._num_prompt_tokens = num_prompt_tokens
        self.account.add(self._seconds[0], 0.0, is_trial=self.is_trial)

    def list_readers(self, unread: Sequence[int]) -> frozenset[int]:
        """Return the drafters that have much to read before they draft."""
        return frozenset(n for n, tokens in enumerate(unread) if tokens > FEW_UNREAD)

    def _count_unread(self, unread: Sequence[int]) -> int:
        return sum(tokens for n, tokens in enumerate(unread) if n not in self.left_out)

    def _may_all_read(self, unread: Sequence[int], ahead: float) -> bool:
        """Return whether no drafter of a chain is to be left out for what it has to read."""
        readers = self.list_readers(unread)
        if not readers or len(readers) == len(self.drafters):
            return True
        price = self._price_reading(sum(unread))
        worth = max(self.value_drafter(n, self._num_rows) for n in readers)
        return price <= ahead * worth / (1 + max(0.0, worth)) and self._may_read(sum(unread), ahead)

    def _price_reading(self, num_unread: int) -> float:
        return num_unread * self.costs.reading if num_unread > FEW_UNREAD else 0.0

    def _repays_reading(self, num_unread: int, ahead: float) -> bool:
        """Return whether drafts repay the drafter's reading in `ahead` seconds of plain steps."""
        return self._price_reading(num_unread) <= ahead * (1 - 1 / self._gain)

    def _may_read(self, num_unread: int, ahead: float) -> bool:
        """Return whether drafters may read unread tokens; `max_read` says how many.

        That is a share of all the time, and what drafts have won. ahead: seconds of plain decoding
        to come.
        """
        self.max_read = None
        price = self._price_reading(num_unread)
        limit = READ_SHARE * (self.account.spent + ahead) - self.account.read
        limit += max(0.0, -self.account.lost)
        if not price or self._num_rows == 1:
            return not price or price <= limit
        self.max_read = int(max(0.0, limit) / self.costs.reading)
        if self.is_trial:
            self.max_read = min(self.max_read, FIRST_PIECE)
        return self.max_read >= min(num_unread, FIRST_PIECE)

    def price_level(self) -> float:
        """How much another level of a draft must promise to be worth its price.

        That is tokens of the newest level that are expected to be accepted, in all rows together
        and at most one in each.
        """
        if self.is_brief:
            return math.inf
        seconds = self._seconds[1:]  # that a draft is verified at all is paid for already
        token = (seconds[-1] - seconds[0]) / max(1, len(seconds) - 1)
        first, second = (self.costs.estimate_draft(self._num_rows, n, -1) for n in (1, 2))
        return float(self._rate * (second - first + token) / self.promise.gains[0])

    def value(self, chances: Array) -> Array:
        """Tokens that the draft of each row promises, without those that its verifying would emit.

        chances: [B, N] of each row's paths, best first, then zeros.
        """
        seconds = self._seconds
        token = (seconds[-1] - seconds[0]) / max(1, (len(seconds) - 1) * self._num_rows)
        worth = np.cumsum(chances - self._rate * token, axis=1)
        return np.asarray(worth.max(axis=1, initial=0.0))

    def value_drafter(self, drafter: int, num_left: int) -> float:
        """Return a drafter's value to each of so many requests in tokens, its time paid."""
        value = self.drafters[drafter]
        seconds = self.costs.estimate_draft(num_left, value.num_levels, drafter)
        return value.gain - self._rate * seconds / num_left

    def is_best(self, drafter: int, value: float, num_left: int) -> bool:
        """Return whether a draft in hand is worth more than one by later drafters of the chain."""
        later = {*range(drafter + 1, len(self.drafters))} - self.left_out
        values = [self.value_drafter(number, num_left) for number in later]
        return value > 0 and value >= max(values, default=0.0)

    def choose(self, chances: Sequence[Sequence[float]] | Array) -> int:
        """Return how many nodes of each row to verify besides the root.

        chances: [B, N] of each row's paths, best first, then zeros.
        """
        plain, *seconds = self._seconds
        totals = [float(sum(column)) for column in zip(*chances, strict=True)][: self.max_tokens]
        totals += [0.0] * (self.max_tokens - len(totals))
        promised = list(itertools.accumulate(totals))
        size = sum(total > 0 for total in totals)
        most, best = 0, -self._rate * plain
        for number, (tokens, took) in enumerate(zip(promised, seconds, strict=False), 1):
            worth = tokens - self._rate * took
            if worth > best and took - plain <= self._allowance:
                most, best = number, worth
        if self.is_brief:  # as if each further level were as good as the first
            num_rows = len(chances)
            rate = totals[0] / num_rows
            usual = itertools.accumulate(num_rows * rate**n for n in range(1, len(totals) + 1))
            promised = [*map(max, promised, usual)]
        # What a draft of this kind promises, whatever is verified of it.
        self._promises.append((len(chances), promised, size))
        return max(most, int(self.is_trial))

    # ---- After it.

    def record(
        self, size: int, emitted: Sequence[int], drafted: Sequence[tuple[int, int, int]],
        num_read: int = 0,
    ) -> None:  # fmt: skip
        """Take what came of a step's drafts, the largest of which has so many nodes.

        emitted: tokens of each request. drafted: the drafters of the chain that were asked, for how
        many requests, and in how many passes. num_read: prompt tokens that they read.
        """
        rows, plain = len(emitted), self._seconds[0]
        draft = sum(self.costs.estimate_draft(n, levels, drafter) for drafter, n, levels in drafted)
        if num_read > FEW_UNREAD:
            seconds = self._price_reading(num_read)
            self.account.read += seconds
            self.account.for_trials -= seconds if self.is_trial else 0.0
            self.account.spent += seconds
        step = self._seconds[-1 if self.is_whole and size > 1 else size - 1]
        extra = draft + step - plain
        self.account.add(extra, draft + step - plain * sum(emitted) / rows, is_trial=self.is_trial)
        asked = {number: (num_asked / rows, levels) for number, num_asked, levels in drafted}
        for number, value in enumerate(self.drafters):
            if number not in self.left_out:
                value.ask(*asked.get(number, (0.0, None)))
        if size > 1 and (self.is_whole or self.is_planned):
            self.promise.take_emitted(emitted, size)

    def learn(self) -> None:
        """Learn from the newest steps."""
        for promised in self._promises:
            self.promise.take_promised(*promised)
        self._promises = []
        self.calibration.learn()
