"""What a speculative method is to the loop: it proposes trees and watches the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from specdec.engine.tree import Tree, make_root


class Proposer(Protocol):
    """Drafts candidates for the active rows of a batch. Row b of every argument is one request."""

    max_draft_tokens: int
    max_draft_depth: int

    def start(self, num_rows: int) -> None:
        """Forget the previous batch; cache rows are numbered 0 ... num_rows - 1."""

    def propose(self, rows: np.ndarray, tokens: Sequence[int]) -> list[Tree]:
        """Return a tree per row, rooted at its last emitted token."""

    def observe(self, rows: np.ndarray, hidden: Tensor) -> None:
        """Take the target's last hidden state [B, D] of each row's newest committed token."""


class PlainProposer:
    """Drafts nothing: every verify step emits the bonus token only."""

    max_draft_tokens = 0
    max_draft_depth = 0

    def start(self, num_rows: int) -> None:
        pass

    def propose(self, rows: np.ndarray, tokens: Sequence[int]) -> list[Tree]:
        return [make_root(token) for token in tokens]

    def observe(self, rows: np.ndarray, hidden: Tensor) -> None:
        pass
