"""ReDrafter: beams searched by a recurrent head over the target's last hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import ALL_LEVELS, DraftContext
from specdec.decode.drafters.hidden_state import HiddenStateDrafter
from specdec.decode.drafters.levels import (
    DynamicTree,
    Level,
    read_temperatures,
    sharpen,
)
from specdec.decode.drafters.trees import get_cpu_tokens
from specdec.decode.requests import ActiveRequest
from specdec.engine.graphs import Graphs
from specdec.engine.native_models import DynamicTrees
from specdec.engine.redrafter import ReDrafterHead
from specdec.engine.transfers import Array, to_device, to_host
from specdec.engine.tree import IntArray, Tree, pack_beams
from specdec.errors import SpecDecError
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.tensors import EMBEDDING


def make_drafter(context: DraftContext) -> BeamDrafter:
    """Lay out the drafter alongside the target whose embedding it shares."""
    params, decoder, num_tokens = context.params, context.decoder, context.options
    assert isinstance(params, ReDrafterParams)
    if context.network is not None and num_tokens is not None:
        raise SpecDecError(
            "--redrafter-tree-tokens: this engine's search is a network, which keeps its beams",
            "leave it out, or build with --backend torch",
        )
    head = context.network
    if head is None:
        embedding = context.weights[EMBEDDING]
        assert not isinstance(embedding, tuple)
        head = ReDrafterHead(
            params,
            context.weights,
            embedding,
            prepack=decoder.is_prepacked,
            kernels=decoder.kernels,
        )
    if num_tokens is not None:
        return BeamTreeDrafter(head, num_tokens)
    drafter = BeamDrafter(head, context.graphs)
    is_fitted = context.has_budget and context.network is None
    return drafter.fit_budget() if is_fitted else drafter


class BeamDrafter(HiddenStateDrafter):
    """Proposes the deduplicated tree of a beam search (https://arxiv.org/abs/2403.09919)."""

    def __init__(self, head: ReDrafterHead, graphs: Graphs | None = None) -> None:
        super().__init__(graphs)
        self.head = head
        self.max_draft_tokens = head.params.max_draft_tokens
        self.max_draft_depth = head.params.max_draft_depth

    def fit_budget(self) -> BeamDrafter:
        """Return, on a CPU, one that says how sure it is of a token."""
        embedding = self.head.embedding
        if isinstance(embedding, Tensor) and not embedding.is_cpu:  # there a search is one graph
            return self
        num_tokens = min(self.max_draft_tokens, get_cpu_tokens(has_budget=True))
        return BeamTreeDrafter(self.head, num_tokens)

    def compute_drafts(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """Search beams for all rows at once, [B, W, L]."""
        return self.replay(self.head, len(roots), [hidden, roots], self.head.search_beams)

    def make_tree(self, root: int, draft: Array) -> Tree:
        """Merge the common prefixes of a row's beams."""
        return pack_beams(root, draft)


class BeamTreeDrafter(BeamDrafter):
    """Proposes the likeliest tokens of all that a search saw, also of beams that it left.

    A beam search that keeps the likeliest beams of each length is EAGLE-2's search.
    """

    def __init__(self, head: ReDrafterHead, num_tokens: int) -> None:
        """num_tokens: of a tree; raise SpecDecError for more than the engine has room for."""
        super().__init__(head)
        params = head.params
        if num_tokens > params.max_draft_tokens:
            raise SpecDecError(
                f"--redrafter-tree-tokens is {num_tokens}, the engine has"
                f" {params.draft_len_source}",
                f"give at most {params.max_draft_tokens}, or convert with more or longer beams",
            )
        self.tree = DynamicTree(
            top_k=params.num_beams, depth=params.draft_len_per_beam, num_tokens=num_tokens
        )
        self.max_draft_tokens = self.tree.num_tokens

    def fit_budget(self) -> BeamTreeDrafter:
        return self

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Search the trees of all rows at once."""
        hidden = self.get_hidden(requests)
        roots = np.array([request.output_ids[-1] for request in requests], np.int64)
        temperatures = read_temperatures(requests)
        native_trees = self.head.search_trees(
            hidden, to_device(roots, hidden.device), self.tree.num_tokens, temperatures,
            self.min_gain,
        )  # fmt: skip
        if native_trees is not None:
            self.num_levels = native_trees.num_levels
            return list_candidates(roots, native_trees)
        draft = BeamDraft(self.head, hidden, roots, temperatures, self.min_gain)
        candidates = self.tree.grow(draft)
        self.num_levels = draft.num_levels
        return candidates


def list_candidates(roots: IntArray, native_trees: DynamicTrees) -> list[Candidates]:
    """Return the trees that a native search found, under their roots."""
    ends = np.zeros((3, len(roots), 1), np.int64)
    ends[0, :, 0], ends[1] = roots, -1
    tokens, parents, depths = np.concatenate((ends, native_trees.nodes), axis=2)
    chances = np.concatenate((np.ones((len(roots), 1)), native_trees.chances), axis=1)
    return [
        Candidates(Tree(*columns), None, sure)
        for *columns, sure in zip(tokens, parents, depths, chances, strict=True)
    ]


class BeamDraft:
    """One draft of all rows by torch's operators: what follows their roots, level by level."""

    def __init__(
        self, head: ReDrafterHead, hidden: Tensor, roots: IntArray, temperatures: Array,
        min_gain: float = ALL_LEVELS,
    ) -> None:  # fmt: skip
        """hidden: [B, D]; temperatures: as in `TreeDraft`; min_gain: as in `Drafter`."""
        self.roots, self.min_gain = roots, min_gain
        self.num_levels = 0  # that were drafted
        self._head, self._sharpness = head, sharpen(temperatures, hidden.device)
        self._context = hidden[:, None]
        self._state: Tensor | None = None

    def rank(self, level: Level) -> tuple[IntArray, np.ndarray]:
        """Read nodes below those of the level before; return what is drafted from each."""
        device, above = self._context.device, self._state
        if above is not None:
            lines = torch.arange(len(self.roots), device=device)[:, None]
            above = above[lines, to_device(level.parents, device)]
        self._state = self._head.update_state(to_device(level.tokens, device), above)
        self.num_levels += 1
        ranks_on_device = self._head.rank_tokens(
            self._context, self._state, level.width, self._sharpness
        )
        ranked, scores = to_host(*ranks_on_device)
        return ranked, scores
