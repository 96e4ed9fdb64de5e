"""EAGLE: static trees by the drafter's accuracy here, dynamic ones by branches, depth and size."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import cast

from specdec.decode.drafters.eagle import EagleProposer, count_top_k
from specdec.decode.drafters.trees import grow_choices

from ..engine import Bench
from ..settings import TuneSettings
from .base import TREE_SIZES, Candidate

TOP_KS = (2, 4, 8)  # branches of dynamic trees
NUM_RANKS = 10  # of each level's tokens, that static trees are made of


def list_candidates(bench: Bench, settings: TuneSettings) -> list[Candidate]:
    """Static trees, then dynamic ones, each down to half of the depth and to the whole depth."""
    most = cast(EagleProposer, bench.engine.proposer).params.max_draft_depth
    depths = sorted({max(1, most // 2), most})
    return [*list_static(bench, depths), *list_dynamic(bench, depths)]


def guess_accuracy(depth: int, rank: int) -> float:
    """How often the token of a rank is right, as static trees are grown by.

    The likeliest token counts for more than all others together, as with every drafter here; which
    of the trees is best is then measured.
    """
    return float(0.6 / (1 + rank) ** 2)


def list_static(bench: Bench, depths: Sequence[int]) -> list[Candidate]:
    """The likeliest trees of rising size."""
    drafter = cast(EagleProposer, bench.engine.proposer)
    params = drafter.params
    found: dict[str, Candidate] = {}
    for max_depth in depths:
        for size in TREE_SIZES:
            choices = grow_choices(
                max_depth, min(size, params.max_draft_len),
                min(NUM_RANKS, params.draft_vocab_size), guess_accuracy,
                params.max_non_leaves_per_layer,
            )  # fmt: skip
            name = f"static {len(choices)}, {max(map(len, choices))} deep"
            if name not in found:
                proposer = EagleProposer(drafter.net, bench.engine.decoder)
                proposer.use_choices(choices)
                run = {"eagle_choices": json.dumps([list(path) for path in choices])}
                found[name] = Candidate(name, proposer, run=run)
    return list(found.values())


def list_dynamic(bench: Bench, depths: Sequence[int]) -> list[Candidate]:
    """Trees that grow where the drafter is sure; at least as large as a level is wide."""
    drafter = cast(EagleProposer, bench.engine.proposer)
    params = drafter.params
    most = count_top_k(params)
    candidates = []
    for top_k in [k for k in TOP_KS if k <= most] or [most]:
        for depth in depths:
            for size in TREE_SIZES:
                if depth < 2 or not max(top_k, depth) <= size <= params.max_draft_len:
                    continue
                proposer = EagleProposer(drafter.net, bench.engine.decoder)
                # A dynamic tree is as deep as the checkpoint says.
                proposer.params = dataclasses.replace(params, num_eagle_layers=depth)
                proposer.use_dynamic_tree(top_k, size)
                if proposer.max_draft_tokens < size:
                    continue  # fewer are drafted
                candidates.append(
                    Candidate(
                        f"dynamic {size}, {depth} deep, top {top_k}",
                        proposer,
                        convert={"num_eagle_layers": depth},
                        run={"eagle_dynamic_tree_max_top_k": top_k, "eagle_tree_tokens": size},
                    )
                )
    return candidates
