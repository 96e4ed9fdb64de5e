"""Command specdec-export: folders for other runtimes."""

from __future__ import annotations

from specdec.command.stages import show_report, stage_command

from .settings import ExportSettings, check_settings


@stage_command("export", ExportSettings)
def command(settings: ExportSettings) -> None:
    """Write a drafter or a model in the format of another runtime."""
    check_settings(settings)
    from .pipeline import export_model

    show_report(export_model(settings), settings, lambda report: str(report["command"]))
