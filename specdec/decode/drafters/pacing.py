"""How many tokens to draft for whom: a fixed number, or what measured acceptance and costs say."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from specdec.engine.transfers import Array

PLAIN_STEPS = 2  # at the start: what there is to win is not known without them
MAX_REFRESH = 128  # after so many drafted steps the cost of a plain one is measured again
REFRESH_GROWTH = 4  # times the plain steps so far, while those are few
DOUBT = 0.6  # where drafts pay if a plain step takes this share of its time, it need not be known
TRIAL_TOKENS = 4  # drafted for one request before the others' draft caches are filled
# Of the time that plain decoding would take, what drafts may lose: at most, and at least for many
# requests, for whom a machine that is busy already has less to win.
LOSS_SHARE, LEAST_LOSS_SHARE = 0.04, 0.01
# The same for two requests, and a half, a third ... of it for twice, three times as many: of a
# draft model, which has their prompts to read, and of all other drafters.
MODEL_LOSS, DRAFTER_LOSS = 0.15, 0.02
HORIZON = 128  # of the steps to come, those that the share is taken of: the text may end before
PROBE_SHARE = 3 / 8  # of that, of the time so far, for drafts that are known not to pay
REST_STEPS = 8  # plain ones after one that drafts nothing, so that not even planning costs time
MAX_AGE = 16  # measurements, of any size, after which a cheaper one may be hoped for
PROMPT_UNIT = 16  # prompt tokens of a step, whose cost is known by so many
FIRST_CHUNK = 16  # tokens by which it is learnt what running a prompt costs the draft model
LEAST_TIMED = 2  # drafts, before they are believed to be too dear: one may have been disturbed
FEW_UNREAD = 64  # so many cost a pass over drafted tokens next to nothing
KEEP = 0.98  # weight of what was known of acceptance before the newest draft
# A belief that a few drafts outweigh: 7 of 10 drafted tokens are accepted.
FIRST_ACCEPTED, FIRST_REACHED = 2.1, 3.0


class Costs:
    """Seconds by size, each the lower quartile of the newest few measurements, or a larger size's.

    A machine that others use too is slower now and then, never faster: the lower ones are the
    step's own. What is smaller never costs more: where it was measured so, the machine was busy.

    It may be slow for minutes. A size that was last measured so would seem dear for good, as nobody
    takes it then. So of one that was not measured for a while it may be hoped that it costs no more
    than those say that were; it begins anew when it is measured again.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._quartiles: dict[int, float] = {}  # as they were measured
        self._newest: dict[int, int] = {}  # which measurement of all was a size's newest
        self._num_measured = 0
        self._seconds: dict[int, float] = {}  # not falling with the size
        self._hoped: dict[int, float] = {}  # the same, of those that are hoped to cost less
        self._sizes: list[int] = []  # sorted

    def record(self, size: int, seconds: float) -> None:
        if size not in self._recent:
            self._recent[size] = deque(maxlen=7)
            bisect.insort(self._sizes, size)
        if size in self._hoped:
            self._recent[size].clear()
        self._recent[size].append(seconds)
        self._num_measured += 1
        self._newest[size] = self._num_measured
        recent = sorted(self._recent[size])
        self._quartiles[size] = recent[(len(recent) - 1) // 4]
        least = math.inf
        for other in reversed(self._sizes):
            self._seconds[other] = least = min(least, self._quartiles[other])
        oldest = self._num_measured - MAX_AGE
        fresh = [n for n in self._sizes if self._newest[n] > oldest]
        self._hoped = {
            n: hoped
            for n in self._sizes
            if self._newest[n] <= oldest and fresh[0] < n <= 2 * fresh[-1]
            and (hoped := _interpolate(self._seconds, fresh, n)) < self._seconds[n]
        }  # fmt: skip

    @property
    def smallest(self) -> int:
        """The smallest size that was measured, 0 for none."""
        return self._sizes[0] if self._sizes else 0

    @property
    def largest(self) -> int:
        """The largest size that was measured, 0 for none."""
        return self._sizes[-1] if self._sizes else 0

    def estimate(self, size: int) -> float | None:
        """Return what a size costs, None where nothing was measured.

        Between two known sizes costs lie on a line, and beyond the largest on one from its half
        on, since two that are near each other differ by chance; below the smallest they are the
        smallest's, as where memory is the limit.
        """
        return _interpolate(self._seconds, self._sizes, size) if self._sizes else None

    def predict(self, sizes: Array, *, is_hopeful: bool = False) -> Array:
        """What `estimate` says of many sizes, where something was measured.

        is_hopeful: of those that were not measured for a while, what may be hoped.
        """
        seconds = self._seconds | self._hoped if is_hopeful else self._seconds
        known = np.array(self._sizes)
        beyond = np.maximum(0, sizes - known[-1])
        found = np.interp(sizes, known, [seconds[size] for size in self._sizes])
        return np.asarray(found + _find_slope(seconds, self._sizes) * beyond)

    def predict_mixed(
        self, sizes: Array, num_prompt_tokens: int, *, is_hopeful: bool = False
    ) -> Array:
        """What steps of these sizes, rising, cost that also read so many tokens of prompts.

        Those would be read anyway, in another step: they pay what a token more costs here, and what
        the step costs at least, such as reading the weights, is left to its own tokens.
        """
        seconds = self.predict(sizes + num_prompt_tokens, is_hopeful=is_hopeful)
        if not num_prompt_tokens:
            return seconds
        price = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
        return np.asarray(
            seconds - num_prompt_tokens * min(price, seconds[0] / (sizes[0] + num_prompt_tokens))
        )

    def price_step(self, num_rows: int, size: int, num_prompt_tokens: int) -> tuple[float, float]:
        """What a plain step of so many requests costs, and one of `size` tokens for each.

        That is never more than `size` plain ones: where it was, the machine was busy.
        """
        sizes = num_rows * np.array([1, max(2, size)])
        plain, longer = self.predict_mixed(sizes, num_prompt_tokens).tolist()
        return plain, min(longer, size * plain)


def _interpolate(seconds: Mapping[int, float], sizes: Sequence[int], size: int) -> float:
    """What a size costs by those of `sizes`, sorted; see `Costs.estimate`."""
    at = bisect.bisect(sizes, size)
    if at == 0 or len(sizes) == 1 or size == sizes[at - 1]:
        return seconds[sizes[max(0, at - 1)]]
    if at == len(sizes):
        return seconds[sizes[-1]] + _find_slope(seconds, sizes) * (size - sizes[-1])
    lower, upper = sizes[at - 1], sizes[at]
    slope = (seconds[upper] - seconds[lower]) / (upper - lower)
    return seconds[lower] + slope * (size - lower)


def _find_slope(seconds: Mapping[int, float], sizes: Sequence[int]) -> float:
    """Seconds of a token beyond the largest size; 0 where it is the only one."""
    largest = sizes[-1]
    lower = sizes[max(0, bisect.bisect(sizes, largest / 2) - 1)]
    rise = seconds[largest] - seconds[lower]
    return rise / (largest - lower) if largest > lower else 0.0


def round_prompt_tokens(num_tokens: int) -> int:
    """A number of prompt tokens in a step, as costs are known by it."""
    return -(-num_tokens // PROMPT_UNIT) * PROMPT_UNIT


def bound_loss(num_rows: int, of_two: float = DRAFTER_LOSS) -> float:
    """The share of plain decoding's time that drafts for so many requests may lose.

    of_two: that for two requests.
    """
    return min(LOSS_SHARE, max(LEAST_LOSS_SHARE, 2 * of_two / num_rows))


def is_plain_due(num_plain: int, since_plain: int, gain: float = 1.0) -> bool:
    """Whether to measure a plain step, after so many of them and of drafted ones since the last.

    gain: how many times as fast as plain ones drafted steps are believed to be.
    """
    is_clear = gain * DOUBT > 1
    refresh = MAX_REFRESH if is_clear else min(MAX_REFRESH, REFRESH_GROWTH * num_plain)
    return num_plain < PLAIN_STEPS or since_plain >= refresh


class Account:
    """Seconds of drafted steps beside those of plain ones for as many tokens.

    Drafts may lose `bound_loss` of plain decoding's time in all; what was won before may be lost
    again. Drafts that are known not to pay are tried for `PROBE_SHARE` of that, and never for more
    than that share of the time in which it was known: what few requests won does not pay for slow
    steps of many.
    """

    def __init__(self, of_two: float = DRAFTER_LOSS) -> None:
        """of_two: see `bound_loss`."""
        self.is_probe = False  # whether drafts are known not to pay
        self.spent = self.lost = 0.0
        self._of_two, self._for_probes = of_two, 0.0
        self._rest = 0, 0.0  # no drafts for so many requests, until so much time is spent

    def find_limit(self, num_rows: int, ahead: float, of_two: float) -> float:
        """Seconds that `bound_loss` leaves to be lost. ahead: seconds to come."""
        share = bound_loss(num_rows, of_two)
        if self.is_probe:
            return share * PROBE_SHARE * self.spent - max(0.0, self.lost)
        return share * (self.spent + ahead) - self.lost

    def find_allowance(self, num_rows: int, ahead: float) -> float:
        """Seconds that a drafted step for so many requests may lose."""
        limit = self.find_limit(num_rows, ahead, self._of_two)
        return min(limit, self._for_probes) if self.is_probe else limit

    def spend(self, num_rows: int, seconds: float) -> None:
        """Take the time of a step, plain or not."""
        self.spent += seconds
        if self.is_probe:
            self._for_probes += PROBE_SHARE * bound_loss(num_rows, self._of_two) * seconds

    def lose(self, seconds: float) -> None:
        """Take what a drafted step lost, or won where that is less than nothing."""
        self.lost += seconds
        if self.is_probe:
            self._for_probes -= seconds

    def rest(self, num_rows: int, seconds: float) -> None:
        """Draft nothing for so many requests until so many seconds are spent."""
        self._rest = num_rows, self.spent + seconds

    def is_at_rest(self, num_rows: int) -> bool:
        """Whether nothing is to be drafted for so many requests."""
        rows, end = self._rest
        return num_rows == rows and self.spent < end


@dataclasses.dataclass(frozen=True)
class DraftPlan:
    """What the draft model is to do in a step.

    most: up to how many tokens the drafts may have, as long as `DraftLength.goes_on` says so; 0
    where `counts` is final.

    counts: tokens to draft for each of the active requests. prefill: for requests that nothing is
    drafted for, by their place, how many of the tokens that the draft model lacks it is to run.
    """

    counts: list[int]
    prefill: dict[int, int] = dataclasses.field(default_factory=dict)
    most: int = 0


def limit_prefill(plan: DraftPlan, unread: Sequence[int], limit: int) -> DraftPlan:
    """A plan by which a drafter reads at most `limit` prompt tokens of those that it has not read.

    It catches up with one request after another, those first that lack least; nothing is drafted
    for those of which some are left.
    """
    read, counts, prefill = 0, list(plan.counts), {}
    for at in sorted(range(len(unread)), key=unread.__getitem__):
        own = unread[at]
        wanted = own if counts[at] else plan.prefill.get(at, 0)
        taken = min(wanted, limit - read)
        read += taken
        if taken < own:
            counts[at] = 0
        if taken and not counts[at]:
            prefill[at] = taken
    return dataclasses.replace(plan, counts=counts, prefill=prefill)


class DraftLength:
    """Chooses the length of drafts, at most `maximum`; fixed unless `is_auto`.

    With a of the drafted tokens accepted where they are reached, a step of n draft tokens emits
    (1 - a^(n+1)) / (1 - a) tokens (Leviathan et al. 2023, equation 1) and costs n passes of the
    draft model and one verify step of n + 1 tokens a request; the best n has the most tokens per
    second. All are measured as the run goes on, a verify step's cost by its tokens in all.

    So that drafts which do not pay cost next to nothing, an `Account` is kept: nothing is drafted
    that would lose more than it allows, if nothing of it were accepted. The first steps are plain;
    the draft model runs a prompt by pieces, the first of which is small and the one cost that no
    account foresees; drafting is tried on one request, and on others as the account allows: at once
    where reading their prompts costs no more than further trials. Where drafts are known not to
    pay, they are tried again on one request.

    Steps that also read prompts are as long as their tokens in all say; see `Costs.predict_mixed`.
    """

    def __init__(self, maximum: int, *, is_auto: bool = False) -> None:
        self.maximum = maximum
        self.is_auto = is_auto
        self._accepted, self._reached = FIRST_ACCEPTED, FIRST_REACHED
        self._verify, self._draft = Costs(), Costs()  # by tokens in the step, by requests
        self._prefill = Costs()  # a token, under size 1
        self._longest_piece = 0  # tokens, of which that is known
        # Of steps by themselves, and of those that also read prompts: plain ones, and drafted ones
        # since the last of these.
        self._num_plain, self._since_plain = [0, 0], [0, 0]
        self._num_drafted = self._num_timed = 0  # tokens; steps whose drafts were timed
        self._num_prompt_tokens = 0  # prompt tokens of the step that was planned last
        self._seconds = np.zeros(self.maximum + 3)  # of such a verify step, by drafted tokens
        self._gain_share = 1.0  # of the step that was planned last
        self._rate = 0.0  # tokens a second that it promised
        self._gain = 1.0  # how many times as fast as plain steps drafts seemed to be
        self._num_planned = 0, 0  # requests in it, and of those the ones to draft for
        self.account = Account(MODEL_LOSS)

    def plan(
        self, unread: Sequence[int], remaining: Sequence[int], num_prompt_tokens: int = 0
    ) -> DraftPlan:
        """Return how many tokens to draft for each of the active requests.

        unread: tokens that the draft model would have to catch up with. remaining: tokens that each
        request may still emit. num_prompt_tokens: prompt tokens that the step reads, too.
        """
        num_rows = len(unread)
        self._num_prompt_tokens = round_prompt_tokens(num_prompt_tokens)
        if not self.is_auto:
            return DraftPlan([self.maximum] * num_rows)
        nothing = DraftPlan([0] * num_rows)
        kind = self._num_prompt_tokens > 0
        if is_plain_due(self._num_plain[kind], self._since_plain[kind], self._gain):
            return nothing
        account = self.account
        if account.is_at_rest(num_rows):
            return nothing
        usable = [row for row in range(num_rows) if remaining[row] > 1]
        if not usable:
            return nothing
        usable.sort(key=lambda row: unread[row])
        sizes = num_rows * np.arange(1, len(self._seconds) + 1)
        self._seconds = self._verify.predict_mixed(sizes, self._num_prompt_tokens)
        ahead = min(max(remaining), HORIZON) * self._seconds[0]
        account.is_probe = False
        allowance = account.find_allowance(num_rows, ahead)
        best, gain = self._find_best(num_rows)
        self._gain = self._seconds[0] / (self._seconds[0] - gain)
        price = self._prefill.estimate(1) or 0.0
        if self._draft.largest == 0:
            return self._try_one(usable[0], unread, remaining, allowance)
        if (
            not best
            and num_rows == 1
            and self._num_timed < LEAST_TIMED
            and unread[0] <= FIRST_CHUNK
        ):
            return self._try_one(0, unread, remaining, math.inf)
        if best and num_rows > 1:
            # What reading costs is known of a small piece at first, which is dear by the token.
            longest = min(unread[usable[-1]], int(allowance / (2 * price)) if price else 0)
            if longest > 2 * self._longest_piece:
                return DraftPlan(nothing.counts, {usable[-1]: longest})
            trials = TRIAL_TOKENS - self._num_drafted
            trial = self._predict_step(1, num_rows, 1) - self._predict_step(0, num_rows)
            if trials > 0 and price * sum(unread[row] for row in usable) > trials * trial:
                return self._try_one(usable[0], unread, remaining, allowance)
        if self._draft.largest < num_rows:
            best = min(best, 1)  # what a pass for more requests costs is a guess yet
        worth = [row for row in usable if gain * remaining[row] / num_rows > price * unread[row]]
        # All at once; or where their prompts are too costly, those that it follows already.
        followed = [row for row in worth if unread[row] <= FIRST_CHUNK]
        would_pay = False
        for rows in (worth, followed):
            share = self._share_gain(rows, remaining)
            if best and rows and self._pays(best, len(rows), num_rows, share):
                would_pay = True
                if self._risk(best, rows, unread) <= allowance:
                    self._gain_share = share
                    most = best
                    while most < self.maximum and self._risk(most + 1, rows, unread) <= allowance:
                        most += 1
                    emitted = num_rows * (1 + share * (self._predict_emitted(best) - 1))
                    self._rate = emitted / self._predict_step(best, num_rows, len(rows))
                    self._num_planned = num_rows, len(rows)
                    counts = [best if row in rows else 0 for row in range(num_rows)]
                    return DraftPlan(counts, most=most)
        account.is_probe = not would_pay
        plan = nothing
        if account.is_probe:
            allowance = account.find_allowance(num_rows, ahead)
            plan = self._try_one(usable[0], unread, remaining, allowance)
        if not any(plan.counts):
            account.rest(num_rows, REST_STEPS * self._predict_step(0, num_rows))
        return plan

    def goes_on(self, length: int, chances: Array) -> bool:
        """Whether another token is worth its price behind `length` tokens, by the newest plan.

        chances: of each request that is drafted for, that all of its draft is right.
        """
        price = self._price_token(length) + (self._draft.estimate(self._num_planned[1]) or 0.0)
        gain = self._gain_share * float(chances.sum()) * self._accepted / self._reached
        return gain > self._rate * price

    def keeps(self, length: int, chances: Array) -> bool:
        """Whether the newest of `length` tokens are worth verifying, if they are right so often."""
        gain = self._gain_share * float(chances.sum())
        return gain > self._rate * self._price_token(length - 1)

    def _price_token(self, length: int) -> float:
        """Seconds by which a verify step takes longer with one token more than so many."""
        return float(self._seconds[length + 1] - self._seconds[length])

    def _share_gain(self, rows: Sequence[int], remaining: Sequence[int]) -> float:
        """The share of what drafts win for these requests that is not spent waiting for others.

        A step costs nearly as much with few requests as with more: it is the last one to end that
        counts.
        """
        others = max((n for row, n in enumerate(remaining) if row not in rows), default=0)
        longest = max((remaining[row] for row in rows), default=0)
        return max(0.0, 1 - others / longest) if longest else 0.0

    def _try_one(
        self, row: int, unread: Sequence[int], remaining: Sequence[int], allowance: float
    ) -> DraftPlan:
        """Draft a token for one request, or let the draft model come nearer to that; or nothing."""
        nothing = [0] * len(unread)
        price = self._prefill.estimate(1)
        if price is None and unread[row] > FIRST_CHUNK:
            return DraftPlan(nothing, {row: FIRST_CHUNK} if allowance > 0 else {})
        if self._risk(1, [row], unread) <= allowance:
            self._gain_share = self._share_gain([row], remaining)
            return DraftPlan([int(place == row) for place in range(len(unread))])
        # A longer piece never costs more a token than a shorter one did.
        affordable = int(allowance / price) if price else 0
        if affordable < FIRST_CHUNK or unread[row] <= FIRST_CHUNK or self._draft.largest:
            return DraftPlan(nothing)
        return DraftPlan(nothing, {row: min(affordable, unread[row])})

    def _risk(self, length: int, rows: Sequence[int], unread: Sequence[int]) -> float:
        """Seconds that drafts for these requests lose if nothing of them is accepted."""
        price = self._prefill.estimate(1) or 0.0
        step = self._predict_step(length, len(unread), len(rows)) - self._predict_step(
            0, len(unread)
        )
        if len(rows) > self._draft.largest:  # what was not seen may cost twice what is known
            step += length * (self._draft.estimate(len(rows)) or 0.0)
        return step + price * sum(unread[row] for row in rows)

    def record_step(
        self,
        *,
        num_rows: int,
        num_tokens: int,
        num_passes: int,
        num_prefilled: int,
        draft_seconds: float,
        verify_seconds: float,
        drafts: Sequence[tuple[int, int]],
    ) -> None:
        """Take what a step over `num_rows` requests of `num_tokens` each has cost and brought.

        num_passes: of the draft model. num_prefilled: tokens it ran besides. drafts: for each
        request how many tokens were drafted, and how many of them accepted.
        """
        kind = self._num_prompt_tokens > 0
        self._verify.record(num_rows * num_tokens + self._num_prompt_tokens, verify_seconds)
        plain, step = self._verify.price_step(num_rows, num_tokens, self._num_prompt_tokens)
        self.account.spend(num_rows, draft_seconds + (step if kind else verify_seconds))
        num_drafting = sum(drafted > 0 for drafted, _ in drafts)
        # Beside a few of them, the pass is what was measured.
        if num_prefilled > (FEW_UNREAD if num_passes else 0):
            usual = num_passes * (self._draft.estimate(num_drafting) or 0.0)
            self._prefill.record(1, max(0.0, draft_seconds - usual) / num_prefilled)
            self._longest_piece = max(self._longest_piece, num_prefilled)
        elif num_passes:
            self._draft.record(num_drafting, draft_seconds / num_passes)
            self._num_timed += 1
        if not num_passes:
            self._num_plain[kind] += 1
            self._since_plain[kind] = 0
            if num_prefilled:
                self.account.lose(draft_seconds)
            return
        self._since_plain[kind] += 1
        for drafted, accepted in drafts:
            if drafted:  # what follows a rejection tells nothing
                self._num_drafted += min(accepted + 1, drafted)
                self._accepted = KEEP * self._accepted + accepted
                self._reached = KEEP * self._reached + min(accepted + 1, drafted)
        won = self._gain_share * sum(accepted for _, accepted in drafts) / num_drafting * plain
        # What others delay is nobody's loss: costs of the same kind are compared.
        step += num_passes * (self._draft.estimate(num_drafting) or 0.0)
        step += num_prefilled * (self._prefill.estimate(1) or 0.0)
        self.account.lose(step - plain - won)

    def _find_best(self, num_rows: int) -> tuple[int, float]:
        """Return the best length, and the seconds it saves whenever every request emits a token."""
        seconds = [
            self._predict_step(length, num_rows) / self._predict_emitted(length)
            for length in range(self.maximum + 1)
        ]
        best = min(range(len(seconds)), key=seconds.__getitem__)
        return best, seconds[0] - seconds[best]

    def _predict_emitted(self, length: int) -> float:
        rate = min(self._accepted / self._reached, 0.999)
        return float((1 - rate ** (length + 1)) / (1 - rate))

    def _predict_step(self, length: int, num_rows: int, num_drafting: int | None = None) -> float:
        draft = self._draft.estimate(num_rows if num_drafting is None else num_drafting) or 0.0
        return length * draft + float(self._seconds[length])

    def _pays(self, length: int, num_drafting: int, num_rows: int, share: float) -> bool:
        """Whether drafts for some of the requests win more than they cost all of them."""
        emitted = 1 + share * (self._predict_emitted(length) - 1)
        plain = emitted * self._predict_step(0, num_rows)
        return plain > self._predict_step(length, num_rows, num_drafting)
