"""What any tree of EAGLE would have accepted at every place of known texts, by a few passes.

What the drafter makes of a text does not depend on the tree. So one pass that follows the text
itself tells, at each place, at which rank its next tokens stand: by that the likeliest static trees
are grown, and it is known what each of them accepts. And one pass that drafts as EAGLE-2 does tells
at which place of the drafter's own order they stand, for every depth and size at once; only another
number of branches drafts other tokens.

Legend: B rows, L levels of a draft, K branches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import PlainProposer
from specdec.decode.drafters.eagle import EagleProposer
from specdec.decode.drafters.levels import DynamicTree, Level, TreeDraft
from specdec.decode.requests import ActiveRequest
from specdec.engine.decoder import Decoder
from specdec.engine.eagle import EagleNet
from specdec.engine.tree import IntArray, Tree, make_root
from specdec.methods.base import Choices

from .replay import Recording, replay

NO_PLACE = np.iinfo(np.int64).max  # of a token that was not drafted
NUM_ROWS = 8  # texts that are drafted for at once
Accepted = Mapping[int, IntArray]  # by the request's index: draft tokens at each place of its text


class TextChain:
    """Stands where a static tree stands; drafts along the text, and notes its tokens' ranks.

    following: the text behind each row's root, at most L tokens. found: [B, L], -1 from the first
    token on that is not among the `num_ranks` most probable.
    """

    def __init__(self, depth: int, num_ranks: int) -> None:
        self.depth, self.num_ranks = depth, num_ranks
        self.num_tokens, self.num_run = 0, depth - 1
        self.following: list[list[int]] = []
        self.found: IntArray = np.zeros((0, depth), np.int64)

    def grow(self, draft: TreeDraft) -> list[Candidates]:
        """Draft from the text's own tokens; propose none."""
        wanted = np.array([row + [-1] * (self.depth - len(row)) for row in self.following])
        self.found = np.full(wanted.shape, -1)
        is_followed = np.ones(len(wanted), np.bool_)
        ranked, _ = draft.rank_root(self.num_ranks)  # [B, 1, ranks]
        for level in range(self.depth):
            hits = ranked[:, 0] == wanted[:, level, None]
            is_followed &= hits.any(axis=1)
            self.found[is_followed, level] = hits.argmax(axis=1)[is_followed]
            if level + 1 < self.depth:
                tokens = np.maximum(wanted[:, level, None], 0)
                ranked, _ = draft.rank_level(Level(tokens, np.zeros_like(tokens), self.num_ranks))
        return [Candidates(make_root(int(token))) for token in draft.roots]


class TextTree(DynamicTree):
    """Grows EAGLE-2's tree whole; notes where the text's tokens stand in the drafter's order.

    found: [B, L, L]. Of a tree of at most n + 1 levels, found[b, n, i] is the place of the token of
    level i, by which it is taken or left.
    """

    def __init__(self, *, top_k: int, depth: int) -> None:
        super().__init__(top_k=top_k, depth=depth, num_tokens=top_k + (depth - 1) * top_k**2)
        self.following: list[list[int]] = []
        self.found: IntArray = np.zeros((0, depth, depth), np.int64)

    def _choose(
        self, roots: IntArray, tokens: IntArray, scores: np.ndarray, parents: IntArray
    ) -> list[Candidates]:
        shape = len(roots), self.depth, self.depth
        self.found = np.full(shape, NO_PLACE)
        for row, text in enumerate(self.following):
            node = -1
            for level, token in enumerate(text):
                (nodes,) = np.nonzero((parents[row] == node) & (tokens[row] == token))
                if not len(nodes):
                    break
                node = int(nodes[0])
                for depth in range(level, self.depth):
                    rivals = scores[row, : self.top_k + depth * self.top_k**2]
                    better = rivals > rivals[node]
                    better[:node] |= rivals[:node] == rivals[node]  # of equal ones the first
                    self.found[row, depth, level] = better.sum()
        return [Candidates(make_root(int(token))) for token in roots]


class Rehearsal(EagleProposer):
    """Drafts at every place of known texts, and proposes nothing."""

    def __init__(
        self,
        net: EagleNet,
        decoder: Decoder,
        recordings: Sequence[Recording],
        tree: TextChain | TextTree,
    ) -> None:
        super().__init__(net, decoder)
        self._use(tree)  # type: ignore[arg-type]  # a chain is used as a tree is
        self._watched = tree
        shape = tree.found.shape[1:]
        self._texts = {r.request.index: r.output_ids for r in recordings}
        self.found = {
            index: np.full((len(text), *shape), -1) for index, text in self._texts.items()
        }

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Tell the tree what comes, and keep what it found."""
        places = [(r.request.index, len(r.output_ids)) for r in requests]
        depth = self._watched.depth
        self._watched.following = [self._texts[index][at : at + depth] for index, at in places]
        candidates: list[Candidates] = super().propose(requests)
        for (index, at), found in zip(places, self._watched.found, strict=True):
            self.found[index][at] = found
        return candidates


def rehearse(
    proposer: EagleProposer,
    decoder: Decoder,
    recordings: Sequence[Recording],
    tree: TextChain | TextTree,
    num_positions: int,
) -> dict[int, IntArray]:
    """Return what the tree finds at each place of each text, by the request's index.

    The first place is left out: its token comes of the prompt's own pass.
    """
    rehearsal = Rehearsal(proposer.net, decoder, recordings, tree)
    replay(rehearsal, recordings, NUM_ROWS, num_positions, decoder)
    return rehearsal.found


def measure_ranks(ranks: Mapping[int, IntArray], num_ranks: int) -> np.ndarray:
    """How often the token of each rank is the text's, below a right path: [L, ranks].

    ranks: what TextChain finds, at the places of each text. Shares do not rise with the rank.
    """
    depth = next(iter(ranks.values())).shape[1]
    right, seen = np.zeros((depth, num_ranks)), np.zeros((depth, 1))
    for found in ranks.values():
        for level in range(depth):
            known = found[1 : len(found) - level]  # the text has a token there
            if level:
                known = known[known[:, level - 1] >= 0]
            hits = known[:, level][known[:, level] >= 0]
            right[level] += np.bincount(hits, minlength=num_ranks)
            seen[level] += len(known)
    shares: np.ndarray = np.minimum.accumulate(right / np.maximum(1, seen), axis=1)
    return shares


def count_static(ranks: Mapping[int, IntArray], choices: Choices) -> Accepted:
    """What a static tree accepts at each place."""
    paths = {()} | set(choices)

    def follow(row: Sequence[int]) -> int:
        length = 0
        while length < len(row) and tuple(row[: length + 1]) in paths:
            length += 1
        return length

    return {
        index: np.array([follow(row) for row in found.tolist()]) for index, found in ranks.items()
    }


def count_dynamic(places: Mapping[int, IntArray], depth: int, num_tokens: int) -> Accepted:
    """What a dynamic tree of that depth and size accepts at each place.

    A token's parent is at least as probable and drafted before it, so is never left out alone.
    """
    return {
        index: (found[:, depth - 1, :depth] < num_tokens).sum(axis=1)
        for index, found in places.items()
    }


class Rehearsed(PlainProposer):
    """Proposes what a tree would have accepted, and wrong tokens up to the tree's size."""

    def __init__(
        self, accepted: Accepted, recordings: Sequence[Recording], num_tokens: int, depth: int
    ) -> None:
        self.max_draft_tokens, self.max_draft_depth = num_tokens, depth
        self._accepted = accepted
        self._texts = {r.request.index: r.output_ids for r in recordings}

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """One chain of the text's tokens, the others below the root."""
        candidates = []
        for request in requests:
            index, at = request.request.index, len(request.output_ids)
            count = int(self._accepted[index][at])
            wrong = self.max_draft_tokens - count
            tokens = [request.output_ids[-1], *self._texts[index][at : at + count]]
            columns = (
                [*tokens, *range(-wrong, 0)],  # no token's number is below 0
                [-1, *range(count), *[0] * wrong],
                [*range(count + 1), *[1] * wrong],
            )
            tree = Tree(*(np.array(column, np.int64) for column in columns))
            candidates.append(Candidates(tree))
        return candidates
