"""Which setting of a drafter is fastest here, by successive halving.

All settings decode a few tokens, the faster half decodes twice as many, and so on; the last few
take turns with plain decoding over all prompts (Jamieson and Talwalkar,
https://arxiv.org/abs/1502.07943).
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec import logs
from specdec.command.settings import require
from specdec.decode.requests import sum_stats
from specdec.decode.settings import DecodeSettings
from specdec.files.staging import check_output_file
from specdec.methods import METHODS, Method
from specdec.methods.draft_target import DraftTargetTune
from specdec.model.checkpoint import CheckpointConfig, read_checkpoint_config
from specdec.options import list_given, name_flag, refuse_contradictions

from .combine import list_combined
from .engine import Bench, Pass, measure_engine
from .measure import alternate, divide, list_results, summarize
from .methods import load_tuning
from .methods.base import Candidate, Tuning, call_build
from .prompts import read_prompt_set
from .recipe import describe_best, write_recipe
from .settings import TuneSettings, read_counts

logger = logs.get_logger(__name__)


FIRST_TOKENS = 16  # that every request decodes in the first round


def tune(settings: TuneSettings) -> dict[str, Any]:
    """Return the table of all settings, predicted and measured, and the best one's commands."""
    require(settings, "checkpoint_dir", "tokenizer_dir")
    if settings.output_file is not None:
        check_output_file(settings.output_file, force=settings.force)
    batch_sizes = read_counts("--batch-sizes", settings.batch_sizes)
    checkpoint = read_checkpoint_config(settings.checkpoint_dir)
    methods = find_methods(settings, checkpoint)
    tunings = [load_tuning(method) for method in methods]
    prompts = read_prompt_set(settings.prompts, max(batch_sizes), settings.prompts_per_category)
    with (
        build_engine(settings, tunings) as run_settings,
        measure_engine(run_settings, prompts, batch_sizes) as (bench, report),
    ):
        candidates = [
            dataclasses.replace(c, run=c.run | {"draft_budget": "fixed"})
            for tuning in tunings
            for c in tuning.list_candidates(bench, settings)
        ]
        found = [tune_batch(bench, candidates, size, settings, methods) for size in batch_sizes]
    report |= {
        "checkpoint_dir": str(settings.checkpoint_dir),
        "method": " and ".join(method.name for method in methods),
        "repeat": settings.repeat,
        "batches": [batch for batch, _ in found],
    }
    report["warnings"] += describe_doubts(report["batches"])
    report |= describe_best(found[0][1], settings, batch_sizes[0])
    if settings.output_file is not None:
        write_recipe(settings.output_file, report, force=settings.force)
    return report


def find_methods(settings: TuneSettings, checkpoint: CheckpointConfig) -> list[Method]:
    """Return what is tuned; raise UsageError where a flag has no effect."""
    pair = list_given(settings, DraftTargetTune)
    refuse_contradictions(settings, (
        (lambda _: pair and "draft_checkpoint_dir" not in pair and name_flag(pair[0]),
         "{found} without --draft-checkpoint-dir",
         "give the draft model's checkpoint, or leave it out"),
        (lambda _: pair and checkpoint.method and checkpoint.method.name,
         "--draft-checkpoint-dir has no effect with a {found} checkpoint",
         "leave it out, or give the plain checkpoint of the target"),
    ))  # fmt: skip
    if pair:
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


def tune_batch(
    bench: Bench,
    candidates: Sequence[Candidate],
    batch_size: int,
    settings: TuneSettings,
    methods: Sequence[Method],
) -> tuple[dict[str, Any], Candidate | None]:
    """Halve the settings for one batch size; measure the last, and what is made of them.

    Returns the table, and the fastest setting; None where plain decoding is.
    """
    logger.info("batch size %d: %d settings", batch_size, len(candidates))
    rows: dict[str, dict[str, Any]] = {}
    left = list(candidates)
    bench.run(bench.plain, batch_size, FIRST_TOKENS)  # warms up
    for number, num_tokens in enumerate(list_rounds(len(left), settings), 1):
        logger.info("round %d: %d settings, %d tokens each", number, len(left), num_tokens)
        tried = try_settings(bench, left, batch_size, num_tokens)
        rows |= {name: row | {"round": number} for name, row in tried.items()}
        left.sort(key=lambda c: -tried[c.name]["trial_ratio"])
        left = left[: max(settings.num_measured, -(-len(left) // 2))]
    left = left[: settings.num_measured]
    combined = list_combined(left, methods)
    finalists = [*left, *combined]
    rounds = alternate(
        bench,
        {"plain": bench.plain, **{c.name: c.proposer for c in finalists}},
        batch_size,
        settings.repeat,
    )
    plain_rates = rounds["plain"].list_rates()
    for candidate in finalists:
        done = rounds[candidate.name]
        whole, rates = describe_pass(done.warm_up), done.list_rates()
        measured = {
            "tokens_per_second": summarize(rates), "ratio": divide(rates, plain_rates),
            "acceptance_length": whole["acceptance_length"],
        }  # fmt: skip
        row = rows.get(candidate.name, whole | {"trial_ratio": None, "round": None})
        rows[candidate.name] = row | {"measured": measured}

    def rank(row: dict[str, Any]) -> tuple[float, int, float]:
        measured = row["measured"]["ratio"]["median"] if row["measured"] else 0.0
        return (-measured, -(row["round"] or 0), -(row["trial_ratio"] or 0.0))

    table = sorted(({"name": name, **row} for name, row in rows.items()), key=rank)
    winner = None
    if table[0]["measured"]["ratio"]["median"] > 1:
        winner = next(c for c in finalists if c.name == table[0]["name"])
    report = {
        "batch_size": batch_size,
        "plain": {"tokens_per_second": summarize(plain_rates)},
        "settings": table,
        "best": winner.name if winner is not None else "plain",
    }
    return report, winner


def list_rounds(num_candidates: int, settings: TuneSettings) -> list[int]:
    """Tokens that each request decodes, round by round, until few enough settings are left."""
    rounds = []
    num_tokens = min(FIRST_TOKENS, settings.max_output_len)
    while num_candidates > settings.num_measured:
        rounds.append(num_tokens)
        num_tokens = min(2 * num_tokens, settings.max_output_len)
        num_candidates = max(settings.num_measured, -(-num_candidates // 2))
    return rounds


def try_settings(
    bench: Bench, candidates: Sequence[Candidate], batch_size: int, num_tokens: int
) -> dict[str, dict[str, Any]]:
    """Decode with each setting once, plain decoding before and after it; rows by setting."""

    rows, before = {}, bench.run(bench.plain, batch_size, num_tokens).rate
    for candidate in logs.show_progress(candidates, label="settings", total=len(candidates)):
        done = bench.run(candidate.proposer, batch_size, num_tokens)
        after = bench.run(bench.plain, batch_size, num_tokens).rate
        ratio = done.rate / statistics.mean([before, after])
        rows[candidate.name] = describe_pass(done) | {"trial_ratio": round(ratio, 4)}
        before = after
    return rows


def describe_doubts(batches: Sequence[dict[str, Any]]) -> list[str]:
    """Say where the best setting may be no faster than plain decoding."""
    doubts = []
    for batch in batches:
        row = next((row for row in batch["settings"] if row["name"] == batch["best"]), None)
        if row is None:
            continue
        ratio = row["measured"]["ratio"]
        fact = (
            f"batch size {batch['batch_size']}: {row['name']} has {ratio['median']:.2f} times the"
            " speed of plain decoding"
        )
        if ratio["lowest"] == ratio["highest"]:
            doubts.append(f"{fact} in the only round: --repeat 5 shows the spread")
        elif ratio["lowest"] <= 1:
            doubts.append(
                f"{fact}, from {ratio['lowest']:.2f} to {ratio['highest']:.2f}: it is doubtful"
                " whether it is faster"
            )
    return doubts


def describe_pass(done: Pass) -> dict[str, Any]:
    """A row of the table, not measured."""
    results = list_results(done)
    totals, num_steps = sum_stats(results), max(1, done.timing.num_steps)
    drafted = sum(result.stats.num_draft_tokens for result in results)
    return {
        "acceptance_length": totals["acceptance_length"] or 1.0,
        "tokens_per_step": round(1 + drafted / max(1, int(totals["num_verify_steps"] or 0)), 2),
        "draft_ms": round(1000 * done.timing.draft / num_steps, 4),
        "measured": None,
    }
