"""ReDrafter: beams searched by a recurrent head over the target's last hidden state."""

from __future__ import annotations

from torch import Tensor

from specdec.decode.drafters.base import DraftContext, StateProposer, get_graphs
from specdec.engine.graphs import Graphs
from specdec.engine.redrafter import ReDrafterHead
from specdec.engine.transfers import Array
from specdec.engine.tree import Tree, pack_beams
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.tensors import EMBEDDING


def make_proposer(context: DraftContext) -> ReDrafterProposer:
    """Lay out the drafter beside the target whose embedding it shares."""
    params, decoder = context.params, context.decoder
    assert isinstance(params, ReDrafterParams)
    head = ReDrafterHead(
        params,
        context.weights,
        context.weights[EMBEDDING],
        prepack=decoder.is_prepacked,
        kernels=decoder.kernels,
    )
    return ReDrafterProposer(head, get_graphs(decoder))


class ReDrafterProposer(StateProposer):
    """Proposes the deduplicated tree of a beam search (https://arxiv.org/abs/2403.09919)."""

    def __init__(self, head: ReDrafterHead, graphs: Graphs | None = None) -> None:
        super().__init__(head.embedding, graphs)
        self.head = head
        self.max_draft_tokens = head.params.max_draft_tokens
        self.max_draft_depth = head.params.max_draft_depth

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
