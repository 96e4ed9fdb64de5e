"""Medusa: a tree over the most probable tokens of heads on the target's last hidden state.

A fixed tree is given by choices, TensorRT-LLM's and Medusa's own form: the path [0, 2] is the third
most probable token of head 1 below the most probable one of head 0. A dynamic one has the paths
that the heads find most probable in this step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import DraftContext
from specdec.decode.drafters.hidden_state import HiddenStateDrafter
from specdec.decode.drafters.trees import (
    check_num_tokens,
    check_paths,
    count_paths,
    get_cpu_tokens,
    grow_choices,
    grow_tree,
    lay_out_paths,
)
from specdec.decode.requests import ActiveRequest
from specdec.engine.draft_net import take_drafter_tensors, take_offsets
from specdec.engine.graphs import Graphs
from specdec.engine.medusa import MedusaHeads
from specdec.engine.transfers import Array, to_host
from specdec.engine.tree import IntArray, Tree
from specdec.methods.base import Choices
from specdec.methods.medusa import MedusaParams

FLAG = "--medusa-choices"
TOP_K = 8  # tokens of a head that a dynamic tree may have


def check_choices(choices: Choices, params: MedusaParams, vocab_size: int) -> None:
    """Raise SpecDecError that lists what is wrong with a tree, for these heads."""
    check_paths(
        choices,
        FLAG,
        max_depth=params.num_heads,
        depth_source=f"{params.num_heads} Medusa heads",
        max_tokens=params.max_draft_len,
        tokens_flag="--max-medusa-token-len",
        vocab_size=vocab_size,
    )


class ChoiceTree:
    """Tree whose nodes are told by their heads and ranks, the root first.

    widths[i]: best tokens of head i that the tree uses. columns: [T - 1], each node's index among
    the best tokens of all heads, side by side.
    """

    def __init__(self, choices: Choices) -> None:
        paths = sorted(choices, key=lambda path: (len(path), path))
        self.widths = [
            1 + max(path[head] for path in paths if len(path) > head)
            for head in range(len(paths[-1]))
        ]
        starts = np.cumsum([0, *self.widths])
        self.columns: IntArray = np.array([starts[len(p) - 1] + p[-1] for p in paths], np.int64)
        self.parents, self.depths = lay_out_paths(paths)

    def fill(self, root: int, ranked: IntArray) -> Tree:
        """Put a row's tokens into the tree; siblings differ since a head ranks a token once."""
        return Tree(np.concatenate(([root], ranked[self.columns])), self.parents, self.depths)


def make_drafter(context: DraftContext) -> MedusaDrafter:
    """Lay out the heads, with the tree of the options.

    Without one the tree is dynamic and small on a CPU, and the largest static one elsewhere.
    """
    params, decoder = context.params, context.decoder
    assert isinstance(params, MedusaParams)
    heads = context.network or MedusaHeads(
        params, context.weights, prepack=decoder.is_prepacked, kernels=decoder.kernels,
        offsets=take_offsets(
            take_drafter_tensors(context.weights, "medusa_heads.0."), decoder.model.vocab_size
        ),
    )  # fmt: skip
    tree: Choices | int
    if context.options is not None:
        tree = context.options
    elif decoder.device.type == "cpu":
        tree = min(params.max_draft_len, get_cpu_tokens(has_budget=context.has_budget))
    else:
        tree = grow_choices(params.num_heads, params.max_draft_len, heads.vocab_size)
    return MedusaDrafter(heads, tree, context.graphs)


class MedusaDrafter(HiddenStateDrafter):
    """Drafter with one tree of ranks for every step, or with each step's most probable paths."""

    _tree: ChoiceTree | None  # of every step; None for dynamic ones

    def __init__(
        self, heads: MedusaHeads, tree: Choices | int, graphs: Graphs | None = None
    ) -> None:
        """tree: a static one, or the number of tokens of a dynamic one."""
        super().__init__(graphs)
        self.heads = heads
        self.use_tree(tree)

    def use_tree(self, tree: Choices | int) -> None:
        """Propose such trees from now on; raise SpecDecError if the heads or engine have none."""
        if isinstance(tree, int):
            self._use_dynamic_tree(tree)
            return
        check_choices(tree, self.heads.params, self.heads.vocab_size)
        self._tree = ChoiceTree(tree)
        self._widths = self._tree.widths
        self.max_draft_tokens = len(tree)
        self.max_draft_depth = len(self._widths)
        self.drafts_ahead = self._graphs is not None

    def _use_dynamic_tree(self, num_tokens: int) -> None:
        """Propose the most probable paths: the products of their tokens' probabilities.

        No head sees what another one drafts, so the product is all that is known of a path.
        """
        params = self.heads.params
        check_num_tokens(
            "--medusa-tree-tokens", num_tokens, params.max_draft_len, "--max-medusa-token-len"
        )
        depth, width = min(params.num_heads, num_tokens), min(TOP_K, self.heads.vocab_size)
        self._tree, self._widths = None, [width] * depth
        self.max_draft_tokens = min(num_tokens, count_paths(depth, width))
        self.max_draft_depth = depth
        self.drafts_ahead = False

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Rank the tokens of all rows at once, and make a tree of each."""
        if self._tree is not None:
            return super().propose(requests)
        hidden = self.get_hidden(requests)
        tokens, scores = to_host(*self.heads.rank_tokens(hidden, self._widths))
        shape = (len(requests), self.max_draft_depth, self._widths[0])
        ranked = zip(tokens.reshape(shape), np.exp(scores).reshape(shape), strict=True)
        return [
            grow_tree(request.output_ids[-1], row_tokens, chances, self.max_draft_tokens)
            for request, (row_tokens, chances) in zip(requests, ranked, strict=True)
        ]

    def compute_drafts(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """Rank the heads' tokens for all rows at once, side by side."""
        widths = self._widths
        return self.replay(
            self.heads, (len(hidden), tuple(widths)), [hidden],
            lambda x: self.heads.rank_tokens(x, widths)[0],
        )  # fmt: skip

    def make_tree(self, root: int, draft: Array) -> Tree:
        """Fill the tree with a row's tokens."""
        assert self._tree is not None
        return self._tree.fill(root, draft)
