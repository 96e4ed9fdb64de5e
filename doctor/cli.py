"""Command `specdec doctor`."""

from __future__ import annotations

from specdec.command.stages import show_report, stage_command
from specdec.options import Contradiction, refuse_contradictions

from .settings import DoctorSettings

CLEARS_ALONE: Contradiction = (
    lambda settings: settings.engine_dir is not None,
    "--clear-cache does nothing else, and --engine-dir was given too",
    "clear the cache first, then check the engine",
)


@stage_command("doctor", DoctorSettings)
def command(settings: DoctorSettings) -> None:
    """Tell what is installed, what this machine can build and run, and why not."""
    if settings.clear_cache:
        refuse_contradictions(settings, [CLEARS_ALONE])
        from .cache import clear_cache, format_cleared

        show_report(clear_cache(), settings, format_cleared)
        return
    from .report import examine, find_error, format_report

    report = examine(settings)
    show_report(report, settings, format_report, find_error(report))
