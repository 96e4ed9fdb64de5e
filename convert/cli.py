"""specdec-convert."""

from __future__ import annotations

from specdec.command.stages import show_report, stage_command

from .settings import ConvertSettings


@stage_command("convert", ConvertSettings)
def command(settings: ConvertSettings) -> None:
    """Turn a Hugging Face model, and its drafter, into a checkpoint folder."""
    from .pipeline import convert_model, format_report

    show_report(convert_model(settings), settings, format_report if settings.dry_run else None)
