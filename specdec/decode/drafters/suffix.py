"""Suffix decoding: the ends of the text are looked up in a tree of all its suffixes, with counts.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
https://arxiv.org/abs/2411.04975. There are no weights.

The tree holds every suffix of the text, edges labelled by places of the text, and how many suffixes
have entered each edge. The ends of the text that occurred before are places in the tree, which move
on by every token that is appended; so what follows them is found without a search:

    text   a b c a b d a b        the ends found: [a b] and [b], in edges that end here
    tree   [a b] -> c once, d once; [b] -> c once, d once
    draft  two branches of probability 1/2: c a b ... and d a b ...
"""

from __future__ import annotations

import dataclasses
import gc
import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import DraftContext, Drafter
from specdec.decode.requests import ActiveRequest
from specdec.engine.tree import Tree, make_root
from specdec.errors import SpecDecError
from specdec.files.texts import add_texts, check_writable, read_texts
from specdec.files.vocabulary import keep_tokens
from specdec.methods.suffix import METHOD, SuffixOptions
from specdec.system import logs

logger = logs.get_logger(__name__)
NUM_BRANCHES = 4  # of the tokens that followed a place, the most frequent: no more are drafted
# That a text which followed another so far goes on to do so, for each token: counts of one or two
# would promise more than they keep.
CONTINUATION = 0.9
EPSILON = 1e-9
OPEN = 1 << 60  # length of an edge that goes on to the end of its text
END = -1  # where a text ends that others follow


def make_drafter(context: DraftContext) -> SuffixDrafter:
    """Draft from the text, as much as the engine has room for."""
    engine, options = context.engine, context.options
    assert engine is not None
    assert isinstance(options, SuffixOptions)
    context.check_room(METHOD, options.max_tokens)
    vocabulary = {"vocab_size": engine.config.checkpoint.model.vocab_size}
    return SuffixDrafter(options, vocabulary | keep_tokens(engine.config.vocabulary))


class Node:
    """An edge of the tree, and the node at its end.

    start, length: its label, as a place in the text. count: suffixes that have entered the edge;
    total: those that have left it for one of `children`. top: the most frequent children, newest
    first.
    """

    __slots__ = ("children", "count", "length", "start", "top", "total")

    def __init__(self, start: int, length: int) -> None:
        self.start, self.length = start, length
        self.count, self.total = 1, 0
        self.children, self.top = _NO_CHILDREN, _NO_TOP  # until it is split

    def enter(self, child: Node) -> None:
        """Count a suffix that goes on into a child that is there already."""
        child.count += 1
        self.total += 1
        self._place_on_top(child)

    def add(self, token: int, child: Node) -> None:
        """Take a new child and all suffixes in it."""
        self.children[token] = child
        self.total += child.count
        self._place_on_top(child)

    def _place_on_top(self, child: Node) -> None:
        top = self.top
        if child in top:
            top.remove(child)
        elif len(top) == NUM_BRANCHES:
            rarest_child = min(reversed(top), key=_get_count)  # the oldest of these
            if child.count < rarest_child.count:
                return
            top.remove(rarest_child)
        top.insert(0, child)


_NO_CHILDREN: dict[int, Node] = {}
_NO_TOP: list[Node] = []


def _get_count(node: Node) -> int:
    return node.count


TextEnd = tuple[Node, int]  # in an edge, so many tokens along it


class SuffixTree:
    """A growing text, or several one after another, and every suffix of them.

    Appending a token costs the same at any length of the text: at most `max_depth` short steps.
    """

    def __init__(self, max_depth: int) -> None:
        """max_depth: tokens of a text's end that are looked for, at most."""
        self.max_depth = max_depth
        self.text: list[int] = []
        self.root = Node(0, 0)
        self.root.children, self.root.top = {}, []
        # The newest text's ends that occurred before, longest first, by one token less each.
        self.text_ends: list[TextEnd] = [(self.root, 0)]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the newest text."""
        text = self.text
        for token in tokens:
            text_ends = self.text_ends
            moved: list[TextEnd] = []
            for index, (node, offset) in enumerate(text_ends):
                if offset < node.length:
                    if text[node.start + offset] == token:
                        moved.append((node, offset + 1))
                        continue
                    # The ends after this one are no longer; those in the same edge come later.
                    self._split(node, offset, sum(p[0] is node for p in text_ends[index:]))
                else:
                    child = node.children.get(token)
                    if child is not None:
                        node.enter(child)
                        moved.append((child, 1))
                        continue
                node.add(token, Node(len(text), OPEN))
            text.append(token)
            moved.append((self.root, 0))
            if len(moved) > self.max_depth + 1:
                del moved[0]
            self.text_ends = moved

    def end(self) -> None:
        """End the newest text: what follows is another."""
        self.text.append(END)
        self.text_ends = [(self.root, 0)]

    def find(self, tokens: Sequence[int]) -> list[TextEnd]:
        """Return the places of all occurring ends of `tokens`, longest first, up to `max_depth`."""
        text_ends: list[TextEnd] = [(self.root, 0)]
        for token in tokens[-self.max_depth :]:
            text_ends = self.follow(text_ends, token)
        return text_ends

    def follow(self, text_ends: Iterable[TextEnd], token: int) -> list[TextEnd]:
        """Move the places of a text that is not in the tree on by a token."""
        moved: list[TextEnd] = []
        for node, offset in text_ends:
            if offset < node.length:
                if self.text[node.start + offset] == token:
                    moved.append((node, offset + 1))
            elif (child := node.children.get(token)) is not None:
                moved.append((child, 1))
        moved.append((self.root, 0))
        return moved[-self.max_depth - 1 :]

    def _split(self, node: Node, offset: int, num_before: int) -> None:
        """End an edge after `offset` tokens; what is below becomes a child.

        num_before: of the suffixes that have entered the edge, those that have come no further.
        """
        text, start = self.text, node.start + offset
        below = Node(start, node.length - offset if node.length < OPEN else OPEN)
        below.count = node.count - num_before
        below.children, below.top, below.total = node.children, node.top, node.total
        node.length, node.children, node.top, node.total = offset, {}, [], 0
        node.add(text[start], below)


class ScoredDraft(NamedTuple):
    """A tree of drafts; score: the tokens of it that are expected to be accepted.

    shares: by node, how often the text went on in that way, from the root on.
    """

    score: float
    tokens: list[int]
    parents: list[int]
    depths: list[int]
    shares: list[float]

    def to_candidates(self) -> Candidates:
        """Return the tree as candidates, with each node's share below its parent as confidence."""
        tree = Tree(*(np.array(column, np.int64) for column in self[1:4]))
        shares = np.array(self.shares)
        return Candidates(
            tree, None, shares / np.where(tree.parents < 0, 1.0, shares[tree.parents])
        )


def _list_branches(
    node: Node, probability: float, min_probability: float
) -> list[tuple[float, Node]]:
    """Return the likely children of a node of that probability, each with its share of it."""
    shares = [(probability * child.count / node.total, child) for child in node.top]
    return [(share, child) for share, child in shares if share >= min_probability]


def grow(  # noqa: C901 - one walk that grows a tree by its best score
    tree: SuffixTree, text_end: TextEnd, max_tokens: int, min_probability: float, root: int
) -> ScoredDraft:
    """Draft the tokens that are likeliest to follow a place, by the frequencies of their branches.

    A branch that reaches the end of the text goes on with what it has copied, so that a text which
    repeats itself is continued for any length.
    """
    text, (node, offset) = tree.text, text_end
    end = len(text)
    tokens, parents, depths, shares = [root], [-1], [0], [1.0]
    probability, parent, depth, score = 1.0, 0, 0, 0.0
    branches: list[tuple[float, int, Node, int, int, int]] = []
    number = 0
    while True:
        while len(tokens) <= max_tokens and offset < node.length:
            if branches and -branches[0][0] > probability:
                number += 1
                entry = (-probability, number, node, parent, depth, offset)
                share, _, node, parent, depth, offset = heapq.heapreplace(branches, entry)
                probability = -share
            position = node.start + offset
            if position >= end:
                copy_start = position - depth
                position = copy_start + depth % (end - copy_start)
            token = text[position]
            if token == END:
                break
            parents.append(parent)
            parent = len(tokens)
            depth += 1
            tokens.append(token)
            depths.append(depth)
            shares.append(probability)
            score += probability
            probability *= CONTINUATION
            offset += 1
        if len(tokens) > max_tokens:
            break
        if offset == node.length:
            for share, child in _list_branches(node, probability, min_probability):
                number += 1  # settles between equals
                heapq.heappush(branches, (-share, number, child, parent, depth, 0))
        if not branches:
            break
        share, _, node, parent, depth, offset = heapq.heappop(branches)
        probability = -share
    return ScoredDraft(score, tokens, parents, depths, shares)


def _sum_certain(size: int) -> float:
    """Return the best possible score of a draft of so many tokens: one continuation alone."""
    return (1 - CONTINUATION**size) / (1 - CONTINUATION)


class FinishedTexts:
    """The texts of finished requests, the newest `max_tokens` or a little less.

    There are two trees: when the younger is half of that, it becomes the older, and what was the
    older is dropped whole.
    """

    def __init__(self, max_tokens: int, max_depth: int) -> None:
        self.max_tokens, self.max_depth = max_tokens, max_depth
        self.trees = [SuffixTree(max_depth)]
        self.version = 0  # places found in an earlier one are no longer right

    def add(self, tokens: Sequence[int]) -> None:
        """Keep a text; of one that is too long, its end."""
        half = self.max_tokens // 2
        tokens = tokens[max(0, len(tokens) - half + 1) :]
        if len(self.trees[-1].text) + len(tokens) + 1 > half:
            self.trees = [self.trees[-1], SuffixTree(self.max_depth)]
        tree = self.trees[-1]
        tree.extend(tokens)
        tree.end()
        self.version += 1


class SuffixText:
    """One request's text as a tree, and where the end of it is in those of finished requests.

    The tree is made by the first draft: a long prompt takes a while, and drafts may never pay.
    """

    def __init__(self, request: ActiveRequest, max_depth: int) -> None:
        self.request = request
        self.tree = SuffixTree(max_depth)
        self._version = -1
        self._finished_ends: list[list[TextEnd]] = []  # by tree of the finished

    def read(self, finished_texts: FinishedTexts | None) -> list[tuple[SuffixTree, list[TextEnd]]]:
        """Take what is new of the text; return all trees with the places to draft from."""
        own_tree, prompt = self.tree, self.request.request.input_ids
        num_known = len(own_tree.text)
        own_tree.extend(prompt[num_known:])
        own_tree.extend(self.request.output_ids[max(0, num_known - len(prompt)) :])
        ends_by_tree = [(own_tree, own_tree.text_ends)]
        if finished_texts is not None:
            if self._version != finished_texts.version:
                self._version = finished_texts.version
                self._finished_ends = [tree.find(own_tree.text) for tree in finished_texts.trees]
            else:
                for token in own_tree.text[num_known:]:
                    self._finished_ends = [
                        tree.follow(text_ends, token)
                        for tree, text_ends in zip(
                            finished_texts.trees, self._finished_ends, strict=True
                        )
                    ]
            ends_by_tree += zip(finished_texts.trees, self._finished_ends, strict=True)
        return ends_by_tree


class SuffixDrafter(Drafter):
    """Proposes the tree of what followed the end of each request's text elsewhere."""

    def __init__(self, options: SuffixOptions, vocabulary: Mapping[str, Any] | None = None) -> None:
        """vocabulary: what tokens are of, as a cache file tells it; of use with one."""
        self.options = options
        self.max_draft_tokens = self.max_draft_depth = options.max_tokens
        self._texts: dict[int, SuffixText] = {}  # by row
        self._finished_texts: FinishedTexts | None = None
        self._vocabulary = dict(vocabulary or {})
        self._unwritten: list[list[int]] = []
        if options.cache is not None:
            self._finished_texts = FinishedTexts(options.max_cached_tokens, options.max_depth)
            check_writable(options.cache)
            for text in read_texts(options.cache, self._vocabulary, options.max_cached_tokens):
                self._finished_texts.add(text)
            # A search for garbage among all these objects takes 0.3 s, in the middle of some step.
            gc.freeze()

    def make_twin(self) -> SuffixDrafter:
        """Return one that knows no texts and has no file for them."""
        return SuffixDrafter(dataclasses.replace(self.options, cache=None))

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Forget the texts, those of finished requests too, unless a file keeps them."""
        options = self.options
        if options.cache is not None:
            self._finish_left()
        self._texts = {}
        if options.cache is None and options.max_cached_tokens:
            self._finished_texts = FinishedTexts(options.max_cached_tokens, options.max_depth)

    def keep(self) -> None:
        """Add the texts of finished requests to the cache file, where there is one."""
        if self.options.cache is not None:
            self._finish_left()
            self._write()

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        """Begin each request's text."""
        for request in requests:
            self._finish(request.row)
            self._texts[request.row] = SuffixText(request, self.options.max_depth)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Add the newest tokens to each text and draft what followed its end before."""
        ended_rows = [
            r for r, text in self._texts.items() if text.request.finish_reason is not None
        ]
        for row in ended_rows:
            self._finish(row)
        return [self._draft(request) for request in requests]

    def _finish_left(self) -> None:
        """Finish the texts that no step goes on with, between two steps."""
        for row in [row for row, text in self._texts.items() if text.request.is_over]:
            self._finish(row)

    def _finish(self, row: int) -> None:
        text = self._texts.pop(row, None)
        if text is not None and self._finished_texts is not None:
            request = text.request
            tokens = [*request.request.input_ids, *request.output_ids]
            self._finished_texts.add(tokens)
            if self.options.cache is not None:
                self._unwritten.append(tokens)
                # A server may be killed, and what is unwritten takes memory.
                if 8 * sum(map(len, self._unwritten)) > self.options.max_cached_tokens:
                    self._write()

    def _write(self) -> None:
        """Add what is new to the file. That it fails costs speed in later runs, and no text."""
        assert self.options.cache is not None
        unwritten, self._unwritten = self._unwritten, []
        if unwritten:
            try:
                add_texts(
                    self.options.cache, unwritten, self._vocabulary, self.options.max_cached_tokens
                )
            except SpecDecError as error:
                logger.warning("--suffix-cache: %s; %s", error.message, error.hint)

    def _draft(self, request: ActiveRequest) -> Candidates:
        """Return the draft of which most is expected to be accepted, of all ends and all trees.

        No more is drafted than `max_factor` times the tokens that were found, so the longest ends
        come first and a draft can be the best without the shorter ones being tried.
        """
        options, root = self.options, request.output_ids[-1]
        # The last token that may be emitted is the bonus token's.
        max_tokens = min(options.max_tokens, request.remaining - 1)
        best_draft: ScoredDraft | None = None
        for tree, text_ends in self._texts[request.row].read(self._finished_texts):
            for index, text_end in enumerate(text_ends[:-1]):
                size = min(max_tokens, int(options.max_factor * (len(text_ends) - 1 - index)))
                least_score = best_draft.score + EPSILON if best_draft is not None else 0.0
                if _sum_certain(size) <= least_score:
                    break
                draft = grow(tree, text_end, size, options.min_probability, root)
                if best_draft is None or draft.score > best_draft.score:
                    best_draft = draft
        if best_draft is None or len(best_draft.tokens) == 1:
            return Candidates(make_root(root))
        return best_draft.to_candidates()
