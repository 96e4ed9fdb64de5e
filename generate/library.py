"""Engines of models for Python's `Engine.load`: made or taken from the cache as generate does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.methods import place_drafter
from specdec.options import check_value, get_flags

from .pipeline import hold_engine, limit_cache, open_cache
from .plans import foresee_engine, plan_draft, plan_target
from .settings import GenerateSettings, check_drafters

STAGES = ("convert", "build")
KEPT = ("no_cache", "force")


def list_model_options() -> list[str]:
    """List the options of a model that is made an engine, without those of its folders."""
    names = [
        field.name for field in dataclasses.fields(GenerateSettings)
        if field.metadata.get("stage") in STAGES and field.name != "model_dir"
    ]  # fmt: skip
    return [*(name for name in names if name not in ("max_batch_size",)), *KEPT]


def hold_models(
    stack: contextlib.ExitStack, fixed: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Path, Path | None]:
    """Make the engines of a target and of a draft model; return their folders.

    stack: holds them in the cache until it is closed. fixed: settings of GenerateSettings that
    parameters give. options: those of `list_model_options`, checked as a recipe's are.
    """
    settings = _read_settings(fixed, options)
    plans = [plan_target(settings)]
    if settings.draft_model_dir is not None:
        plans.append(plan_draft(settings))
    cache, max_bytes = stack.enter_context(open_cache(settings))
    for plan in plans:
        if settings.force or not cache.has(plan.name):
            foresee_engine(plan)
    folders = [stack.enter_context(hold_engine(cache, plan, settings)) for plan in plans]
    if max_bytes is not None:
        limit_cache(cache, max_bytes)
    return folders[0], folders[1] if len(folders) > 1 else None


def _read_settings(fixed: Mapping[str, Any], options: Mapping[str, Any]) -> GenerateSettings:
    """Return settings of generate; UsageError for wrong values, or several drafters."""
    flags = {name: flag for name, (flag, _) in get_flags(GenerateSettings).items()}
    given = {name: value for name, value in {**fixed, **options}.items() if value is not None}
    values = {name: check_value(name, value, flags[name]) for name, value in given.items()}
    settings = place_drafter(GenerateSettings(**values))
    check_drafters(list(values))
    return settings
