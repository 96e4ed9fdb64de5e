"""Why is speculation not faster here? Measure, then rank the causes."""

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
from .prompts import Prompt, read_prompt_set
from .settings import DiagnoseSettings, read_counts
from .steps import list_sizes, time_steps

# Without a drafter of their own, whose quality could be to blame.
FREE_METHODS = tuple(name for name, method in METHODS.items() if method.source == "target")


@dataclasses.dataclass
class Observed:
    """What a run showed besides its times.

    contexts: (tokens before a step, draft tokens it accepted). largest: hidden value or logit.
    experts: of each step of a mixture, its tokens and the experts a layer that they chose.
    """

    contexts: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    largest: float = 0.0
    experts: list[tuple[float, float]] = dataclasses.field(default_factory=list)


def diagnose(settings: DiagnoseSettings) -> dict[str, Any]:
    """Return the causes for each batch size, with what they were found by."""
    run_settings = settings.to_decode()
    require(run_settings, "tokenizer_dir")
    batch_sizes = sorted(read_counts("--batch-sizes", settings.batch_sizes))
    prompts = read_prompt_set(settings.prompts, max(batch_sizes), settings.prompts_per_category)
    batches = []
    smallest = None
    with measure_engine(run_settings, prompts, batch_sizes) as (bench, report):
        observed = observe_run(bench, max(batch_sizes))
        suspects = list_suspects(bench, prompts, observed)
        for size in batch_sizes:
            measured = measure_batch(bench, size, settings.repeat)
            smallest = smallest or (size, measured["ratio"]["median"])
            facts = collect_facts(bench, measured, observed, smallest, settings.repeat)
            batches.append(
                {
                    "batch_size": size,
                    "ratio": measured["ratio"],
                    "acceptance_length": facts.acceptance_length,
                    "break_even": round(facts.break_even, 4),
                    "step_ms": {"speculation": facts.speculation, "plain": facts.plain},
                    "step_ms_by_tokens": facts.step_ms,
                    "causes": [cause.to_json() for cause in rank_causes(facts, suspects)],
                }
            )
    return report | {
        "engine_dir": str(settings.engine_dir),
        "experts": describe_experts(bench, observed, max(batch_sizes)),
        "batches": batches,
    }


def observe_run(bench: Bench, batch_size: int) -> Observed:
    """Decode once, untimed, and note what the engine's proposer is shown of each step."""
    observed = Observed()
    proposer: Drafter = bench.engine.proposer
    honest = proposer.observe
    half = bench.dtype == "float16"
    decoder = bench.engine.decoder
    before = decoder.count_experts()

    def observe(
        requests: Sequence[ActiveRequest], states: Any, paths: Sequence[Sequence[int]]
    ) -> None:
        nonlocal before
        counted, before = before, decoder.count_experts()
        if counted and all(request.stats.num_verify_steps for request in requests):
            observed.experts.append((before[1] - counted[1], before[2] - counted[2]))
        for row, (request, path) in enumerate(zip(requests, paths, strict=True)):
            if request.stats.num_verify_steps:  # else it is the prompt's own pass
                length = len(request.request.input_ids) + len(request.output_ids)
                observed.contexts.append((length - len(path), len(path) - 1))
            if half:
                own = states.last[row, list(path)]
                logits = bench.engine.decoder.compute_logits(own[None])
                observed.largest = find_largest(observed.largest, own, logits)
        honest(requests, states, paths)

    proposer.observe = observe  # type: ignore[method-assign]
    try:
        bench.run(proposer, batch_size)
    finally:
        del proposer.observe
    return observed


def describe_experts(bench: Bench, observed: Observed, batch_size: int) -> dict[str, Any] | None:
    """What the verify steps of the observed run read of a mixture; None of any other model."""
    experts = bench.engine.config.checkpoint.model.experts
    if experts is None or not observed.experts:
        return None
    tokens, touched = (statistics.fmean(column) for column in zip(*observed.experts, strict=True))
    return {
        "per_layer": experts.num,
        "per_token": experts.top_k,
        "batch_size": batch_size,
        "tokens_per_step": round(tokens, 2),
        "per_step": round(touched, 2),
    }


def find_largest(before: float, *tensors: Any) -> float:
    """The largest magnitude so far; infinity for what is no number."""
    import torch

    for tensor in tensors:
        value = float(torch.nan_to_num(tensor.float().abs(), nan=torch.inf, posinf=torch.inf).max())
        before = max(before, value)
    return before


def list_suspects(bench: Bench, prompts: Sequence[Prompt], observed: Observed) -> list[Cause]:
    """List causes that no time tells."""
    engine = bench.engine
    num_messages = sum(
        prompt.asked.messages is not None or bool(prompt.turns) for prompt in prompts
    )
    found = (
        find_overflow(bench.dtype, observed.largest),
        find_unused_template(bool(bench.tokenizer.chat_template), num_messages),
        find_missing_kernels(engine.device.type, engine.decoder.kernels is not None),
    )
    return [cause for cause in found if cause is not None]


def collect_facts(
    bench: Bench,
    measured: dict[str, Any],
    observed: Observed,
    smallest: tuple[int, float],
    repeat: int,
) -> BatchFacts:
    """Put together what a batch's measurement and the costs of its steps say."""
    acceptance = measured["acceptance"]
    lengths = [length for length, _ in observed.contexts] or [1]
    sizes = list_sizes(1 + bench.engine.proposer.max_draft_tokens)
    costs = time_steps(
        bench.engine.decoder, sizes, past_len=round(statistics.median(lengths)),
        repeat=max(3, repeat), batch_size=measured["batch_size"],
    )  # fmt: skip
    plain = measured["plain"]
    prefill = plain["prefill_seconds"]["median"]
    stepping = plain["num_steps"] * plain["step_ms"]["total"] / 1000
    return BatchFacts(
        batch_size=measured["batch_size"],
        speculation=measured["speculation"]["step_ms"],
        plain=plain["step_ms"],
        step_ms={size: round(1000 * seconds, 4) for size, seconds in costs.items()},
        tokens_per_step=1 + acceptance["draft_tokens_per_step"],
        acceptance_length=acceptance["acceptance_length"],
        by_position=acceptance["accepted_by_position"],
        contexts=observed.contexts,
        ratio=measured["ratio"]["median"],
        step_ratio=measured["step_ratio"]["median"],
        smallest=smallest,
        prefill_share=prefill / (prefill + stepping),
        is_trained=bench.engine.method not in FREE_METHODS,
        in_use=list_remedies_in_use(bench.engine),
    )


def list_remedies_in_use(engine: TorchEngine) -> frozenset[str]:
    """Return the names of what `advise` need not advise: it is so, or cannot be."""
    config, is_cpu = engine.config, engine.device.type == "cpu"
    has_matrices = config.checkpoint.drafter is not None  # of a drafter, which a build can round
    facts = {
        "rounded_drafter": not (is_cpu and has_matrices) or config.drafter_weights is not None,
        # What is stored as integers or in blocks is multiplied so.
        "bfloat16": not is_cpu or config.checkpoint.model.dtype == "bfloat16",
        "kernels": not is_cpu or engine.decoder.kernels is not None,
        "budget": not getattr(engine.proposer, "is_fixed", True),
    }
    return frozenset(name for name, holds in facts.items() if holds)
