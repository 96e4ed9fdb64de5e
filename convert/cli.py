"""specdec-convert."""

from __future__ import annotations

import json

import click

from specdec.command.stages import stage_command

from .settings import ConvertSettings


@stage_command("convert", ConvertSettings)
def command(settings: ConvertSettings) -> None:
    """Turn a Hugging Face model, and its drafter, into a checkpoint folder."""
    from .pipeline import convert_model, format_report

    report = convert_model(settings)
    if settings.json:
        click.echo(json.dumps(report))
    elif settings.dry_run:
        click.echo(format_report(report))
