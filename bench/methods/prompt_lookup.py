"""Prompt lookup: tokens drafted and lengths of the n-gram, on any plain target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.decode.drafters.prompt_lookup import PromptLookupProposer
from specdec.methods.prompt_lookup import METHOD, LookupOptions

from .base import Candidate, Trial, take_plain

if TYPE_CHECKING:
    from ..engine import Bench
    from ..settings import TuneSettings

NUM_TOKENS = (1, 2, 3, 4, 5, 7, 10, 15)
NGRAM_SIZES = (1, 2, 3, 4)


def prepare(settings: TuneSettings, folder: Path) -> Trial:
    """Build the target with room for the longest draft."""
    longest = max(NUM_TOKENS)
    return take_plain(settings, METHOD, longest, prompt_lookup_num_tokens=longest)


def list_candidates(bench: Bench, settings: TuneSettings) -> list[Candidate]:
    """Every number of tokens with every length of the n-gram."""
    return [
        Candidate(
            f"lookup of {length}, {size}-grams",
            PromptLookupProposer(LookupOptions(num_tokens=length, max_ngram_size=size)),
            build={"speculative_decoding_mode": METHOD.mode, "max_draft_len": length},
            run={"prompt_lookup_num_tokens": length, "max_matching_ngram_size": size},
        )
        for length in NUM_TOKENS
        for size in NGRAM_SIZES
    ]
