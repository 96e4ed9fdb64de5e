"""Features of the frozen target, which drafters read. Legend as in methods/base.py."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

# Logits of a chunk, by device: a CPU's fit its cache, a GPU's fill its units.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}


def count_rows_at_once(device: torch.device, num_logits: int) -> int:
    """Return the number of rows, of so many logits each, that are computed at once."""
    return max(1, CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"]) // num_logits)


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """Sizes of the target that a drafter has to fit."""

    hidden_size: int
    vocab_size: int
    embedding_scale: float = 1.0  # by which the target multiplies rows of its embedding table


@dataclasses.dataclass(frozen=True)
class OutputHead:
    """Output layer of the target, with the changes that the target makes to its logits.

    scale: factor of the logits. cap: a scaled logit x becomes cap tanh(x / cap); None: no cap.
    """

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    cap: float | None = None

    def keep_tokens(self, tokens: Tensor) -> OutputHead:
        """Return the output layer of these tokens alone."""
        bias = None if self.bias is None else self.bias[tokens]
        return dataclasses.replace(self, weight=self.weight[tokens], bias=bias)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits [..., V] of states [..., D], in float32."""
        logits = (hidden @ self.weight.to(hidden.dtype).T).float()
        if self.bias is not None:
            logits = logits.add_(self.bias.float())
        if self.scale != 1:
            logits = logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def choose_tokens(self, hidden: Tensor) -> Tensor:
        """Return the most probable tokens [N] of states [N, D], without a gradient."""
        with torch.no_grad():
            chunks = torch.split(hidden, count_rows_at_once(hidden.device, len(self.weight)))
            return torch.cat([self.compute_logits(chunk).argmax(1) for chunk in chunks])

    @functools.cached_property
    def joint_weight(self) -> Tensor:
        """Weight with the bias as one more column: [V, D], or [V, D + 1] with a bias."""
        if self.bias is None:
            return self.weight
        return torch.cat((self.weight, self.bias[:, None].to(self.weight.dtype)), dim=1)

    def join_input(self, hidden: Tensor) -> Tensor:
        """Return the input of `joint_weight`, which gives logits before the cap.

        [N, D] -> [N, D or D + 1].
        """
        if self.bias is not None:
            hidden = torch.cat((hidden, hidden.new_ones(len(hidden), 1)), dim=1)
        return hidden if self.scale == 1 else hidden * self.scale


@dataclasses.dataclass(frozen=True)
class Features:
    """Features that the frozen target gives of a batch of rows."""

    tokens: Tensor  # [B, T] int64
    hidden: Tensor  # [B, T, D] last hidden states, after the final norm
    embedded: Tensor  # [B, T, D] the tokens' rows of the target's table of embeddings
    head: OutputHead | None = None  # for methods that learn from the target's distribution
    auxiliary: Tensor | None = None  # [B, T, A D] outputs of A inner layers; None for A = 0

    @property
    def normalizers(self) -> Tensor:
        """[B, T], of the target's next tokens: a logit minus it is the token's log-probability."""
        return self._next_tokens[0]

    @property
    def choices(self) -> Tensor:
        """[B, T], the target's most probable next tokens."""
        return self._next_tokens[1]

    @functools.cached_property
    def _next_tokens(self) -> tuple[Tensor, Tensor]:
        """Normalizers and choices of the next tokens, which take all logits.

        Depths, losses and measures of drafters that draft some of the tokens share them.
        """
        head, hidden = self.head, self.hidden.flatten(0, 1)
        assert head is not None
        normalizers, choices = [], []
        with torch.no_grad():
            for chunk in torch.split(hidden, count_rows_at_once(hidden.device, len(head.weight))):
                logits = head.compute_logits(chunk)
                normalizers.append(logits.logsumexp(1))
                choices.append(logits.argmax(1))
        shape = self.tokens.shape
        return torch.cat(normalizers).view(shape), torch.cat(choices).view(shape)
