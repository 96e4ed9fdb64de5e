"""MTP: chains of rising length."""

from __future__ import annotations

from typing import cast

from specdec.decode.drafters.mtp import MtpProposer
from specdec.methods.mtp import MtpOptions

from ..engine import Bench
from ..settings import TuneSettings
from .base import Candidate


def list_candidates(bench: Bench, settings: TuneSettings) -> list[Candidate]:
    """Chains of every length that the engine has room for."""
    engine, drafter = bench.engine, cast(MtpProposer, bench.engine.proposer)
    return [
        Candidate(
            f"chain of {size}",
            MtpProposer(drafter.net, engine.decoder, MtpOptions(num_tokens=size)),
            run={"mtp_num_draft_tokens": str(size)},
        )
        for size in range(1, drafter.params.max_draft_len + 1)
    ]
