"""ReDrafter: beams searched by a recurrent head over the target's last hidden state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.engine.decoder import Decoder
from specdec.engine.redrafter import ReDrafterHead
from specdec.engine.tree import Tree, pack_beams
from specdec.methods import ReDrafterParams


def make_proposer(
    params: ReDrafterParams, weights: Mapping[str, Tensor], decoder: Decoder
) -> ReDrafterProposer:
    """Lay out the drafter beside the target whose embedding it shares."""
    head = ReDrafterHead(
        params,
        weights,
        decoder.embedding,
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

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forget the previous batch."""
        embedding = self.head.embedding
        self._hidden = embedding.new_zeros((len(prompts), embedding.shape[1]))

    def propose(self, rows: np.ndarray, outputs: Sequence[Sequence[int]]) -> list[Tree]:
        """Search beams for all rows at once; pack each row's into a tree."""
        device = self._hidden.device
        roots = [output[-1] for output in outputs]
        hidden = self._hidden[torch.from_numpy(rows).to(device)]
        beams = self.head.search_beams(hidden, torch.tensor(roots, device=device))  # [B, W, L]
        drafts = beams.cpu().numpy()
        return [pack_beams(root, draft) for root, draft in zip(roots, drafts, strict=True)]

    def observe(self, rows: np.ndarray, states: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Keep the hidden state of each row's newest committed token: the next search reads it."""
        device = self._hidden.device
        last = torch.tensor([path[-1] for path in paths], device=device)
        newest = states[torch.arange(len(paths), device=device), last]
        self._hidden[torch.from_numpy(rows).to(device)] = newest
