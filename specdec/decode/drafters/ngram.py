"""Drafts from a table of n-grams: the likeliest continuations of the last few tokens, as a tree.

REST drafts from a store of texts (He et al., https://arxiv.org/abs/2311.08252); here the store is
counts of n-grams, as of a back-off language model, so that a file of some megabytes holds what
millions of tokens say. There are no weights: any model with the table's vocabulary can be drafted
for. The tree grows by its likeliest node, whose chance is the product of the shares on its path:

    text  ... in order    table  [in order] -> to 0.9;  [order to] -> be 0.2, make 0.1
    tree  order - to - be
                     +- make
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import DraftContext, Drafter
from specdec.decode.requests import ActiveRequest
from specdec.engine.tree import Tree, make_root
from specdec.errors import SpecDecError
from specdec.files.ngrams import NgramTable, hash_tokens, read_ngrams
from specdec.methods.ngram import METHOD, NgramOptions

LEAST_CHANCE = 0.02  # of a drafted token; less is not worth a node anywhere
MAX_DEPTH = 8  # of a path: n-grams guess a few tokens, not sentences


def make_drafter(context: DraftContext) -> NgramDrafter:
    """Open the table that the options name; SpecDecError for one of another vocabulary."""
    options = context.options
    assert isinstance(options, NgramOptions)
    assert context.engine is not None
    context.check_room(METHOD, options.max_tokens)
    table = read_ngrams(options.path)
    vocab_size = context.engine.config.checkpoint.model.vocab_size
    tokenizer = context.tokenizer
    is_known = tokenizer is not None and hash_tokens(tokenizer, table.num_tokens) == table.sha256
    if table.num_tokens > vocab_size or (tokenizer is not None and not is_known):
        raise SpecDecError(
            f"{options.path} is of another tokenizer: its {table.num_tokens} tokens are not the"
            f" first of this model's {vocab_size}",
            "give a table of this tokenizer: specdec-train ngrams --tokenizer-dir makes one",
        )
    return NgramDrafter(options, table)


class NgramDrafter(Drafter):
    """Proposes the tree of a table's likeliest continuations of each request's text."""

    def __init__(self, options: NgramOptions, table: NgramTable) -> None:
        self.options, self.table = options, table
        self.max_draft_tokens = options.max_tokens
        self.max_draft_depth = min(options.max_tokens, MAX_DEPTH)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Draft from the last tokens of each text."""
        return [self._draft(request) for request in requests]

    def _draft(self, request: ActiveRequest) -> Candidates:
        order, output = self.table.max_order, request.output_ids
        context = output[-order:]
        if len(context) < order:
            context = [*request.request.input_ids[len(context) - order :], *context]
        # The last token that may be emitted is the bonus token's.
        max_tokens = min(self.options.max_tokens, request.remaining - 1)
        return (
            self._grow(context, max_tokens) if max_tokens > 0 else Candidates(make_root(output[-1]))
        )

    def _grow(self, context: list[int], max_tokens: int) -> Candidates:
        """Grow the tree of at most so many tokens by its likeliest node, again and again."""
        find, order = self.table.find, self.table.max_order
        tokens, parents, depths, confidences = [context[-1]], [-1], [0], [1.0]
        contexts = [tuple(context)]
        heap: list[tuple[float, int, int, float]] = []  # chance, parent, token, its share
        node, chance = 0, 1.0
        while True:
            if depths[node] < MAX_DEPTH:
                for token, share in find(contexts[node]):
                    if chance * share < LEAST_CHANCE:
                        break
                    heapq.heappush(heap, (-chance * share, node, token, share))
            if not heap or len(tokens) > max_tokens:
                break
            negative_chance, parent, token, share = heapq.heappop(heap)
            node, chance = len(tokens), -negative_chance
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            confidences.append(share)
            contexts.append((*contexts[parent], token)[-order:])
        columns = (tokens, parents, depths)
        tree = Tree(*(np.array(column, np.int64) for column in columns))
        return Candidates(tree, None, np.array(confidences))
