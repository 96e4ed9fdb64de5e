"""specdec-export."""

from __future__ import annotations

import json

import click

from specdec.command.stages import stage_command

from .settings import ExportSettings, check_settings


@stage_command("export", ExportSettings)
def command(settings: ExportSettings) -> None:
    """Write a drafter or a model in the format of another runtime."""
    check_settings(settings)
    from .pipeline import export_model

    report = export_model(settings)
    click.echo(json.dumps(report) if settings.json else report["command"])
