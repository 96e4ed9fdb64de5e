"""Merging of several drafters' candidates for one request into one tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.decode.accept import Candidates
from specdec.decode.drafters.calibration import read_confidence
from specdec.engine.tree import TreeBuilder


def merge_candidates(proposals: Sequence[Candidates]) -> Candidates:
    """Merge trees with one root into a tree of all their paths; equal beginnings are one.

    The higher confidence in a token counts.
    """
    builder, confidence = TreeBuilder(int(proposals[0].tree.tokens[0])), [1.0]
    for candidates in proposals:
        tree, nodes = candidates.tree, [0]
        tree_confidence = read_confidence(candidates).tolist()
        for node in range(1, tree.num_nodes):
            merged = builder.add(nodes[int(tree.parents[node])], int(tree.tokens[node]))
            nodes.append(merged)
            if merged == len(confidence):
                confidence.append(0.0)
            confidence[merged] = max(confidence[merged], tree_confidence[node])
    return Candidates(builder.build(), None, np.array(confidence))


def join_candidates(proposals: Sequence[Candidates]) -> Candidates:
    """Join the candidates of several methods for one request in one tree.

    Draws from a distribution cannot share a tree: what they are drawn from is asked for.
    """
    drafted = [candidates for candidates in proposals if candidates.tree.num_draft_tokens]
    if len(drafted) < 2:
        return drafted[0] if drafted else proposals[0]
    assert all(candidates.draft_probs is None for candidates in drafted)
    return merge_candidates(drafted)
