"""Suffix decoding: tokens drafted, and tokens for each that was found, on any plain target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.decode.drafters.suffix import SuffixProposer
from specdec.methods.suffix import METHOD, SuffixOptions

from .base import Candidate, Trial, take_plain

if TYPE_CHECKING:
    from ..engine import Bench
    from ..settings import TuneSettings

NUM_TOKENS = (2, 3, 5, 8, 15, 31)
FACTORS = (1.0, 4.0, 16.0)


def prepare(settings: TuneSettings, folder: Path) -> Trial:
    """Build the target with room for the largest tree."""
    most = max(NUM_TOKENS)
    return take_plain(settings, METHOD, most, suffix_max_tokens=most)


def list_candidates(bench: Bench, settings: TuneSettings) -> list[Candidate]:
    """Every number of tokens with every factor."""
    return [
        Candidate(
            f"suffix of {most}, factor {factor:g}",
            SuffixProposer(SuffixOptions(max_tokens=most, max_factor=factor)),
            build={"speculative_decoding_mode": METHOD.mode, "max_draft_len": most},
            run={"suffix_max_tokens": most, "suffix_max_factor": factor},
        )
        for most in NUM_TOKENS
        for factor in FACTORS
    ]
