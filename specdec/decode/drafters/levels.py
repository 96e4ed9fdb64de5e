"""Trees that are drafted level by level: by EAGLE, ReDrafter and draft models, and in one pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import ALL_LEVELS
from specdec.decode.requests import ActiveRequest
from specdec.engine.kv_cache import KVCache
from specdec.engine.native_drafts import PairDrafts, TreeLayout
from specdec.engine.step import Step
from specdec.engine.transfers import Array, to_device, to_host
from specdec.engine.tree import BoolArray, IntArray, Tree

# For a drafter that learned the target's distribution: the token that it finds likeliest is the
# target's likeliest more often than it is likely. So for greedy requests its probabilities are
# those of a lower temperature; by this one trees of pycode's ReDrafter and EAGLEs hold most.
DRAFTER_MIN_TEMPERATURE = 0.5
NO_LAST_POSITION = 2**62


def read_temperatures(
    requests: Sequence[ActiveRequest], min_temperature: float = DRAFTER_MIN_TEMPERATURE
) -> Array:
    """Return temperatures by which drafts are judged, [B]: each request's, if that is higher."""
    samplings = [request.request.sampling for request in requests]
    return np.array(
        [
            min_temperature if sampling.is_greedy else max(sampling.temperature, min_temperature)
            for sampling in samplings
        ]
    )


def sharpen(temperatures: Array, device: torch.device) -> Tensor:
    """Return factors [B, 1, 1] that turn logits [B, n, V] into those at temperatures [B]."""
    return to_device(1 / temperatures, device)[:, None, None].float()


@dataclasses.dataclass(frozen=True)
class Level:
    """Nodes of one depth that are run, to draft from each.

    tokens, parents: [B, n], a parent by its place in the level before; width: tokens to rank.
    """

    tokens: IntArray
    parents: IntArray
    width: int


def make_first(roots: IntArray, width: int) -> Level:
    """Return the level of the roots [B]."""
    return Level(roots[:, None], np.zeros((len(roots), 1), np.int64), width)


class LevelDraft(Protocol):
    """One draft of all rows: their roots, and what follows from level to level.

    min_gain: as in `Drafter`.
    """

    roots: IntArray
    min_gain: float

    def rank(self, level: Level) -> tuple[IntArray, np.ndarray]:
        """Rank the tokens after a level's nodes, [B, n, width], with log-probabilities.

        The first level is that of the roots; each of the others is below the one before.
        """
        ...


class TreeNet(Protocol):
    """Layers with a cache of their own: a drafter's that reads features, or a whole draft model."""

    def forward(self, step: Step, features: Tensor, cache: KVCache) -> Tensor:
        """Run nodes after features [B, n, D] of those above; return theirs [B, n, D]."""
        ...

    def rank_tokens(
        self, hidden: Tensor, width: int, sharpness: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the `width` most probable tokens after [B, n, D], and their log-probabilities.

        sharpness: [B, 1, 1], by which logits are multiplied first; None is one.
        """
        ...


class TreeDraft:
    """One draft of all rows: their roots, what has run, and where the next level goes.

    Nodes are written after the committed tokens of the cache, and never committed.
    """

    def __init__(
        self, net: TreeNet, cache: KVCache, rows: IntArray, roots: IntArray, hidden: Tensor,
        temperatures: Array, min_gain: float = ALL_LEVELS, last_position: int = NO_LAST_POSITION,
    ) -> None:  # fmt: skip
        """Begin trees at these roots.

        temperatures: [B], of the probabilities by which tokens are judged. min_gain: as in
        `Drafter`. last_position: nodes beyond it are run as if at it.
        """
        self.roots, self.min_gain = roots, min_gain
        self.num_levels = 0  # that were drafted
        self._net, self._cache, self._rows = net, cache, rows
        self._sharpness = sharpen(temperatures, hidden.device).to(hidden.dtype)
        self._last_position = last_position
        self._hidden = hidden[:, None]  # [B, n, D], of the newest level
        self._positions = cache.past_lens[rows]
        self._mask: BoolArray = np.zeros((len(rows), 1, 0), np.bool_)
        self._run_positions = np.zeros((len(rows), 0), np.int64)  # of the nodes that have run

    def rank(self, level: Level) -> tuple[IntArray, np.ndarray]:
        """Run nodes but the roots, which have run; return what is drafted from each."""
        if self.num_levels:
            self._run(level)
        self.num_levels += 1
        tokens, scores = self._net.rank_tokens(self._hidden, level.width, self._sharpness)
        ranked, likelihoods = to_host(tokens, scores)
        return ranked, likelihoods

    def _run(self, level: Level) -> None:
        num_rows, size = level.tokens.shape
        lines = np.arange(num_rows)[:, None]
        self_mask = np.broadcast_to(np.eye(size, dtype=np.bool_), (num_rows, size, size))
        self._mask = np.concatenate((self._mask[lines, level.parents], self_mask), axis=2)
        node_positions = np.minimum(self._positions, self._last_position)[:, None]
        positions = np.broadcast_to(node_positions, level.tokens.shape)
        step = Step(
            rows=self._rows,
            tokens=level.tokens,
            positions=positions,
            tree_mask=self._mask,
            earlier_positions=self._run_positions,
        )
        self._run_positions = step.mask_positions
        device = self._hidden.device
        above = self._hidden[to_device(lines, device), to_device(level.parents, device)]
        self._hidden = self._net.forward(step, above, self._cache)
        self._positions = self._positions + 1


class DynamicTree:
    """EAGLE-2's tree (https://arxiv.org/abs/2406.16858), grown where the drafter is sure.

    Each level runs the `top_k` nodes of the greatest probability from the root on, as the drafter
    has it, and drafts `top_k` tokens from each; of all that were drafted, the `num_tokens` of
    greatest probability are proposed. A child is never likelier than its parent, so levels end
    where no node that would be run is likelier than the last of those.
    """

    def __init__(self, *, top_k: int, depth: int, num_tokens: int) -> None:
        self.top_k, self.depth = top_k, depth
        num_drafted = top_k + (depth - 1) * top_k**2
        self.num_tokens = min(num_tokens, num_drafted)
        self.num_run = (depth - 1) * top_k
        self.max_width = top_k

    def lay_out(self) -> TreeLayout:
        """Return the tree as kernels draft it."""
        top_k = self.top_k
        return TreeLayout(None, self.depth, top_k, self.num_tokens, self.num_run, top_k)

    def name_drafts(self, drafts: PairDrafts) -> list[Candidates]:
        """Return what kernels have drafted."""
        return [
            Candidates(Tree(*columns), None, chances)
            for *columns, chances in zip(*drafts.nodes, np.exp(drafts.log_chances), strict=True)
        ]

    def grow(self, draft: LevelDraft) -> list[Candidates]:
        """Draft all levels for all rows, or those that are worth their price; then choose."""
        top_k = self.top_k
        ranked, scores = draft.rank(make_first(draft.roots, top_k))  # [B, 1, K]
        tokens, scores = ranked[:, 0], scores[:, 0]
        num_rows = len(tokens)
        run_indices = np.broadcast_to(np.arange(top_k), (num_rows, top_k))  # in the newest drafted
        all_tokens, all_scores = [tokens], [scores]
        all_parents = [np.full((num_rows, top_k), -1)]
        level_start = 0  # of the newest drafted, among all
        parent_indices = np.zeros_like(
            run_indices
        )  # of the parents of what is run, in the level before
        for _ in range(1, self.depth):
            run_tokens = np.take_along_axis(tokens, run_indices, axis=1)
            totals = np.take_along_axis(scores, run_indices, axis=1)
            if not np.minimum(np.exp(totals).sum(1), 1.0).sum() > draft.min_gain:
                break
            if self._is_settled(np.concatenate(all_scores, axis=1), totals):
                break
            ranked, child_scores = draft.rank(Level(run_tokens, parent_indices, top_k))  # [B, K, K]
            parents = np.repeat(level_start + run_indices, top_k, axis=1)
            level_start += tokens.shape[1]
            tokens = ranked.reshape(num_rows, -1)
            scores = (child_scores + totals[:, :, None]).reshape(num_rows, -1)
            all_tokens.append(tokens)
            all_scores.append(scores)
            all_parents.append(parents)
            run_indices = _find_best(scores, top_k)
            parent_indices = run_indices // top_k
        return self._choose(
            draft.roots, np.concatenate(all_tokens, axis=1), np.concatenate(all_scores, axis=1),
            np.concatenate(all_parents, axis=1),
        )  # fmt: skip

    def _is_settled(self, scores: np.ndarray, totals: np.ndarray) -> bool:
        """Return whether no descendant of nodes with these totals can be among a row's best."""
        size = self.num_tokens
        if scores.shape[1] < size:
            return False
        lowest_scores = np.partition(scores, -size, axis=1)[:, -size]
        return bool((totals.max(1) <= lowest_scores).all())

    def _choose(
        self, roots: IntArray, tokens: IntArray, scores: np.ndarray, parents: IntArray
    ) -> list[Candidates]:
        candidates = []
        best_nodes = np.sort(_find_best(scores, self.num_tokens), axis=1)
        for row, row_nodes in enumerate(best_nodes):
            # A parent is at least as probable as its child, and comes first where they tie.
            nodes = np.where(
                parents[row, row_nodes] < 0,
                0,
                np.searchsorted(row_nodes, parents[row, row_nodes]) + 1,
            )
            depths = np.zeros(len(row_nodes) + 1, np.int64)
            for node, parent in enumerate(nodes, 1):
                depths[node] = depths[parent] + 1
            all_tokens = np.concatenate(([roots[row]], tokens[row, row_nodes]))
            totals = np.concatenate(([0.0], scores[row, row_nodes]))
            node_scores = totals - totals[np.concatenate(([0], nodes))]
            tree = Tree(all_tokens, np.concatenate(([-1], nodes)), depths)
            candidates.append(Candidates(tree, None, np.exp(node_scores)))
        return candidates


def _find_best(scores: np.ndarray, count: int) -> IntArray:
    """Return places of the greatest scores of each row, of equal ones the first."""
    indices: IntArray = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return indices
