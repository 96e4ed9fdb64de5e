"""Pipeline of a benchmark: engine and prompts to a report of the speed-up, with warnings."""

from __future__ import annotations

from typing import Any

from specdec.command.settings import require
from specdec.errors import SpecDecError, count
from specdec.files.staging import check_output_dir
from specdec.methods.draft_target import DraftTargetDraft
from specdec.options import as_options
from specdec.system import logs

from .machine import describe_load, measure_memory
from .settings import BenchSettings, read_counts

logger = logs.get_logger(__name__)
MANY_LOOPS = 0.25  # share of repetitive texts that is worth a warning


def run_bench(settings: BenchSettings) -> dict[str, Any]:
    """Measure an engine, and return the object that `--json` prints."""
    run_settings = settings.to_decode()
    require(run_settings, "tokenizer_dir")
    batch_sizes = read_counts("--batch-sizes", settings.batch_sizes)
    if settings.output is not None:
        check_output_dir(settings.output, force=settings.force, inputs=[])
    from .engine import measure_engine
    from .measure import measure_batch
    from .prompts import read_prompt_set

    prompts = read_prompt_set(settings.prompts, max(batch_sizes), settings.prompts_per_category)
    pair = as_options(settings, DraftTargetDraft)
    batches = []
    with measure_engine(run_settings, prompts, batch_sizes) as (bench, report):
        for size in batch_sizes:
            rounds = f"{count(settings.repeat, 'round')} of {count(len(prompts), 'prompt')}"
            logger.info("batch size %d: %s, with and without speculation", size, rounds)
            batches.append(measure_batch(bench, size, settings.repeat))
    report |= {
        "engine_dir": str(settings.engine_dir),
        "draft_engine_dir": str(pair.draft_engine_dir) if pair.draft_engine_dir else None,
        "load_seconds": round(bench.engine.load_seconds, 3),
        "prompts": str(settings.prompts) if settings.prompts else None,
        "repeat": settings.repeat,
        "memory": measure_memory(),
        "batches": batches,
    }
    report["warnings"] = list_warnings(report, pair.use_logits)
    return report


def list_warnings(report: dict[str, Any], use_logits: bool) -> list[str]:
    """Return warnings about doubtful figures."""
    warnings = describe_load(report["processors_used_by_others"])
    for batch in report["batches"]:
        label = f"batch size {batch['batch_size']}"
        loops, texts = batch["looping"], batch["texts"]
        if loops["texts"] > MANY_LOOPS * loops["of"]:
            warnings.append(
                f"{label}: {loops['texts']} of {loops['of']} texts run in circles, which are easy"
                f" to draft; acceptance length over the others:"
                f" {loops['acceptance_length_of_others']}"
            )
        if texts["equal"] < texts["compared"] and not use_logits:
            warnings.append(
                f"{label}: {texts['compared'] - texts['equal']} of {texts['compared']} texts differ"
                f" from those without speculation ({report['dtype']})"
            )
        for name in ("speculation", "plain"):
            rates = batch[name]["tokens_per_second"]
            if rates["highest"] > 1.3 * rates["lowest"]:
                warnings.append(
                    f"{label}: {name} ran at {rates['lowest']:.1f} to {rates['highest']:.1f}"
                    " tokens/s: too unsteady for small differences"
                )
    return warnings


def find_error(report: dict[str, Any], use_logits: bool) -> SpecDecError | None:
    """Return the error of a report in which texts differ by more than rounding."""
    if report["dtype"] != "float32" or use_logits:
        return None
    different = [
        f"{batch['texts']['compared'] - batch['texts']['equal']} at batch size"
        f" {batch['batch_size']}"
        for batch in report["batches"]
        if batch["texts"]["equal"] < batch["texts"]["compared"]
    ]
    if not different:
        return None
    return SpecDecError(
        f"{report['engine_dir']}: texts differ with and without speculation in float32:"
        f" {', '.join(different)}",
        "specdec-verify --engine-dir shows where, and whether a near-tie explains it",
    )
