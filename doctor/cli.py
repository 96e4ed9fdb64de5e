"""Command `specdec doctor`."""

from __future__ import annotations

from specdec.command.stages import show_report, stage_command

from .settings import DoctorSettings


@stage_command("doctor", DoctorSettings)
def command(settings: DoctorSettings) -> None:
    """Tell what is installed, what this machine can build and run, and why not."""
    from .report import examine, find_error, format_report

    report = examine(settings)
    show_report(report, settings, format_report, find_error(report))
