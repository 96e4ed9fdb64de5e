"""What a speculative method is to the loop: it proposes trees and watches the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from specdec.engine.tree import Tree, make_root


class Proposer(Protocol):
    """Drafts candidates for the active rows of a batch. `rows` are cache row numbers, [B]."""

    max_draft_tokens: int
    max_draft_depth: int

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forget the previous batch; cache row r now holds the request of prompts[r]."""

    def propose(self, rows: np.ndarray, outputs: Sequence[Sequence[int]]) -> list[Tree]:
        """Return a tree per row, rooted at the last of its emitted tokens."""

    def observe(self, rows: np.ndarray, states: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Take the target's last hidden states [B, T, D] of a step and each row's accepted nodes.

        After the prompts, T is 1 and the only node is each prompt's last token.
        """


class PlainProposer:
    """Drafts nothing: every verify step emits the bonus token only."""

    max_draft_tokens = 0
    max_draft_depth = 0

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        pass

    def propose(self, rows: np.ndarray, outputs: Sequence[Sequence[int]]) -> list[Tree]:
        return [make_root(output[-1]) for output in outputs]

    def observe(self, rows: np.ndarray, states: Tensor, paths: Sequence[Sequence[int]]) -> None:
        pass
