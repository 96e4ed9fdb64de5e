"""`specdec-train`: data and a Hugging Face target -> a drafter folder."""

from __future__ import annotations

import json

import click

from specdec.command.stages import stage_command

from .data.settings import DataSettings
from .settings import TrainSettings


@stage_command("train", TrainSettings)
def command(settings: TrainSettings) -> None:
    """Train a drafter for a target, which stays as it is."""
    from .pipeline import train_drafter

    report = train_drafter(settings)
    if settings.json and report is not None:
        click.echo(json.dumps(report))


@stage_command("train data", DataSettings, section="data")
def data_command(settings: DataSettings) -> None:
    """Make training data: let the target itself answer conversations or continue prompts."""
    from .data.pipeline import regenerate_data

    report = regenerate_data(settings)
    if settings.json:
        click.echo(json.dumps(report))


command.subcommands = {"data": data_command}
