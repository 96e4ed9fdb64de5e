"""The two accept rules, which keep the text of plain decoding: docs/exactness.md.

Legend: B rows, T tree nodes, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.decode.sampling import (
    ACCEPT,
    CHOICE,
    Sampler,
    draw,
    draw_residual,
    draw_tokens,
    find_residual,
    process_logits,
    take_rows,
)
from specdec.engine.ranking import find_best
from specdec.engine.transfers import Array, to_device, to_host
from specdec.engine.tree import BoolArray, IntArray, Tree
from specdec.text.grammar import GrammarState

Accepted = tuple[list[int], int]  # the accepted nodes, root first, and the bonus token
MAX_NODES = 256  # most nodes whose distributions are in memory at once, on a device


@dataclasses.dataclass(slots=True)
class Candidates:
    """Draft tree that is proposed for one row, with what its drafter knows of it.

    draft_probs: for a tree that is one path, drawn token by token from these distributions: the
    one that node n + 1 was drawn from at index n, each [V]. None for candidates that were not
    drawn, such as the beams of a search: of these a token stays where the target chooses the same.
    confidence: [T], the drafter's estimate of each node's probability below its parent (the root's
    is 1); None where it has none. source: index of that drafter in a chain of drafters.
    """

    tree: Tree
    draft_probs: Sequence[Tensor] | None = None
    confidence: Array | None = None
    source: int = 0

    def prune(self, grammar: GrammarState) -> Candidates:
        """Leave out the nodes that a grammar forbids."""
        probs = self.draft_probs
        nodes = grammar.list_kept(self.tree, is_drawn=probs is not None)
        if len(nodes) == self.tree.num_nodes:
            return self
        kept_probs = None if probs is None else probs[: len(nodes) - 1] or None
        return dataclasses.replace(self.keep(nodes), draft_probs=kept_probs)

    def keep(self, nodes: Sequence[int] | IntArray) -> Candidates:
        """Return candidates of these nodes only, which were not drawn; see `Tree.keep`."""
        confidence = None if self.confidence is None else self.confidence[nodes]
        return Candidates(self.tree.keep(nodes), self.draft_probs, confidence, self.source)

    def limit(self, max_tokens: int | None) -> Candidates:
        """Keep the first tokens of a draft, whatever they are; None keeps all."""
        if max_tokens is None or self.tree.num_draft_tokens <= max_tokens:
            return self
        kept = self.keep(np.arange(max_tokens + 1))
        probs = None if self.draft_probs is None else self.draft_probs[:max_tokens]
        return dataclasses.replace(kept, draft_probs=probs)

    def make_chain(self) -> Candidates:
        """Keep the likeliest path: at a fork the child of most confidence, else the first."""
        parents = self.tree.parents
        if (parents == np.arange(-1, len(parents) - 1)).all():
            return self
        confidence = np.ones(len(parents)) if self.confidence is None else self.confidence
        path = [0]
        while len(children := np.flatnonzero(parents == path[-1])):
            path.append(int(children[confidence[children].argmax()]))
        return self.keep(path)


def accept(tree: Tree, choices: Sequence[int]) -> Accepted:
    """Follow the target through a tree; return the accepted nodes, root first, and the bonus token.

    choices[n] is the token that the target emits after node n: its argmax when decoding greedily.
    From the root, the child holding the target's token is entered while there is one. So every
    emitted token, the accepted ones and the bonus token, is the target's own choice given what
    precedes it, whatever was drafted: the output is that of decoding one token per step.
    """
    path = [0]
    if tree.num_nodes == 1:
        return path, int(choices[0])
    children = map_children(tree)
    while True:
        token = int(choices[path[-1]])
        child = children.get((path[-1], token))
        if child is None:
            return path, token
        path.append(child)


def map_children(tree: Tree) -> dict[tuple[int, int], int]:
    """Return a tree's edges: (parent node, token) -> node."""
    edges = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    return {edge: node for node, edge in enumerate(edges)}


def accept_batch(
    candidates: Sequence[Candidates],
    logits: Tensor | None,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    choices: Array | None = None,
) -> list[Accepted]:
    """Return the accepted nodes and the bonus token of every row.

    logits: [B, T, V], the target's after each node. positions[b] is the output position of the
    token that follows row b's root. choices: [B, T], the logits' best tokens, where all rows are
    greedy and they have come to the host already; the logits are not looked at then.
    """
    if choices is not None:
        return [accept(c.tree, row) for c, row in zip(candidates, choices, strict=True)]
    assert logits is not None
    logits = _shape_logits(candidates, logits, samplers)
    results: list[Accepted] = [([0], 0)] * len(candidates)
    greedy_rows = [row for row, sampler in enumerate(samplers) if sampler.params.is_greedy]
    if greedy_rows:
        (best_tokens,) = to_host(find_best(take_rows(logits, greedy_rows)))
        for row, row_choices in zip(greedy_rows, best_tokens.tolist(), strict=True):
            results[row] = accept(candidates[row].tree, row_choices)
    sampled_rows = sorted({*range(len(candidates))} - {*greedy_rows})
    accept_sampled = _accept_in_groups if logits.is_cuda else _accept_by_walks
    for row, result in accept_sampled(candidates, logits, samplers, positions, sampled_rows):
        results[row] = result
    return results


def _shape_logits(
    candidates: Sequence[Candidates], logits: Tensor, samplers: Sequence[Sampler]
) -> Tensor:
    """Return logits [B, T, V] with the penalties, bans and grammars of the rows that have any."""
    shapers = {row: s.shaper for row, s in enumerate(samplers) if s.shaper is not None}
    if not shapers:
        return logits
    logits = logits.to(torch.float32, copy=True)
    for row, shaper in shapers.items():
        tree = candidates[row].tree
        logits[row, : tree.num_nodes] = shaper.shape(tree, logits[row])
    return logits


def _accept_in_groups(
    candidates: Sequence[Candidates],
    logits: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    sampled_rows: Sequence[int],
) -> Iterator[tuple[int, Accepted]]:
    """Yield sampled rows and their results, of groups of rows that a device accepts at once."""
    group_size = max(1, MAX_NODES // logits.shape[1])
    for start in range(0, len(sampled_rows), group_size):
        rows = sampled_rows[start : start + group_size]
        group_results = accept_at_once(
            [candidates[row] for row in rows], take_rows(logits, rows),
            [samplers[row] for row in rows], [positions[row] for row in rows],
        )  # fmt: skip
        yield from zip(rows, group_results, strict=True)


@dataclasses.dataclass(eq=False)
class _Walk:
    """Path of a sampled row down its tree, as far as it has been accepted.

    position: output position of the token that follows the root. path: nodes from the root on.
    """

    row: int
    candidates: Candidates
    sampler: Sampler
    position: int
    path: list[int] = dataclasses.field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        self.children = map_children(self.candidates.tree)

    @property
    def next_position(self) -> int:
        """Output position of the token after the newest node."""
        return self.position + len(self.path) - 1

    def take_choice(self, choice: int, probs: Tensor, uniform: float) -> int | None:
        """Enter the child that a choice accepts; return the bonus token where there is none.

        choice: the token that the random number draws from the target's probabilities [V].
        """
        node, draft_probs = self.path[-1], self.candidates.draft_probs
        if draft_probs is None:
            child = self.children.get((node, choice))
            if child is None:
                return choice
            self.path.append(child)
            return None
        if node == len(draft_probs):  # the chain's last
            return choice
        token = int(self.candidates.tree.tokens[node + 1])
        likelihoods = float(probs[token]), float(draft_probs[node][token])
        if not _is_kept(likelihoods, self.sampler, self.next_position):
            return draw_residual(probs, draft_probs[node], uniform)
        self.path.append(node + 1)
        return None


def _accept_by_walks(
    candidates: Sequence[Candidates],
    logits: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    sampled_rows: Sequence[int],
) -> Iterator[tuple[int, Accepted]]:
    """Follow sampled rows down their trees, all of them a node at a time; yield their results."""
    walks = [_Walk(row, candidates[row], samplers[row], positions[row]) for row in sampled_rows]
    while walks:
        rows, nodes = [walk.row for walk in walks], [walk.path[-1] for walk in walks]
        probs = process_logits(logits[rows, nodes], [walk.sampler.params for walk in walks])
        uniforms = [walk.sampler.get_uniform(CHOICE, walk.next_position) for walk in walks]
        unfinished_walks = []
        for walk, *choice in zip(walks, draw(probs, uniforms), probs, uniforms, strict=True):
            bonus_token = walk.take_choice(*choice)
            if bonus_token is None:
                unfinished_walks.append(walk)
            else:
                yield walk.row, (walk.path, bonus_token)
        walks = unfinished_walks


def accept_on_device(
    trees: Sequence[Tree], tree_mask: BoolArray, choices: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply `accept` before the host knows: return each row's last accepted node and bonus token.

    tree_mask: [B, T, T], padded as the step's; choices: [B, T], on the device.
    """
    device = choices.device
    shape = tree_mask.shape[:2]
    tokens, parents = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    for row, tree in enumerate(trees):
        tokens[row, : tree.num_nodes] = tree.tokens  # -1, as padding, is never chosen
        parents[row, 1 : tree.num_nodes] = tree.parents[1:]
    sees = to_device(tree_mask, device)
    is_chosen = choices.gather(1, to_device(parents, device)) == to_device(tokens, device)
    is_chosen[:, 0] = True
    is_accepted = (is_chosen[:, None] | ~sees).all(-1)  # with all nodes before it
    last_nodes = (is_accepted * sees.sum(-1)).argmax(-1)
    return last_nodes, choices.gather(1, last_nodes[:, None])[:, 0]


def accept_at_once(
    candidates: Sequence[Candidates],
    logits: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
) -> list[Accepted]:
    """Accept as the walks of sampled rows do, with one wait for the device.

    A token is drawn at every node, as if the walk came there, and the host then walks by itself.
    That is more arithmetic than a walk's, and on a device takes less time than the waits.
    Legend: M nodes of all trees, numbered tree by tree.
    """
    device = logits.device
    trees = [c.tree for c in candidates]
    counts = [tree.num_nodes for tree in trees]
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    nodes = [node for count in counts for node in range(count)]
    probs = process_logits(
        logits[to_device(rows, device), to_device(nodes, device)],
        [samplers[row].params for row in rows],
    )  # [M, V]
    uniforms = [
        samplers[row].get_uniform(CHOICE, positions[row] + int(trees[row].depths[node]))
        for row, node in zip(rows, nodes, strict=True)
    ]
    roots = [0, *itertools.accumulate(counts)]
    tokens, likelihoods = _draw_at_nodes(candidates, roots, probs, uniforms)
    results = []
    for row, candidate in enumerate(candidates):
        root = roots[row]
        row_tokens = tokens[root : root + counts[row]].tolist()
        if candidate.draft_probs is None:
            results.append(accept(candidate.tree, row_tokens))
            continue
        end = _count_accepted(likelihoods, root, samplers[row], positions[row])
        results.append((list(range(end + 1)), row_tokens[end]))
    return results


def _count_accepted(
    likelihoods: dict[int, tuple[float, float]], root: int, sampler: Sampler, position: int
) -> int:
    """Count the tokens that stay of a drawn chain, by `likelihoods` from the node `root` on."""
    end = 0
    while root + end in likelihoods and _is_kept(likelihoods[root + end], sampler, position + end):
        end += 1
    return end


def _is_kept(likelihoods: tuple[float, float], sampler: Sampler, position: int) -> bool:
    """Return whether a drawn token stays, by its probabilities: the target's and the drafter's.

    Leviathan et al. 2023, algorithm 1: a token that was drawn with probability q is kept with
    probability min(1, p / q), else replaced by one drawn from what p has beyond q.
    """
    p, q = likelihoods
    return sampler.get_uniform(ACCEPT, position) * q < p


def _draw_at_nodes(
    candidates: Sequence[Candidates], roots: Sequence[int], probs: Tensor, uniforms: Sequence[float]
) -> tuple[Array, dict[int, tuple[float, float]]]:
    """Draw a token at each of M nodes; where the node's child was drawn, from the residual.

    probs: [M, V], changed. roots: the number of each row's root among the M. Returns the tokens,
    and by node whose child was drawn that child's probabilities, the target's and the drafter's.
    """
    parents, draft_rows, child_tokens = [], [], []
    for root, candidate in zip(roots, candidates, strict=False):
        for node, draft_row in enumerate(candidate.draft_probs or ()):
            parents.append(root + node)
            draft_rows.append(draft_row.to(probs.device))
            child_tokens.append(int(candidate.tree.tokens[node + 1]))
    if not parents:
        return to_host(draw_tokens(probs, uniforms))[0], {}
    parents_on_device = to_device(parents, probs.device)
    children = to_device(child_tokens, probs.device)[:, None]
    draft_probs, target_probs = torch.stack(draft_rows), probs[parents_on_device]
    target_likelihoods = target_probs.gather(1, children)
    draft_likelihoods = draft_probs.gather(1, children)
    probs[parents_on_device] = find_residual(target_probs, draft_probs)
    tokens, p, q = to_host(draw_tokens(probs, uniforms), target_likelihoods, draft_likelihoods)
    pairs = zip(p[:, 0].tolist(), q[:, 0].tolist(), strict=True)
    return tokens, dict(zip(parents, pairs, strict=True))
