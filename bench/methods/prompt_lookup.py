"""Prompt lookup: tokens drafted and lengths of the n-gram, on any plain target."""

from __future__ import annotations

from specdec.decode.drafters.prompt_lookup import PromptLookupProposer
from specdec.methods.prompt_lookup import METHOD, LookupOptions

from ..engine import Bench
from ..settings import TuneSettings
from .base import Candidate, make_room, take_plain

NUM_TOKENS = (1, 2, 3, 4, 5, 7, 10, 15)
NGRAM_SIZES = (1, 2, 3, 4)


prepare = take_plain(METHOD, max(NUM_TOKENS), prompt_lookup_num_tokens=max(NUM_TOKENS))


def list_candidates(bench: Bench, settings: TuneSettings) -> list[Candidate]:
    """Every number of tokens with every length of the n-gram."""
    return [
        Candidate(
            f"lookup of {length}, {size}-grams",
            PromptLookupProposer(LookupOptions(num_tokens=length, max_ngram_size=size)),
            build=make_room(METHOD, length),
            run={"prompt_lookup_num_tokens": length, "max_matching_ngram_size": size},
        )
        for length in NUM_TOKENS
        for size in NGRAM_SIZES
    ]
