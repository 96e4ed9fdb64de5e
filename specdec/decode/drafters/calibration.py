"""How often drafted tokens are right: what a drafter brings along, and what texts teach."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.decode.accept import Candidates
from specdec.decode.drafters.trees import estimate_accuracy
from specdec.engine.transfers import Array
from specdec.engine.tree import Tree

KEEP = 0.98  # weight of what was known of acceptance before the newest draft
MAX_DEPTH = 12  # deeper tokens are counted as these
NUM_BUCKETS = 10  # of a drafter's confidence
FIRST_TRIALS = 4.0  # trials that a drafter's own word weighs as much as
SURE = 0.999  # the most that is believed of a token
MOST_WEIGHT = 1e100  # of a token, before all are counted in small numbers again
NUM_CELLS = (MAX_DEPTH + 1) * NUM_BUCKETS  # of one drafter


class Calibration:
    """How often drafted tokens were right, by drafter, depth and the drafter's own confidence.

    Where little is known of a depth, what is known of all depths counts, and where that is little,
    the drafter's word. Newer steps count more.
    """

    def __init__(self) -> None:
        # By cell (`_find_cells`), where depth 0 stands for all depths: right ones, and all. Lists
        # and a loop: the few nodes of most steps would take longer by calls of numpy.
        self._right, self._seen = list[float](), list[float]()
        self._weight = 1.0  # of a token that is counted now; it grows, as older ones count less
        self._new: list[tuple[Candidates, Sequence[int]]] = []  # drafts to learn from, their paths

    def estimate(self, *drafts: Candidates) -> list[float]:
        """[sum of T], the chance that a node is accepted where its parent is; 1 for roots."""
        lines: dict[int, tuple[float, float]] = {}  # by cell: chance = base + rise * confidence
        right, seen, trials, chances = self._right, self._seen, FIRST_TRIALS * self._weight, []
        for cell, sure in zip(*self._find_cells(drafts), strict=True):
            if cell not in lines:
                anywhere = cell - cell % NUM_CELLS + cell % NUM_BUCKETS
                share, total = trials / (seen[cell] + trials), seen[anywhere] + trials
                base = right[cell] / (seen[cell] + trials) + share * right[anywhere] / total
                lines[cell] = base, share * trials / total
            base, rise = lines[cell]
            chances.append(min(base + rise * sure, SURE))
        start = 0
        for candidates in drafts:
            chances[start] = 1.0
            start += candidates.tree.num_nodes
        return chances

    def record(self, drafts: Sequence[Candidates], paths: Sequence[Sequence[int]]) -> None:
        """Take which nodes were accepted, root first, to `learn` from them later."""
        self._new += zip(drafts, paths, strict=True)

    def learn(self) -> None:
        """Count the nodes of the newest drafts; only children of accepted ones were looked at."""
        new, self._new = self._new, []
        cells, start = self._find_cells([candidates for candidates, _ in new])[0], 0
        for candidates, path in new:
            if candidates.tree.num_nodes > 1:
                self._weight /= KEEP
                accepted = set(path)
                for node, parent in enumerate(candidates.tree.parents.tolist()):
                    if parent in accepted:
                        self._count(cells[start + node], self._weight, node in accepted)
            start += candidates.tree.num_nodes
        if self._weight > MOST_WEIGHT:
            self._right = [value / self._weight for value in self._right]
            self._seen = [value / self._weight for value in self._seen]
            self._weight = 1.0

    def _count(self, cell: int, weight: float, is_right: bool) -> None:
        for each in (cell, cell - cell % NUM_CELLS + cell % NUM_BUCKETS):
            self._seen[each] += weight
            self._right[each] += weight * is_right

    def _find_cells(self, drafts: Sequence[Candidates]) -> tuple[list[int], list[float]]:
        """Where the nodes of trees are counted, and the drafter's confidence in each."""
        cells, confidences = list[int](), list[float]()
        for candidates in drafts:
            sure, first = read_confidence(candidates).tolist(), NUM_CELLS * candidates.source
            for depth, each in zip(candidates.tree.depths.tolist(), sure, strict=True):
                bucket = min(int(each * NUM_BUCKETS), NUM_BUCKETS - 1)
                cells.append(first + min(depth, MAX_DEPTH) * NUM_BUCKETS + bucket)
            confidences += sure
        missing = max(cells, default=0) // NUM_CELLS * NUM_CELLS + NUM_CELLS - len(self._seen)
        if missing > 0:
            self._right += [0.0] * missing
            self._seen += [0.0] * missing
        return cells, confidences


def read_confidence(candidates: Candidates) -> Array:
    """[T], the drafter's confidence in each node; by its place among its siblings if it has none.

    None in what is no number, which a drafter makes that leaves the range of its type.
    """
    if candidates.confidence is not None:
        return np.fmax(candidates.confidence, 0.0)
    tree = candidates.tree
    order = np.argsort(tree.parents, kind="stable")
    _, first, counts = np.unique(tree.parents[order], return_index=True, return_counts=True)
    ranks = np.empty(tree.num_nodes, np.int64)
    ranks[order] = np.arange(tree.num_nodes) - np.repeat(first, counts)
    return np.asarray(estimate_accuracy(np.maximum(tree.depths - 1, 0), ranks))


def follow_chances(trees: Sequence[Tree], chances: Sequence[float]) -> list[list[float]]:
    """The chances that whole paths to nodes are accepted, of each tree, by those of all nodes."""
    paths, start = [], 0
    for tree in trees:
        row = list(chances[start : start + tree.num_nodes])
        for node, parent in enumerate(tree.parents.tolist()):
            if node:  # parents come first
                row[node] *= row[parent]
        paths.append(row)
        start += tree.num_nodes
    return paths
