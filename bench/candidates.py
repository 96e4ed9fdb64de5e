"""The settings that specdec tune considers, each as a proposer on one engine."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specdec.run.choices import grow_choices
from specdec.run.draft_length import DraftLength
from specdec.run.methods.base import Proposer
from specdec.run.methods.draft_target import DraftTargetProposer
from specdec.run.methods.medusa import MedusaProposer
from specdec.run.methods.redrafter import ReDrafterProposer
from specdec.storage import Array

from .engine import Bench
from .replay import Recording

TREE_SIZES = (1, 2, 3, 5, 7, 10, 15, 20, 31, 47, 63)
NUM_RANKS = 10  # of each Medusa head, that trees are made of


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One setting; the options are those of the stages that it is chosen by."""

    name: str
    proposer: Proposer
    convert: dict[str, Any] = dataclasses.field(default_factory=dict)
    build: dict[str, Any] = dataclasses.field(default_factory=dict)
    run: dict[str, Any] = dataclasses.field(default_factory=dict)


def list_redrafter(bench: Bench, beams: Sequence[int], max_length: int) -> list[Candidate]:
    """Every number of beams with every length; all share the engine's network."""
    head = bench.engine.proposer.head
    candidates = []
    for num_beams in beams:
        for length in range(1, max_length + 1):
            other = copy.copy(head)
            other.params = dataclasses.replace(
                head.params, num_beams=num_beams, draft_len_per_beam=length
            )
            candidates.append(
                Candidate(
                    name=f"{num_beams} x {length}",
                    proposer=ReDrafterProposer(other),
                    convert={
                        "redrafter_num_beams": num_beams,
                        "redrafter_draft_len_per_beam": length,
                    },
                )
            )
    return candidates


def list_draft_target(bench: Bench, max_length: int) -> list[Candidate]:
    """Every draft length, of one draft model."""
    drafter = bench.engine.proposer.decoder
    config = bench.engine.config
    return [
        Candidate(
            name=f"{length} tokens",
            proposer=DraftTargetProposer(
                drafter, DraftLength(length), use_logits=False,
                target_vocab_size=config.checkpoint.model.vocab_size,
                max_num_tokens=config.build.max_num_tokens,
            ),
            build={"max_draft_len": length},
            run={"draft_len": str(length)},
        )
        for length in range(1, max_length + 1)
    ]  # fmt: skip


def list_medusa(bench: Bench, recordings: Sequence[Recording]) -> list[Candidate]:
    """Trees of rising size, each of the paths that are likeliest by the heads' accuracy here."""
    heads = bench.engine.proposer.heads
    accuracies = measure_accuracies(heads, recordings)
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
    return list(found.values())


@torch.inference_mode()
def measure_accuracies(heads: Any, recordings: Sequence[Recording]) -> Array:
    """How often a head's token of each rank is the text's, [heads, ranks], not rising with rank."""
    num_heads, num_ranks = heads.params.num_heads, min(NUM_RANKS, heads.vocab_size)
    right, seen = np.zeros((num_heads, num_ranks)), np.zeros((num_heads, 1))
    for recording in recordings:
        ranked = heads.rank_tokens(recording.states, [num_ranks] * num_heads).cpu().numpy()
        tokens = ranked.reshape(-1, num_heads, num_ranks)
        text = np.array(recording.output_ids)
        for head in range(num_heads):
            # The state that chose token i drafts, by head 0, token i + 1.
            wanted = text[1 + head :]
            right[head] += (tokens[: len(wanted), head] == wanted[:, None]).sum(0)
            seen[head] += len(wanted)
    shares: Array = np.minimum.accumulate(right / np.maximum(1, seen), axis=1)
    return shares
