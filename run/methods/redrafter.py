"""ReDrafter: beams searched by a recurrent head over the target's last hidden state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec.engine.decoder import Decoder
from specdec.engine.redrafter import ReDrafterHead
from specdec.engine.tree import pack_beams
from specdec.methods import ReDrafterParams
from specdec.tensors import EMBEDDING

from ..requests import ActiveRequest
from ..verify import Candidates
from .base import keep_newest, list_rows


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
    return ReDrafterProposer(head)


class ReDrafterProposer:
    """Proposes the deduplicated tree of a beam search (https://arxiv.org/abs/2403.09919)."""

    def __init__(self, head: ReDrafterHead) -> None:
        self.head = head
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
        hidden = self._hidden[torch.from_numpy(list_rows(requests)).to(device)]
        beams = self.head.search_beams(hidden, torch.tensor(roots, device=device))  # [B, W, L]
        drafts = beams.cpu().numpy()
        return [
            Candidates(pack_beams(root, draft)) for root, draft in zip(roots, drafts, strict=True)
        ]

    def observe(
        self, requests: Sequence[ActiveRequest], states: Tensor, paths: Sequence[Sequence[int]]
    ) -> None:
        """Keep the hidden state of each row's newest committed token: the next search reads it."""
        keep_newest(self._hidden, requests, states, paths)
