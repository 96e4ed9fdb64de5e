"""How often drafted tokens are right: what a drafter brings along, and what texts teach."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec.decode.accept import Candidates, map_children
from specdec.decode.drafters.trees import estimate_accuracy
from specdec.engine.transfers import Array
from specdec.engine.tree import Tree
from specdec.files.acceptance import MAX_DEPTH, MAX_NODES, NUM_BUCKETS, Acceptance

KEPT_WEIGHT = 0.98  # weight of what was known of acceptance before the newest draft
PRIOR_TRIALS = 40.0  # tokens of a depth and confidence that a drafter's record counts as at most
FIRST_TRIALS = 4.0  # trials that a drafter's own word weighs as much as
MAX_CHANCE = 0.999  # the most that is believed of a token
MAX_WEIGHT = 1e100  # of a token, before all are counted in small numbers again
MIDDLES = tuple((bucket + 0.5) / NUM_BUCKETS for bucket in range(NUM_BUCKETS))  # confidences
LOST_CONFIDENCE = 0.01  # in the place of what is no number
LEAST_EXPECTED = 0.1  # tokens that a drafter's record expects of the unlikeliest ones, at least
NUM_CELLS = (MAX_DEPTH + 1) * NUM_BUCKETS  # of one drafter


class Calibration:
    """How often drafted tokens were right, by drafter, depth and the drafter's own confidence.

    A token's chance is the drafter's confidence in it, times how many more tokens of about that
    confidence were accepted than it had expected: so of the many that it finds unlikely, those that
    it finds the least likely are not taken for as good as the others. Where little is known of a
    depth, what is known of all depths counts, and where that is little, the drafter's word. Newer
    steps count more.
    """

    def __init__(self, record: Acceptance | None = None, source: int = 0) -> None:
        """Begin with the record of one drafter, whose place in a chain is `source`."""
        # Weights of accepted tokens, and the sums of the confidences, times their weights, in all
        # tokens whose parents were accepted: by cell (`_find_cells`), where depth 0 stands for all
        # depths. Lists and a loop: the few nodes of most steps would take longer by calls of numpy.
        self._accepted_weights, self._expected_weights = list[float](), list[float]()
        # Of each drafter's newest token; they grow, as older tokens count less.
        self._weights = list[float]()
        self._ratios = dict[int, float]()  # of `_find_ratio`, by cell, until more is learned
        # Drafts to learn from, and their accepted paths.
        self._new_drafts: list[tuple[Candidates, Sequence[int]]] = []
        self._add_drafters(source + 1)
        if record is not None:
            self._begin(record, source * NUM_CELLS)

    def _add_drafters(self, num_drafters: int) -> None:
        """Make room for the counts of so many drafters in all."""
        num_missing = num_drafters - len(self._weights)
        if num_missing > 0:
            self._weights += [1.0] * num_missing
            self._accepted_weights += [0.0] * (num_missing * NUM_CELLS)
            self._expected_weights += [0.0] * (num_missing * NUM_CELLS)

    def _begin(self, record: Acceptance, first_cell: int) -> None:
        totals = [[sum(column) for column in zip(*rows, strict=True)] for rows in
                  (record.right, record.seen)]  # fmt: skip
        accepted_counts, reached_counts = (totals[0], *record.right), (totals[1], *record.seen)
        cell = first_cell
        for counts in zip(accepted_counts, reached_counts, strict=True):  # of each depth
            for bucket, (num_accepted, num_reached) in enumerate(zip(*counts, strict=True)):
                if num_reached:
                    weight = min(num_reached, PRIOR_TRIALS)
                    accepted = self._accepted_weights[cell] = weight * num_accepted / num_reached
                    # How unlikely the unlikeliest were, the record does not tell.
                    expected = weight * MIDDLES[bucket] if bucket else max(accepted, LEAST_EXPECTED)
                    self._expected_weights[cell] = expected
                cell += 1

    def estimate(self, *drafts: Candidates) -> list[float]:
        """Return each node's chance where its parent is accepted, [sum of T]; 1 for roots."""
        ratios, chances = self._ratios, list[float]()
        for candidates in drafts:
            root = len(chances)
            for cell, confidence in self._find_cells(candidates):
                ratio = ratios.get(cell) or self._find_ratio(cell)
                chances.append(min(ratio * confidence, MAX_CHANCE))
            chances[root] = 1.0
        return chances

    def _find_ratio(self, cell: int) -> float:
        """Return the accepted tokens of a cell over those that the drafter expected."""
        accepted_weights, expected_weights = self._accepted_weights, self._expected_weights
        bucket = cell % NUM_BUCKETS
        depths_cell = cell - cell % NUM_CELLS + bucket  # of all depths
        trials = FIRST_TRIALS * MIDDLES[bucket] * self._weights[cell // NUM_CELLS]
        ratio = (accepted_weights[depths_cell] + trials) / (expected_weights[depths_cell] + trials)
        ratio = (accepted_weights[cell] + trials * ratio) / (expected_weights[cell] + trials)
        self._ratios[cell] = ratio
        return ratio

    def rank(self, drafts: Sequence[Candidates]) -> list[tuple[list[float], list[int]]]:
        """Return of each draft the chances of its nodes, best first, and these nodes."""
        ranks = []
        for row in follow_chances([c.tree for c in drafts], self.estimate(*drafts)):
            order = sorted(range(1, len(row)), key=row.__getitem__, reverse=True)
            ranks.append(([row[node] for node in order], order))
        return ranks

    def record(self, drafts: Sequence[Candidates], paths: Sequence[Sequence[int]]) -> None:
        """Take which nodes were accepted, root first, to `learn` from them later."""
        self._new_drafts += zip(drafts, paths, strict=True)

    def learn(self) -> None:
        """Count the nodes of the newest drafts; only children of accepted ones were looked at."""
        new_drafts, self._new_drafts, self._ratios = self._new_drafts, [], {}
        for candidates, path in new_drafts:
            if candidates.tree.num_nodes > 1:
                cells = self._find_cells(candidates)
                weight = self._weights[candidates.source] = self._age(candidates.source)
                for node, is_accepted in list_judged(candidates.tree, path):
                    self._count(*cells[node], weight, is_accepted)

    def _age(self, source: int) -> float:
        """Return the weight of a drafter's newest token, beside which its older ones count less."""
        weight = self._weights[source] / KEPT_WEIGHT
        if weight <= MAX_WEIGHT:
            return weight
        for cell in range(source * NUM_CELLS, (source + 1) * NUM_CELLS):
            self._accepted_weights[cell] /= weight
            self._expected_weights[cell] /= weight
        return 1.0

    def _count(self, cell: int, confidence: float, weight: float, is_accepted: bool) -> None:
        for counted_cell in (cell, cell - cell % NUM_CELLS + cell % NUM_BUCKETS):
            self._expected_weights[counted_cell] += weight * confidence
            self._accepted_weights[counted_cell] += weight * is_accepted

    def _find_cells(self, candidates: Candidates) -> list[tuple[int, float]]:
        """Return the cells that count a tree's nodes, and the drafter's confidences, [T]."""
        self._add_drafters(candidates.source + 1)
        first_cell, last_bucket = NUM_CELLS * candidates.source, NUM_BUCKETS - 1
        depths, confidences = candidates.tree.depths.tolist(), read_confidence(candidates).tolist()
        cells = []
        for depth, confidence in zip(depths, confidences, strict=True):
            bucket = min(int(confidence * NUM_BUCKETS), last_bucket)
            cell = first_cell + min(depth, MAX_DEPTH) * NUM_BUCKETS + bucket
            cells.append((cell, confidence))
        return cells


def follow_text(candidates: Candidates, emitted: Sequence[int]) -> tuple[Candidates, list[int]]:
    """Return what a text says of a draft that was not verified: its judged nodes, and their path.

    emitted: the text after the root, beyond which nothing is known.
    """
    tree = candidates.tree
    if int(tree.depths.max()) > len(emitted):
        candidates = candidates.keep(np.flatnonzero(tree.depths <= len(emitted)))
        tree = candidates.tree
    path, children = [0], map_children(tree)
    for token in emitted:
        node = children.get((path[-1], token))
        if node is None:
            break
        path.append(node)
    return candidates, path


def list_judged(tree: Tree, path: Sequence[int]) -> list[tuple[int, bool]]:
    """List the nodes whose parents were accepted, and which of them were, too.

    path: of accepted nodes, root first. No other nodes were looked at.
    """
    accepted_nodes = set(path)
    return [
        (node, node in accepted_nodes)
        for node, parent in enumerate(tree.parents.tolist()) if parent in accepted_nodes
    ]  # fmt: skip


def read_confidence(candidates: Candidates) -> Array:
    """Return the drafter's confidence in each node, [T]; by its rank among siblings if it has none.

    Little in what is no number, which a drafter makes that leaves the range of its type.
    """
    if candidates.confidence is not None:
        return np.where(np.isnan(candidates.confidence), LOST_CONFIDENCE, candidates.confidence)
    tree = candidates.tree
    if tree.num_nodes == 1:  # as where a lookup finds nothing
        return np.ones(1)
    order = np.argsort(tree.parents, kind="stable")
    _, starts, counts = np.unique(tree.parents[order], return_index=True, return_counts=True)
    ranks = np.empty(tree.num_nodes, np.int64)
    ranks[order] = np.arange(tree.num_nodes) - np.repeat(starts, counts)
    return np.asarray(estimate_accuracy(np.maximum(tree.depths - 1, 0), ranks))


def follow_chances(trees: Sequence[Tree], chances: Sequence[float]) -> list[list[float]]:
    """Return each tree's chances that whole paths are accepted, by those of single nodes.

    Of siblings one is accepted at most: where their chances add up to more than 1, they are shares.
    """
    paths, start = [], 0
    for tree in trees:
        row = list(chances[start : start + tree.num_nodes])
        parents = tree.parents.tolist()
        totals = [0.0] * tree.num_nodes
        for node, parent in enumerate(parents):
            if node:
                totals[parent] += row[node]
        for node, parent in enumerate(parents):
            if node:  # parents come first
                row[node] *= row[parent] / max(1.0, totals[parent])
        paths.append(row)
        start += tree.num_nodes
    return paths


def sum_chances(chances: Sequence[Sequence[float]], max_tokens: int) -> tuple[list[float], int]:
    """Return the tokens that so many nodes of all rows promise, [max_tokens].

    And the nodes of the largest draft. chances: of each row's paths, [B] of any length, best first.
    """
    columns = itertools.zip_longest(*chances, fillvalue=0.0)
    totals = [float(sum(column)) for column in columns][:max_tokens]
    missing_totals = [0.0] * (max_tokens - len(totals))
    return [*itertools.accumulate(totals + missing_totals)], sum(n > 0 for n in totals)


class AcceptanceCounts:
    """Counts of accepted drafts, for the record that goes with a drafter."""

    def __init__(self) -> None:
        self._accepted_counts = np.zeros((MAX_DEPTH, NUM_BUCKETS), np.int64)
        self._reached_counts = np.zeros((MAX_DEPTH, NUM_BUCKETS), np.int64)
        self._gains, self._num_drafts = np.zeros(MAX_NODES), 0

    def record(self, drafts: Sequence[Candidates], paths: Sequence[Sequence[int]]) -> None:
        """Count the nodes of a step, of which these were accepted, the root first."""
        for candidates, path in zip(drafts, paths, strict=True):
            tree, accepted_nodes = candidates.tree, set(path)
            if tree.num_nodes == 1:
                continue
            confidences = read_confidence(candidates).tolist()
            for node, is_accepted in list_judged(tree, path):
                depth = min(int(tree.depths[node]), MAX_DEPTH) - 1
                bucket = min(int(confidences[node] * NUM_BUCKETS), NUM_BUCKETS - 1)
                self._reached_counts[depth, bucket] += 1
                self._accepted_counts[depth, bucket] += is_accepted
            (chances,) = follow_chances([tree], confidences)
            order = sorted(range(1, tree.num_nodes), key=chances.__getitem__, reverse=True)
            gains = np.cumsum([node in accepted_nodes for node in order])[:MAX_NODES]
            self._gains += np.pad(gains, (0, MAX_NODES - len(gains)), mode="edge")
            self._num_drafts += 1

    def make_record(self, **about: Any) -> Acceptance | None:
        """Return the record; None where nothing was drafted."""
        if not self._num_drafts:
            return None
        gains = (self._gains / self._num_drafts).round(4).tolist()
        return Acceptance(
            right=tuple(map(tuple, self._accepted_counts.tolist())),
            seen=tuple(map(tuple, self._reached_counts.tolist())),
            gains=tuple(gains), num_drafts=self._num_drafts, about=about,
        )  # fmt: skip
