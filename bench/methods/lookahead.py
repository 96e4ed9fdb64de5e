"""Lookahead: windows, on any plain target."""

from __future__ import annotations

from specdec.decode.drafters.lookahead import LookaheadProposer
from specdec.methods.lookahead import METHOD, LookaheadConfig

from ..engine import Bench
from ..settings import TuneSettings
from .base import Candidate, make_room, take_plain

WINDOWS = tuple(LookaheadConfig(size, size, size) for size in (2, 3, 4, 5))


prepare = take_plain(METHOD, max(window.max_draft_tokens for window in WINDOWS))


def list_candidates(bench: Bench, settings: TuneSettings) -> list[Candidate]:
    """Every window."""
    return [
        Candidate(
            f"lookahead {window}",
            LookaheadProposer(window, bench.engine.decoder),
            build=make_room(METHOD, window.max_draft_tokens),
            run={"lookahead_config": str(window)},
        )
        for window in WINDOWS
    ]
