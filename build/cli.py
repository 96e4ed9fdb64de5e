"""specdec-build."""

from __future__ import annotations

import json

import click

from specdec.command import run_command, stage_command

from .settings import BuildSettings


@stage_command("build", BuildSettings)
def command(settings: BuildSettings) -> None:
    """Turn a checkpoint folder into an engine folder."""
    from .pipeline import build_engine

    report = build_engine(settings)
    if settings.json:
        click.echo(json.dumps(report))
    elif settings.dry_run:
        click.echo("\n".join(f"{key}: {value}" for key, value in report.items()))


def main() -> None:
    """Entry point of `specdec-build`."""
    run_command(command)
