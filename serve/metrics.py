"""Counters for Prometheus under vLLM's names, and the `metrics` of an answer."""

from __future__ import annotations

import itertools
import time
from collections import Counter as Counts
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specdec import Engine, Event

from .scheduler import Job

LABELS = ("model_name",)
LONG = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480)
SHORT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
SIZES = tuple(2**n for n in range(15))
COUNTERS = {
    "spec_decode_num_drafts": "Verify steps of requests for which something was drafted.",
    "spec_decode_num_draft_tokens": "Tokens drafted.",
    "spec_decode_num_accepted_tokens": "Drafted tokens accepted.",
    "prompt_tokens": "Tokens of prompts read.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked for in the cache.",
    "prefix_cache_hits": "Prompt tokens taken from the cache.",
    "session_restored_tokens": "Prompt tokens taken from --session-dir.",
    "session_written_tokens": "Tokens whose keys and values were written to --session-dir.",
    "session_failed_writes": "Blocks of --session-dir that could not be written.",
    "session_damaged_blocks": "Blocks of --session-dir that were damaged, and removed.",
    "num_preemptions": "Requests that lost their row to others; none ever do.",
}
GAUGES = {
    "num_requests_running": "Requests that have a row.",
    "num_requests_waiting": "Requests that wait for one.",
    "session_bytes": "Bytes of --session-dir.",
    "kv_cache_usage_perc": "Share of the cache that running requests have filled, 0 to 1.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": (SHORT + (20, 40, 80), "From a request's coming to a token."),
    "inter_token_latency_seconds": (SHORT, "Between two steps that brought a request tokens."),
    "request_time_per_output_token_seconds": (SHORT, "A request's decoding, by token."),
    "e2e_request_latency_seconds": (LONG, "From a request's coming to its end."),
    "request_queue_time_seconds": (LONG, "Waiting for a row."),
    "request_prefill_time_seconds": (LONG, "From the row to the first token."),
    "request_decode_time_seconds": (LONG, "From the first token to the last."),
    "request_inference_time_seconds": (LONG, "From the row to the last token."),
    "request_prompt_tokens": (SIZES, "Tokens of a prompt."),
    "request_generation_tokens": (SIZES, "Tokens of an output."),
    "iteration_tokens_total": (SIZES, "Tokens that a step read and generated."),
}  # fmt: skip
# Finish reason of the engine -> OpenAI's.
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "abort"}


class Metrics:
    """Counters of a scheduler's steps and requests; a Watcher of the scheduler."""

    def __init__(self, prefix: str, model: str, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine
        self._cached = 0, 0
        self._session_counts = {key: 0 for key in COUNTERS if key.startswith("session_")}
        options: dict[str, Any] = {"registry": self.registry}

        def name(key: str) -> str:
            return f"{prefix}:{key}"

        self._counters: dict[str, Any] = {
            key: Counter(name(key), text, LABELS, **options).labels(model)
            for key, text in COUNTERS.items()
        }
        self._gauges: dict[str, Any] = {
            key: Gauge(name(key), text, LABELS, **options).labels(model)
            for key, text in GAUGES.items()
        }
        self._histograms: dict[str, Any] = {
            key: Histogram(name(key), text, LABELS, buckets=buckets, **options).labels(model)
            for key, (buckets, text) in HISTOGRAMS.items()
        }
        self._per_position = Counter(
            name("spec_decode_num_accepted_tokens_per_pos"),
            "Drafted tokens accepted, by their place in the draft.",
            (*LABELS, "position"), **options,
        )  # fmt: skip
        self._success = Counter(
            name("request_success"), "Requests that ended.", (*LABELS, "finished_reason"), **options
        )
        self._model = model
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model, reason)

    def _read_cache(self) -> tuple[int, int]:
        """Return the prompt tokens that were looked for in the cache, and those taken from it.

        The engine counts both when a request is given its row.
        """
        return self._engine.num_sought_tokens, self._engine.num_reused_tokens

    def render(self, running: Sequence[Job], num_waiting: int) -> bytes:
        """Return the metrics in Prometheus's text format, with gauges of this moment."""
        room = self._engine.max_batch_size * self._engine.max_seq_len
        for key, value in (
            ("num_requests_running", len(running)),
            ("num_requests_waiting", num_waiting),
            ("kv_cache_usage_perc", sum(job.num_cached_tokens for job in running) / room),
        ):
            self._gauges[key].set(value)
        self._count_sessions()
        return generate_latest(self.registry)

    def _count_sessions(self) -> None:
        """Take what the sessions have counted; 0 where none are kept."""
        if (sessions := self._engine.sessions) is None:
            return
        folder = sessions.folder
        self._gauges["session_bytes"].set(folder.num_bytes)
        for key, count in (
            ("session_restored_tokens", sessions.num_restored_tokens),
            ("session_written_tokens", sessions.num_written_tokens),
            ("session_failed_writes", folder.num_failures),
            ("session_damaged_blocks", folder.num_damaged),
        ):
            self._counters[key].inc(count - self._session_counts[key])
            self._session_counts[key] = count

    def note_start(self) -> None:
        """Begin to count; work before the first request does not count."""
        self._cached = self._read_cache()

    def note_step(self, jobs: Sequence[tuple[Job, Event]]) -> None:
        """Count the tokens and drafts of a step."""
        num_read = 0
        drafts = drafted = accepted = generated = 0
        positions: Counts[int] = Counts()
        for job, event in jobs:
            generated += len(event.token_ids) if job.has_output else 0
            if event.token_ids and not job.gaps:
                num_read += len(job.request.input_ids)
                assert job.first_token_time is not None
                seconds = job.first_token_time - job.queue_time
                self._histograms["time_to_first_token_seconds"].observe(seconds)
            elif event.token_ids:
                self._histograms["inter_token_latency_seconds"].observe(job.gaps[-1])
            for num_drafted, num_accepted in job.steps[len(job.steps) - job.num_new_steps :]:
                drafts += num_drafted > 0
                drafted += num_drafted
                accepted += num_accepted
                positions.update(range(num_accepted))
        for position, count in positions.items():
            self._per_position.labels(self._model, str(position)).inc(count)
        (sought, reused), (sought_before, reused_before) = self._read_cache(), self._cached
        for key, value in (
            ("spec_decode_num_drafts", drafts),
            ("spec_decode_num_draft_tokens", drafted),
            ("spec_decode_num_accepted_tokens", accepted),
            ("prompt_tokens", num_read),
            ("generation_tokens", generated),
            ("prefix_cache_queries", sought - sought_before),
            ("prefix_cache_hits", reused - reused_before),
        ):
            self._counters[key].inc(value)
        self._cached = sought, reused
        if jobs:
            self._histograms["iteration_tokens_total"].observe(num_read + generated)

    def note_end(self, job: Job, reason: str) -> None:
        """Count a request that has ended, and its times."""
        if not job.has_output and reason == "eos":
            reason = "length"  # as the answer says
        self._success.labels(self._model, FINISH_REASONS.get(reason, "error")).inc()
        row_time, first_time, last_time = job.row_time, job.first_token_time, job.last_token_time
        num_tokens = job.num_output_tokens
        values = {
            "e2e_request_latency_seconds": time.perf_counter() - job.queue_time,
            "request_prompt_tokens": len(job.request.input_ids),
            "request_generation_tokens": num_tokens,
        }
        if row_time is not None:
            values["request_queue_time_seconds"] = row_time - job.queue_time
        if row_time is not None and first_time is not None and last_time is not None:
            values |= {
                "request_prefill_time_seconds": first_time - row_time,
                "request_decode_time_seconds": last_time - first_time,
                "request_inference_time_seconds": last_time - row_time,
            }
            if num_tokens > 1:
                seconds = (last_time - first_time) / (num_tokens - 1)
                values["request_time_per_output_token_seconds"] = seconds
        for key, value in values.items():
            self._histograms[key].observe(value)


def describe_jobs(jobs: Sequence[Job], num_choices: int = 1) -> dict[str, Any]:
    """Return an answer's `metrics`, in vLLM's names; of several choices, sums and longest times.

    num_choices: how many jobs, one after the other, are choices of one prompt, which counts once.
    """
    first_jobs = jobs[::num_choices]
    stats = [job.stats for job in first_jobs if job.stats is not None]
    counts = {
        "num_prompt_tokens": sum(len(job.request.input_ids) for job in first_jobs),
        "num_cached_prompt_tokens": sum(request_stats.num_cached_tokens for request_stats in stats),
    }
    return _describe_times(jobs) | counts | {"speculative_decoding": _describe_speculation(jobs)}


def _describe_times(jobs: Sequence[Job]) -> dict[str, float | None]:
    """Return the times of an answer in milliseconds, and its speed."""
    queue_time = min(job.queue_time for job in jobs)
    row_time = min((job.row_time for job in jobs if job.row_time is not None), default=None)
    first_times = [job.first_token_time for job in jobs if job.first_token_time is not None]
    last_times = [job.last_token_time for job in jobs if job.last_token_time is not None]
    gaps = [gap for job in jobs for gap in job.gaps]
    first_time, last_time = min(first_times, default=None), max(last_times, default=None)
    num_tokens = sum(job.num_output_tokens for job in jobs)
    tokens_per_second = _divide(num_tokens, _subtract(last_time, row_time))
    return {
        "time_to_first_token_ms": _to_ms(_subtract(first_time, queue_time)),
        "generation_time_ms": _to_ms(_subtract(last_time, first_time)),
        "queue_time_ms": _to_ms(_subtract(row_time, queue_time)),
        "mean_itl_ms": _to_ms(_divide(sum(gaps), len(gaps))),
        "tokens_per_second": _round(tokens_per_second, 3),
    }


def _describe_speculation(jobs: Sequence[Job]) -> dict[str, Any] | None:
    """Return the counts of an answer's verify steps; None where the engine does not count them."""
    all_stats = [job.stats for job in jobs if job.stats is not None]
    if any(stats.unknown_keys for stats in all_stats):
        return None
    steps = [step for job in jobs for step in job.steps]
    drafted = [num_drafted for num_drafted, _ in steps]
    accepted = [num_accepted for _, num_accepted in steps]
    num_emitted = sum(max(0, stats.num_output_tokens - 1) for stats in all_stats)
    return {
        "mean_acceptance_length": _round(_divide(num_emitted, len(steps)), 4),
        "draft_acceptance_rate": _round(_divide(sum(accepted), sum(drafted)), 4),
        "acceptance_histogram": _add_histograms(stats.accepted_histogram for stats in all_stats),
        "num_spec_steps": sum(map(bool, drafted)),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": max(drafted, default=0),
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
    }


def _add_histograms(histograms: Iterable[Sequence[int]]) -> list[int]:
    """Return the sum of histograms of any lengths, bin by bin."""
    return [sum(counts) for counts in itertools.zip_longest(*histograms, fillvalue=0)]


def _divide(dividend: float, divisor: float | None) -> float | None:
    """Return a quotient; None where the divisor is 0 or was not measured."""
    return dividend / divisor if divisor else None


def _round(number: float | None, digits: int) -> float | None:
    return None if number is None else round(number, digits)


def _subtract(end: float | None, start: float | None) -> float | None:
    """Return the seconds between two times; None where one is not known yet."""
    return None if end is None or start is None else end - start


def _to_ms(seconds: float | None) -> float | None:
    return None if seconds is None else _round(1000 * seconds, 3)
