"""What a drafter is shown of the frozen target. Legend as in methods/base.py."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """Sizes of the target that a drafter has to fit."""

    hidden_size: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class OutputHead:
    """The target's own output layer."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]


@dataclasses.dataclass(frozen=True)
class Features:
    """What the frozen target says about a batch of rows."""

    tokens: Tensor  # [B, T] int64
    hidden: Tensor  # [B, T, D] last hidden states, after the final norm
    embedded: Tensor  # [B, T, D] the target's own embeddings of the tokens
    head: OutputHead | None = None  # where something is learned from the target's distribution
    auxiliary: Tensor | None = None  # [B, T, A D] outputs of A inner layers, where they are read
