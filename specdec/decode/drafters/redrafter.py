"""ReDrafter: beams searched by a recurrent head over the target's last hidden state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import DraftContext, StateProposer, get_graphs, list_rows
from specdec.decode.drafters.levels import DynamicTree, Level, read_temperatures, temper
from specdec.decode.drafters.trees import BUDGET_CPU_TOKENS
from specdec.decode.requests import ActiveRequest
from specdec.engine.graphs import Graphs
from specdec.engine.redrafter import ReDrafterHead
from specdec.engine.transfers import Array, to_device, to_host
from specdec.engine.tree import IntArray, Tree, pack_beams
from specdec.errors import SpecDecError
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.tensors import EMBEDDING


def make_proposer(context: DraftContext) -> ReDrafterProposer:
    """Lay out the drafter beside the target whose embedding it shares."""
    params, decoder, num_tokens = context.params, context.decoder, context.options
    assert isinstance(params, ReDrafterParams)
    head = ReDrafterHead(
        params,
        context.weights,
        context.weights[EMBEDDING],
        prepack=decoder.is_prepacked,
        kernels=decoder.kernels,
    )
    if num_tokens is not None:
        return DynamicProposer(head, num_tokens)
    proposer = ReDrafterProposer(head, get_graphs(decoder))
    return proposer.fit_budget() if context.has_budget else proposer


class ReDrafterProposer(StateProposer):
    """Proposes the deduplicated tree of a beam search (https://arxiv.org/abs/2403.09919)."""

    def __init__(self, head: ReDrafterHead, graphs: Graphs | None = None) -> None:
        super().__init__(head.embedding, graphs)
        self.head = head
        self.max_draft_tokens = head.params.max_draft_tokens
        self.max_draft_depth = head.params.max_draft_depth

    def fit_budget(self) -> ReDrafterProposer:
        """What drafts if only that is verified which pays: it says how sure it is of a token."""
        if self.head.embedding.device.type != "cpu":  # there a search is one graph
            return self
        return DynamicProposer(self.head, min(self.max_draft_tokens, BUDGET_CPU_TOKENS))

    def compute_drafts(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """Search beams for all rows at once, [B, W, L]."""
        if self._graphs is not None:
            found = self._graphs.call(
                self.head,
                len(roots),
                (hidden, roots),
                lambda *inputs: (self.head.search_beams(*inputs),),
            )
            if found is not None:
                return found[0]
        return self.head.search_beams(hidden, roots)

    def make_tree(self, root: int, draft: Array) -> Tree:
        """Merge the common prefixes of a row's beams."""
        return pack_beams(root, draft)


class DynamicProposer(ReDrafterProposer):
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
        self.num_levels = 1  # as in `LevelDrafter`
        self.goes_on: Callable[[np.ndarray], bool] | None = None

    def fit_budget(self) -> DynamicProposer:
        return self

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Draft the tree's levels for all rows at once."""
        hidden = self._hidden[to_device(list_rows(requests), self._hidden.device)]
        roots = np.array([request.output_ids[-1] for request in requests], np.int64)
        draft = BeamDraft(self.head, hidden, roots, read_temperatures(requests), self.goes_on)
        candidates = self.tree.grow(draft)
        self.num_levels = draft.num_levels
        return candidates


class BeamDraft:
    """One draft of all rows: what follows their roots, from level to level."""

    def __init__(
        self, head: ReDrafterHead, hidden: Tensor, roots: IntArray, temperatures: Array,
        goes_on: Callable[[np.ndarray], bool] | None = None,
    ) -> None:  # fmt: skip
        """hidden: [B, D]; temperatures: as in `temper`; goes_on: as in `LevelDrafter`."""
        self.roots, self.goes_on = roots, goes_on
        self.num_levels = 0  # that were drafted
        self._head, self._temperatures = head, temperatures
        self._context = head.make_context(hidden)[:, None]
        self._state = head.update_state(to_device(roots, hidden.device)[:, None], None)

    def rank_root(self, width: int) -> tuple[IntArray, np.ndarray]:
        """The most probable tokens after the roots, [B, 1, width], and their log-probabilities."""
        self.num_levels += 1
        ranked, scores = to_host(*self._head.rank_tokens(self._context, self._state, width))
        return ranked, temper(scores, self._temperatures)

    def rank_level(self, level: Level) -> tuple[IntArray, np.ndarray]:
        """Read nodes below those of the level before; return what is drafted from each."""
        device = self._state.device
        lines = torch.arange(len(self.roots), device=device)[:, None]
        above = self._state[lines, to_device(level.parents, device)]
        self._state = self._head.update_state(to_device(level.tokens, device), above)
        return self.rank_root(level.width)
