"""Tokens that drafts promise a request: by the nodes that are verified of them, and by drafter."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import numpy as np

from specdec.decode.drafters.calibration import KEPT_WEIGHT, MAX_CHANCE
from specdec.engine.transfers import Array
from specdec.files.acceptance import Acceptance

KEPT_PROMISE_WEIGHT = 0.95  # weight of what drafts promised before the newest draft
KEPT_LONG_WEIGHT = 0.99  # as KEPT_WEIGHT, for means over more drafts
FIRST_RATE = 0.7  # believed at first: of the drafted tokens that are reached, those accepted
FIRST_DRAFTS = 3.0  # drafts that this weighs as much as
USUAL_DRAFTS = 100.0  # drafts of earlier texts that count at most in what drafts usually bring
PRIOR_DRAFTS = 10.0  # drafts that a drafter's record counts as
TRUSTED_DRAFTS = 4.0  # drafts after which half of the tokens that they bring is relied on
KEPT_GAINS = 32  # drafts of a drafter whose promises are kept
SHARE_STEPS = 8  # over which a drafter's share of the requests is a mean
LEVEL_STEPS = 4  # over which the levels of its drafts are a mean
DELAY_STEPS = 40  # over which the delay of a step is a mean
PRICE_STEPS = 20  # drafts over which the seconds of one are a mean
MAX_PRICE_CHANGE = 2.0  # of these seconds, that one draft may show, either way
MAX_PRICE_RATIO = 4.0  # of these seconds to the table's, either way


class Promise:
    """Tokens that drafts are expected to bring a request, by how many of their nodes are verified.

    A mean over the newest drafts. Chains of which nothing is chosen by how sure the drafter is
    bring what the share of their tokens does that was right, from token to token. Where a drafter
    has nothing to propose, or little, less is verified than could be: that is counted too.
    """

    def __init__(
        self, max_tokens: int, *, is_chain: bool, record: Acceptance | None = None
    ) -> None:
        self.is_chain = is_chain
        self._weight, self._num_known = FIRST_DRAFTS, 0.0  # drafts that were learned from
        first_gains = np.cumsum(FIRST_RATE ** np.arange(1, max_tokens + 1))
        if record is not None:  # as far as it tells; a larger tree brings no more
            self._weight = self._num_known = PRIOR_DRAFTS
            recorded_sizes = np.minimum(np.arange(max_tokens), len(record.gains) - 1)
            first_gains = np.array(record.gains)[recorded_sizes]
        self._gain_sums = self._weight * first_gains
        self._accepted_tokens, self._reached_tokens = FIRST_RATE * FIRST_DRAFTS, FIRST_DRAFTS
        self._usual_gains = self._gain_sums / self._weight  # what drafts bring where a text begins
        self._num_new = 0.0  # drafts of the newest texts that were learned from
        self._num_usual = 0.0  # drafts that are in what is usual
        # Of steps, the share whose largest draft has so many nodes besides the root.
        self._size_shares = np.zeros(max_tokens + 1)
        self._size_shares[-1] = 1.0

    @property
    def gains(self) -> Array:
        """Return the expected gains, [max_tokens]."""
        return np.asarray(self._gain_sums / self._weight)

    @property
    def trust(self) -> float:
        """Return the share of the expected gains that is relied on."""
        return self._num_known / (self._num_known + TRUSTED_DRAFTS)

    def start(self, share: float) -> None:
        """Expect of new texts, a share of all, what texts usually bring."""
        self._num_known *= 1 - share / 2
        if self._num_new:
            newest_share = self._num_new / (self._num_usual + self._num_new)
            self._usual_gains += newest_share * (self.gains - self._usual_gains)
        self._num_usual = min(self._num_usual + self._num_new, USUAL_DRAFTS)
        self._num_new = 0.0
        kept_share, new_weight = 1 - share, share * FIRST_DRAFTS
        self._gain_sums = kept_share * self._gain_sums + new_weight * self._usual_gains
        self._weight = kept_share * self._weight + new_weight
        self._reached_tokens = kept_share * self._reached_tokens + new_weight
        usual_rate = float(self._usual_gains[:1].sum())
        self._accepted_tokens = kept_share * self._accepted_tokens + new_weight * usual_rate

    def expect_seconds(self, seconds: Array) -> Array:
        """Return the expected seconds of steps in which at most so many nodes are verified.

        seconds: [1 + sizes], of steps by what they verify besides the root, all of these; result:
        like them.
        """
        shares = self._size_shares
        verified = np.cumsum(shares * seconds) - shares * seconds  # in all drafts that are smaller
        at_least = 1.0 - np.cumsum(shares) + shares
        return np.asarray(verified + at_least * seconds)

    def take_promised(self, num_rows: int, promised_gains: Sequence[float], size: int) -> None:
        """Take what the chances of the drafted nodes of so many rows add up to, by their number.

        size: drafted nodes of the largest of them.
        """
        kept_share = KEPT_PROMISE_WEIGHT**num_rows
        self._num_known = kept_share * self._num_known + num_rows
        self._num_new += num_rows
        self._gain_sums = kept_share * self._gain_sums + promised_gains
        self._weight = kept_share * self._weight + num_rows
        self._size_shares *= KEPT_PROMISE_WEIGHT
        self._size_shares[size] += 1 - KEPT_PROMISE_WEIGHT

    def take_emitted(self, emitted_counts: Sequence[int], size: int) -> None:
        """Take how many tokens each row of a step of `size` nodes has emitted."""
        for count in emitted_counts:
            self._gain_sums = KEPT_WEIGHT * self._gain_sums
            self._weight = KEPT_WEIGHT * self._weight + 1
            self._num_known = KEPT_PROMISE_WEIGHT * self._num_known + 1
            self._num_new += 1
            if self.is_chain:
                num_reached = min(count, size - 1)
                self._accepted_tokens = KEPT_LONG_WEIGHT * self._accepted_tokens + count - 1
                self._reached_tokens = KEPT_LONG_WEIGHT * self._reached_tokens + num_reached
            else:
                self._gain_sums = self._gain_sums + count - 1
        if self.is_chain:
            rate = min(self._accepted_tokens / self._reached_tokens, MAX_CHANCE)
            depths = np.arange(1, len(self._gain_sums) + 1)
            self._gain_sums = self._weight * np.cumsum(rate**depths)


class DrafterValue:
    """Tokens that the drafts of one drafter of a chain promise a request, and how it is used.

    Of an untried drafter half of the drafts are believed to bring nothing. What was not tried for
    long is believed to be as at first, so that it is tried again. num_levels: of its drafts, a
    mean. share: of a step's requests, those that it is asked for. price_ratio: seconds that its
    drafts take over those of the table.
    """

    def __init__(self, max_depth: int, record: Acceptance | None = None) -> None:
        """Begin with what its record tells, or with what drafts usually promise."""
        self.max_depth, self.num_levels, self.share = max_depth, float(min(2, max_depth)), 1.0
        self.price_ratio = 1.0
        self._first_gain = (1 - FIRST_RATE ** (max_depth + 1)) / (1 - FIRST_RATE) - 1
        if record is not None:
            self._first_gain = record.gains[-1]
        self._newest_gains = collections.deque[float](maxlen=KEPT_GAINS)
        self._rest_seconds = 0.0  # that a trial may take
        self._delays = {True: 0.0, False: 0.0}  # of steps, by whether it drafted for them

    def record(self, gains: Sequence[float]) -> None:
        """Take what the drafts of a step promise, in tokens."""
        self._newest_gains.extend(gains)

    def expect_more(self, gain: float) -> float:
        """Return the tokens that a draft is expected to bring beyond those of one in hand."""
        first_gain = max(0.0, 2 * self._first_gain - gain) / 2
        newest_gains = sum(newest - gain for newest in self._newest_gains if newest > gain)
        num_drafts = FIRST_DRAFTS + len(self._newest_gains)
        return (FIRST_DRAFTS * first_gain + newest_gains) / num_drafts

    def average(self, value: Callable[[float], float]) -> float:
        """Return the mean of a function of what each draft promises; less than 0 counts as 0."""
        values = [max(0.0, value(gain)) for gain in self._newest_gains]
        return sum(values) / len(values) if values else 0.0

    def ask(self, share: float, num_levels: int | None) -> None:
        """Take a step that asks it for a share of its requests; None levels where for none."""
        self.share += (share - self.share) / SHARE_STEPS
        if num_levels is not None:
            self._rest_seconds = 0.0
            self.num_levels += (num_levels - self.num_levels) / LEVEL_STEPS

    def rest(self, seconds: float, price: float) -> None:
        """Take a step that does not ask it; forget a draft where trials may take its price.

        seconds: of the step, that trials may take.
        """
        self._rest_seconds += seconds
        if self._rest_seconds >= price:
            self._rest_seconds = 0.0
            if self._newest_gains:
                self._newest_gains.popleft()

    @property
    def delay(self) -> float:
        """Return the seconds by which steps are longer after its drafts: caches have other data."""
        return max(0.0, self._delays[True] - self._delays[False])

    def take_delay(self, seconds: float, *, is_asked: bool) -> None:
        """Take the seconds by which a step was longer than its price.

        is_asked: whether this drafter has drafted for it.
        """
        self._delays[is_asked] += (seconds - self._delays[is_asked]) / DELAY_STEPS

    def price(self, ratio: float) -> None:
        """Take the seconds of a draft over what was expected."""
        ratio = min(max(ratio, 1 / MAX_PRICE_CHANGE), MAX_PRICE_CHANGE)
        ratio = self.price_ratio * (1 + (ratio - 1) / PRICE_STEPS)
        self.price_ratio = min(max(ratio, 1 / MAX_PRICE_RATIO), MAX_PRICE_RATIO)
