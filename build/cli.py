"""specdec-build."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.command.stages import show_report, stage_command

from .settings import BuildSettings

if TYPE_CHECKING:
    from specdec.checkpoint.config import CheckpointConfig
    from specdec.engine.layout import BuildConfig


@stage_command("build", BuildSettings)
def command(settings: BuildSettings) -> None:
    """Turn a checkpoint folder into an engine folder."""
    from .pipeline import build_engine

    show_report(build_engine(settings), settings, format_plan if settings.dry_run else None)


def foresee(settings: BuildSettings, checkpoint: CheckpointConfig) -> BuildConfig | None:
    """Return the limits of the engine that settings make of a checkpoint that is to be written.

    None of one that `Engine` cannot load. Raises SpecDecError for what needs no tensor to be known
    as wrong.
    """
    from .pipeline import check_before_checkpoint

    return check_before_checkpoint(settings, checkpoint)


command.foresee = foresee


def format_plan(report: dict[str, Any]) -> str:
    """Return a plan as lines of text; commands as one types them."""
    lines = []
    for key, value in report.items():
        if key == "commands":
            lines += [f"command: {command['shell']}" for command in value]
        elif key != "notes":  # the log has them
            lines.append(f"{key}: {value}")
    return "\n".join(lines)
