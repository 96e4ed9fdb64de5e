"""Medusa: a fixed tree over the most probable tokens of heads on the target's last hidden state.

A tree is given by choices, TensorRT-LLM's and Medusa's own form: the path [0, 2] is the third most
probable token of head 1 below the most probable one of head 0.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec.decode.drafters.base import DraftContext, StateProposer, get_graphs
from specdec.decode.drafters.trees import (
    BUDGET_CPU_TOKENS,
    DEFAULT_CPU_TOKENS,
    check_paths,
    grow_choices,
)
from specdec.engine.graphs import Graphs
from specdec.engine.medusa import MedusaHeads
from specdec.engine.transfers import Array
from specdec.engine.tree import IntArray, Tree
from specdec.methods.base import Choices
from specdec.methods.medusa import MedusaParams

FLAG = "--medusa-choices"


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
    """The nodes of a tree, root first, each by its head and rank.

    widths[i]: tokens needed of head i. columns: [T - 1], where a node's token stands in the heads'
    ranked tokens laid side by side.
    """

    def __init__(self, choices: Choices) -> None:
        paths = sorted(choices, key=lambda path: (len(path), path))
        nodes: dict[tuple[int, ...], int] = {
            (): 0,
            **{path: node for node, path in enumerate(paths, 1)},
        }
        self.widths = [
            1 + max(path[head] for path in paths if len(path) > head)
            for head in range(len(paths[-1]))
        ]
        starts = np.cumsum([0, *self.widths])
        self.columns: IntArray = np.array([starts[len(p) - 1] + p[-1] for p in paths], np.int64)
        self.parents: IntArray = np.array([-1, *(nodes[p[:-1]] for p in paths)], np.int64)
        self.depths: IntArray = np.array([0, *map(len, paths)], np.int64)

    def fill(self, root: int, ranked: IntArray) -> Tree:
        """Put a row's tokens into the tree; siblings differ since a head ranks a token once."""
        return Tree(np.concatenate(([root], ranked[self.columns])), self.parents, self.depths)


def make_proposer(context: DraftContext) -> MedusaProposer:
    """Lay out the heads, with the tree that is asked for.

    Else with one that is small on a CPU, and the largest allowed elsewhere.
    """
    params, decoder, choices = context.params, context.decoder, context.options
    assert isinstance(params, MedusaParams)
    heads = MedusaHeads(
        params, context.weights, prepack=decoder.is_prepacked, kernels=decoder.kernels,
        dtype=decoder.dtype,
    )  # fmt: skip
    if choices is None:
        num_tokens = params.max_draft_len
        if decoder.device.type == "cpu":
            most = BUDGET_CPU_TOKENS if context.has_budget else DEFAULT_CPU_TOKENS
            num_tokens = min(num_tokens, most)
        choices = grow_choices(params.num_heads, num_tokens, heads.vocab_size)
    return MedusaProposer(heads, choices, get_graphs(decoder))


class MedusaProposer(StateProposer):
    """Proposes the same tree of ranks every step, filled with the heads' tokens."""

    def __init__(self, heads: MedusaHeads, choices: Choices, graphs: Graphs | None = None) -> None:
        super().__init__(
            torch.empty(heads.hidden_size, dtype=heads.dtype, device=heads.device), graphs
        )
        self.heads = heads
        self.use_choices(choices)

    def use_choices(self, choices: Choices) -> None:
        """Propose this tree from now on; raise SpecDecError if the heads have no such tree."""
        check_choices(choices, self.heads.params, self.heads.vocab_size)
        self.tree = ChoiceTree(choices)
        self.max_draft_tokens = len(choices)
        self.max_draft_depth = len(self.tree.widths)

    def compute_drafts(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """Rank the heads' tokens for all rows at once, side by side."""
        widths = self.tree.widths
        if self._graphs is not None:
            found = self._graphs.call(
                self.heads,
                (len(hidden), tuple(widths)),
                (hidden,),
                lambda x: (self.heads.rank_tokens(x, widths),),
            )
            if found is not None:
                return found[0]
        return self.heads.rank_tokens(hidden, widths)

    def make_tree(self, root: int, draft: Array) -> Tree:
        """Fill the tree with a row's tokens."""
        return self.tree.fill(root, draft)
