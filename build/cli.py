"""specdec-build."""

from __future__ import annotations

import json
from typing import Any

import click

from specdec.command.stages import stage_command

from .settings import BuildSettings


@stage_command("build", BuildSettings)
def command(settings: BuildSettings) -> None:
    """Turn a checkpoint folder into an engine folder."""
    from .pipeline import build_engine

    report = build_engine(settings)
    if settings.json:
        click.echo(json.dumps(report))
    elif settings.dry_run:
        click.echo("\n".join(format_plan(report)))


def format_plan(report: dict[str, Any]) -> list[str]:
    """Return a plan as lines of text; commands as one types them."""
    lines = []
    for key, value in report.items():
        if key == "commands":
            lines += [f"command: {command['shell']}" for command in value]
        elif key != "notes":  # the log has them
            lines.append(f"{key}: {value}")
    return lines
