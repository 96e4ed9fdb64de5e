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
from specdec.errors import SpecDecError, UsageError
from specdec.methods import EXTERNAL_METHODS
from specdec.processes import call_stage
from specdec.run.methods.base import PromptFollower
from specdec.run.settings import RunSettings
from specdec.schema import CheckpointConfig, read_checkpoint_config
from specdec.settings import require
from specdec.storage import read_json, write_json

from .candidates import (
    MAX_NGRAM_TOKENS,
    Candidate,
    list_draft_target,
    list_eagle,
    list_medusa,
    list_ngrams,
    list_redrafter,
)
from .engine import Bench, open_bench
from .forecast import Forecaster
from .machine import LoadMeter, describe_load, describe_machine
from .measure import alternate, divide, list_results, summarize
from .prompts import read_prompt_set
from .recipe import describe_best, write_recipe
from .replay import PromptRecorder, Recorder, Recording, Replay
from .settings import TuneSettings, read_counts
from .steps import average, interpolate, level_costs, list_sizes, time_steps

logger = logs.get_logger(__name__)
NGRAMS = "prompt_lookup and lookahead"  # what a plain target can draft by


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a replay and the costs of steps say of a setting."""

    candidate: Candidate
    found: Replay
    tokens_per_second: float


def tune(settings: TuneSettings) -> dict[str, Any]:
    """Return the table of all settings, predicted and measured, and the best one's commands."""
    require(settings, "checkpoint_dir", "tokenizer_dir")
    assert settings.checkpoint_dir is not None
    if settings.output_file is not None and settings.output_file.exists() and not settings.force:
        raise SpecDecError(f"{settings.output_file} exists", "give another name, or --force")
    batch_sizes = read_counts("--batch-sizes", settings.batch_sizes)
    beams = read_counts("--beams", settings.beams)
    checkpoint = read_checkpoint_config(settings.checkpoint_dir)
    method = check_method(settings, checkpoint)
    prompts = read_prompt_set(settings.prompts)
    meter = LoadMeter()
    with build_engine(settings, method, max(batch_sizes), max(beams)) as run_settings:
        bench = open_bench(run_settings)
        bench.take_prompts(prompts, run_settings)
        bench.check_batch_sizes(batch_sizes)
        recordings = record(bench, max(batch_sizes))
        if method == "redrafter":
            candidates = list_redrafter(bench, beams, settings.max_length)
        elif method == "medusa":
            candidates = list_medusa(bench, recordings)
        elif method == "eagle":
            candidates = list_eagle(bench, recordings)
        elif method == NGRAMS:
            candidates = list_ngrams(bench)
        else:
            candidates = list_draft_target(bench, settings.max_length)
        batches = [
            tune_batch(bench, candidates, recordings, size, settings) for size in batch_sizes
        ]
        others = meter.measure()
        report: dict[str, Any] = {
            **describe_machine(),
            "processors_used_by_others": others,
            "checkpoint_dir": str(settings.checkpoint_dir),
            "method": method,
            "device": str(bench.engine.device),
            "dtype": bench.dtype,
            "num_prompts": len(bench.requests),
            "max_output_len": settings.max_output_len,
            "repeat": settings.repeat,
            "batches": batches,
            "warnings": describe_load(others),
        }
    best = next((c for c in candidates if c.name == batches[0]["best"]), None)
    report |= describe_best(best, settings, method, batch_sizes[0])
    if settings.output_file is not None:
        write_recipe(settings.output_file, report, force=settings.force)
    return report


def check_method(settings: TuneSettings, checkpoint: CheckpointConfig) -> str:
    """Return what is tuned; raise UsageError where a flag has no effect."""
    method = checkpoint.method.name if checkpoint.method else None
    if settings.draft_checkpoint_dir is not None:
        if method is not None:
            raise UsageError(
                f"--draft-checkpoint-dir has no effect with a {method} checkpoint",
                "leave it out, or give the plain checkpoint of the target",
            )
        return "draft_target"
    return method or NGRAMS


@contextlib.contextmanager
def build_engine(
    settings: TuneSettings, method: str, batch_size: int, num_beams: int
) -> Iterator[RunSettings]:
    """Build, aside, an engine with room for every setting; yield what loads it."""
    assert settings.checkpoint_dir is not None
    with tempfile.TemporaryDirectory(prefix="specdec-tune-") as name:
        folder = Path(name)
        source = settings.checkpoint_dir
        flags = ["--max-batch-size", str(batch_size)]
        draft_dir = None
        if method == "redrafter":
            source = enlarge_redrafter(source, folder / "checkpoint", num_beams, settings)
        if settings.draft_checkpoint_dir is not None:
            draft_dir = folder / "draft"
            call_build(settings.draft_checkpoint_dir, draft_dir, *flags)
            flags += ["--speculative-decoding-mode", EXTERNAL_METHODS["draft_target"]]
            flags += ["--max-draft-len", str(settings.max_length)]
        if method == NGRAMS:
            flags += ["--speculative-decoding-mode", EXTERNAL_METHODS["prompt_lookup"]]
            flags += ["--max-draft-len", str(MAX_NGRAM_TOKENS)]
        call_build(source, folder / "engine", *flags)
        yield RunSettings(
            engine_dir=folder / "engine", draft_engine_dir=draft_dir, device=settings.device,
            tokenizer_dir=settings.tokenizer_dir, max_output_len=settings.max_output_len,
            draft_len=None if draft_dir is None else str(settings.max_length),
            prompt_lookup_num_tokens=MAX_NGRAM_TOKENS if method == NGRAMS else None,
        )  # fmt: skip


def call_build(checkpoint: Path, engine: Path, *flags: str) -> None:
    """Build an engine for torch with specdec-build."""
    logger.info("building an engine of %s", checkpoint)
    call_stage(
        "build",
        ["--checkpoint-dir", str(checkpoint), "--output-dir", str(engine), "--backend", "torch",
         *flags],
    )  # fmt: skip


def enlarge_redrafter(source: Path, folder: Path, num_beams: int, settings: TuneSettings) -> Path:
    """Make a checkpoint of the same tensors with the most beams and the longest drafts."""
    folder.mkdir()
    config = read_json(source / "config.json") | {
        "redrafter_num_beams": num_beams,
        "redrafter_draft_len_per_beam": settings.max_length,
    }
    write_json(folder / "config.json", config)
    for path in source.glob("rank*.safetensors"):
        (folder / path.name).symlink_to(path.resolve())
    return folder


def record(bench: Bench, batch_size: int) -> list[Recording]:
    """Decode all prompts plainly, and keep what the target computed at every token."""
    follows = isinstance(bench.engine.proposer, PromptFollower)
    recordings = []
    for requests in bench.groups.values():
        recorder = (PromptRecorder if follows else Recorder)(bench.engine.decoder)
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
) -> dict[str, Any]:
    """Predict every setting for one batch size, and measure the best."""
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
    predictions = []
    for candidate in logs.show_progress(candidates, label="replays", total=len(candidates)):
        found = forecaster.find(candidate)
        rate = predict(found.sizes, sum(found.draft_seconds))
        predictions.append(Prediction(candidate, found, rate))
    predictions.sort(key=lambda p: -p.tokens_per_second)
    chosen = predictions[: settings.num_measured]
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
    return {
        "batch_size": batch_size,
        "step_ms_by_tokens": {size: round(1000 * cost, 4) for size, cost in measured_costs.items()},
        "plain": {
            "predicted_tokens_per_second": round(plain_prediction, 2),
            "tokens_per_second": summarize(plain_rates),
        },
        "settings": rows,
        "best": best["name"] if best["measured"]["ratio"]["median"] > 1 else "plain",
    }


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
