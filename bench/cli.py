"""specdec-bench."""

from __future__ import annotations

from specdec.command.stages import show_report, stage_command
from specdec.methods.draft_target import DraftTargetDraft
from specdec.options import as_options

from .settings import BenchSettings


@stage_command("bench", BenchSettings)
def command(settings: BenchSettings) -> None:
    """Measure an engine with and without speculation, by turns in one process."""
    from .pipeline import find_error, run_bench
    from .report import format_report, write_report

    report = run_bench(settings)
    show_report(report, settings, format_report)
    if settings.output is not None:
        write_report(report, settings.output, force=settings.force)
    if error := find_error(report, as_options(settings, DraftTargetDraft).use_logits):
        raise error
