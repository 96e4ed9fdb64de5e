"""EAGLE: static trees by the drafter's accuracy here, dynamic ones by branches, depth and size."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from specdec.decode.drafters.eagle import EagleProposer, count_top_k
from specdec.decode.drafters.trees import grow_choices

from ..rehearsal import (
    Rehearsed,
    TextChain,
    TextTree,
    count_dynamic,
    count_static,
    measure_ranks,
    rehearse,
)
from ..replay import Recording, count_positions
from .base import NUM_RANKS, TREE_SIZES, Candidate
from .base import take_checkpoint as prepare

if TYPE_CHECKING:
    from ..engine import Bench
    from ..settings import TuneSettings

__all__ = ["list_candidates", "prepare"]

TOP_KS = (2, 4, 8)  # branches of dynamic trees


def list_candidates(
    bench: Bench, recordings: Sequence[Recording], settings: TuneSettings
) -> list[Candidate]:
    """Static trees, then dynamic ones."""
    return [*list_static(bench, recordings), *list_dynamic(bench, recordings)]


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
