"""The two accept rules, which keep the text of plain decoding: docs/exactness.md.

Legend: B rows, T tree nodes, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

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
MAX_NODES = 256  # whose distributions are held at once, where each is drawn from


@dataclasses.dataclass(slots=True)
class Candidates:
    """What is proposed for one row.

    draft_probs: for a tree that is one path, drawn token by token from these distributions: the
    one that node n + 1 was drawn from at index n, each [V]. None for candidates that were not
    drawn, such as the beams of a search, or that are only to be compared.
    confidence: [T], what the drafter knows of each node's probability below its parent (the root's
    is 1); None where that is nothing. source: by whose measure, in a chain of drafters.
    """

    tree: Tree
    draft_probs: Sequence[Tensor] | None = None
    confidence: Array | None = None
    source: int = 0

    def prune(self, grammar: GrammarState) -> Candidates:
        """Leave out what a grammar forbids."""
        probs = self.draft_probs
        tree = grammar.prune(self.tree, is_drawn=probs is not None)
        return Candidates(tree, None if probs is None else probs[: tree.num_draft_tokens] or None)

    def keep(self, nodes: Sequence[int] | IntArray) -> Candidates:
        """Candidates of these nodes only, which were not drawn; see `Tree.keep`."""
        confidence = None if self.confidence is None else self.confidence[nodes]
        return Candidates(self.tree.keep(nodes), self.draft_probs, confidence, self.source)

    def make_chain(self) -> Candidates:
        """The likeliest path alone: at a fork the child of most confidence, else the first."""
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
    """(parent node, token) -> node."""
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
    shaped = [row for row, sampler in enumerate(samplers) if sampler.shaper is not None]
    if shaped:
        logits = logits.to(torch.float32, copy=True)
        for row in shaped:
            tree, shaper = candidates[row].tree, samplers[row].shaper
            assert shaper is not None
            logits[row, : tree.num_nodes] = shaper.shape(tree, logits[row])
    results: list[Accepted] = [([0], 0)] * len(candidates)
    greedy = [b for b, sampler in enumerate(samplers) if sampler.params.is_greedy]
    if greedy:
        (choices,) = to_host(find_best(take_rows(logits, greedy)))
        for row, row_choices in zip(greedy, choices.tolist(), strict=True):
            results[row] = accept(candidates[row].tree, row_choices)
    if len(greedy) == len(candidates):
        return results
    sampled = sorted({*range(len(candidates))} - {*greedy})
    if sampled and logits.is_cuda:
        count = max(1, MAX_NODES // logits.shape[1])
        for rows in (sampled[at : at + count] for at in range(0, len(sampled), count)):
            found = accept_at_once(
                [candidates[b] for b in rows], take_rows(logits, rows),
                [samplers[b] for b in rows], [positions[b] for b in rows],
            )  # fmt: skip
            for row, result in zip(rows, found, strict=True):
                results[row] = result
        return results
    for row, result in _walk(candidates, logits, samplers, positions, sampled).items():
        results[row] = result
    return results


def _walk(
    candidates: Sequence[Candidates],
    logits: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    rows: Sequence[int],
) -> dict[int, Accepted]:
    """Follow sampled rows down their trees, all of them a node at a time."""
    paths, results = {row: [0] for row in rows}, dict[int, Accepted]()
    children = {row: map_children(candidates[row].tree) for row in rows}
    while walking := [row for row in rows if row not in results]:
        ends = [paths[row][-1] for row in walking]
        places = [positions[row] + len(paths[row]) - 1 for row in walking]
        probs = process_logits(logits[walking, ends], [samplers[row].params for row in walking])
        uniforms = [
            samplers[row].get_uniform(CHOICE, place)
            for row, place in zip(walking, places, strict=True)
        ]
        for at, (row, choice) in enumerate(zip(walking, draw(probs, uniforms), strict=True)):
            end, draft_probs = ends[at], candidates[row].draft_probs
            child = children[row].get((end, choice)) if draft_probs is None else None
            if draft_probs is not None and end < len(draft_probs):
                # Leviathan et al. 2023, algorithm 1: a token drawn with probability q is kept with
                # probability min(1, p / q), else replaced by one drawn from what p has beyond q.
                token = int(candidates[row].tree.tokens[end + 1])
                p, q = float(probs[at][token]), float(draft_probs[end][token])
                if samplers[row].get_uniform(ACCEPT, places[at]) * q < p:
                    child = end + 1
                else:
                    choice = draw_residual(probs[at], draft_probs[end], uniforms[at])
            if child is None:
                results[row] = paths[row], choice
            else:
                paths[row].append(child)
    return results


def accept_on_device(
    trees: Sequence[Tree], tree_mask: BoolArray, choices: Tensor
) -> tuple[Tensor, Tensor]:
    """What `accept` finds, before the host knows: each row's last accepted node and bonus token.

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
    last = (is_accepted * sees.sum(-1)).argmax(-1)
    return last, choices.gather(1, last[:, None])[:, 0]


def accept_at_once(
    candidates: Sequence[Candidates],
    logits: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
) -> list[Accepted]:
    """Return what the walks of sampled rows come to, with one wait for the device.

    A token is drawn at every node, as if the walk came there, and the host then walks by itself.
    That is more arithmetic than a walk's, and on a device takes less time than the waits.
    """
    device = logits.device
    trees = [c.tree for c in candidates]
    counts = [tree.num_nodes for tree in trees]
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    nodes = [node for count in counts for node in range(count)]
    firsts = [0, *itertools.accumulate(counts)]
    probs = process_logits(
        logits[to_device(rows, device), to_device(nodes, device)],
        [samplers[row].params for row in rows],
    )  # [M, V], M the nodes of all trees
    uniforms = [
        samplers[row].get_uniform(CHOICE, positions[row] + int(trees[row].depths[node]))
        for row, node in zip(rows, nodes, strict=True)
    ]
    # For each node whose child was drawn: its place, what the child was drawn from, its token.
    drawn = [
        (firsts[row] + node, draft, int(candidate.tree.tokens[node + 1]))
        for row, candidate in enumerate(candidates)
        for node, draft in enumerate(candidate.draft_probs or [])
    ]
    if not drawn:
        tokens = to_host(draw_tokens(probs, uniforms))[0]
        kept = {}
    else:
        places = to_device([place for place, _, _ in drawn], device)
        draft_probs = torch.stack([draft.to(device) for _, draft, _ in drawn])
        children = to_device([token for _, _, token in drawn], device)[:, None]
        own = probs[places]
        likelihoods = own.gather(1, children), draft_probs.gather(1, children)
        probs[places] = find_residual(own, draft_probs)
        tokens, p, q = to_host(draw_tokens(probs, uniforms), *likelihoods)
        kept = {place: (float(p[at, 0]), float(q[at, 0])) for at, (place, *_) in enumerate(drawn)}
    results = []
    for row, candidate in enumerate(candidates):
        first = firsts[row]
        row_tokens = tokens[first : first + counts[row]].tolist()
        if candidate.draft_probs is None:
            results.append(accept(candidate.tree, row_tokens))
            continue
        end = 0
        while first + end in kept:
            p_child, q_child = kept[first + end]
            uniform = samplers[row].get_uniform(ACCEPT, positions[row] + end)
            if not uniform * q_child < p_child:
                break
            end += 1
        results.append((list(range(end + 1)), row_tokens[end]))
    return results
