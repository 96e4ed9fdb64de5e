"""How much to draft, verify and read in the next step, by what steps cost and drafts bring.

A drafter says how sure it is of each token. How often such tokens have been right turns that into
the chance that a token is accepted. A row's best nodes are those of the greatest chance from the
root on, as in EAGLE-2 (https://arxiv.org/abs/2406.16858, section 4.2); how many of them a step
verifies depends on what it costs here, for so many rows, as in Sequoia
(https://arxiv.org/abs/2402.12374, section 3.3), by times that are measured as the run goes on.

Legend: B rows, T nodes of a row's tree, the root among them.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from specdec.decode.accept import Candidates
from specdec.decode.drafters.trees import estimate_accuracy
from specdec.engine.transfers import Array
from specdec.engine.tree import Tree

KEEP = 0.98  # weight of what was known of acceptance before the newest draft
LONG_KEEP = 0.99  # the same where only what was accepted tells, or whole steps are counted
NUM_MEASURED = 7  # measurements of a size that count, the newest
NUM_RATIOS = 5  # steps that say how slow the machine is at present
NUM_USUAL = 63  # measurements of a size, as they were taken, that say what it usually takes
MOST_WEIGHT = 1e100  # of a measurement, before all are counted in small numbers again
# Of a draft's tokens: deeper ones are counted as these; buckets of the drafter's confidence; trials
# that its own word weighs as much as; the most that is believed of a token.
MAX_DEPTH, NUM_BUCKETS, FIRST_TRIALS, SURE = 12, 10, 4.0, 0.999
NUM_PLACES = (MAX_DEPTH + 1) * NUM_BUCKETS  # of one drafter
# Believed at first: of the drafted tokens that are reached, those that are accepted; and the drafts
# that this weighs as much as.
FIRST_RATE, FIRST_DRAFTS = 0.7, 3.0
USUAL_SHARE = 0.2  # weight of the newest text in what drafts usually bring, once some have ended
PLAIN_STEPS = 2  # at the start: what there is to win is not known without them
# After so many drafted steps a plain one is measured again; times the plain steps so far, while
# those are few. Not where drafts would pay even if it took this share of its time.
MAX_REFRESH, REFRESH_GROWTH, CLEAR_SHARE = 128, 4, 0.6
# Plain steps behind a draft that are slower than others, since the processor's caches hold what the
# drafter has read. Where the gain is less than this, they do not count as measurements, and so many
# plain steps in a row are made.
COLD_STEPS, CLOSE_GAIN, CLOSE_RUN = 2, 1.25, 4
# Shares of the time of plain decoding: what drafts may lose, and what trials may lose of
# drafts that are known not to pay. The steps to come that count: the text may end before.
LOSS_SHARE, TRIAL_SHARE, HORIZON = 0.02, 0.012, 64
READ_SHARE = 0.04  # of the same time, what drafters may take to read prompts
# After so many drafts of one level, all levels are tried again, as what they cost may have been
# measured at a bad moment.
DEEP_REFRESH = 64
# Steps by one plan, so that planning costs next to no time: where it says no drafts, at least and
# at most, and where it says drafts. Steps at most until what they took is looked at.
REST_STEPS, MOST_REST, KEPT_STEPS, MOST_NEW = 8, 24, 4, 32
FEW_UNREAD = 64  # prompt tokens that cost a draft's pass next to nothing
FIRST_PIECE = 2 * FEW_UNREAD  # prompt tokens by which a drafter's reading is timed
PROMPT_UNIT = 16  # prompt tokens of a step are counted by so many
# Tokens of a step that reads prompts for each request that runs or waits, what the running ones
# verify included; at least and at most. LEAST_READ are prompts', whatever that takes.
CHUNK_SHARE, LEAST_CHUNK, MOST_CHUNK, LEAST_READ = 13, 64, 512, 16
# How many times as long as a plain step it may be; and how long it may be in any case.
MOST_TIMES, LEAST_TIMES = 6.0, 2.0


def find_low(values: Iterable[float]) -> float:
    """The lower tercile of some values: other programs only ever delay, often several in a row."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 3]


class Costs:
    """Seconds by size, by the newest measurements; a larger size never costs less.

    Between two known sizes costs lie on a line, and beyond the largest on one from its half on,
    since two that are near each other differ by chance; below the smallest they are the smallest's,
    as where memory is the limit.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        # The same, however slow the machine was, by age and by size.
        self._taken: dict[int, tuple[deque[float], list[float]]] = {}
        self._low: dict[int, float] = {}  # what each is believed to take
        self._counts: dict[int, int] = {}
        self.smallest = self.largest = 0  # sizes that were measured
        self._line: tuple[list[int], list[float], float] | None = None  # and the rise beyond

    def record(
        self, size: int, seconds: float, guess: float | None = None, slow: float = 1.0
    ) -> None:
        """Take a measurement. guess: what was foreseen, which counts too: a first is doubtful.
        slow: how many times as long as it takes alone everything takes at present.
        """
        if size not in self._recent:
            self._recent[size] = deque([] if guess is None else [guess], maxlen=NUM_MEASURED)
            self._taken[size], self._counts[size] = (deque(), []), 0
            self.smallest, self.largest = min(self._recent), max(self._recent)
        self._counts[size] += 1
        by_age, ordered = self._taken[size]
        by_age.append(seconds)
        bisect.insort(ordered, seconds)
        if len(by_age) > NUM_USUAL:
            del ordered[bisect.bisect_left(ordered, by_age.popleft())]
        self._recent[size].append(seconds / slow)
        low = find_low(self._recent[size])
        if low != self._low.get(size):
            self._low[size], self._line = low, None

    def count(self, size: int) -> int:
        """How often a size was measured."""
        return self._counts.get(size, 0)

    @property
    def num_measured(self) -> int:
        """How often any size was measured."""
        return sum(self._counts.values())

    def find_usual(self, size: int) -> float:
        """What a size that was measured took in the middle, however slow the machine was.

        Were it divided by how slow that was, which follows from this, both would drift away.
        """
        ordered = self._taken[size][1]
        return ordered[(len(ordered) - 1) // 2]

    def predict(self, sizes: Array) -> Array:
        """What each of some sizes costs; 0 where nothing was measured."""
        if not self._recent:
            return np.zeros(len(sizes))
        known, seconds, slope = self._line_up()
        found = np.interp(sizes, known, seconds)
        if slope and sizes[-1] > self.largest:
            found += slope * np.maximum(0, sizes - self.largest)
        return np.asarray(found)

    def estimate(self, size: float) -> float:
        """What one size costs."""
        if not self._recent:
            return 0.0
        known, seconds, slope = self._line_up()
        if size >= self.largest:
            return seconds[-1] + slope * (size - self.largest)
        at = bisect.bisect_right(known, size)
        if not at:
            return seconds[0]
        share = (size - known[at - 1]) / (known[at] - known[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])

    def _line_up(self) -> tuple[list[int], list[float], float]:
        if self._line is None:
            sizes = sorted(self._low)
            seconds = [self._low[size] for size in sizes]
            for at in range(len(sizes) - 1, 0, -1):
                seconds[at - 1] = min(seconds[at - 1], seconds[at])
            lower = max(0, bisect.bisect_right(sizes, self.largest / 2) - 1)
            rise = self.largest - sizes[lower]
            slope = (seconds[-1] - seconds[lower]) / rise if rise else 0.0
            self._line = sizes, seconds, slope
        return self._line


class DraftCosts:
    """Seconds of drafts by the number of requests and by levels, which are passes of the drafter.

    The first level costs more than another: it reads the newest tokens too, and bears what a draft
    costs at least. So costs are measured by the number of levels. Where only drafts of about as
    many levels were measured, the rise is that of the nearest number of requests that has more; and
    proportional to the levels where there is none.
    """

    def __init__(self) -> None:
        self._costs: dict[int, Costs] = {}

    def record(self, num_rows: int, num_levels: int, seconds: float, most: float) -> None:
        """Take a measurement. most: what a level takes at most, unless it does so again."""
        own = self._costs.setdefault(num_rows, Costs())
        first = own.estimate(1)
        guess = num_levels * (min(first, most) if first else most)
        own.record(num_levels, seconds, min(seconds, guess))

    def count(self, num_rows: int) -> int:
        """How many drafts of so many requests were measured."""
        return self._costs[num_rows].num_measured if num_rows in self._costs else 0

    def estimate(self, num_rows: int, num_levels: float = 1) -> float:
        """What a draft costs; 0 where nothing was measured."""
        own = self._costs.get(num_rows)
        if own is not None and own.largest >= 2 * own.smallest:
            return own.estimate(num_levels)
        if not self._costs:
            return 0.0
        nearest = sorted(self._costs, key=lambda known: (abs(known - num_rows), -known))
        known = [self._costs[at] for at in nearest]
        like = next((costs for costs in known if costs.largest >= 2 * costs.smallest), None)
        most = known[0].largest
        times = (
            num_levels / most if like is None else like.estimate(num_levels) / like.estimate(most)
        )
        return known[0].estimate(most) * times

    def predict(self, num_rows: int, levels: Iterable[int]) -> Array:
        """The same of each of some numbers of levels."""
        return np.array([self.estimate(num_rows, number) for number in levels])

    def price_level(self, num_rows: int) -> float:
        """What one level more costs."""
        top = max([2, *(costs.largest for costs in self._costs.values())])
        return (self.estimate(num_rows, top) - self.estimate(num_rows)) / (top - 1)


class Calibration:
    """How often drafted tokens were right, by drafter, depth and the drafter's own confidence.

    Where little is known of a depth, what is known of all depths counts, and where that is little,
    the drafter's word. Newer steps count more.
    """

    def __init__(self) -> None:
        # By place (`_find_places`), where depth 0 stands for all depths: right ones, and all. Lists
        # and a loop: the few nodes of most steps would take longer by calls of numpy.
        self._right, self._seen = list[float](), list[float]()
        self._weight = 1.0  # of a token that is counted now; it grows, as older ones count less
        self._new: list[tuple[Candidates, Sequence[int]]] = []  # drafts to learn from, their paths

    def estimate(self, *found: Candidates) -> list[float]:
        """[sum of T], the chance that a node is accepted where its parent is; 1 for roots."""
        known: dict[int, tuple[float, float]] = {}  # by place: chance = base + rise * confidence
        right, seen, trials, chances = self._right, self._seen, FIRST_TRIALS * self._weight, []
        for place, sure in zip(*self._find_places(found), strict=True):
            if place not in known:
                at = place - place % NUM_PLACES + place % NUM_BUCKETS
                share, anywhere = trials / (seen[place] + trials), seen[at] + trials
                base = right[place] / (seen[place] + trials) + share * right[at] / anywhere
                known[place] = base, share * trials / anywhere
            base, rise = known[place]
            chances.append(min(base + rise * sure, SURE))
        start = 0
        for candidates in found:
            chances[start] = 1.0
            start += candidates.tree.num_nodes
        return chances

    def record(self, found: Sequence[Candidates], paths: Sequence[Sequence[int]]) -> None:
        """Take which nodes were accepted, root first, to `learn` from them later."""
        self._new += zip(found, paths, strict=True)

    def learn(self) -> None:
        """Count the nodes of the newest drafts; only children of accepted ones were looked at."""
        new, self._new = self._new, []
        places, start = self._find_places([candidates for candidates, _ in new])[0], 0
        right, seen = self._right, self._seen
        for candidates, path in new:
            if candidates.tree.num_nodes > 1:
                self._weight /= KEEP
                accepted = set(path)
                for node, parent in enumerate(candidates.tree.parents.tolist()):
                    if parent in accepted:
                        place = places[start + node]
                        is_right = self._weight * (node in accepted)
                        for own in (place, place - place % NUM_PLACES + place % NUM_BUCKETS):
                            seen[own] += self._weight
                            right[own] += is_right
            start += candidates.tree.num_nodes
        if self._weight > MOST_WEIGHT:
            self._forget()

    def _forget(self) -> None:
        """Count in small numbers again."""
        for table in (self._right, self._seen):
            table[:] = [value / self._weight for value in table]
        self._weight = 1.0

    def _find_places(self, found: Sequence[Candidates]) -> tuple[list[int], list[float]]:
        """Where the nodes of trees are counted, and the drafter's confidence in each."""
        places, sures = list[int](), list[float]()
        for candidates in found:
            sure, first = read_confidence(candidates).tolist(), NUM_PLACES * candidates.source
            for depth, each in zip(candidates.tree.depths.tolist(), sure, strict=True):
                bucket = min(int(each * NUM_BUCKETS), NUM_BUCKETS - 1)
                places.append(first + min(depth, MAX_DEPTH) * NUM_BUCKETS + bucket)
            sures += sure
        missing = max(places, default=0) // NUM_PLACES * NUM_PLACES + NUM_PLACES - len(self._seen)
        if missing > 0:
            self._right += [0.0] * missing
            self._seen += [0.0] * missing
        return places, sures


def read_confidence(candidates: Candidates) -> Array:
    """[T], the drafter's confidence in each node; by its place among its siblings if not told.

    None in what is no number, which a drafter makes that leaves the range of its type.
    """
    if candidates.confidence is not None:
        return np.fmax(candidates.confidence, 0.0)
    tree = candidates.tree
    order = np.argsort(tree.parents, kind="stable")
    _, first, counts = np.unique(tree.parents[order], return_index=True, return_counts=True)
    ranks = np.empty(tree.num_nodes, np.int64)
    ranks[order] = np.arange(tree.num_nodes) - np.repeat(first, counts)
    return np.asarray(estimate_accuracy(np.maximum(tree.depths - 1, 0), ranks))


def follow_chances(trees: Sequence[Tree], chances: Sequence[float]) -> list[list[float]]:
    """The chances that whole paths to nodes are accepted, of each tree, by those of all nodes."""
    found, start = [], 0
    for tree in trees:
        own = list(chances[start : start + tree.num_nodes])
        for node, parent in enumerate(tree.parents.tolist()):
            if node:  # parents come first
                own[node] *= own[parent]
        found.append(own)
        start += tree.num_nodes
    return found


@dataclasses.dataclass
class Account:
    """Seconds of drafted steps compared with those of plain ones for as many tokens.

    spent: of all steps. lost: by drafts, less than nothing where they won. read: by drafters, for
    prompts. for_trials: what trials of drafts that are known not to pay may lose yet, what the
    drafter reads for them included; it grows only while that is known, so that what few requests
    won does not pay for slow steps of many.
    """

    spent: float = 0.0
    lost: float = 0.0
    read: float = 0.0
    for_trials: float = 0.0

    def find_limit(self, ahead: float) -> float:
        """Seconds that may be lost. ahead: seconds of plain decoding to come."""
        return LOSS_SHARE * (self.spent + ahead) - self.lost

    def add(self, seconds: float, lost: float, *, is_trial: bool) -> None:
        """Take a step's seconds, and what its drafts lost."""
        self.spent += seconds
        self.lost += lost
        if is_trial:
            self.for_trials += TRIAL_SHARE * seconds - lost


class Drafted(NamedTuple):
    """What came of the newest step's drafts.

    seconds: of drafting, None where nothing was drafted. size: T. emitted: tokens of each request.
    num_levels: passes of the drafter. num_prefilled: prompt tokens that it read.
    """

    seconds: float | None
    size: int
    emitted: Sequence[int]
    num_levels: int = 1
    num_prefilled: int = 0


class Source:
    """What the drafts of one drafter of a chain promise a request, and what they cost.

    What was not tried for long is believed to be as at first, so that it is tried again.
    """

    def __init__(self, max_depth: int) -> None:
        self.costs = Costs()  # by requests
        self._belief = (1 - FIRST_RATE ** (max_depth + 1)) / (1 - FIRST_RATE) - 1
        self._sum = self._weight = 0.0

    def record(self, gains: Sequence[float]) -> None:
        """Take what the drafts of a step promise, in tokens; none where it drafts for nobody."""
        self._sum, self._weight = LONG_KEEP * self._sum, LONG_KEEP * self._weight
        self._sum += sum(gains)
        self._weight += len(gains)

    @property
    def gain(self) -> float:
        """Tokens that a draft is expected to bring a request."""
        return (self._sum + FIRST_DRAFTS * self._belief) / (self._weight + FIRST_DRAFTS)


class Pace:
    """Decides for each step whether to draft, who drafts, what is verified, and what is read.

    A step of T nodes a row costs a draft and one pass over B x T tokens, since rows are padded to
    the largest tree. It emits a token per row, and what is accepted of the T - 1 best nodes. What
    those promise is kept as a mean over the newest drafts, by their number; so the best number and
    the tokens per second that it promises are known for any B before anything is drafted. Those
    tokens a second are the price of a second: of the drafts that then come, as many nodes are kept
    as promise more tokens than the time that verifying them takes would emit.

    Others may use the machine too. So all times are divided by how slow it is at present, which
    the newest steps without prompts tell: the median of what each took by what such steps take.

    A size that no step had costs as many tokens of a prompt, and at least what a smaller one does;
    where no prompt was timed, sizes are tried by doubling. The first steps are plain; the first
    draft has one level, and another, as soon as that may be lost, as many as there are, which tells
    what a level costs. A first measurement is doubted where a guess is lower, and after many drafts
    of one level all are tried again. An `Account` is kept: nothing is drafted that could lose more
    than it allows, if none of it were accepted. A plan serves for some steps, since it takes time.

    A step that reads prompts too takes what its tokens in all do. Running requests wait for all of
    it: how many tokens it may have is `choose_chunk`'s to say.
    """

    def __init__(
        self, max_tokens: int = 0, *, is_whole: bool = False, is_planned: bool = False,
        max_depths: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """max_tokens: of a row's draft. is_whole: whether all or nothing of it is verified.
        is_planned: whether it is a chain of as many tokens as `length` says. max_depths: of each
        drafter of a chain.
        """
        self.max_tokens, self.is_whole, self.is_planned = max_tokens, is_whole, is_planned
        self.calibration, self.account = Calibration(), Account()
        self.sources = [Source(depth) for depth in max_depths]
        self.max_levels = max_tokens  # of the step's draft
        self.max_read: int | None = None  # prompt tokens that the drafter may read for the step
        self.is_trial = False  # whether the step's drafts are known not to pay
        self.is_brief = True  # whether they have one level, since it is not known what more cost
        self._steps, self._drafts = Costs(), DraftCosts()  # by tokens
        self._ratios: deque[float] = deque(maxlen=NUM_RATIOS)
        self._slow = 1.0  # times as long as it takes alone, everything takes at present
        self._token = 0.0  # seconds of a prompt's token, of many; 0 where it is not known
        self._reading = Costs()  # of a prompt's token that the drafter reads, under size 1
        self._num_levels = 1.0  # a mean
        self._depth = max(max_depths, default=max_tokens)  # levels at most
        self._since_deep = 0  # drafts since the newest of more than a level
        self._is_deep = False  # whether the step's has all levels, to measure them again
        self._is_tried = False  # whether a draft of more than a level was made
        self._gains = FIRST_DRAFTS * np.cumsum(FIRST_RATE ** np.arange(1, max_tokens + 1))
        self._weight = FIRST_DRAFTS
        self._usual = self._gains / self._weight  # what drafts bring where a text begins
        self._num_texts = 0.0  # that have begun, all requests together counting as one
        self._right, self._reached = FIRST_RATE * FIRST_DRAFTS, FIRST_DRAFTS  # of planned drafts
        self._known: set[int] = set()  # numbers of requests that plain steps had
        self._num_plain = self._since_plain = self._num_small = self._since_small = 0
        self._num_warm = 0  # plain steps behind the newest draft or prompt
        self._num_rows = self._num_prompt_tokens = 0  # of the step that was planned last
        self._seconds = [0.0]  # of a step by nodes a row, by the newest plan
        self._rest, self.drafts_on = 0, False  # steps to come without a plan; what it decided
        self._rate = 0.0  # tokens per second that the plan promised
        self._gain = 1.0  # the same by that of plain steps
        self._allowance = math.inf  # seconds that the step may lose
        self._drafted: Drafted | None = None
        # Steps, and what drafts promised, that are still to be learned from.
        self._new: list[tuple[int, int, int, float, Drafted | None]] = []
        self._promises: list[tuple[int, list[float]]] = []

    # ---- Before a step.

    def start(self, num_texts: int) -> None:
        """Expect of so many new texts what texts usually bring, not what the last ones brought."""
        self.learn()
        share = min(1.0, num_texts / max(1, self._num_rows))
        newest = share * max(USUAL_SHARE, 1 / max(1.0, self._num_texts))
        self._usual += newest * (self._gains / self._weight - self._usual)
        self._num_texts += share
        kept, self._rest = 1 - share, 0
        self._gains = kept * self._gains + share * FIRST_DRAFTS * self._usual
        self._weight = kept * self._weight + share * FIRST_DRAFTS
        self._reached = kept * self._reached + share * FIRST_DRAFTS
        self._right = kept * self._right + share * FIRST_DRAFTS * float(self._usual[:1].sum())

    def plan(
        self, remaining: Sequence[int], num_prompt_tokens: int = 0, num_unread: int = 0
    ) -> bool:
        """Whether to draft.

        remaining: tokens that each request of the step may still emit. num_prompt_tokens: those of
        prompts that it reads, too. num_unread: those that the drafter has to read before it drafts.
        """
        num_rows = len(remaining)
        if self.rest(num_rows, num_prompt_tokens):
            return False
        is_kept = self._rest > 1 and num_rows == self._num_rows and not num_prompt_tokens
        is_last = max(remaining) <= 1
        if is_kept and num_unread <= FEW_UNREAD and not is_last:
            self.skip(num_rows, 0)
            return True
        self.learn()
        self.skip(num_rows, num_prompt_tokens)
        if is_last or not self._steps.largest:
            return False
        seconds = self._predict()
        self._seconds = seconds.tolist()
        plain, level = float(seconds[0]), self._drafts.estimate(num_rows)
        sizes = np.arange(1, len(seconds))
        draft = np.full(len(sizes), self._drafts.estimate(num_rows, self._num_levels))
        if self.is_planned:
            draft = self._drafts.predict(num_rows, range(1, len(seconds)))
        gains = self._gains[self.max_tokens - 1 :] if self.is_whole else self._gains[: len(sizes)]
        emitted = 1 + gains / self._weight  # tokens of a request
        rates = num_rows * emitted / (draft + seconds[1:])
        best = int(rates.argmax())
        self._rate = max(float(rates[best]), num_rows / plain)
        self._gain = float(rates[best]) * plain / num_rows
        ahead = min(max(remaining), HORIZON) * plain
        pays = self._gain > 1 and self._repays_reading(num_unread, ahead)
        self.is_trial = not pays and self._drafts.count(num_rows) > 1
        limit = self.account.find_limit(ahead)
        self.is_brief = not level or (not self._is_tried and self._depth * level > limit)
        extra = (self._depth - 1) * self._drafts.price_level(num_rows)
        self._is_deep = self._is_tried and not self.is_trial and self._since_deep >= DEEP_REFRESH
        self._is_deep &= min(extra, plain) <= limit
        # The least that is drafted and verified, if it pays nothing back.
        least = 0
        if self.is_planned and not self.is_brief and not self.is_trial:
            least = best if self._is_tried else min(1, len(sizes) - 1)
            least = len(sizes) - 1 if self._is_deep else least
        while least and draft[least] + seconds[least + 1] - plain > limit:
            least -= 1
        self.max_levels = least + 1
        price = level if self.is_brief else float(draft[least])
        if not (self.is_brief or self._is_tried or self.is_planned):
            price = self._depth * level
        self._allowance = limit - price
        expected = price + float(seconds[least + 1]) - plain * float(emitted[least])
        if num_unread > FEW_UNREAD:
            expected += min(num_unread, FIRST_PIECE) * self._reading.estimate(1)
        if self._is_plain_due():
            self.drafts_on, self._rest = False, CLOSE_RUN * (self._gain < CLOSE_GAIN)
            return False
        drafts = (
            seconds[least + 1] - plain <= self._allowance
            and (not self.is_trial or expected <= self.account.for_trials)
            and self._may_read(num_unread, ahead)
        )
        self.drafts_on, self._rest = bool(drafts), 0
        most_lost = KEPT_STEPS * float(draft[-1] + seconds[-1])
        if not drafts:
            self._rest = self._count_rest(expected, plain)
        elif self._is_tried and not self._is_deep and not self.is_trial and most_lost < limit:
            self._rest = KEPT_STEPS
        return self.drafts_on

    def rest(self, num_rows: int, num_prompt_tokens: int) -> bool:
        """Whether the next step of so many requests drafts nothing, as the last plan says."""
        if not self.is_resting(num_rows):
            return False
        self.skip(num_rows, num_prompt_tokens)
        return True

    def is_resting(self, num_rows: int) -> bool:
        """Whether the last plan says of the next step of so many requests that nothing drafts."""
        return not self.drafts_on and self._rest > 1 and num_rows == self._num_rows

    def _count_rest(self, price: float, plain: float) -> int:
        """Steps until a trial of this price may be lost; fewer where other things may change."""
        missing = price - self.account.for_trials if self.is_trial else 0.0
        return min(max(REST_STEPS, int(missing / (TRIAL_SHARE * plain))), MOST_REST)

    def skip(self, num_rows: int, num_prompt_tokens: int = 0) -> None:
        """Begin a step of so many requests for which nothing is drafted."""
        self._num_rows, self._rest = num_rows, self._rest - 1
        self._num_prompt_tokens = _round_up(num_prompt_tokens)
        self._drafted = Drafted(None, 1, (1,) * num_rows)  # unless drafts are recorded

    def _is_plain_due(self) -> bool:
        """Whether to measure a plain step."""
        # With fewer requests a plain step costs no more; much less, perhaps.
        if not any(self._num_rows <= known < 2 * self._num_rows for known in self._known):
            return True
        if self._gain * CLEAR_SHARE > 1 and self._num_plain >= PLAIN_STEPS:
            return self._since_plain >= MAX_REFRESH
        return _is_due(self._num_plain, self._since_plain)

    def _repays_reading(self, num_unread: int, ahead: float) -> bool:
        """Whether drafts win what the drafter has to read, in `ahead` seconds of plain steps."""
        price = num_unread * self._reading.estimate(1)
        return num_unread <= FEW_UNREAD or price <= ahead * (1 - 1 / self._gain)

    def _may_read(self, num_unread: int, ahead: float) -> bool:
        """Whether the drafter may read what it lacks, or a piece of it, which `max_read` then says.

        ahead: seconds of plain decoding to come.
        """
        self.max_read = None
        price = self._reading.estimate(1)
        if num_unread <= FEW_UNREAD:
            return True
        if not self.is_trial and not self._repays_reading(num_unread, ahead):
            return False
        limit = READ_SHARE * (self.account.spent + ahead) - self.account.read
        most = int(max(0.0, limit) / price) if price else FIRST_PIECE
        if self.is_trial or not price:
            most = min(most, FIRST_PIECE)
        if self._num_rows > 1:
            self.max_read = most
            return most >= min(num_unread, FIRST_PIECE)
        return not price or num_unread * price <= limit

    def price_level(self) -> float:
        """How much another level of a draft must promise to be worth its price.

        That is tokens of the newest level that are expected to be accepted, in all rows together
        and at most one in each.
        """
        if self.is_brief or not self._is_tried or self._is_deep:
            return math.inf if self.is_brief else -math.inf
        seconds = self._seconds[1:]  # that a draft is verified at all is paid for already
        token = (seconds[-1] - seconds[0]) / max(1, len(seconds) - 1)
        price = self._rate * (self._drafts.price_level(self._num_rows) + token)
        return float(price * self._weight / self._gains[0])

    def value(self, chances: Array) -> Array:
        """Tokens that the draft of each row promises, without those that its verifying would emit.

        chances: [B, N] of each row's paths, best first, then zeros.
        """
        seconds = self._seconds
        token = (seconds[-1] - seconds[0]) / max(1, (len(seconds) - 1) * self._num_rows)
        worth = np.cumsum(chances - self._rate * token, axis=1)
        return np.asarray(worth.max(axis=1, initial=0.0))

    def value_source(self, source: int, num_left: int) -> float:
        """What a drafter of a chain would be worth to each of so many requests, its time paid."""
        other = self.sources[source]
        return other.gain - self._rate * other.costs.estimate(num_left) / num_left

    def is_best(self, source: int, value: float, num_left: int) -> bool:
        """Whether a draft in hand is worth more than one by those that come later in a chain."""
        later = range(source + 1, len(self.sources))
        return value > 0 and value >= max(self.value_source(at, num_left) for at in later)

    def choose(self, chances: Sequence[Sequence[float]] | Array) -> int:
        """How many nodes of each row to verify besides the root.

        chances: [B, N] of each row's paths, best first, then zeros.
        """
        seconds, num_rows = self._seconds, len(chances)
        found = [float(sum(column)) for column in zip(*chances, strict=True)][: self.max_tokens]
        found += [0.0] * (self.max_tokens - len(found))
        promised = list(itertools.accumulate(found))
        most, best = 0, -self._rate * seconds[0]
        for number, (tokens, took) in enumerate(zip(promised, seconds[1:], strict=False), 1):
            worth = tokens - self._rate * took
            if worth > best and took - seconds[0] <= self._allowance:
                most, best = number, worth
        if self.is_brief:  # as if each further level were as good as the first
            rate = found[0] / num_rows
            usual = itertools.accumulate(num_rows * rate**n for n in range(1, len(found) + 1))
            promised = [*map(max, promised, usual)]
        # What a draft of this kind promises, whatever is verified of it.
        self._promises.append((num_rows, promised))
        return max(most, int(self._gain <= 1))

    def _predict(self) -> Array:
        """Seconds of a step by nodes a row, from 1 on; of whole drafts, of 1 and of all."""
        rows, prompt, most = self._num_rows, self._num_prompt_tokens, self.max_tokens + 1
        if self.is_whole:
            return self._foresee(rows * np.array([1, most]), prompt)
        if not self._token:
            most = max(2, min(most, (2 * self._steps.largest - prompt) // rows))
        return self._foresee(rows * np.arange(1, most + 1), prompt)

    def _foresee(self, sizes: Array, prompt: int = 0) -> Array:
        """Seconds of steps that verify so many tokens, rising, without what their prompts take.

        Beyond the largest that was measured, as many tokens of a prompt, if one was timed. Prompts
        would be read anyway, in another step: they pay what a token more costs here, and what a
        step costs at least, such as reading the weights, is left to its own tokens.
        """
        tokens, largest = sizes + prompt, self._steps.largest
        seconds = self._steps.predict(tokens)
        if self._token:
            beyond = np.maximum(self._steps.estimate(largest), tokens * self._token)
            seconds = np.where(tokens > largest, beyond, seconds)
        if prompt:
            price = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
            seconds = seconds - prompt * min(price, seconds[0] / tokens[0])
        return np.asarray(seconds)

    def even_out(self, seconds: float) -> float:
        """What would have taken so long if nobody else used the machine."""
        return seconds / self._slow

    # ---- After it.

    def record_drafts(
        self, seconds: float | None, size: int, emitted: Sequence[int], num_levels: int = 1,
        num_prefilled: int = 0,
    ) -> None:  # fmt: skip
        """Take what came of drafts; `record_step` follows. See `Drafted`."""
        self._drafted = Drafted(seconds, size, emitted, num_levels, num_prefilled)

    def record_prompt(self, num_tokens: int, seconds: float) -> None:
        """Take what a pass over nothing but prompts took."""
        if num_tokens >= FEW_UNREAD:
            self._token = seconds / self._slow / num_tokens

    def record_step(
        self, num_rows: int, num_verified: int, num_prompt_tokens: int, seconds: float
    ) -> None:
        """Take what a step of so many requests, which verified so many tokens, took the target.

        It is learned from when that matters: together with others that takes a third of the time.
        """
        self._new.append((num_rows, num_verified, num_prompt_tokens, seconds, self._drafted))
        self._drafted = None
        if num_prompt_tokens or self._num_prompt_tokens or len(self._new) >= MOST_NEW:
            self.learn()

    def learn(self) -> None:
        """Learn from the newest steps."""
        new, self._new = self._new, []
        for step in new:
            self._learn_step(*step)
        for num_rows, promised in self._promises:
            kept = KEEP**num_rows
            self._gains = kept * self._gains + promised
            self._weight = kept * self._weight + num_rows
        self._promises = []
        self.calibration.learn()

    def _learn_step(
        self, num_rows: int, num_verified: int, num_prompt_tokens: int, seconds: float,
        drafted: Drafted | None,
    ) -> None:  # fmt: skip
        num_tokens = num_verified + _round_up(num_prompt_tokens)
        self._since_small += 1
        if num_tokens <= _count_least(num_rows):
            self._num_small += 1
            self._since_small = 0
        guess, steps = None, self._steps
        if drafted is None or drafted.seconds is not None or num_prompt_tokens:
            self._num_warm = -1
        is_plain = drafted is not None and drafted.size == 1 and not num_prompt_tokens
        if steps.count(num_tokens) > 2 and not num_prompt_tokens:
            self._ratios.append(seconds / steps.find_usual(num_tokens))
            self._slow = sorted(self._ratios)[(len(self._ratios) - 1) // 2]
        elif steps.largest and not steps.count(num_tokens):  # a token costs no more than others did
            token = self._token or steps.estimate(steps.largest) / steps.largest
            guess = max(steps.estimate(num_tokens), num_tokens * token)
        is_cold = is_plain and self._num_warm < COLD_STEPS and self._gain < CLOSE_GAIN
        if not is_cold or steps.count(num_tokens) < PLAIN_STEPS:
            steps.record(num_tokens, seconds, guess, self._slow)
        seconds /= self._slow
        if drafted is not None:
            self._settle(drafted, seconds)
        self._num_warm += 1

    def _settle(self, drafted: Drafted, seconds: float) -> None:
        """Learn from a step and its drafts, and enter it into the account."""
        num_rows, size = len(drafted.emitted), drafted.size
        self._since_plain += 1
        if size == 1:
            self._known.add(num_rows)
            self._num_plain += 1
            self._since_plain = 0
        if drafted.seconds is None and not self._num_prompt_tokens:
            is_cold = self._num_warm < COLD_STEPS  # and what it takes longer, drafts have lost
            lost = seconds - self._steps.estimate(num_rows) if is_cold else 0.0
            self.account.add(seconds, lost, is_trial=self.is_trial)
            return
        if self._num_prompt_tokens:
            sizes = num_rows * np.array([1, max(2, size)])
            foreseen = self._foresee(sizes, self._num_prompt_tokens).tolist()
            plain, step = foreseen[0], foreseen[size > 1]
        else:
            plain, step = (self._steps.estimate(num_rows * n) for n in (1, size))
            step = seconds if size == 1 else step
        took, lost = (drafted.seconds or 0.0) / self._slow, 0.0
        if drafted.seconds is not None:
            levels = max(1, drafted.num_levels)
            if drafted.num_prefilled > FEW_UNREAD:
                read = max(0.0, took - self._drafts.estimate(num_rows, levels))
                self._reading.record(1, read / drafted.num_prefilled)
                self.account.read += read
                self.account.for_trials -= read if self.is_trial else 0.0
                took -= read
            else:
                self._drafts.record(num_rows, levels, took, plain)
                self._since_deep = 0 if levels > 1 or self._is_deep else self._since_deep + 1
                self._is_tried |= not self.is_brief and (levels > 1 or not self.is_planned)
            self._num_levels += (levels - self._num_levels) / FIRST_TRIALS
            # What others delay is nobody's loss: costs of the same kind are compared.
            draft = self._drafts.estimate(num_rows, levels)
            lost = draft + step - plain * sum(drafted.emitted) / num_rows
            if size > 1 and (self.is_whole or self.is_planned):
                self._learn(drafted)
        own = step if self._num_prompt_tokens else seconds  # without what prompts take
        self.account.add(took + own, lost, is_trial=self.is_trial)

    def _learn(self, drafted: Drafted) -> None:
        """Take what drafts brought of which nothing was chosen by how sure the drafter is."""
        for count in drafted.emitted:
            self._gains *= KEEP
            self._weight = KEEP * self._weight + 1
            if self.is_whole:
                self._gains += count - 1
                continue
            self._right = LONG_KEEP * self._right + count - 1
            self._reached = LONG_KEEP * self._reached + min(count, drafted.size - 1)
        if self.is_planned:
            rate = min(self._right / self._reached, SURE)
            self._gains = self._weight * np.cumsum(rate ** np.arange(1, self.max_tokens + 1))

    # ---- Prompts.

    def choose_chunk(self, num_active: int, num_requests: int, *, is_reading: bool) -> int:
        """Tokens of a step that also reads prompts, those of the running requests included.

        Where multiplying takes the time, as on a processor without AMX, it should not be many times
        as long as theirs are otherwise; where reading the weights does, more tokens cost next to
        nothing. num_requests: those that run and those that wait. is_reading: whether there are
        prompts; now and then a small step is measured, also where every step reads some.
        """
        if is_reading:
            self.learn()
        wanted = min(max(LEAST_CHUNK, CHUNK_SHARE * num_requests), MOST_CHUNK)
        least, steps = _count_least(num_active), self._steps
        most = max(wanted, min(MOST_CHUNK, 2 * steps.largest))
        if not steps.largest or most <= least:
            return wanted
        if is_reading and _is_due(self._num_small, self._since_small):
            return least
        plain, longest = steps.estimate(num_active), steps.estimate(steps.largest)
        if num_active < steps.smallest < steps.largest:  # on the line of all that were measured
            slope = (longest - plain) / (steps.largest - steps.smallest)
            plain = max(0.0, plain - slope * (steps.smallest - num_active))
        seconds = self._foresee(np.arange(least + 1, most + 1))  # rising
        fewest, longest = (
            least + int(np.searchsorted(seconds, times * plain, side="right"))
            for times in (LEAST_TIMES, MOST_TIMES)
        )
        return min(max(wanted, fewest), longest)


def _round_up(num_prompt_tokens: int) -> int:
    """Prompt tokens of a step as they are counted."""
    unit = PROMPT_UNIT if num_prompt_tokens > FEW_UNREAD else 1
    return -(-num_prompt_tokens // unit) * unit


def _count_least(num_active: int) -> int:
    """Tokens of the smallest step of so many requests that reads prompts."""
    return num_active + max(num_active, LEAST_READ)


def _is_due(num_measured: int, num_since: int) -> bool:
    """Whether to measure again what was measured so often, and so many steps ago."""
    refresh = min(MAX_REFRESH, REFRESH_GROWTH * num_measured)
    return num_measured < PLAIN_STEPS or num_since >= refresh
