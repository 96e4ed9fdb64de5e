"""Commands `specdec-bench` and `specdec diagnose`."""

from __future__ import annotations

from specdec.command.stages import show_report, stage_command
from specdec.methods.draft_target import DraftTargetDraft
from specdec.options import as_options

from .settings import BenchSettings, DiagnoseSettings


@stage_command("bench", BenchSettings)
def command(settings: BenchSettings) -> None:
    """Measure an engine with and without speculation, by turns in one process."""
    from .pipeline import find_error, run_bench
    from .report import format_report, format_sweep, write_report

    if settings.sweep:
        from .sweep import run_sweep

        swept = run_sweep(settings)
        show_report(swept, settings, format_sweep)
        reports = [row["report"] for row in swept["sweep"] if "report" in row]
    else:
        reports = [run_bench(settings)]
        show_report(reports[0], settings, format_report)
        if settings.output is not None:
            write_report(reports[0], settings.output, force=settings.force)
    for report in reports:
        if error := find_error(report, as_options(settings, DraftTargetDraft).use_logits):
            raise error


@stage_command("diagnose", DiagnoseSettings)
def diagnose(settings: DiagnoseSettings) -> None:
    """Tell why speculation is not faster, the weightiest cause first."""
    from . import diagnose
    from .report import format_diagnosis

    show_report(diagnose.diagnose(settings), settings, format_diagnosis)
