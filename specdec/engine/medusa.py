"""Medusa heads: each drafts one position from the target's last hidden state alone.

Medusa, https://arxiv.org/abs/2401.10774. Legend: B rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec.engine.integers import make_linear
from specdec.engine.linear import Linear, can_prepack
from specdec.engine.native import NativeKernels
from specdec.methods.medusa import MedusaParams


class MedusaHeads:
    """The heads' networks. `weights` are a checkpoint's `medusa_heads.*` tensors."""

    def __init__(
        self,
        params: MedusaParams,
        weights: Mapping[str, Tensor],
        *,
        prepack: bool = True,
        kernels: NativeKernels | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """dtype: of what they read; that of their matrices if None."""
        first = weights["medusa_heads.0.lm_head.weight"]
        prepack = prepack and can_prepack(first.dtype, first.device)

        def linear(name: str) -> Linear:
            return make_linear(weights, f"medusa_heads.{name}", prepack=prepack, kernels=kernels)

        self.params = params
        self.vocab_size, self.hidden_size = first.shape
        self.dtype, self.device = dtype or first.dtype, first.device
        self.blocks = [
            [linear(f"{head}.medusa_layers.{layer}.linear") for layer in range(params.num_layers)]
            for head in range(params.num_heads)
        ]
        self.lm_heads = [linear(f"{head}.lm_head") for head in range(params.num_heads)]

    def compute_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Logits [B, V] for the token head + 2 places after the one whose state is `hidden`."""
        x = hidden
        for block in self.blocks[head]:
            x = x + torch.nn.functional.silu(block(x))
        return self.lm_heads[head](x)

    def rank_tokens(self, hidden: Tensor, widths: Sequence[int]) -> Tensor:
        """The widths[i] most probable tokens of head i, best first, the heads' side by side.

        hidden: [B, D]. Returns [B, sum of widths]; heads beyond `widths` are not computed.
        """
        ranked = [
            self.compute_logits(head, hidden).topk(width, dim=-1).indices
            for head, width in enumerate(widths)
        ]
        return torch.cat(ranked, dim=-1)
