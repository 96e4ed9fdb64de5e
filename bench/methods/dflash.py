"""DFlash: chains of rising length, and trees of rising size."""

from __future__ import annotations

from typing import cast

from specdec.decode.drafters.dflash import DEFAULT_TOP_K, DFlashProposer
from specdec.methods.dflash import DFlashDraft

from ..engine import Bench
from ..settings import TuneSettings
from .base import TREE_SIZES, Candidate


def list_candidates(bench: Bench, settings: TuneSettings) -> list[Candidate]:
    """Chains up to the whole block, and trees of the likeliest paths."""
    engine, drafter = bench.engine, cast(DFlashProposer, bench.engine.proposer)
    params = drafter.params
    top_k = min(DEFAULT_TOP_K, params.draft_vocab_size)
    shapes = [(size, 1) for size in {*TREE_SIZES, params.max_draft_depth}]
    shapes += [(size, top_k) for size in TREE_SIZES if size > 1 < top_k]
    found: dict[str, Candidate] = {}
    for size, width in sorted(shapes, key=lambda shape: (shape[1], shape[0])):
        most = min(size, params.max_draft_len)
        options = DFlashDraft(dflash_tokens=most, dflash_top_k=width)
        proposer = DFlashProposer(drafter.net, engine.decoder, options)
        if proposer.max_draft_tokens < size:
            continue  # so many are not drafted
        name = f"chain of {size}" if width == 1 else f"tree of {size}, top {width}"
        run = {"dflash_tokens": size, "dflash_top_k": width}
        found[name] = Candidate(name, proposer, run=run)
    return list(found.values())
