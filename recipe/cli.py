"""Command `specdec recipe`."""

from __future__ import annotations

from specdec.command.stages import show_report, stage_command

from .settings import RecipeSettings, check_settings


@stage_command("recipe", RecipeSettings)
def command(settings: RecipeSettings) -> None:
    """Write a recipe as jobs of a scheduler, from data to a server that was audited."""
    check_settings(settings)
    from .pipeline import write_jobs

    show_report(write_jobs(settings), settings, lambda report: str(report["command"]))
