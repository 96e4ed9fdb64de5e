"""Measurement of what an engine's steps and its drafters' drafts cost on this machine.

The loop itself runs, on texts of random tokens, with drafts of the sizes that are asked for: so
what is measured is all that a step takes, the host's part included. It takes some seconds at most,
when an engine is loaded that drafts what pays; `cost_keeping` keeps the table.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from specdec.decode.accept import Candidates
from specdec.decode.cost_table import SLOW_SECONDS, CostTable, Curve, Grid, smooth
from specdec.decode.drafters.base import ALL_LEVELS, Drafter
from specdec.decode.drafters.pace import FEW_UNREAD_TOKENS, Pace
from specdec.decode.drafters.paced import PacedDrafter
from specdec.decode.loop import Batch, Options
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.timing import Timing
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Step
from specdec.engine.tree import Tree

Clock = Callable[[], float]
Measurements = dict[int, dict[int, list[float]]]
MAX_SECONDS = 3.0  # that measuring takes, but for steps that have begun
WARM_STEPS = 1  # before those that are counted: caches are as a step of the kind leaves them
COUNTED_STEPS = 2  # of one kind in a row
# Plain steps: they alone leave a drafter's weights in no cache, and all else is held against them.
PLAIN_WARM_STEPS = 5  # plain steps before those that are counted
PLAIN_COUNTED_STEPS = 6  # plain steps in a row
MAX_ROUNDS = 8  # in which each kind of step has its turn
DEAR_RATIO = 2.0  # of a step's seconds to a plain one's, above which computing sets its time
LEAST_PROMPT = 2  # tokens of a prompt, where reading it takes long
SHORT_PROMPT = 8  # tokens of a prompt whose reading is not measured, at most
READ_TOKENS = 16  # of a prompt whose reading is measured, at least
LONG_PROMPT = FEW_UNREAD_TOKENS + 16  # tokens of a prompt that is read where that takes little time
PROMPT_SECONDS = 0.3  # that reading the prompts of one batch may take
ROWS_FACTOR = 4  # from one measured number of requests to the next
FAR_POSITION = 1024  # positions in the cache by which the context's price is measured
MIN_FAR_POSITION = 128  # where an engine has room for fewer, the context costs nothing
CONTEXT_TURNS = 5  # at most, in which the price of the context is measured, after one to warm up
CONTEXT_SECONDS = 0.2  # that these turns take, but for one that has begun
MAX_CONTEXT_NODES = 4  # of a step that measures the price of the context
NUM_WORDS = 4  # different tokens of a prompt: so few repeat, and lookups find something
CACHE_FILLING = 0.01  # number in a cache, since memory that was never written is read faster
QUIET_RATIO = 1.5  # of a step's median seconds to its least, at most on a quiet machine
NO_COSTS = Grid(((1, Curve((1,), (0.0,))),))  # of drafts that take no time
# Table of steps that all cost the same, for a pace that measures.
FREE_COSTS = CostTable(steps=Grid(((1, Curve((1,), (1.0,))),)), drafts=(NO_COSTS,))


@dataclasses.dataclass(frozen=True)
class StepKind:
    """One kind of step: nodes a row that are verified, levels that are drafted at most.

    is_deep: whether a draft has all levels that it can have.
    """

    size: int
    num_levels: int = 0
    is_deep: bool = True


@dataclasses.dataclass(frozen=True)
class ReadingTime:
    """Seconds of a draft before which so many tokens of prompts were read."""

    drafter: int
    num_rows: int
    num_levels: int
    num_tokens: int
    seconds: float

    def find_seconds(self, drafts: Sequence[Grid]) -> float:
        """Return the seconds of a token, without those that the draft takes anyway."""
        usual_seconds = drafts[self.drafter].estimate(self.num_rows, np.array([self.num_levels]))[0]
        return max(0.0, self.seconds - float(usual_seconds)) / self.num_tokens


class ForcedPace(Pace):
    """Drafts what a kind of step has, whatever it costs or brings.

    All that a pace does is done, and then overruled: it is a part of what a drafted step takes.
    """

    kind = StepKind(1)

    def plan(self, remaining: Sequence[int], *cache: Any) -> bool:
        super().plan(remaining, *cache)
        self.max_levels, self.max_read = self.kind.num_levels, None
        return self.kind.size > 1

    def is_resting(self, num_rows: int) -> bool:
        return self.kind.size == 1

    def price_level(self) -> float:
        return min(super().price_level(), ALL_LEVELS) if self.kind.is_deep else np.inf

    def choose(self, chances: Any) -> int:
        super().choose(chances)
        return self.kind.size - 1


class Probe(PacedDrafter):
    """Drafts of one drafter, or of those that share a tree, with the seconds that they take."""

    def __init__(self, group: Sequence[Drafter], clock: Clock, vocab_size: int) -> None:
        super().__init__([group], FREE_COSTS)
        pace = self.pace
        self.pace: ForcedPace = ForcedPace(
            self.max_draft_tokens, FREE_COSTS, is_whole=pace.is_whole, is_planned=pace.is_planned
        )
        self.seconds, self._draft_clock, self._vocab_size = 0.0, clock, vocab_size

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        start_time = self._draft_clock()
        drafts = super().propose(requests)
        self.seconds = self._draft_clock() - start_time
        if self.is_indivisible or any(c.draft_probs is not None for c in drafts):
            return drafts
        self._drafts = [self._fit(candidates) for candidates in drafts]
        return self._drafts

    def _fit(self, candidates: Candidates) -> Candidates:
        """Lengthen or shorten a draft to as many nodes as are to be verified."""
        tree, size = candidates.tree, self.pace.kind.size
        num_missing = size - tree.num_nodes
        if num_missing <= 0:
            return candidates.keep(range(size)) if num_missing else candidates
        last_node, depth = tree.num_nodes - 1, int(tree.depths[-1])
        return Candidates(
            Tree(
                np.concatenate((tree.tokens, np.arange(num_missing) % self._vocab_size)),
                np.concatenate((tree.parents, np.arange(last_node, last_node + num_missing))),
                np.concatenate((tree.depths, np.arange(depth + 1, depth + 1 + num_missing))),
            )
        )


class Measuring:
    """Times of steps of an engine, by numbers of requests and kinds of steps, until time is up."""

    def __init__(
        self, decoder: Decoder, groups: Sequence[Sequence[Drafter]], *, max_batch_size: int,
        max_seq_len: int, max_num_tokens: int, clock: Clock = time.perf_counter,
    ) -> None:  # fmt: skip
        self._decoder, self._clock = decoder, clock
        self._max_batch_size, self._max_seq_len = max_batch_size, max_seq_len
        self._options = Options(max_num_tokens=max_num_tokens)
        self._deadline = clock() + MAX_SECONDS
        self._chance = random.Random(0)
        vocab_size = decoder.model.vocab_size
        self._probes = [Probe(group, clock, vocab_size) for group in groups or [[Drafter()]]]
        # Seconds, all that were measured: of steps by requests and nodes, of drafts the same by
        # levels, of passes over prompts by tokens, and of a prompt's token that a drafter reads.
        self._steps = _Times()
        self._drafts = [_Times() for _ in groups]
        self._prompts: dict[int, float] = {}
        self._reading: list[ReadingTime] = []

    @torch.inference_mode()
    def measure(self) -> tuple[CostTable, bool]:
        """Return the table, and whether the machine was quiet meanwhile."""
        # The drafter with the largest trees measures all steps, the others only their drafts.
        order = sorted(enumerate(self._probes), key=lambda probe: -probe[1].max_draft_tokens)
        self._start(1, order[0][1], LEAST_PROMPT)  # memory and threads are ready after it
        for num_rows in self._list_rows():
            for turn, (number, probe) in enumerate(order):
                if not (self._has_all(num_rows, number) and self._is_late):
                    kinds = _list_drafts(probe) if turn else _list_steps(probe)
                    self._measure_rows(num_rows, number, kinds, len(order) - turn)
            if self._is_late:
                break
        steps, drafts = self._steps.make_grid(), [times.make_grid() for times in self._drafts]
        reading = [read.find_seconds(drafts) for read in self._reading]
        table = CostTable(
            steps=steps, drafts=(*drafts,), reading=statistics.median_low(reading or [0.0]),
            prompts=smooth(self._prompts) if self._prompts else None,
            context=self._measure_context(),
        )  # fmt: skip
        return table, self._steps.find_noise() < QUIET_RATIO

    @property
    def _is_late(self) -> bool:
        return self._clock() > self._deadline

    def _has_all(self, num_rows: int, number: int) -> bool:
        """Return whether steps of so many requests were measured, and a drafter's drafts of any."""
        has_drafts = not self._drafts or not self._drafts[number].is_empty
        return self._steps.has(num_rows) and has_drafts

    def _list_rows(self) -> list[int]:
        """List the numbers of requests to measure: one, all, then some between."""
        max_rows, numbers_between = self._max_batch_size, list[int]()
        while (number := ROWS_FACTOR ** (len(numbers_between) + 1)) < max_rows:
            numbers_between.append(number)
        return [*dict.fromkeys((1, max_rows, *numbers_between))]

    def _measure_rows(
        self, num_rows: int, number: int, kinds: Sequence[StepKind], num_left: int
    ) -> None:
        """Measure kinds of steps, smallest first, with a drafter.

        num_left: drafters that are measured yet. A kind that takes n times a plain step's time has
        every n-th turn. Sizes beyond one that is dear have none: they lie on a line.
        """
        probe = self._probes[number]
        seconds_left = max(0.0, self._deadline - self._clock())
        share = 0.5 if num_rows == 1 and self._max_batch_size > 1 else 0.9
        end_time = self._clock() + seconds_left * share * 3 / (2 + num_left)
        batch: Batch | None = None
        for turn in range(1 + MAX_ROUNDS):  # the first warms everything up
            prompt_length = self._fit_prompt(num_rows)
            if self._reads_prompt(num_rows, probe, turn):
                batch, prompt_length = None, self._fit_read_prompt(probe)
            for kind in self._choose_kinds(num_rows, kinds, turn):
                if turn and self._clock() > end_time:
                    return
                if batch is None or not _has_room(batch, self._count_needed(probe)):
                    batch = self._start(num_rows, probe, prompt_length)
                if batch is None:
                    return
                self._time_steps(batch, number, probe, kind, is_counted=turn > 0)

    def _reads_prompt(self, num_rows: int, probe: Probe, turn: int) -> bool:
        """Return whether a turn begins with a prompt, so that its reading is measured."""
        is_reader = num_rows == 1 and probe is self._probes[-1]  # it alone may be one that reads
        if not is_reader or turn == 0:
            return False
        is_cheap = self._fit_read_prompt(probe) <= self._count_affordable(1)
        return turn == 1 or (turn == 2 and is_cheap)

    def _choose_kinds(
        self, num_rows: int, kinds: Sequence[StepKind], turn: int
    ) -> Iterator[StepKind]:
        """Choose the kinds that have a turn, each by the times of those before it."""
        for kind in kinds:
            if turn % max(1, int(self._find_ratio(num_rows, kind))) == 0:
                yield kind
            if kind.num_levels > 1 and self._find_ratio(num_rows, kind) > DEAR_RATIO:
                return

    def _is_slow(self, num_rows: int) -> bool:
        return self._steps.find_least(num_rows) > SLOW_SECONDS

    def _find_ratio(self, num_rows: int, kind: StepKind) -> float:
        """Return how many times a plain step's time a kind takes; 0 where it is not measured."""
        plain_seconds = self._steps.find_least(num_rows) or np.inf
        return self._steps.find_least(num_rows, kind.size) / plain_seconds

    def _count_needed(self, probe: Probe) -> int:
        """Return the tokens that the steps of one kind emit at most."""
        drafted = (WARM_STEPS + COUNTED_STEPS) * (probe.max_draft_tokens + 2)
        return max(drafted, PLAIN_WARM_STEPS + PLAIN_COUNTED_STEPS + 1)

    def _count_affordable(self, num_rows: int) -> int:
        """Count the tokens of each prompt that are worth their time here."""
        price = min((seconds / tokens for tokens, seconds in self._prompts.items()), default=0.0)
        return int(PROMPT_SECONDS / max(1e-9, price * num_rows))

    def _fit_prompt(self, num_rows: int) -> int:
        return min(max(LEAST_PROMPT, self._count_affordable(num_rows) // 4), SHORT_PROMPT)

    def _fit_read_prompt(self, probe: Probe) -> int:
        """Return the tokens of a prompt whose reading is measured.

        Beside the least there are tokens that a step may bring, which are read in each draft.
        """
        least_length = READ_TOKENS + probe.max_draft_depth + 1
        return min(max(least_length, self._count_affordable(1)), LONG_PROMPT)

    def _start(self, num_rows: int, probe: Probe, prompt_length: int) -> Batch | None:
        """Begin texts, and read their prompts; None where the engine has no room for any."""
        needed_tokens = 2 * self._count_needed(probe)
        text_length = min(self._max_seq_len, prompt_length + max(needed_tokens, 256))
        prompt_length = min(prompt_length, max(1, text_length - needed_tokens))
        if text_length <= prompt_length + probe.max_draft_tokens + 2:
            return None
        words = self._chance.choices(range(self._decoder.model.vocab_size), k=NUM_WORDS)
        requests = [
            Request(
                index=index, max_output_len=text_length - prompt_length, end_ids=frozenset(),
                input_ids=self._chance.choices(words, k=prompt_length),
            )
            for index in range(num_rows)
        ]  # fmt: skip
        batch = Batch(
            self._decoder, probe, self._options, Timing(), num_rows=num_rows,
            max_seq_len=text_length,
        )  # fmt: skip
        for request in requests:
            batch.submit(request)
        probe.pace.kind = StepKind(1)
        start_time = self._clock()
        batch.step()
        seconds, tokens = self._clock() - start_time, prompt_length * num_rows
        self._prompts[tokens] = min(seconds, self._prompts.get(tokens, seconds))
        return batch

    def _time_steps(
        self, batch: Batch, number: int, probe: Probe, kind: StepKind, *, is_counted: bool
    ) -> None:
        """Time steps of one kind; of an engine whose steps leave nothing in caches, one."""
        num_rows = len(batch.scheduler.active)
        probe.pace.kind = kind
        num_warm, num_counted = WARM_STEPS, COUNTED_STEPS
        if kind.size == 1:
            num_warm, num_counted = PLAIN_WARM_STEPS, PLAIN_COUNTED_STEPS
        for step in range(num_warm + num_counted):
            probe.seconds, probe.num_prefilled = 0.0, 0
            start_time = self._clock()
            batch.step()
            seconds = self._clock() - start_time
            drafting = probe.seconds if kind.size > 1 else 0.0
            if probe.num_prefilled >= (READ_TOKENS if num_rows == 1 else LONG_PROMPT):
                self._reading.append(
                    ReadingTime(
                        number, num_rows, max(1, probe.num_levels), probe.num_prefilled, drafting
                    )
                )
                continue
            is_slow = self._is_slow(num_rows)
            if step < num_warm and self._steps.has(num_rows, kind.size) and not is_slow:
                continue
            is_counted = is_counted or is_slow
            self._steps.add(num_rows, kind.size, seconds - drafting, is_counted=is_counted)
            if kind.size > 1:
                levels = max(1, probe.num_levels)
                self._drafts[number].add(num_rows, levels, drafting, is_counted=is_counted)
            if self._is_slow(num_rows):
                break

    def _measure_context(self) -> Curve:
        """Return the seconds that a position in the cache adds to a step, by its nodes.

        Reading of keys and values is the price of one node, further nodes multiply with them.
        """
        max_tokens = max(probe.max_draft_tokens for probe in self._probes)
        sizes = sorted({1, min(1 + max_tokens, MAX_CONTEXT_NODES)})
        far_position = min(FAR_POSITION, self._max_seq_len - 1 - sizes[-1])
        if far_position < MIN_FAR_POSITION:
            return CostTable.context
        cache = self._decoder.make_cache(1, far_position + sizes[-1])
        cache.blocks.fill_(CACHE_FILLING)
        times = self._time_chains(cache, sizes, (1, far_position))
        least = {kind: min(seconds[1:] or seconds) for kind, seconds in times.items()}
        rises = {size: least[size, far_position] - least[size, 1] for size in sizes}
        return smooth({size: max(0.0, rise) / (far_position - 1) for size, rise in rises.items()})

    def _time_chains(
        self, cache: KVCache, sizes: Sequence[int], pasts: Sequence[int]
    ) -> dict[tuple[int, int], list[float]]:
        """Return the seconds of steps by turns, by their nodes and the positions before."""
        times = {(size, past): list[float]() for size in sizes for past in pasts}
        end_time = self._clock() + CONTEXT_SECONDS
        for _ in range(1 + CONTEXT_TURNS):
            for kind, seconds in times.items():
                start_time = self._clock()
                self._run_chain(cache, *kind)
                seconds.append(self._clock() - start_time)
            if self._clock() > end_time:
                break
        return times

    def _run_chain(self, cache: KVCache, size: int, past: int) -> None:
        """Run a step of one request, whose chain of so many nodes comes after `past` positions."""
        cache.fill(past)
        step = Step(
            rows=np.zeros(1, np.int64), tokens=np.zeros((1, size), np.int64),
            positions=np.arange(past, past + size)[None],
            tree_mask=np.tril(np.ones((1, size, size), np.bool_)),
        )  # fmt: skip
        states = self._decoder.forward(step, cache)
        self._decoder.compute_logits(states).sum().item()  # waits for a device


class _Times:
    """Seconds of steps, those that were counted apart from those that warmed up."""

    def __init__(self) -> None:
        # By requests and sizes.
        self._seconds: Measurements = defaultdict(lambda: defaultdict(list))
        self._warming_seconds: Measurements = defaultdict(lambda: defaultdict(list))

    def add(self, num_rows: int, size: int, seconds: float, *, is_counted: bool) -> None:
        (self._seconds if is_counted else self._warming_seconds)[num_rows][size].append(seconds)

    def has(self, num_rows: int, size: int = 1) -> bool:
        """Return whether steps of a size were measured, or of any but for warming up."""
        return bool(self._list_seconds(num_rows, size))

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was measured, not even for warming up."""
        return not (self._seconds or self._warming_seconds)

    def find_least(self, num_rows: int, size: int = 1) -> float:
        """Return the least seconds of steps of a size; 0 where none were measured."""
        return min(self._list_seconds(num_rows, size), default=0.0)

    def _list_seconds(self, num_rows: int, size: int) -> list[float]:
        return self._seconds[num_rows][size] or self._warming_seconds[num_rows][size]

    def make_grid(self) -> Grid:
        """Return the lower quartile of each."""
        curves = {}
        for num_rows in sorted({*self._seconds, *self._warming_seconds}):
            low_seconds: dict[int, float] = {}
            for size in {*self._seconds[num_rows], *self._warming_seconds[num_rows]}:
                if measured := self._list_seconds(num_rows, size):
                    low_seconds[size] = find_quartile(measured)
            if low_seconds:
                curves[num_rows] = smooth(low_seconds)
        return Grid((*sorted(curves.items()),)) if curves else NO_COSTS

    def find_noise(self) -> float:
        """Return the median of how many times its least a kind of step usually takes."""
        ratios = [
            statistics.median(seconds) / max(1e-9, min(seconds))
            for sizes in self._seconds.values()
            for seconds in sizes.values()
            if len(seconds) > 2
        ]
        return statistics.median(ratios) if ratios else 1.0


def _list_steps(probe: Probe) -> list[StepKind]:
    """List the kinds of steps to measure with a drafter: plain ones, and by powers of two."""
    max_tokens = probe.max_draft_tokens
    if not max_tokens:
        return [StepKind(1)]
    if probe.is_indivisible:
        return [StepKind(1), StepKind(max_tokens + 1)]
    brief = _list_brief(probe)
    sizes = {*(2**n for n in range(1, max_tokens.bit_length())), max_tokens + 1}
    sizes -= {kind.size for kind in brief}
    return [StepKind(1), *brief, *(StepKind(size, size - 1) for size in sorted(sizes))]


def _list_drafts(probe: Probe) -> list[StepKind]:
    """List the kinds of steps that tell what the least and the most drafts cost."""
    max_tokens = probe.max_draft_tokens
    if probe.is_indivisible:
        return [StepKind(max_tokens + 1)]
    return [*(_list_brief(probe) or [StepKind(2, 1)]), StepKind(2, max_tokens)]


def _list_brief(probe: Probe) -> list[StepKind]:
    """Return the step with a draft of one level, if the drafter has others and asks for each."""
    has_levels = probe.max_draft_depth > 1 and not probe.pace.is_planned
    return [StepKind(2, 1, is_deep=False)] if has_levels else []


def find_quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile: others only delay, and of more steps the least is less.

    Of n in order it is the (n + 1) / 4-th, or lies as far between two, so that few steps are not
    the cheaper or the dearer for it.
    """
    ordered, place = sorted(seconds), max(0.0, (len(seconds) + 1) / 4 - 1)
    return float(np.interp(place, range(len(ordered)), ordered))


def _has_room(batch: Batch, num_tokens: int) -> bool:
    active = batch.scheduler.active
    return bool(active) and min(request.remaining for request in active) > num_tokens
