"""specdec-convert."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from specdec.command.stages import show_report, stage_command

from .settings import ConvertSettings

if TYPE_CHECKING:
    from specdec.checkpoint.config import CheckpointConfig

    from .matching import DrafterMatcher


@stage_command("convert", ConvertSettings)
def command(settings: ConvertSettings) -> None:
    """Turn a Hugging Face model, and its drafter, into a checkpoint folder."""
    from .pipeline import convert_model
    from .report import format_report, tells_backends

    is_told = tells_backends(settings)
    format_plan = functools.partial(format_report, tells_backends=is_told)
    show_report(convert_model(settings), settings, format_plan if settings.dry_run else None)


def foresee(settings: ConvertSettings) -> tuple[CheckpointConfig, dict[str, Any] | None]:
    """Return the configuration and the vocabulary of the checkpoint that settings make."""
    from .pipeline import complete_settings, make_plan

    plan = make_plan(complete_settings(settings))
    return plan.checkpoint, plan.vocabulary


def open_matcher(model_dir: str) -> DrafterMatcher:
    """Return what holds drafters against a target, for specdec match."""
    from .matching import DrafterMatcher

    return DrafterMatcher(model_dir)


command.foresee, command.open_matcher = foresee, open_matcher
