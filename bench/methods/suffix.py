"""Suffix decoding: tokens drafted, and tokens for each that was found, on any plain target."""

from __future__ import annotations

from specdec.decode.drafters.suffix import SuffixProposer
from specdec.methods.suffix import METHOD, SuffixOptions

from ..engine import Bench
from ..settings import TuneSettings
from .base import Candidate, make_room, take_plain

NUM_TOKENS = (2, 3, 5, 8, 15, 31)
FACTORS = (1.0, 4.0, 16.0)


prepare = take_plain(METHOD, max(NUM_TOKENS), suffix_max_tokens=max(NUM_TOKENS))


def list_candidates(bench: Bench, settings: TuneSettings) -> list[Candidate]:
    """Every number of tokens with every factor."""
    return [
        Candidate(
            f"suffix of {most}, factor {factor:g}",
            SuffixProposer(SuffixOptions(max_tokens=most, max_factor=factor)),
            build=make_room(METHOD, most),
            run={"suffix_max_tokens": most, "suffix_max_factor": factor},
        )
        for most in NUM_TOKENS
        for factor in FACTORS
    ]
