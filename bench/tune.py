"""Which setting of a drafter is fastest here: predict all, measure the best few."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec import logs
from specdec.command.settings import list_given, name_flag, require
from specdec.decode.drafters.base import PromptFollower
from specdec.decode.settings import DecodeSettings
from specdec.errors import SpecDecError, UsageError
from specdec.files.staging import check_output_file
from specdec.methods import METHODS, Method
from specdec.methods.draft_target import DraftTargetTune
from specdec.model.checkpoint import CheckpointConfig, read_checkpoint_config

from .combine import list_combined
from .engine import Bench, open_bench
from .forecast import Forecaster
from .machine import LoadMeter, describe_load, describe_machine
from .measure import alternate, divide, list_results, summarize
from .methods import load_tuning
from .methods.base import Candidate, Tuning, call_build
from .prompts import read_prompt_set
from .recipe import describe_best, write_recipe
from .replay import PromptStateRecorder, Recording, Replay, StateRecorder
from .settings import TuneSettings, read_counts
from .steps import average, interpolate, level_costs, list_sizes, time_steps

logger = logs.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a replay and the costs of steps say of a setting."""

    candidate: Candidate
    found: Replay
    tokens_per_second: float


def tune(settings: TuneSettings) -> dict[str, Any]:
    """Return the table of all settings, predicted and measured, and the best one's commands."""
    require(settings, "checkpoint_dir", "tokenizer_dir")
    if settings.output_file is not None and settings.output_file.exists() and not settings.force:
        raise SpecDecError(f"{settings.output_file} exists", "give another name, or --force")
    if settings.output_file is not None:
        check_output_file(settings.output_file)
    batch_sizes = read_counts("--batch-sizes", settings.batch_sizes)
    checkpoint = read_checkpoint_config(settings.checkpoint_dir)
    methods = find_methods(settings, checkpoint)
    tunings = [load_tuning(method) for method in methods]
    prompts = read_prompt_set(settings.prompts, max(batch_sizes))
    meter = LoadMeter()
    with build_engine(settings, tunings) as run_settings:
        bench = open_bench(run_settings)
        bench.take_prompts(prompts, run_settings)
        bench.check_batch_sizes(batch_sizes)
        recordings = record(bench, max(batch_sizes))
        candidates = [
            candidate
            for tuning in tunings
            for candidate in tuning.list_candidates(bench, recordings, settings)
        ]
        found = [
            tune_batch(bench, candidates, recordings, size, settings, methods)
            for size in batch_sizes
        ]
        others = meter.measure()
        report: dict[str, Any] = {
            **describe_machine(),
            "processors_used_by_others": others,
            "checkpoint_dir": str(settings.checkpoint_dir),
            "method": " and ".join(method.name for method in methods),
            "device": str(bench.engine.device),
            "dtype": bench.dtype,
            "num_prompts": len(bench.requests),
            "max_output_len": settings.max_output_len,
            "repeat": settings.repeat,
            "batches": [batch for batch, _ in found],
            "warnings": describe_load(others),
        }
    report |= describe_best(found[0][1], settings, batch_sizes[0])
    if settings.output_file is not None:
        write_recipe(settings.output_file, report, force=settings.force)
    return report


def find_methods(settings: TuneSettings, checkpoint: CheckpointConfig) -> list[Method]:
    """Return what is tuned; raise UsageError where a flag has no effect."""
    pair = list_given(settings, DraftTargetTune)
    if pair and "draft_checkpoint_dir" not in pair:
        raise UsageError(
            f"{name_flag(pair[0])} without --draft-checkpoint-dir",
            "give the draft model's checkpoint, or leave it out",
        )
    if pair:
        if checkpoint.method is not None:
            raise UsageError(
                f"--draft-checkpoint-dir has no effect with a {checkpoint.method.name} checkpoint",
                "leave it out, or give the plain checkpoint of the target",
            )
        return [METHODS["draft_target"]]
    if checkpoint.method is not None:
        return [checkpoint.method]
    return [method for method in METHODS.values() if method.source == "target"]


@contextlib.contextmanager
def build_engine(settings: TuneSettings, tunings: Sequence[Tuning]) -> Iterator[DecodeSettings]:
    """Build, aside, an engine with room for every setting; yield what loads it."""
    with tempfile.TemporaryDirectory(prefix="specdec-tune-") as name:
        folder = Path(name)
        logger.info("building an engine of %s", settings.checkpoint_dir)
        trials = [tuning.prepare(settings, folder) for tuning in tunings]
        flags = ["--max-batch-size", str(settings.max_batch_size)]
        if trials[0].mode is not None:
            longest = max(trial.max_draft_len or 0 for trial in trials)
            flags += [
                "--speculative-decoding-mode",
                trials[0].mode,
                "--max-draft-len",
                str(longest),
            ]
        call_build(trials[0].checkpoint, folder / "engine", *flags)
        yield DecodeSettings(
            engine_dir=folder / "engine", device=settings.device,
            tokenizer_dir=settings.tokenizer_dir, max_output_len=settings.max_output_len,
            # Several methods exclude one another; settings are tried on the bare drafter.
            **trials[0].run | {"draft_budget": "fixed"},
        )  # fmt: skip


def record(bench: Bench, batch_size: int) -> list[Recording]:
    """Decode all prompts plainly, and keep what the target computed at every token."""
    follows = isinstance(bench.engine.proposer, PromptFollower)
    recordings = []
    for requests in bench.groups.values():
        recorder = (PromptStateRecorder if follows else StateRecorder)(bench.engine.decoder)
        results = bench.decode(requests, recorder, batch_size, bench.engine.timing)
        for result in results:
            request = result.request
            states = torch.stack(recorder.states[request.index])
            prompt_states = recorder.get_prompt(request.index)
            if result.finish_reason == "stop":  # the text is not followed when it is replayed
                request = dataclasses.replace(
                    request, max_output_len=len(result.output_ids), stop=()
                )
            recordings.append(Recording(request, result.output_ids, states, prompt_states))
    return recordings


def tune_batch(
    bench: Bench,
    candidates: Sequence[Candidate],
    recordings: Sequence[Recording],
    batch_size: int,
    settings: TuneSettings,
    methods: Sequence[Method],
) -> tuple[dict[str, Any], Candidate | None]:
    """Predict every setting for one batch size; measure the best, and what is made of them.

    Returns the table, and the fastest setting; None where plain decoding is.
    """
    logger.info("batch size %d: %d settings", batch_size, len(candidates))
    bench.run(bench.plain, batch_size)  # warms up
    plain = bench.run(bench.plain, batch_size)
    timing = plain.timing
    overhead = (timing.accept + timing.other) / max(1, timing.num_steps)
    past_len = round(
        statistics.median(len(r.request.input_ids) + len(r.output_ids) // 2 for r in recordings)
    )
    largest = 1 + max(c.proposer.max_draft_tokens for c in candidates)
    measured_costs = time_steps(
        bench.engine.decoder, list_sizes(largest), past_len=past_len,
        repeat=max(3, settings.repeat), batch_size=batch_size,
    )  # fmt: skip
    costs = level_costs(measured_costs)
    num_tokens = plain.count_tokens()

    def predict(steps: Sequence[float], draft_seconds: float) -> float:
        seconds = sum(interpolate(costs, size) + overhead for size in steps)
        return float(num_tokens / (timing.prefill + draft_seconds + seconds))

    forecaster = Forecaster(bench, recordings, batch_size)

    def forecast(candidate: Candidate) -> Prediction:
        found = forecaster.find(candidate)
        return Prediction(candidate, found, predict(found.sizes, sum(found.draft_seconds)))

    shown = logs.show_progress(candidates, label="replays", total=len(candidates))
    predictions = [forecast(candidate) for candidate in shown]
    predictions.sort(key=lambda p: -p.tokens_per_second)
    combined = [forecast(c) for c in list_combined([p.candidate for p in predictions], methods)]
    chosen = predictions[: settings.num_measured] + combined
    predictions += combined
    predictions.sort(key=lambda p: -p.tokens_per_second)
    rounds = alternate(
        bench,
        {"plain": bench.plain, **{p.candidate.name: p.candidate.proposer for p in chosen}},
        batch_size,
        settings.repeat,
    )
    plain_rates = rounds["plain"].list_rates()
    plain_prediction = predict([1] * timing.num_steps, 0.0)
    rows = []
    for prediction in predictions:
        name = prediction.candidate.name
        row = describe_prediction(prediction, plain_prediction)
        if name in rounds:
            rates = rounds[name].list_rates()
            totals = [r.stats for r in list_results(rounds[name].warm_up)]
            steps = sum(stats.num_verify_steps for stats in totals)
            emitted = sum(stats.num_output_tokens - 1 for stats in totals)
            row["measured"] = {
                "tokens_per_second": summarize(rates),
                "ratio": divide(rates, plain_rates),
                "acceptance_length": round(emitted / max(1, steps), 4),
            }
        rows.append(row)
    measured = [row for row in rows if row["measured"] is not None]
    best = max(measured, key=lambda row: row["measured"]["ratio"]["median"])
    names = {p.candidate.name: p.candidate for p in predictions}
    winner = names[best["name"]] if best["measured"]["ratio"]["median"] > 1 else None
    report = {
        "batch_size": batch_size,
        "step_ms_by_tokens": {size: round(1000 * cost, 4) for size, cost in measured_costs.items()},
        "plain": {
            "predicted_tokens_per_second": round(plain_prediction, 2),
            "tokens_per_second": summarize(plain_rates),
        },
        "settings": rows,
        "best": winner.name if winner is not None else "plain",
    }
    return report, winner


def describe_prediction(prediction: Prediction, plain: float) -> dict[str, Any]:
    """A row of the table, not measured."""
    found = prediction.found
    return {
        "name": prediction.candidate.name,
        "acceptance_length": round(found.acceptance_length, 4),
        "tokens_per_step": round(average(found.sizes), 2),
        "draft_ms": round(1000 * average(found.draft_seconds), 4),
        "predicted_tokens_per_second": round(prediction.tokens_per_second, 2),
        "predicted_ratio": round(prediction.tokens_per_second / plain, 4),
        "measured": None,
    }
