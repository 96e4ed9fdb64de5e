"""Steps of one token a row, where that token is on the device and not on the host yet."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import States, Step
from specdec.engine.tree import IntArray


def run_tokens(decoder: Decoder, cache: KVCache, rows: IntArray, tokens: Tensor) -> States:
    """Run and commit one token per row, `tokens` [B] on the device; return states [B, 1, D]."""
    positions = cache.past_lens[rows][:, None]
    step = Step(
        rows=rows,
        tokens=np.zeros_like(positions),  # the host does not know them
        positions=positions,
        tree_mask=np.ones((len(rows), 1, 1), np.bool_),
    )
    states = decoder.forward(step, cache, tokens[:, None])
    for row in rows.tolist():
        cache.commit(row, [0])
    return States(states, decoder.observed_outputs)
