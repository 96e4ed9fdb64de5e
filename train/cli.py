"""`specdec-train`: data and a Hugging Face target -> a drafter folder."""

from __future__ import annotations

from specdec.command.stages import show_report, stage_command

from .data.settings import DataSettings
from .ngrams.settings import NgramTableSettings
from .settings import TrainSettings


@stage_command("train", TrainSettings)
def command(settings: TrainSettings) -> None:
    """Train a drafter for a target, which stays as it is."""
    from .pipeline import train_drafter

    if (report := train_drafter(settings)) is not None:
        show_report(report, settings)


@stage_command("train data", DataSettings, section="data")
def data_command(settings: DataSettings) -> None:
    """Make training data: let the target itself answer conversations or continue prompts."""
    from .data.pipeline import regenerate_data

    show_report(regenerate_data(settings), settings)


@stage_command("train ngrams", NgramTableSettings, section="ngrams")
def ngrams_command(settings: NgramTableSettings) -> None:
    """Count the n-grams of texts: a table that drafts for every model with their tokenizer."""
    from .ngrams.pipeline import make_ngram_table

    show_report(make_ngram_table(settings), settings)


command.subcommands = {"data": data_command, "ngrams": ngrams_command}
