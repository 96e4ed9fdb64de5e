"""Facts of the tensorrt backend by which the stages choose; its build alone knows what it takes."""

from __future__ import annotations

from specdec.checkpoint.config import CheckpointConfig
from specdec.errors import Problems

from .library import find_package


def is_installed() -> bool:
    """Return whether one of its libraries is here; none is imported."""
    return find_package() is not None


def suits_machine() -> bool:
    """Return False: nobody gets it who did not ask for it."""
    return False


def find_checkpoint_problems(
    checkpoint: CheckpointConfig, label: str | None = None
) -> Problems | None:
    """Return None: it depends on the GPU that an engine is for, and the build says it."""
    return None


def takes_flag(name: str) -> bool:
    """Return False: it has the flags of specdec-build alone."""
    return False
