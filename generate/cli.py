"""specdec generate."""

from __future__ import annotations

from specdec.command.stages import stage_command
from specdec.methods import place_drafter

from .settings import GenerateSettings, check_settings


@stage_command("generate", GenerateSettings)
def command(settings: GenerateSettings) -> None:
    """Convert, build and run in one command; what was built is kept for the next time."""
    settings = place_drafter(settings)
    check_settings(settings)  # before torch is imported
    from .pipeline import clear_cache, generate

    if settings.clear_cache:
        clear_cache()
    else:
        generate(settings)
