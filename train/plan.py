"""Plan of a training: its tokens, steps, disk, memory, and hours here by a short measured rate.

The steps that are measured change weights in memory alone, which are thrown away.
"""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable
from typing import Any

from specdec.errors import UsageError
from specdec.system.logs import get_logger

from .settings import TrainSettings

MEASURED_SECONDS = 8.0  # after which no further step is begun, of each rate
HIDDEN_STATES_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "fp8": "float8_e4m3fn"}

logger = get_logger(__name__)


def plan_training(settings: TrainSettings) -> dict[str, Any]:
    """Return the plan of a training, which is not begun; nothing is written."""
    from .devices import start_accelerator
    from .hidden_states import make_plan
    from .job import make_drafter
    from .loop import Hooks, Loop
    from .rows import prepare_rows
    from .setup import open_target, prepare_setup
    from .sharding import estimate_bytes
    from .target import load_tokenizer

    accelerator = start_accelerator(settings)
    if accelerator.num_processes > 1:
        raise UsageError(
            f"--plan in {accelerator.num_processes} processes",
            "plan in one: several share its hours",
        )
    setup = prepare_setup(settings, accelerator)
    target = open_target(setup)
    vocab_size = target.shape.vocab_size
    tokenizer = load_tokenizer(settings.model_dir, vocab_size)
    train, heldout = prepare_rows(settings.data, settings.eval_data, tokenizer, setup.max_length)
    drafter = make_drafter(setup, target, train)
    loop = Loop(settings, accelerator, target, drafter, train, heldout, Hooks())
    data_tokens = len(train.tokens) + len(heldout.tokens)
    training_tokens = round(loop.num_steps * loop.rows_per_step * len(train.tokens) / len(train))
    splits = {"train": train, "heldout": heldout}
    plans = {
        name: make_plan(setup, splits, vocab_size, dtype)
        for name, dtype in HIDDEN_STATES_DTYPES.items()
    }
    report = {
        "method": settings.method,
        "plan": True,
        "rows": len(train),
        "heldout_rows": len(heldout),
        "data_tokens": data_tokens,
        "labels": int(train.mask.sum()),
        "steps": loop.num_steps,
        "rows_per_step": loop.rows_per_step,
        "training_tokens": training_tokens,
        "drafter_parameters": sum(p.numel() for p in drafter.parameters()),
        "drafter_bytes": estimate_bytes(drafter, loop.optimizers),
        "hidden_states_bytes": {
            name: data_tokens * plan.token_bytes + plan.table_bytes for name, plan in plans.items()
        },
        **estimate_hours(loop, data_tokens, training_tokens),
        "peak_memory_bytes": measure_peak_memory(accelerator.device.type),
    }
    show_plan(report)
    return report


def estimate_hours(loop: Any, data_tokens: int, training_tokens: int) -> dict[str, Any]:
    """Measure rates in tokens a second; return them, and the hours that they make."""
    steps, batches = itertools.count(1), itertools.count()

    def take_step() -> int:
        tokens_before = loop.num_tokens
        loop.take_step(next(steps), measure=False)
        return int(loop.num_tokens - tokens_before)

    def read_batch() -> int:
        batch = loop.load_batch(next(batches), 0)
        loop.target.read(batch).hidden.sum().item()  # waits for a GPU
        return sum(batch.lengths)

    step_seconds, read_seconds = measure_token_seconds(take_step), measure_token_seconds(read_batch)
    drafter_seconds = max(0.0, step_seconds - read_seconds)
    hours = {
        "with_target": training_tokens * step_seconds / 3600,
        "with_hidden_states_dir": (
            (data_tokens * read_seconds + training_tokens * drafter_seconds) / 3600
        ),
    }
    return {
        "target_tokens_per_second": round(1 / read_seconds),
        "training_tokens_per_second": round(1 / step_seconds),
        "hours": {name: float(f"{value:.4g}") for name, value in hours.items()},
    }


def measure_token_seconds(work: Callable[[], int]) -> float:
    """Return the seconds a token of work that returns its tokens; the first call is not timed."""
    work()
    num_tokens, start = 0, time.monotonic()
    while not num_tokens or time.monotonic() - start < MEASURED_SECONDS:
        num_tokens += work()
    return (time.monotonic() - start) / num_tokens


def measure_peak_memory(device: str) -> int:
    """Return the most bytes that this process has had on the device."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def show_plan(report: dict[str, Any]) -> None:
    """Log a plan for readers."""
    logger.info(
        "plan: %d tokens of data in %d rows, %d of them labels; %d steps of %d rows read %d tokens",
        report["data_tokens"], report["rows"] + report["heldout_rows"], report["labels"],
        report["steps"], report["rows_per_step"], report["training_tokens"],
    )  # fmt: skip
    logger.info(
        "plan: hidden states would take %s",
        ", ".join(f"{n / 1e9:.3f} GB in {t}" for t, n in report["hidden_states_bytes"].items()),
    )
    logger.info(
        "plan: here %d tokens/s of training, of the target alone %d; that is %.2f hours, with"
        " --hidden-states-dir %.2f, without evaluations",
        report["training_tokens_per_second"], report["target_tokens_per_second"],
        report["hours"]["with_target"], report["hours"]["with_hidden_states_dir"],
    )  # fmt: skip
    logger.info(
        "plan: %d parameters are trained, the peak of memory was %.2f GB",
        report["drafter_parameters"], report["peak_memory_bytes"] / 1e9,
    )  # fmt: skip
    sizes = report["drafter_bytes"]
    logger.info(
        "plan: weights, gradients and optimizer states take %.2f GB of each of several processes,"
        " with --shard-drafter %s",
        sizes["whole"] / 1e9,
        ", ".join(f"{size / 1e9:.2f} GB of {count}" for count, size in sizes["sharded"].items()),
    )
