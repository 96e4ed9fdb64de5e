"""What pacing keeps and loses, on simulated machines and drafters, from a run's first step on.

It has a table of what the machine's steps and drafts cost, of which each entry is wrong by a few
percent, as measured ones are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specdec.decode.accept import Candidates
from specdec.decode.cost_table import CostTable, Grid, smooth
from specdec.decode.drafters.calibration import read_confidence
from specdec.decode.drafters.pace import Pace
from specdec.engine.tree import pack_beams
from tests.covering import cover

LENGTHS = 4, 12  # tokens of a draft
FIRST, LAST = 100, 400  # steps: until the first, losses to plain decoding count, then the share
SHARE, LOSS = 0.97, 0.05
NUM_DRAWS, DRAWS_EACH = 12, 3  # draws of the table's errors, and those that each world has
# Worlds that miss the share for some draws, and what the worst of twelve keeps.
SHORT_OF_SHARE = {
    "flat-uneven-0.4-dear-levels-sure-12-4": 0.96,
    "flat-faster later-rises-cheap-planned-honest-4-1": 0.96,
    "steep-spikes-0.9-dear-pass-sure-12-1": 0.9,
    "roof-still-rises-dear at first-lookup-sure-12-1": 0.95,
    "flat-uneven-0.4-dear at first-pass-sure-4-4-True": 0.94,
}
ERROR = 0.05  # by which an entry of the table is wrong at most

# Seconds of a step by its tokens: bound by memory for a while, by arithmetic at once, by both.
MACHINES: dict[str, Callable[[int], float]] = {
    "flat": lambda tokens: 1.0 + 0.02 * tokens,
    "steep": lambda tokens: 0.3 + 0.2 * tokens,
    "roof": lambda tokens: max(1.0 + 0.006 * tokens, 0.085 * tokens),
    "blocks": lambda tokens: 1.0 + 0.25 * (math.ceil(tokens / 8) - 1),
}
COVERED_MACHINES = tuple(MACHINES)
# On which a second token is dearer than all further ones together, as on small models.
MACHINES["jump"] = lambda tokens: 1.0 + (tokens > 1) * (0.25 + 0.04 * (tokens - 1))
# By how much a step is slower than it is alone, by its number.
NOISES: dict[str, Callable[[int, random.Random], float]] = {
    "still": lambda step, chance: 1.0,
    "uneven": lambda step, chance: 1 + 0.1 * chance.random(),
    "spikes": lambda step, chance: 2.5 if chance.random() < 0.04 else 1.0,
    "slow minutes": lambda step, chance: 1.7 if step % 120 > 95 else 1.0,
    "faster later": lambda step, chance: 1.6 if step < 60 else 1.0,
}
# How often a drafted token is right, by step.
RATES: dict[str, Callable[[int], float]] = {
    "0": lambda step: 0.0,
    "0.4": lambda step: 0.4,
    "0.7": lambda step: 0.7,
    "0.9": lambda step: 0.9,
    "falls": lambda step: 0.85 if step < 200 else 0.2,
    "rises": lambda step: 0.2 if step < 200 else 0.85,
}
# Seconds of a level of drafts, and of a draft besides. How a drafter works: in one pass or in one
# for each token, which may end early or not; whole drafts are not cut; a lookup finds something
# every other time.
COSTS = {"cheap": (0.06, 0.0), "dear": (0.25, 0.0), "dear at first": (0.06, 0.4)}
COVERED_COSTS = tuple(COSTS)
COSTS["very dear"] = (0.3, 0.1)
KINDS = ("pass", "levels", "planned", "whole", "lookup")
WORDS = ("honest", "sure")  # what the drafter says of itself
# By how much plain steps after a drafted one are slower, the first, the second and so on: the
# drafter has taken the target's weights out of the processor's caches.
COLD = 0.08, 0.04, 0.02


@dataclasses.dataclass
class World:
    """A run of `num_rows` requests that never end."""

    machine: str
    noise: str
    rate: str
    cost: str
    kind: str
    words: str
    length: int
    num_rows: int
    is_cold: bool = False
    since: int = 0  # steps after the newest draft

    def run(self, pace: Any) -> tuple[float, float]:
        """The share kept of the better of plain and fixed drafting, and what was lost before.

        Tokens are counted as they are to be expected, and all three ways have the same noise.
        """
        chance, self.since = random.Random(0), 0
        tokens, seconds = np.zeros((2, 3)), np.zeros((2, 3))  # before and after; ours, plain, fixed
        for step in range(LAST):
            noise = NOISES[self.noise](step, chance)
            drafts = [self.draft(step, chance) for _ in range(self.num_rows)]
            paid = self.step(pace, drafts, noise, chance)
            part = int(step >= FIRST)
            plain = MACHINES[self.machine](self.num_rows) * noise
            longest = max(len(chances) for chances, _ in drafts)
            fixed = MACHINES[self.machine](self.num_rows * (longest + 1)) * noise
            fixed += self.price(self.length) * noise
            emitted = sum(1 + np.cumprod(chances).sum() for chances, _ in drafts)
            tokens[part] += paid[0], self.num_rows, emitted
            seconds[part] += paid[1], plain, fixed
        before, after = tokens / seconds
        return after[0] / max(after[1:]), 1 - before[0] / before[1]

    def measure(self, seed: int) -> CostTable:
        """A table of its costs, by powers of two, which is wrong by chance."""
        chance = random.Random(seed)

        def curve(costs: Callable[[int], float], largest: int) -> Grid:
            sizes = sorted({*(2**n for n in range(largest.bit_length())), largest})
            wrong = {n: costs(n) * (1 + ERROR * chance.uniform(-1, 1)) for n in sizes}
            return Grid(((self.num_rows, smooth(wrong)),))

        steps = curve(lambda size: MACHINES[self.machine](self.num_rows * size), self.length + 1)
        return CostTable(steps=steps, drafts=(curve(self.price, self.length),))

    def make_pace(self, seed: int = 1) -> Pace:
        is_planned = self.kind == "planned"
        table = self.measure(seed)
        return Pace(self.length, table, is_whole=self.kind == "whole", is_planned=is_planned)

    def price(self, num_levels: int) -> float:
        """Seconds of a draft of so many tokens a row."""
        level, first = (seconds * (1 + 0.02 * self.num_rows) for seconds in COSTS[self.cost])
        if self.kind == "lookup":
            return level / 10
        return first + level * (num_levels if self.kind in ("levels", "planned") else 2)

    def draft(self, step: int, chance: random.Random) -> tuple[np.ndarray, np.ndarray]:
        """How often each token of a draft is right, and how sure the drafter is of it."""
        rate = RATES[self.rate](step)
        length = self.length
        if self.kind == "lookup":
            length = self.length * chance.randrange(2)
        chances = np.full(length, rate)
        if self.words == "honest":  # surer of some than of others, right as often in all
            spread = min(rate, 1 - rate)
            chances += [spread * chance.choice((-0.9, 0.9)) for _ in range(length)]
            return chances, chances
        return chances, np.full(length, 0.95)

    def step(
        self, pace: Pace, drafts: list[tuple[np.ndarray, np.ndarray]], noise: float,
        chance: random.Random,
    ) -> tuple[float, float]:  # fmt: skip
        """One step as pace has it: tokens to be expected, seconds."""
        num_rows, size, draft_seconds, num_levels = self.num_rows, 1, None, 1
        found: list[Candidates] = []
        if pace.plan([1000] * num_rows):
            lengths = [len(chances) for chances, _ in drafts]
            if self.kind == "planned":
                lengths = [min(pace.max_levels, n) for n in lengths]
                num_levels = max(lengths)
            elif self.kind == "levels":
                least = pace.price_level()
                sure = np.sum([np.cumprod(words) for _, words in drafts], axis=0)
                ends = np.flatnonzero(sure <= least)
                num_levels = max(1, min([self.length, *(ends + 1)]))
                lengths = [num_levels] * num_rows
            draft_seconds = self.price(num_levels) * noise * (1 + 0.02 * chance.random())
            found = [
                Candidates(
                    pack_beams(0, np.arange(1, n + 1)[None])
                    if n else pack_beams(0, np.ones((1, 1), np.int64)).keep([0]),
                    None, np.array([1.0, *words[:n]]),
                )
                for n, (_, words) in zip(lengths, drafts, strict=True)
            ]  # fmt: skip
            most = max(lengths)
            if self.kind not in ("whole", "planned"):
                chances = np.zeros((num_rows, most))
                for row, own in enumerate(found):
                    chances[row, : lengths[row]] = np.cumprod(pace.calibration.estimate(own))[1:]
                most = pace.choose(chances.tolist())
            found = [
                dataclasses.replace(
                    c, tree=c.tree.keep(range(min(most + 1, c.tree.num_nodes))),
                    confidence=read_confidence(c)[: most + 1],
                )
                for c in found
            ]  # fmt: skip
            size = max(c.tree.num_nodes for c in found)
        self.since = self.since + 1 if draft_seconds is None else 0
        took = MACHINES[self.machine](num_rows * size) * noise
        if self.is_cold and size == 1 and self.since <= len(COLD):
            took *= 1 + COLD[max(0, self.since - 1)]
        paths, expected = [[0] for _ in range(num_rows)], float(num_rows)
        for row, candidates in enumerate(found):
            kept = drafts[row][0][: candidates.tree.num_nodes - 1]
            expected += np.cumprod(kept).sum()
            right = list(itertools.takewhile(lambda each: chance.random() < each, kept))
            paths[row] = [*range(len(right) + 1)]
        if found:
            pace.calibration.record(found, paths)
            pace.record(size, [len(path) for path in paths], [(0, num_rows, num_levels)])
        return expected, took + (draft_seconds or 0.0)


def list_worlds() -> list[World]:
    """Rows in which every pair of values occurs, and those where something else is hard.

    In two only long drafts pay; in four plain steps after a draft are slower than others. In the
    last four a draft costs as much as several steps, so that one that is wrong loses more than 64
    steps may lose.
    """
    rows = itertools.product(
        COVERED_MACHINES, NOISES, RATES, COVERED_COSTS, KINDS, WORDS, LENGTHS, (1, 4, 16)
    )
    long = [
        World("flat", "still", "0.9", "dear at first", kind, "honest", 12, 1)
        for kind in ("levels", "planned")
    ]
    cold = [
        ("flat", "uneven", "0.4", "dear at first", "pass", "sure", 4, 4),
        ("flat", "still", "0", "cheap", "planned", "sure", 4, 4),
        ("flat", "uneven", "0", "cheap", "pass", "honest", 12, 1),
        ("roof", "still", "0", "dear", "levels", "honest", 4, 1),
    ]
    jump = [
        World("jump", "uneven", "0.9", "very dear", kind, words, 8, 1)
        for kind in ("levels", "planned")
        for words in WORDS
    ]
    covering = [World(*row) for row in cover(rows)]
    return covering + long + [World(*row, is_cold=True) for row in cold] + jump


def list_draws() -> list[tuple[World, int]]:
    """Each world with some draws of the table's errors, so that all draws occur."""
    return [
        (world, (number + turn * NUM_DRAWS // DRAWS_EACH) % NUM_DRAWS)
        for number, world in enumerate(list_worlds())
        for turn in range(DRAWS_EACH)
    ]


def name_world(world: World) -> str:
    """Name a world by its values, without its state."""
    return "-".join(str(value) for name, value in vars(world).items() if name != "since")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world", "draw"), list_draws(), ids=lambda v: name_world(v) if isinstance(v, World) else str(v)
)
def test_what_is_kept_and_what_is_lost(world: World, draw: int) -> None:
    least = SHORT_OF_SHARE.get(name_world(world).removesuffix("-False"), SHARE)
    share, loss = world.run(world.make_pace(draw))
    assert share >= least
    assert loss <= LOSS


class Texts(World):
    """Texts of 60 steps, of which one in three is easy; pace is told where one begins."""

    begins = False

    def draft(self, step: int, chance: random.Random) -> tuple[np.ndarray, np.ndarray]:
        self.begins = step % 60 == 0
        return super().draft(step, chance)

    def step(
        self, pace: Pace, drafts: list[tuple[np.ndarray, np.ndarray]], noise: float,
        chance: random.Random,
    ) -> tuple[float, float]:  # fmt: skip
        if self.begins:
            pace.start(self.num_rows)
        return super().step(pace, drafts, noise, chance)


@pytest.mark.thorough
@pytest.mark.parametrize("cost", ["cheap", "dear"])
@pytest.mark.parametrize("kind", ["pass", "levels", "planned", "whole"])
def test_hard_texts_do_not_end_drafting_for_the_next(
    kind: str, cost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RATES, "texts", lambda step: (0.85, 0.3, 0.2)[step // 60 % 3])
    world = Texts("roof", "uneven", "texts", cost, kind, "honest", 4, 1)
    share, loss = world.run(world.make_pace())
    assert share >= SHARE
    assert loss <= LOSS
