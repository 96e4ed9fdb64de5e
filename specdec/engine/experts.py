"""A layer of experts: a token's hidden state decides which of them it goes through.

The router's products, the softmax over all experts and the sum over a token's experts, in the order
of their numbers, are float32 whatever the model's type is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.engine.layers import ACTIVATIONS
from specdec.engine.linear import Linear
from specdec.engine.native import NativeKernels, PackedExperts
from specdec.model.experts import Experts


class ExpertLayer:
    """A rank's part of a layer's experts. Legend: M tokens, D hidden, E experts.

    router: float32 [E, D]. up, down: of the rank's own experts; up gives what is multiplied, then
    what is activated. shared: up, down and gate [1, D] of the expert that every token takes.
    seen: steps, tokens of them, and experts that these chose, over all steps.
    """

    def __init__(
        self,
        sizes: Experts,
        rank: int,
        activation: str,
        router: Tensor,
        up: Sequence[Linear],
        down: Sequence[Linear],
        shared: tuple[Linear, Linear, Tensor] | None,
        kernels: NativeKernels | None,
    ) -> None:
        self.sizes, self.own = sizes, sizes.list_rank_experts(rank)
        self.router, self.up, self.down, self.shared = router, up, down, shared
        self.seen = np.zeros(3, np.int64)
        self._activate = ACTIVATIONS[activation]
        self.packed: PackedExperts | None = None
        if kernels is not None:
            self.packed = PackedExperts(
                kernels, router, [each.packed for each in up], [each.packed for each in down],
                None if shared is None else (shared[0].packed, shared[1].packed, shared[2]),
                hidden=router.shape[1], top_k=sizes.top_k, first=self.own.start,
                inner=up[0].num_outputs // 2,
                shared_inner=0 if shared is None else shared[0].num_outputs // 2,
                renormalizes=sizes.renormalizes, seen=self.seen,
            )  # fmt: skip

    def choose(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights, float32: [M, D] -> both [M, top_k]."""
        scores = torch.nn.functional.linear(h.float(), self.router).softmax(-1)
        weights, chosen = scores.topk(self.sizes.top_k, dim=-1)
        if self.sizes.renormalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    def __call__(self, h: Tensor) -> Tensor:
        """[..., D] -> [..., D], by torch: what this rank's experts add up to."""
        rows = h.reshape(-1, h.shape[-1])
        weights, chosen = self.choose(rows)
        out = torch.zeros_like(rows, dtype=torch.float32)
        taken = sorted(set(chosen.flatten().tolist()))
        self.seen += (1, len(rows), len(taken))
        for expert in taken:
            if expert not in self.own:
                continue
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            at = expert - self.own.start
            y = self._run_one(self.up[at], self.down[at], rows[tokens])
            out.index_add_(0, tokens, y.float() * weights[tokens, places, None])
        if self.shared is not None:
            up, down, gate = self.shared
            amount = torch.nn.functional.linear(rows, gate).float().sigmoid()
            out += amount * self._run_one(up, down, rows).float()
        return out.to(h.dtype).view_as(h)

    def _run_one(self, up: Linear, down: Linear, x: Tensor) -> Tensor:
        multiplied, activated = up(x).chunk(2, dim=-1)
        return down(self._activate(activated) * multiplied)
