"""Speculation on and off by turns: speed, its spread, where the time goes, what is accepted."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from specdec.decode.drafters.base import Drafter
from specdec.decode.requests import ActiveRequest, sum_stats
from specdec.system import logs

from .engine import PARTS, Bench, Pass
from .repetition import is_looping

logger = logs.get_logger(__name__)


@dataclasses.dataclass
class Rounds:
    """Passes of one way of decoding; the first, which warmed up, gives texts and no times."""

    warm_up: Pass
    timed: list[Pass] = dataclasses.field(default_factory=list)

    def take(self, category: str) -> Rounds:
        """The part of each pass that decoded one category."""
        return Rounds(self.warm_up.take(category), [done.take(category) for done in self.timed])

    def list_rates(self) -> list[float]:
        """Tokens per second of each round, prompts included."""
        return [done.rate for done in self.timed]

    def list_step_rates(self) -> list[float]:
        """Tokens per second of each round, without the prompts and the tokens that they yield."""
        return [
            sum(len(text) - 1 for text in done.texts)
            / max(1e-9, sum(getattr(done.timing, part) for part in PARTS))
            for done in self.timed
        ]

    def describe_step(self) -> dict[str, float]:
        """Median milliseconds of a step, whole and by part."""
        times = {
            part: statistics.median(
                1000 * getattr(done.timing, part) / max(1, done.timing.num_steps)
                for done in self.timed
            )
            for part in PARTS
        }
        return {part: round(value, 4) for part, value in times.items()} | {
            "total": round(sum(times.values()), 4)
        }


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Median and spread."""
    return {
        "median": round(statistics.median(values), 4),
        "lowest": round(min(values), 4),
        "highest": round(max(values), 4),
    }


def divide(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Median and spread of the ratio within each round."""
    return summarize([a / b for a, b in zip(over, under, strict=True)])


def alternate(
    bench: Bench, proposers: dict[str, Drafter], batch_size: int, repeat: int
) -> dict[str, Rounds]:
    """Decode with each proposer in turn, `repeat` times after one round that is not timed.

    Every other round goes backwards, so that a drift of the machine's speed favours none.
    """
    rounds: dict[str, Rounds] = {}
    with logs.show_waiting(f"measuring batches of {batch_size}", logger) as tell:
        for name, proposer in proposers.items():
            tell(f"warming up, {name}")
            rounds[name] = Rounds(bench.run(proposer, batch_size))
        for index in range(repeat):
            order = list(proposers) if index % 2 == 0 else list(proposers)[::-1]
            for name in order:
                tell(f"round {index + 1} of {repeat}, {name}")
                rounds[name].timed.append(bench.run(proposers[name], batch_size))
    return rounds


def measure_batch(bench: Bench, batch_size: int, repeat: int) -> dict[str, Any]:
    """Compare speculation with plain decoding for one batch size."""
    rounds = alternate(
        bench, {"speculation": bench.engine.proposer, "plain": bench.plain}, batch_size, repeat
    )
    ours, plain = rounds["speculation"], rounds["plain"]
    return {
        "batch_size": batch_size,
        **compare(ours, plain),
        "step_ratio": divide(ours.list_step_rates(), plain.list_step_rates()),
        **{
            name: {
                "tokens_per_second": summarize(done.list_rates()),
                "step_tokens_per_second": summarize(done.list_step_rates()),
                "prefill_seconds": summarize([d.timing.prefill for d in done.timed]),
                "num_steps": done.warm_up.timing.num_steps,
                "step_ms": done.describe_step(),
            }
            for name, done in rounds.items()
        },
        "categories": {
            name: {"num_prompts": len(group), **compare(ours.take(name), plain.take(name))}
            for name, group in bench.groups.items()
        },
        "looping": describe_loops(list_results(ours.warm_up)),
    }


def compare(ours: Rounds, plain: Rounds) -> dict[str, Any]:
    """Speculation over plain decoding, for all prompts or for those of a category."""
    return {
        "ratio": divide(ours.list_rates(), plain.list_rates()),
        "acceptance": describe_acceptance(list_results(ours.warm_up)),
        "texts": compare_texts(ours.warm_up.texts, plain.warm_up.texts),
    }


def list_results(done: Pass) -> list[ActiveRequest]:
    """Those of all categories."""
    return [result for results in done.results.values() for result in results]


def describe_acceptance(results: Sequence[ActiveRequest]) -> dict[str, Any]:
    """Acceptance over all verify steps of some requests.

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
    """How many texts run in circles, and what acceptance is over the others."""
    others = [result for result in results if not is_looping(result.output_ids)]
    length = sum_stats(others)["acceptance_length"] if others else None
    return {
        "texts": len(results) - len(others),
        "of": len(results),
        "acceptance_length_of_others": length,
    }


def compare_texts(ours: Iterable[list[int]], plain: Iterable[list[int]]) -> dict[str, int]:
    """Count the texts that are the same with and without speculation."""
    same = [a == b for a, b in zip(ours, plain, strict=True)]
    return {"compared": len(same), "equal": sum(same)}
