"""Checkpoint folder to engine folder, by the backend that is asked for or suits the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.command.settings import make_unknown_error, require
from specdec.errors import UsageError
from specdec.files.backends import BACKENDS, Backend, choose_default
from specdec.options import get_flags, name_flag, refuse_contradictions
from specdec.system import logs

from .settings import BuildSettings

if TYPE_CHECKING:
    from specdec.checkpoint.config import CheckpointConfig
    from specdec.engine.layout import BuildConfig

logger = logs.get_logger(__name__)


def build_engine(settings: BuildSettings) -> dict[str, Any]:
    """Build an engine and return what was built; with `dry_run`, only check and describe it."""
    from . import triton

    refuse_contradictions(settings, triton.CONTRADICTIONS)
    if settings.emit_triton is None:
        return build_any_engine(settings)
    require(settings)
    templates = triton.read_templates(settings)
    report = {} if settings.checkpoint_dir is None else build_any_engine(settings)
    if report and settings.dry_run:  # there is no engine yet to describe
        return report
    return report | triton.write_repository(settings, templates)


def build_any_engine(settings: BuildSettings) -> dict[str, Any]:
    """Build with the backend that is asked for."""
    require(settings, "checkpoint_dir")
    report: dict[str, Any] = choose_backend(settings).load("build").build_engine(settings)
    return report


def check_before_checkpoint(
    settings: BuildSettings, checkpoint: CheckpointConfig
) -> BuildConfig | None:
    """Return the limits of a planned checkpoint's engine, None of one that `Engine` cannot load.

    Raises SpecDecError for what can be known before the checkpoint's tensors are there.
    """
    backend = choose_backend(settings)
    limits: BuildConfig | None = backend.load("build").foresee_limits(settings, checkpoint)
    return limits


def choose_backend(settings: BuildSettings) -> Backend:
    """Return the backend; raise UsageError for options that it has no use for."""
    if settings.backend != "auto":
        backend = BACKENDS[settings.backend]
    else:
        backend = choose_default()
        if backend.is_separate:
            logger.info("backend %s: it is installed here, and a GPU is visible", backend.name)
    refuse_unknown_options(settings, backend)
    refuse_foreign_options(settings, backend)
    return backend


def refuse_unknown_options(settings: BuildSettings, backend: Backend) -> None:
    """Raise UsageError for options that neither specdec-build nor the backend's builder has."""
    for name, option in settings.unknown_options.items() if backend.builder is None else ():
        takers = [each for each in BACKENDS.values() if each.load("support").takes_flag(name)]
        if not takers:
            raise make_unknown_error(BuildSettings, "build", name, option)
        flag, taker = name_flag(name), takers[0]
        raise UsageError(
            f"{flag} is a flag of {taker.builder}, which the {backend.name} backend has no use for",
            f"leave {flag} out, or give --backend {taker.name}",
        )


def refuse_foreign_options(settings: BuildSettings, backend: Backend) -> None:
    """Raise UsageError for options that only other backends take.

    Where nobody asked for this backend, those that say how another computes are named and have no
    effect.
    """
    flags = get_flags(BuildSettings)
    foreign_fields = {
        name: other
        for other in BACKENDS.values() if other is not backend
        for name in (*other.build_fields, *other.ineffective_fields)
        if getattr(settings, name) != flags[name][1]
    }  # fmt: skip
    if not foreign_fields:
        return
    is_harmless = all(name in other.ineffective_fields for name, other in foreign_fields.items())
    if settings.backend == "auto" and is_harmless:
        shown = ", ".join(map(name_flag, foreign_fields))
        logger.warning(
            "no effect on the %s backend, which was chosen here: %s", backend.name, shown
        )
        return
    name, other = next(iter(foreign_fields.items()))
    raise UsageError(
        f"{name_flag(name)} has no meaning for the {backend.name} backend",
        f"leave {name_flag(name)} out, or give --backend {other.name}",
    )
