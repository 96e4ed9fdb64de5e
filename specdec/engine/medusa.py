"""Medusa heads: each drafts one position from the target's last hidden state alone.

Medusa, https://arxiv.org/abs/2401.10774. Legend: B rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec.engine.draft_net import rank_logits, rank_packed
from specdec.engine.integers import get_height, make_linear
from specdec.engine.linear import Linear, can_prepack
from specdec.engine.native import NativeKernels
from specdec.engine.native_matrices import Weight
from specdec.methods.medusa import MedusaParams


class MedusaHeads:
    """The heads' networks. `weights` are a checkpoint's `medusa_heads.*` tensors."""

    def __init__(
        self,
        params: MedusaParams,
        weights: Mapping[str, Weight],
        *,
        prepack: bool = True,
        kernels: NativeKernels | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        """offsets: what a shortened vocabulary adds to the number of an output, [V]."""
        self.offsets = offsets
        first_head = weights["medusa_heads.0.lm_head.weight"]
        if isinstance(first_head, Tensor):
            prepack = prepack and can_prepack(first_head.dtype, first_head.device)

        def linear(name: str) -> Linear:
            return make_linear(weights, f"medusa_heads.{name}", prepack=prepack, kernels=kernels)

        self.params = params
        self.vocab_size = get_height(first_head)
        self.blocks = [
            [linear(f"{head}.medusa_layers.{layer}.linear") for layer in range(params.num_layers)]
            for head in range(params.num_heads)
        ]
        self.lm_heads = [linear(f"{head}.lm_head") for head in range(params.num_heads)]

    def compute_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Compute logits [B, V] for the token head + 2 places after the one of state `hidden`."""
        return self.lm_heads[head](self._run_blocks(head, hidden))

    def _run_blocks(self, head: int, hidden: Tensor) -> Tensor:
        x = hidden
        for block in self.blocks[head]:
            x = x + torch.nn.functional.silu(block(x))
        return x

    def rank_tokens(self, hidden: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rank the widths[i] most probable tokens of head i, best first, the heads' side by side.

        hidden: [B, D]. Returns them and their log-probabilities, both [B, sum of widths]; heads
        beyond `widths` are not computed.
        """
        ranked = []
        for head, width in enumerate(widths):
            x, lm_head = self._run_blocks(head, hidden), self.lm_heads[head]
            if lm_head.kernels is None:
                ranked.append(rank_logits(lm_head(x), width, self.offsets))
            else:
                ranked.append(rank_packed(lm_head, x, width, self.offsets))
        tokens, scores = (
            torch.cat(head_results, dim=-1) for head_results in zip(*ranked, strict=True)
        )
        return tokens, scores
