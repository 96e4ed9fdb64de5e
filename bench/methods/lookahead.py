"""Lookahead: windows, on any plain target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.decode.drafters.lookahead import LookaheadProposer
from specdec.methods.lookahead import METHOD, LookaheadConfig

from .base import Candidate, Trial, take_plain

if TYPE_CHECKING:
    from ..engine import Bench
    from ..settings import TuneSettings

WINDOWS = tuple(LookaheadConfig(size, size, size) for size in (2, 3, 4, 5))


def prepare(settings: TuneSettings, folder: Path) -> Trial:
    """Build the target with room for the largest window."""
    longest = max(window.max_draft_tokens for window in WINDOWS)
    return take_plain(settings, METHOD, longest)


def list_candidates(bench: Bench, settings: TuneSettings) -> list[Candidate]:
    """Every window."""
    return [
        Candidate(
            f"lookahead {window}",
            LookaheadProposer(window, bench.engine.decoder),
            build={
                "speculative_decoding_mode": METHOD.mode,
                "max_draft_len": window.max_draft_tokens,
            },
            run={"lookahead_config": str(window)},
        )
        for window in WINDOWS
    ]
