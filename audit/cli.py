"""specdec audit."""

from __future__ import annotations

import json

import click

from specdec.command.stages import stage_command

from .settings import AuditSettings


@stage_command("audit", AuditSettings)
def command(settings: AuditSettings) -> None:
    """Tell whether a running server is lossless, and whether its speculation works."""
    from .pipeline import audit_server
    from .report import find_error, format_report

    report = audit_server(settings)
    click.echo(json.dumps(report) if settings.json else format_report(report))
    if error := find_error(report):
        raise error
