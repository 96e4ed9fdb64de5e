"""Engines that `specdec.Engine` runs in this process: those of torch and of TensorRT's layers."""

from __future__ import annotations

from typing import Any

from specdec.methods.draft_target import DraftOptions
from specdec.system import logs

from ..settings import RunSettings
from .base import OpenedEngine

logger = logs.get_logger(__name__)


def follow_ranks(settings: RunSettings) -> bool:
    """Return False: the engine starts what ranks it needs, or meets them, when it is loaded."""
    return False


def open_engine(
    settings: RunSettings, options: DraftOptions | None, tokenizer: Any
) -> OpenedEngine:
    """Load an engine, and the draft model's that the settings name."""
    from specdec import Engine

    if settings.kv_cache_free_gpu_memory_fraction is not None:
        logger.warning(
            "--kv-cache-free-gpu-memory-fraction has no effect on a torch engine, whose"
            " cache is as large as the requests need"
        )
    engine = Engine.open(settings, tokenizer, measuring="never" if settings.dry_run else "late")
    return OpenedEngine(engine, engine.core, engine.core.begin_drafts)
