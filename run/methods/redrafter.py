"""ReDrafter: beams searched by a recurrent head over the target's last hidden state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec.engine.decoder import Decoder
from specdec.engine.graphs import Graphs
from specdec.engine.redrafter import ReDrafterHead
from specdec.engine.transfers import to_device, to_host
from specdec.engine.tree import pack_beams
from specdec.methods import ReDrafterParams
from specdec.tensors import EMBEDDING

from ..requests import ActiveRequest
from ..verify import Candidates
from .base import get_graphs, keep_newest, list_rows


def make_proposer(
    params: ReDrafterParams, weights: Mapping[str, Tensor], decoder: Decoder
) -> ReDrafterProposer:
    """Lay out the drafter beside the target whose embedding it shares."""
    head = ReDrafterHead(
        params,
        weights,
        weights[EMBEDDING],
        prepack=decoder.is_prepacked,
        kernels=decoder.kernels,
    )
    return ReDrafterProposer(head, get_graphs(decoder))


class ReDrafterProposer:
    """Proposes the deduplicated tree of a beam search (https://arxiv.org/abs/2403.09919)."""

    def __init__(self, head: ReDrafterHead, graphs: Graphs | None = None) -> None:
        self.head = head
        self._graphs = graphs
        self.max_draft_tokens = head.params.max_draft_tokens
        self.max_draft_depth = head.params.max_draft_depth
        self._hidden = torch.empty(0)

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Make room for one hidden state a row."""
        embedding = self.head.embedding
        self._hidden = embedding.new_zeros((num_rows, embedding.shape[1]))

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        """Nothing: the state comes with `observe`."""

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Search beams for all rows at once; pack each row's into a tree."""
        device = self._hidden.device
        roots = [request.output_ids[-1] for request in requests]
        hidden = self._hidden[to_device(list_rows(requests), device)]
        beams = self._search(hidden, to_device(roots, device))  # [B, W, L]
        (drafts,) = to_host(beams)
        return [
            Candidates(pack_beams(root, draft)) for root, draft in zip(roots, drafts, strict=True)
        ]

    def _search(self, hidden: Tensor, roots: Tensor) -> Tensor:
        found = None
        if self._graphs is not None:
            found = self._graphs.call(
                "beam search",
                len(roots),
                (hidden, roots),
                lambda *inputs: (self.head.search_beams(*inputs),),
            )
        return self.head.search_beams(hidden, roots) if found is None else found[0]

    def observe(
        self, requests: Sequence[ActiveRequest], states: Tensor, paths: Sequence[Sequence[int]]
    ) -> None:
        """Keep the hidden state of each row's newest committed token: the next search reads it."""
        keep_newest(self._hidden, requests, states, paths)
