"""The steps that a setting would cause, and what its drafts cost, found without decoding twice."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from specdec.decode.drafters.base import Proposer
from specdec.decode.requests import sum_stats

from .engine import Bench
from .measure import list_results
from .methods.base import Candidate
from .replay import Recording, Replay, count_positions, replay

SAMPLE_STEPS = 24  # drafts that are timed, where what is accepted is known without


class Forecaster:
    """Finds, for one batch size, the steps that each setting would cause and its drafts' times."""

    def __init__(self, bench: Bench, recordings: Sequence[Recording], batch_size: int) -> None:
        self.bench, self.recordings, self.batch_size = bench, recordings, batch_size
        # Categories are decoded one after another, so that no batch holds requests of two.
        known = {recording.request.index: recording for recording in recordings}
        self._groups = [[known[r.index] for r in group] for group in bench.groups.values()]
        self._sampled: dict[str, Replay] = {}  # by cost

    def find(self, candidate: Candidate) -> Replay:
        """Replay a setting; decode where only that tells."""
        if not candidate.is_replayed:
            return self._decode(candidate)
        if candidate.rehearsed is None:
            return self._replay(candidate.proposer)
        if candidate.cost not in self._sampled:
            self._replay(candidate.proposer, 1)  # warms up
            self._sampled[candidate.cost] = self._replay(candidate.proposer, SAMPLE_STEPS)
        found = self._replay(candidate.rehearsed)
        found.draft_seconds = spread_seconds(self._sampled[candidate.cost], found.num_admitted)
        return found

    def _replay(self, proposer: Proposer, max_steps: int | None = None) -> Replay:
        positions = count_positions(self.recordings, proposer.max_draft_tokens)
        decoder = self.bench.engine.decoder
        found = Replay()
        for group in self._groups:
            left = None if max_steps is None else max_steps - len(found.sizes)
            found += replay(proposer, group, self.batch_size, positions, decoder, max_steps=left)
        return found

    def _decode(self, candidate: Candidate) -> Replay:
        done = self.bench.run(candidate.proposer, self.batch_size)
        results = list_results(done)
        totals, num_steps = sum_stats(results), done.timing.num_steps
        drafted = sum(r.stats.num_draft_tokens for r in results)
        num_row_steps = int(totals["num_verify_steps"] or 0)
        return Replay(
            sizes=[1 + drafted / max(1, num_row_steps)] * num_steps,
            draft_seconds=[done.timing.draft / max(1, num_steps)] * num_steps,
            num_emitted=int(totals["num_output_tokens"] or 0) - len(results),
            num_row_steps=num_row_steps,
        )


def spread_seconds(sample: Replay, num_admitted: Sequence[int]) -> list[float]:
    """Seconds of all drafts by those of a few: of each draft, and of each request's first one."""
    pairs = list(zip(sample.draft_seconds, sample.num_admitted, strict=True))
    usual = statistics.median([s for s, count in pairs if not count] or sample.draft_seconds)
    first = sum(max(0.0, s - usual) for s, count in pairs if count)
    each = first / max(1, sum(sample.num_admitted))
    return [usual + each * count for count in num_admitted]
