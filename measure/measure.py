"""Measurements with and without speculation by turns: speed, spread, phases, acceptance."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from specdec.decode.drafters.base import Drafter
from specdec.decode.requests import ActiveRequest, sum_stats
from specdec.system import logs

from .engine import PHASES, Bench, BenchRun
from .repetition import is_looping

logger = logs.get_logger(__name__)


@dataclasses.dataclass
class Rounds:
    """Runs with one drafter: a warm-up that gives texts, and timed runs."""

    warm_up: BenchRun
    timed: list[BenchRun] = dataclasses.field(default_factory=list)

    def take(self, category: str) -> Rounds:
        """Return the rounds of one category."""
        return Rounds(self.warm_up.take(category), [run.take(category) for run in self.timed])

    def list_rates(self) -> list[float]:
        """Return the tokens per second of each round, prompts included."""
        return [run.rate for run in self.timed]

    def list_step_rates(self) -> list[float]:
        """Return the tokens per second of each round's steps.

        The prompts' passes and the tokens that they yield do not count.
        """
        return [
            sum(len(text) - 1 for text in run.texts)
            / max(1e-9, sum(getattr(run.timing, phase) for phase in PHASES))
            for run in self.timed
        ]

    def describe_step(self) -> dict[str, float]:
        """Return the median milliseconds of a step, in total and by phase."""
        times = {
            phase: statistics.median(
                1000 * getattr(run.timing, phase) / max(1, run.timing.num_steps)
                for run in self.timed
            )
            for phase in PHASES
        }
        return {phase: round(value, 4) for phase, value in times.items()} | {
            "total": round(sum(times.values()), 4)
        }


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the lowest and the highest value."""
    return {
        "median": round(statistics.median(values), 4),
        "lowest": round(min(values), 4),
        "highest": round(max(values), 4),
    }


def divide(rates: Sequence[float], plain_rates: Sequence[float]) -> dict[str, float]:
    """Return the median and the spread of the ratio of two rates within each round."""
    return summarize([a / b for a, b in zip(rates, plain_rates, strict=True)])


def alternate(
    bench: Bench, drafters: dict[str, Drafter], batch_size: int, repeat: int
) -> dict[str, Rounds]:
    """Decode with each drafter in turn, `repeat` times after one untimed round.

    Every other round goes backwards, so that a drift of the machine's speed favours no drafter.
    """
    rounds: dict[str, Rounds] = {}
    with logs.show_waiting(f"measuring batches of {batch_size}", logger) as tell:
        for name, drafter in drafters.items():
            tell(f"warming up, {name}")
            rounds[name] = Rounds(bench.run(drafter, batch_size))
        for index in range(repeat):
            order = list(drafters) if index % 2 == 0 else list(drafters)[::-1]
            for name in order:
                tell(f"round {index + 1} of {repeat}, {name}")
                rounds[name].timed.append(bench.run(drafters[name], batch_size))
    return rounds


def measure_batch(bench: Bench, batch_size: int, repeat: int) -> dict[str, Any]:
    """Compare speculation with plain decoding for one batch size."""
    rounds = alternate(
        bench, {"speculation": bench.engine.drafter, "plain": bench.plain}, batch_size, repeat
    )
    speculation, plain = rounds["speculation"], rounds["plain"]
    return {
        "batch_size": batch_size,
        **compare(speculation, plain),
        "step_ratio": divide(speculation.list_step_rates(), plain.list_step_rates()),
        **{name: describe_rounds(group) for name, group in rounds.items()},
        "categories": {
            name: {"num_prompts": len(group), **compare(speculation.take(name), plain.take(name))}
            for name, group in bench.groups.items()
        },
        "looping": describe_loops(list_results(speculation.warm_up)),
    }


def describe_rounds(rounds: Rounds) -> dict[str, Any]:
    """Return speeds, steps and milliseconds of a step of one drafter."""
    return {
        "tokens_per_second": summarize(rounds.list_rates()),
        "step_tokens_per_second": summarize(rounds.list_step_rates()),
        "prefill_seconds": summarize([run.timing.prefill for run in rounds.timed]),
        "num_steps": rounds.warm_up.timing.num_steps,
        "step_ms": rounds.describe_step(),
    }


def compare(speculation: Rounds, plain: Rounds) -> dict[str, Any]:
    """Compare speculation with plain decoding, for all prompts or for those of a category."""
    return {
        "ratio": divide(speculation.list_rates(), plain.list_rates()),
        "acceptance": describe_acceptance(list_results(speculation.warm_up)),
        "texts": compare_texts(speculation.warm_up.texts, plain.warm_up.texts),
    }


def list_results(run: BenchRun) -> list[ActiveRequest]:
    """Return the results of all categories."""
    return [result for results in run.results.values() for result in results]


def describe_acceptance(results: Sequence[ActiveRequest]) -> dict[str, Any]:
    """Return acceptance over all verify steps of some requests.

    accepted_by_position[n]: the share of steps in which more than n draft tokens were accepted.
    """
    histogram = [
        sum(counts) for counts in zip(*(r.stats.accepted_histogram for r in results), strict=True)
    ]
    steps = sum(histogram)
    totals = sum_stats(results)
    return {
        "acceptance_length": totals["acceptance_length"],
        "acceptance_rate": totals["acceptance_rate"],
        "draft_tokens_per_step": round(
            sum(r.stats.num_draft_tokens for r in results) / max(1, steps), 3
        ),
        "accepted_histogram": histogram,
        "accepted_by_position": [
            round(sum(histogram[n:]) / max(1, steps), 4) for n in range(1, len(histogram))
        ],
    }


def describe_loops(results: Sequence[ActiveRequest]) -> dict[str, Any]:
    """Count the texts that repeat themselves, and return the acceptance length of the others."""
    straight_results = [result for result in results if not is_looping(result.output_ids)]
    length = sum_stats(straight_results)["acceptance_length"] if straight_results else None
    return {
        "texts": len(results) - len(straight_results),
        "of": len(results),
        "acceptance_length_of_others": length,
    }


def compare_texts(
    texts: Iterable[list[int]], plain_texts: Iterable[list[int]]
) -> dict[str, int]:  # fmt: skip
    """Count the texts that are equal with and without speculation."""
    equalities = [a == b for a, b in zip(texts, plain_texts, strict=True)]
    return {"compared": len(equalities), "equal": sum(equalities)}
