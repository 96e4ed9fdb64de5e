"""Speculative methods at run time: one file each, under the method's name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from torch import Tensor

from specdec.decode.drafters.base import PlainProposer, Proposer
from specdec.engine.decoder import Decoder
from specdec.schema import CheckpointConfig


def make_proposer(
    checkpoint: CheckpointConfig, weights: Mapping[str, Tensor], decoder: Decoder
) -> Proposer:
    """Return the proposer of a checkpoint's method, or one that drafts nothing."""
    if checkpoint.method is None:
        return PlainProposer()
    module = importlib.import_module(f"{__name__}.{checkpoint.method.name}")
    proposer: Proposer = module.make_proposer(checkpoint.drafter, weights, decoder)
    return proposer
