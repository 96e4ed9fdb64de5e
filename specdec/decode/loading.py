"""From an engine folder and the options of a run to an engine that can decode."""

from __future__ import annotations

from typing import Any

from specdec.decode.drafters import read_drafting, refuse_others
from specdec.decode.engine import TorchEngine
from specdec.decode.settings import DecodeSettings


def load_engine(settings: DecodeSettings, tokenizer: Any) -> TorchEngine:
    """Load an engine of torch, and the one that drafts for it.

    tokenizer: to compare with that of --draft-tokenizer-dir; None where there is none.
    """
    drafting = read_drafting(settings, tokenizer)
    if settings.no_speculation:
        refuse_others(drafting, (), speculates=False)
    return TorchEngine(
        settings.engine_dir,
        device=settings.device,
        devices=drafting.target_devices,
        speculate=not settings.no_speculation,
        drafting=drafting,
    )
