"""Medusa: trees of rising size, of the likeliest paths by the heads' accuracy here, or by step."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import torch

from specdec.decode.drafters.medusa import MedusaProposer
from specdec.decode.drafters.trees import grow_choices
from specdec.files.reading import Array

from ..engine import Bench
from ..measure import list_results
from ..settings import TuneSettings
from .base import TREE_SIZES, Candidate

NUM_RANKS = 10  # of each head's tokens, that static trees are made of


def list_candidates(bench: Bench, settings: TuneSettings) -> list[Candidate]:
    """Trees of rising size: of the likeliest paths by the heads' accuracy here, and dynamic."""
    heads = cast(MedusaProposer, bench.engine.proposer).heads
    accuracies = measure_accuracies(bench, heads)
    found: dict[str, Candidate] = {}
    for size in TREE_SIZES:
        choices = grow_choices(
            len(accuracies), min(size, heads.params.max_draft_len), accuracies.shape[1],
            lambda depth, rank: float(accuracies[depth, rank]),
        )  # fmt: skip
        name = f"tree of {len(choices)}, {max(map(len, choices))} deep"
        if name not in found:
            text = json.dumps([list(path) for path in choices])
            found[name] = Candidate(
                name, MedusaProposer(heads, choices), run={"medusa_choices": text}
            )
            name = f"dynamic tree of {len(choices)}"
            run = {"medusa_tree_tokens": len(choices)}
            found[name] = Candidate(name, MedusaProposer(heads, len(choices)), run=run)
    return list(found.values())


@torch.inference_mode()
def measure_accuracies(bench: Bench, heads: Any) -> Array:
    """How often a head's token of each rank is the text's, [heads, ranks], not rising with rank."""
    num_heads, num_ranks = heads.params.num_heads, min(NUM_RANKS, heads.vocab_size)
    right, seen = np.zeros((num_heads, num_ranks)), np.zeros((num_heads, 1))
    for result in list_results(bench.run(bench.plain, bench.max_batch_size)):
        prompt, text = result.request.input_ids, np.array(result.output_ids)
        states = bench.read_states([*prompt, *result.output_ids])[len(prompt) - 1 : -1]
        ranked, _ = heads.rank_tokens(states, [num_ranks] * num_heads)
        tokens = ranked.cpu().numpy().reshape(-1, num_heads, num_ranks)
        for head in range(num_heads):
            # The state that chose token i drafts, by head 0, token i + 1.
            wanted = text[1 + head :]
            right[head] += (tokens[: len(wanted), head] == wanted[:, None]).sum(0)
            seen[head] += len(wanted)
    shares: Array = np.minimum.accumulate(right / np.maximum(1, seen), axis=1)
    return shares
