"""specdec doctor."""

from __future__ import annotations

import json

import click

from specdec.command.stages import stage_command

from .settings import DoctorSettings


@stage_command("doctor", DoctorSettings)
def command(settings: DoctorSettings) -> None:
    """Tell what is installed, what this machine can build and run, and why not."""
    from .report import examine, find_error, format_report

    report = examine(settings)
    click.echo(json.dumps(report) if settings.json else format_report(report))
    if error := find_error(report):
        raise error
