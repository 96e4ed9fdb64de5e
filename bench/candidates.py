"""The settings that specdec tune considers, each as a proposer on one engine."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from specdec.decode.drafters.base import Proposer
from specdec.decode.drafters.draft_target import DraftTargetProposer
from specdec.decode.drafters.eagle import EagleProposer, count_top_k
from specdec.decode.drafters.lookahead import LookaheadProposer
from specdec.decode.drafters.medusa import MedusaProposer
from specdec.decode.drafters.pacing import DraftLength
from specdec.decode.drafters.prompt_lookup import PromptLookupProposer
from specdec.decode.drafters.redrafter import ReDrafterProposer
from specdec.decode.drafters.trees import grow_choices
from specdec.decode.ngram_options import LookaheadConfig, LookupOptions
from specdec.methods import EXTERNAL_METHODS
from specdec.storage import Array

from .engine import Bench
from .rehearsal import (
    Rehearsed,
    TextChain,
    TextTree,
    count_dynamic,
    count_static,
    measure_ranks,
    rehearse,
)
from .replay import Recording, count_positions

TREE_SIZES = (1, 2, 3, 5, 7, 10, 15, 20, 31, 47, 63)
NUM_RANKS = 10  # of each level of a draft, that static trees are made of
TOP_KS = (2, 4, 8)  # branches of dynamic trees
LOOKUP_LENGTHS = (1, 2, 3, 4, 5, 7, 10, 15)
NGRAM_SIZES = (1, 2, 3, 4)
WINDOWS = tuple(LookaheadConfig(size, size, size) for size in (2, 3, 4, 5))
# What a plain target must have room for, to draft of n-grams in all these ways.
MAX_NGRAM_TOKENS = max(*LOOKUP_LENGTHS, *(window.max_draft_tokens for window in WINDOWS))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One setting; the options are those of the stages that it is chosen by.

    rehearsed: proposes the same at no cost, where that is known; what drafting costs is then
    sampled, once for all candidates of the same `cost`. is_replayed: whether recorded texts tell
    what is accepted, or only decoding does.
    """

    name: str
    proposer: Proposer
    convert: dict[str, Any] = dataclasses.field(default_factory=dict)
    build: dict[str, Any] = dataclasses.field(default_factory=dict)
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    rehearsed: Proposer | None = None
    cost: str = ""
    is_replayed: bool = True


def list_redrafter(bench: Bench, beams: Sequence[int], max_length: int) -> list[Candidate]:
    """Every number of beams with every length; all share the engine's network."""
    head = cast(ReDrafterProposer, bench.engine.proposer).head
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
    drafter = cast(DraftTargetProposer, bench.engine.proposer).decoder
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
    heads = cast(MedusaProposer, bench.engine.proposer).heads
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


def list_eagle(bench: Bench, recordings: Sequence[Recording]) -> list[Candidate]:
    """Static trees by the drafter's accuracy here, and dynamic ones by branches, depth and size."""
    static, dynamic = list_static(bench, recordings), list_dynamic(bench, recordings)
    return [*static, *dynamic]


def list_static(bench: Bench, recordings: Sequence[Recording]) -> list[Candidate]:
    """The likeliest trees of rising size, each down to every depth."""
    engine, drafter = bench.engine, cast(EagleProposer, bench.engine.proposer)
    params = drafter.params
    num_ranks = min(NUM_RANKS, params.draft_vocab_size)
    chain = TextChain(params.max_draft_depth, num_ranks)
    positions = count_positions(recordings, 0)
    ranks = rehearse(drafter, engine.decoder, recordings, chain, positions)
    accuracies = measure_ranks(ranks, num_ranks)
    found: dict[str, Candidate] = {}
    for max_depth in range(1, params.max_draft_depth + 1):
        for size in TREE_SIZES:
            choices = grow_choices(
                max_depth, min(size, params.max_draft_len), num_ranks,
                lambda depth, rank: float(accuracies[depth, rank]),
                params.max_non_leaves_per_layer,
            )  # fmt: skip
            depth = max(map(len, choices))
            name = f"static {len(choices)}, {depth} deep"
            if name in found:
                continue
            proposer = EagleProposer(drafter.net, engine.decoder)
            proposer.use_choices(choices)
            accepted = count_static(ranks, choices)
            found[name] = Candidate(
                name, proposer,
                run={"eagle_choices": json.dumps([list(path) for path in choices])},
                rehearsed=Rehearsed(accepted, recordings, len(choices), depth),
                cost=name,
            )  # fmt: skip
    return list(found.values())


def list_dynamic(bench: Bench, recordings: Sequence[Recording]) -> list[Candidate]:
    """Trees that grow where the drafter is sure; at least as large as a level is wide."""
    engine, drafter = bench.engine, cast(EagleProposer, bench.engine.proposer)
    params = drafter.params
    most = count_top_k(params)
    candidates = []
    for top_k in [k for k in TOP_KS if k <= most] or [most]:
        tree = TextTree(top_k=top_k, depth=params.max_draft_depth)
        positions = count_positions(recordings, 0)
        places = rehearse(drafter, engine.decoder, recordings, tree, positions)
        for depth in range(2, params.max_draft_depth + 1):
            for size in TREE_SIZES:
                if not max(top_k, depth) <= size <= min(params.max_draft_len, tree.num_tokens):
                    continue
                proposer = EagleProposer(drafter.net, engine.decoder)
                # A dynamic tree is as deep as the checkpoint says.
                proposer.params = dataclasses.replace(params, num_eagle_layers=depth)
                proposer.use_dynamic_tree(top_k, size)
                if proposer.max_draft_tokens < size:
                    continue  # fewer are drafted
                accepted = count_dynamic(places, depth, size)
                candidates.append(
                    Candidate(
                        f"dynamic {size}, {depth} deep, top {top_k}",
                        proposer,
                        convert={"num_eagle_layers": depth},
                        run={"eagle_dynamic_tree_max_top_k": top_k, "eagle_tree_tokens": size},
                        rehearsed=Rehearsed(accepted, recordings, size, depth),
                        cost=f"top {top_k}, {depth} deep",
                    )  # fmt: skip
                )
    return candidates


def list_ngrams(bench: Bench) -> list[Candidate]:
    """What a target without a drafter can do: prompt lookup and lookahead."""
    candidates = [
        Candidate(
            f"lookup of {length}, {size}-grams",
            PromptLookupProposer(LookupOptions(num_tokens=length, max_ngram_size=size)),
            build={
                "speculative_decoding_mode": EXTERNAL_METHODS["prompt_lookup"],
                "max_draft_len": length,
            },
            run={"prompt_lookup_num_tokens": length, "max_matching_ngram_size": size},
        )
        for length in LOOKUP_LENGTHS
        for size in NGRAM_SIZES
    ]
    for window in WINDOWS:
        candidates.append(
            Candidate(
                f"lookahead {window}",
                LookaheadProposer(window, bench.engine.decoder),
                build={
                    "speculative_decoding_mode": EXTERNAL_METHODS["lookahead"],
                    "max_draft_len": window.max_draft_tokens,
                },
                run={"lookahead_config": str(window)},
                is_replayed=False,
            )  # fmt: skip
        )
    return candidates


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
