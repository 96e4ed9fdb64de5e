"""Command `specdec match`."""

from __future__ import annotations

from specdec.command.settings import require
from specdec.command.stages import show_report, stage_command

from .settings import MatchSettings


@stage_command("match", MatchSettings)
def command(settings: MatchSettings) -> None:
    """Tell which drafters on this machine fit a model, by headers alone, and why others do not."""
    require(settings)
    from .pipeline import match_drafters
    from .report import find_error, format_report

    report = match_drafters(settings)
    show_report(report, settings, format_report, find_error(report))
