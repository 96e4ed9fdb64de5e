"""Diagnosis of an engine: measure, then rank the causes why speculation is not faster."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from specdec.command.settings import require
from specdec.decode.drafters.base import Drafter
from specdec.decode.engine import TorchEngine
from specdec.decode.requests import ActiveRequest
from specdec.methods import METHODS

from .causes import (
    BatchFacts,
    Cause,
    find_missing_kernels,
    find_overflow,
    find_unused_template,
    rank_causes,
)
from .engine import Bench, measure_engine
from .measure import measure_batch
from .prompts import BenchPrompt, read_prompt_set
from .settings import DiagnoseSettings, read_counts
from .steps import list_sizes, time_steps

# Methods without a trained drafter, whose quality could be a cause.
FREE_METHODS = tuple(name for name, method in METHODS.items() if method.source == "target")


@dataclasses.dataclass
class RunObservations:
    """Observations of a run besides its times.

    contexts: (tokens before a step, draft tokens it accepted). max_magnitude: the largest of the
    hidden values and logits. experts: of each step of a mixture, its number of tokens and the
    number of experts of a layer that they chose.
    """

    contexts: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    max_magnitude: float = 0.0
    experts: list[tuple[float, float]] = dataclasses.field(default_factory=list)


def diagnose(settings: DiagnoseSettings) -> dict[str, Any]:
    """Return the causes for each batch size, with the measurements that show them."""
    run_settings = settings.to_decode()
    require(run_settings, "tokenizer_dir")
    batch_sizes = sorted(read_counts("--batch-sizes", settings.batch_sizes))
    prompts = read_prompt_set(settings.prompts, max(batch_sizes), settings.prompts_per_category)
    batches = []
    smallest_batch = None
    with measure_engine(run_settings, prompts, batch_sizes) as (bench, report):
        observations = observe_run(bench, max(batch_sizes))
        suspects = list_suspects(bench, prompts, observations)
        for size in batch_sizes:
            batch = measure_batch(bench, size, settings.repeat)
            smallest_batch = smallest_batch or (size, batch["ratio"]["median"])
            facts = collect_facts(bench, batch, observations, smallest_batch, settings.repeat)
            batches.append(
                {
                    "batch_size": size,
                    "ratio": batch["ratio"],
                    "acceptance_length": facts.acceptance_length,
                    "break_even": round(facts.break_even, 4),
                    "step_ms": {"speculation": facts.speculation, "plain": facts.plain},
                    "step_ms_by_tokens": facts.step_ms,
                    "causes": [cause.to_json() for cause in rank_causes(facts, suspects)],
                }
            )
    return report | {
        "engine_dir": str(settings.engine_dir),
        "experts": describe_experts(bench, observations, max(batch_sizes)),
        "batches": batches,
    }


def observe_run(bench: Bench, batch_size: int) -> RunObservations:
    """Decode once, untimed, and return observations of the states that a drafter sees."""
    observations = RunObservations()
    drafter: Drafter = bench.engine.drafter
    original_observe = drafter.observe
    is_float16 = bench.dtype == "float16"
    decoder = bench.engine.decoder
    expert_counts = decoder.count_experts()

    def observe(
        requests: Sequence[ActiveRequest], states: Any, paths: Sequence[Sequence[int]]
    ) -> None:
        nonlocal expert_counts
        old_counts, expert_counts = expert_counts, decoder.count_experts()
        if old_counts and all(request.stats.num_verify_steps for request in requests):
            step_counts = expert_counts[1] - old_counts[1], expert_counts[2] - old_counts[2]
            observations.experts.append(step_counts)
        for row, (request, path) in enumerate(zip(requests, paths, strict=True)):
            if request.stats.num_verify_steps:  # not the prompt's pass
                length = len(request.request.input_ids) + len(request.output_ids)
                observations.contexts.append((length - len(path), len(path) - 1))
            if is_float16:
                hidden = states.hidden[row, list(path)]
                logits = bench.engine.decoder.compute_logits(hidden[None])
                observations.max_magnitude = find_max_magnitude(
                    observations.max_magnitude, hidden, logits
                )
        original_observe(requests, states, paths)

    drafter.observe = observe  # type: ignore[method-assign]
    try:
        bench.run(drafter, batch_size)
    finally:
        del drafter.observe
    return observations


def describe_experts(
    bench: Bench, observations: RunObservations, batch_size: int
) -> dict[str, Any] | None:
    """Return how many experts of a mixture the verify steps read; None for any other model."""
    experts = bench.engine.config.checkpoint.model.experts
    if experts is None or not observations.experts:
        return None
    tokens, num_experts = map(statistics.fmean, zip(*observations.experts, strict=True))
    return {
        "per_layer": experts.num,
        "per_token": experts.top_k,
        "batch_size": batch_size,
        "tokens_per_step": round(tokens, 2),
        "per_step": round(num_experts, 2),
    }


def find_max_magnitude(max_magnitude: float, *tensors: Any) -> float:
    """Return the largest of a magnitude and the tensors' magnitudes; infinity for nan."""
    import torch

    for tensor in tensors:
        value = float(torch.nan_to_num(tensor.float().abs(), nan=torch.inf, posinf=torch.inf).max())
        max_magnitude = max(max_magnitude, value)
    return max_magnitude


def list_suspects(
    bench: Bench, prompts: Sequence[BenchPrompt], observations: RunObservations
) -> list[Cause]:
    """List causes that measured times do not show."""
    engine = bench.engine
    num_messages = sum(entry.prompt.messages is not None or bool(entry.turns) for entry in prompts)
    causes = (
        find_overflow(bench.dtype, observations.max_magnitude),
        find_unused_template(bool(bench.tokenizer.chat_template), num_messages),
        find_missing_kernels(engine.device.type, engine.decoder.kernels is not None),
    )
    return [cause for cause in causes if cause is not None]


def collect_facts(
    bench: Bench,
    batch: dict[str, Any],
    observations: RunObservations,
    smallest_batch: tuple[int, float],
    repeat: int,
) -> BatchFacts:
    """Collect the facts of a batch: its measurement, and the costs of its steps."""
    acceptance = batch["acceptance"]
    lengths = [length for length, _ in observations.contexts] or [1]
    sizes = list_sizes(1 + bench.engine.drafter.max_draft_tokens)
    costs = time_steps(
        bench.engine.decoder, sizes, past_len=round(statistics.median(lengths)),
        repeat=max(3, repeat), batch_size=batch["batch_size"],
    )  # fmt: skip
    plain = batch["plain"]
    prefill_seconds = plain["prefill_seconds"]["median"]
    step_seconds = plain["num_steps"] * plain["step_ms"]["total"] / 1000
    return BatchFacts(
        batch_size=batch["batch_size"],
        speculation=batch["speculation"]["step_ms"],
        plain=plain["step_ms"],
        step_ms={size: round(1000 * seconds, 4) for size, seconds in costs.items()},
        tokens_per_step=1 + acceptance["draft_tokens_per_step"],
        acceptance_length=acceptance["acceptance_length"],
        by_position=acceptance["accepted_by_position"],
        contexts=observations.contexts,
        ratio=batch["ratio"]["median"],
        step_ratio=batch["step_ratio"]["median"],
        smallest_batch=smallest_batch,
        prefill_share=prefill_seconds / (prefill_seconds + step_seconds),
        is_trained=bench.engine.method not in FREE_METHODS,
        in_use=list_remedies_in_use(bench.engine),
    )


def list_remedies_in_use(engine: TorchEngine) -> frozenset[str]:
    """Return the names of remedies that an engine already has, or cannot have."""
    config, is_cpu = engine.config, engine.device.type == "cpu"
    has_matrices = config.checkpoint.drafter is not None  # a drafter's, which a build can round
    facts = {
        "rounded_drafter": not (is_cpu and has_matrices) or config.drafter_weights is not None,
        # Weights that are stored as integers or in blocks are multiplied as such.
        "bfloat16": not is_cpu or config.checkpoint.model.dtype == "bfloat16",
        "kernels": not is_cpu or engine.decoder.kernels is not None,
        "budget": not getattr(engine.drafter, "is_fixed", True),
    }
    return frozenset(name for name, is_in_use in facts.items() if is_in_use)
