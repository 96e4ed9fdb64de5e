"""What a drafter is shown of the frozen target. Legend as in methods/base.py."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """Sizes of the target that a drafter has to fit."""

    hidden_size: int
    vocab_size: int
    embedding_scale: float = 1.0  # what the target multiplies a row of its table by


@dataclasses.dataclass(frozen=True)
class OutputHead:
    """The target's own output layer, and what the target makes of its logits.

    scale: what they are multiplied by. cap: a logit x is then cap tanh(x / cap); None leaves it.
    """

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    cap: float | None = None

    def take(self, tokens: Tensor) -> OutputHead:
        """The layer for these tokens only."""
        bias = None if self.bias is None else self.bias[tokens]
        return dataclasses.replace(self, weight=self.weight[tokens], bias=bias)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of states [..., D], in float32."""
        logits = (hidden @ self.weight.to(hidden.dtype).T).float()
        if self.bias is not None:
            logits = logits.add_(self.bias.float())
        if self.scale != 1:
            logits = logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    @functools.cached_property
    def joint_weight(self) -> Tensor:
        """[V, D], or with a bias [V, D + 1]: the bias is one more column."""
        if self.bias is None:
            return self.weight
        return torch.cat((self.weight, self.bias[:, None].to(self.weight.dtype)), dim=1)

    def join_input(self, hidden: Tensor) -> Tensor:
        """What `joint_weight` multiplies to logits before the cap: [N, D] -> [N, D or D + 1]."""
        if self.bias is not None:
            hidden = torch.cat((hidden, hidden.new_ones(len(hidden), 1)), dim=1)
        return hidden if self.scale == 1 else hidden * self.scale


@dataclasses.dataclass(frozen=True)
class Features:
    """What the frozen target says about a batch of rows."""

    tokens: Tensor  # [B, T] int64
    hidden: Tensor  # [B, T, D] last hidden states, after the final norm
    embedded: Tensor  # [B, T, D] the tokens' rows of the target's table of embeddings
    head: OutputHead | None = None  # where something is learned from the target's distribution
    auxiliary: Tensor | None = None  # [B, T, A D] outputs of A inner layers, where they are read
