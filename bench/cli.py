"""specdec-bench, specdec tune and specdec diagnose."""

from __future__ import annotations

from specdec.command.stages import show_report, stage_command
from specdec.methods.draft_target import DraftTargetDraft
from specdec.options import as_options

from .settings import BenchSettings, DiagnoseSettings, TuneSettings


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


@stage_command("tune", TuneSettings)
def tune(settings: TuneSettings) -> None:
    """Find the fastest setting of a drafter on this machine."""
    from . import tune
    from .report import format_tuning

    show_report(tune.tune(settings), settings, format_tuning)


@stage_command("diagnose", DiagnoseSettings)
def diagnose(settings: DiagnoseSettings) -> None:
    """Tell why speculation is not faster, the weightiest cause first."""
    from . import diagnose
    from .report import format_diagnosis

    show_report(diagnose.diagnose(settings), settings, format_diagnosis)
