"""How many tokens to draft for whom: a fixed number, or what measured acceptance and costs say."""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Sequence

PLAIN_STEPS = 2  # at the start: what there is to win is not known without them
REFRESH_STEPS = 128  # after so many drafted steps the cost of a plain one is measured again
TRIAL_TOKENS = 6  # drafted for one request before the others' draft caches are filled
RISK_SHARE = 0.035  # of a run's plain time, that may be lost to finding out whether drafts pay
PROBE_SHARE = 0.02  # of the time so far, that may be lost to drafts known not to pay
KEEP = 0.98  # weight of what was known of acceptance before the newest draft
# A belief that a few drafts outweigh: 7 of 10 drafted tokens are accepted.
FIRST_ACCEPTED, FIRST_REACHED = 2.1, 3.0


class Costs:
    """Seconds by size, each the lower median of the newest few measurements."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._sizes: list[int] = []  # sorted

    def record(self, size: int, seconds: float) -> None:
        if size not in self._recent:
            self._recent[size] = deque(maxlen=5)
            bisect.insort(self._sizes, size)
        self._recent[size].append(seconds)
        self._medians[size] = statistics.median_low(self._recent[size])

    @property
    def largest(self) -> int:
        """The largest size that was measured, 0 for none."""
        return self._sizes[-1] if self._sizes else 0

    def estimate(self, size: int) -> float | None:
        """Return what a size costs, None where nothing was measured.

        Between two known sizes, and beyond the largest, costs lie on a line that does not fall;
        below the smallest they are the smallest's, as where memory is the limit.
        """
        sizes, medians = self._sizes, self._medians
        if not sizes:
            return None
        if size in medians:
            return medians[size]
        if size < sizes[0] or len(sizes) == 1:
            return medians[sizes[0]]
        at = min(bisect.bisect(sizes, size), len(sizes) - 1)
        lower, upper = sizes[at - 1], sizes[at]
        slope = max(0.0, (medians[upper] - medians[lower]) / (upper - lower))
        nearest = upper if size > upper else lower
        return medians[nearest] + slope * (size - nearest)


class DraftLength:
    """Chooses the length of drafts, at most `maximum`; fixed unless `is_auto`.

    With a of the drafted tokens accepted where they are reached, a step of n draft tokens emits
    (1 - a^(n+1)) / (1 - a) tokens (Leviathan et al. 2023, equation 1) and costs n passes of the
    draft model and one verify step of n + 1 tokens a request; the best n has the most tokens per
    second. All are measured as the run goes on, a verify step's cost by its tokens in all.

    So that drafts which do not pay cost next to nothing: the first steps are plain; drafting is
    tried on one request, whose prompt the draft model must then run, and on the others only once it
    is known to win more than their prompts cost; and what was lost against plain decoding is
    counted, so that later trials take a small share of the time.
    """

    def __init__(self, maximum: int, *, is_auto: bool = False) -> None:
        self.maximum = maximum
        self.is_auto = is_auto
        self.reset()

    def reset(self) -> None:
        """Forget what was measured: another run begins."""
        self._accepted, self._reached = FIRST_ACCEPTED, FIRST_REACHED
        self._verify, self._draft = Costs(), Costs()  # by tokens in the step, by requests
        self._catch_up = Costs()  # a token, under size 1
        self._num_plain = self._num_trials = self._num_drafted = self._since_plain = 0
        self._spent = self._lost = 0.0

    def plan(self, lags: Sequence[int], remaining: Sequence[int]) -> list[int]:
        """Return how many tokens to draft for each of the active requests.

        lags: tokens that the draft model would have to catch up with. remaining: tokens that each
        request may still emit.
        """
        num_rows = len(lags)
        if not self.is_auto:
            return [self.maximum] * num_rows
        nothing = [0] * num_rows
        if self._num_plain < PLAIN_STEPS or self._since_plain >= REFRESH_STEPS:
            return nothing
        usable = [row for row in range(num_rows) if remaining[row] > 1]
        if not usable:
            return nothing
        usable.sort(key=lambda row: lags[row])
        single = [int(row == usable[0]) for row in range(num_rows)]
        plain = self._predict_step(0, num_rows)
        risk = RISK_SHARE * (self._spent + max(remaining) * plain)
        if self._draft.largest == 0:
            # The first draft runs a prompt: what a pass costs is seen at the second.
            self._num_trials += 1
            return single if self._num_trials <= 2 or self._lost < risk else nothing
        best, gain = self._find_best(num_rows)
        price = self._catch_up.estimate(1) or 0.0
        if best and num_rows > 1 and self._num_drafted < TRIAL_TOKENS:
            cost = lags[usable[0]] * price + self._predict_step(1, num_rows, 1) - plain
            return single if self._lost + cost < risk else nothing
        if best and self._draft.largest < num_rows:
            # What a pass for so many costs is a guess yet: for twice as many as it is known for.
            best = 1
            usable = usable[: 2 * self._draft.largest]
        counts = [0] * num_rows
        for row in usable:
            counts[row] = best if gain * remaining[row] / num_rows > price * lags[row] else 0
        num_drafting = sum(count > 0 for count in counts)
        if self._pays(best, num_drafting, num_rows):
            return counts
        cost = self._predict_step(1, num_rows, num_drafting) - plain
        cost += price * sum(lags[row] for row in range(num_rows) if counts[row])
        if num_drafting > self._draft.largest and self._lost + cost < risk:
            return counts
        cost = lags[usable[0]] * price + self._predict_step(1, num_rows, 1) - plain
        return single if self._lost + cost <= PROBE_SHARE * self._spent else nothing

    def record_step(
        self,
        *,
        num_rows: int,
        num_tokens: int,
        num_passes: int,
        num_caught_up: int,
        draft_seconds: float,
        verify_seconds: float,
        drafts: Sequence[tuple[int, int]],
    ) -> None:
        """Take what a step over `num_rows` requests of `num_tokens` each has cost and brought.

        num_passes: of the draft model. num_caught_up: tokens it ran besides. drafts: for each
        request how many tokens were drafted, and how many of them accepted.
        """
        self._verify.record(num_rows * num_tokens, verify_seconds)
        self._spent += draft_seconds + verify_seconds
        if not num_passes:
            self._num_plain += 1
            self._since_plain = 0
            return
        self._since_plain += 1
        num_drafting = sum(drafted > 0 for drafted, _ in drafts)
        if num_caught_up:
            usual = num_passes * (self._draft.estimate(num_drafting) or 0.0)
            self._catch_up.record(1, max(0.0, draft_seconds - usual) / num_caught_up)
        else:
            self._draft.record(num_drafting, draft_seconds / num_passes)
        for drafted, accepted in drafts:
            if drafted:  # what follows a rejection tells nothing
                self._num_drafted += min(accepted + 1, drafted)
                self._accepted = KEEP * self._accepted + accepted
                self._reached = KEEP * self._reached + min(accepted + 1, drafted)
        emitted = sum(accepted + 1 for _, accepted in drafts) / num_rows
        plain = self._verify.estimate(num_rows) or 0.0
        self._lost += draft_seconds + verify_seconds - emitted * plain

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
        return length * draft + (self._verify.estimate(num_rows * (length + 1)) or 0.0)

    def _pays(self, length: int, num_drafting: int, num_rows: int) -> bool:
        """Whether drafts for some of the requests win more than they cost all of them."""
        if not num_drafting:
            return False
        share = num_drafting / num_rows
        emitted = 1 - share + share * self._predict_emitted(length)
        plain = emitted * self._predict_step(0, num_rows)
        return plain > self._predict_step(length, num_rows, num_drafting)
