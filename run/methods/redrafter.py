"""ReDrafter: beams searched by a recurrent head over the target's last hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.engine.redrafter import ReDrafterHead
from specdec.engine.tree import Tree, pack_beams


class ReDrafterProposer:
    """Proposes the deduplicated tree of a beam search (https://arxiv.org/abs/2403.09919)."""

    def __init__(self, head: ReDrafterHead) -> None:
        self.head = head
        self.max_draft_tokens = head.params.max_draft_tokens
        self.max_draft_depth = head.params.max_draft_depth
        self._hidden = torch.empty(0)

    def start(self, num_rows: int) -> None:
        """Forget the previous batch."""
        embedding = self.head.embedding
        self._hidden = embedding.new_zeros((num_rows, embedding.shape[1]))

    def propose(self, rows: np.ndarray, tokens: Sequence[int]) -> list[Tree]:
        """Search beams for all rows at once; pack each row's into a tree."""
        device = self._hidden.device
        hidden = self._hidden[torch.from_numpy(rows).to(device)]
        roots = torch.tensor(tokens, device=device)
        beams = self.head.search_beams(hidden, roots).cpu().numpy()  # [B, W, L]
        return [pack_beams(token, row) for token, row in zip(tokens, beams, strict=True)]

    def observe(self, rows: np.ndarray, hidden: Tensor) -> None:
        """Keep the hidden state that the next proposal starts from."""
        self._hidden[torch.from_numpy(rows).to(self._hidden.device)] = hidden
