"""A layer of experts: a token's hidden state decides which of them it goes through.

The router's products, the scores of all experts and the sum over a token's experts, in the order
of their numbers, are float32 whatever the model's type is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.engine.layers import ACTIVATIONS, GATES, CutGate
from specdec.engine.linear import Linear
from specdec.engine.native import NativeKernels
from specdec.engine.native_models import ExpertBiases, ExpertSizes, PackedExperts
from specdec.model.experts import Experts


@dataclasses.dataclass(frozen=True)
class Router:
    """Products by which a token's experts are chosen: float32, weight [E, D], bias [E] or None.

    score_bias: [E], of the choice among the scores alone, or None. scales: of what each expert
    yields, [E], or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    score_bias: Tensor | None = None
    scales: Tensor | None = None


class ExpertLayer:
    """The experts of a layer that a rank holds. Legend: M tokens, D hidden, E experts.

    up, down: linears of the rank's experts; the first half of up's outputs is multiplied by the
    second half, activated, or as a `CutGate` says. shared_expert: up, down and gate [1, D] of the
    expert that every token takes, whose gate may be None. counters: steps so far, their tokens, and
    the experts that these chose.
    """

    def __init__(
        self,
        sizes: Experts,
        rank: int,
        activation: str | CutGate,
        router: Router,
        up: Sequence[Linear],
        down: Sequence[Linear],
        shared_expert: tuple[Linear, Linear, Tensor | None] | None,
        kernels: NativeKernels | None,
    ) -> None:
        self.sizes, self.local_experts = sizes, sizes.list_rank_experts(rank)
        self.router, self.up, self.down, self.shared_expert = router, up, down, shared_expert
        self.counters = np.zeros(3, np.int64)
        self._activation = activation
        self.packed: PackedExperts | None = None
        if kernels is not None and (isinstance(activation, CutGate) or activation in GATES):
            self.packed = PackedExperts(
                kernels,
                router.weight,
                [linear.packed for linear in up],
                [linear.packed for linear in down],
                shared_expert
                and (shared_expert[0].packed, shared_expert[1].packed, shared_expert[2]),
                ExpertSizes(
                    hidden=router.weight.shape[1], top_k=sizes.top_k,
                    first_expert=self.local_experts.start, inner=up[0].num_outputs // 2,
                    shared_inner=shared_expert[0].num_outputs // 2 if shared_expert else 0,
                    renormalizes=sizes.renormalizes, uses_sigmoid=sizes.scores == "sigmoid",
                    weight_scale=sizes.weight_scale, sum_epsilon=sizes.sum_epsilon,
                    gate=activation if isinstance(activation, CutGate) else None,
                    uses_gelu=GATES.get(str(activation)) == "gelu",
                ),
                self.counters,
                ExpertBiases(
                    router.bias, _join_biases(up), _join_biases(down), router.score_bias,
                    router.scales,
                ),
            )  # fmt: skip

    def choose(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts of each token of [M, D]; return their weights and numbers, [M, top_k]."""
        router, sizes = self.router, self.sizes
        scores = torch.nn.functional.linear(h.float(), router.weight, router.bias)
        scores = scores.sigmoid() if sizes.scores == "sigmoid" else scores.softmax(-1)
        ranked = scores if router.score_bias is None else scores + router.score_bias
        experts = ranked.topk(sizes.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if sizes.renormalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + sizes.sum_epsilon)
        if router.scales is not None:
            weights = weights * router.scales[experts]
        return weights * sizes.weight_scale, experts

    def __call__(self, h: Tensor, routed: Tensor | None = None) -> Tensor:
        """Return the sum of this rank's experts for each token, by torch: [..., D] -> [..., D].

        routed: what the router reads, h if None.
        """
        rows = h.reshape(-1, h.shape[-1])
        weights, choices = self.choose(rows if routed is None else routed.reshape(rows.shape))
        sums = torch.zeros_like(rows, dtype=torch.float32)
        used_experts = sorted(set(choices.flatten().tolist()))
        self.counters += (1, len(rows), len(used_experts))
        for expert in used_experts:
            if expert not in self.local_experts:
                continue
            tokens, ranks = (choices == expert).nonzero(as_tuple=True)
            index = expert - self.local_experts.start
            y = self._run_one(self.up[index], self.down[index], rows[tokens])
            sums.index_add_(0, tokens, y.float() * weights[tokens, ranks, None])
        if self.shared_expert is not None:
            up, down, gate = self.shared_expert
            output = self._run_one(up, down, rows).float()
            if gate is not None:
                output = torch.nn.functional.linear(rows, gate).float().sigmoid() * output
            sums += output
        return sums.to(h.dtype).view_as(h)

    def _run_one(self, up: Linear, down: Linear, x: Tensor) -> Tensor:
        multiplied, activated = up(x).chunk(2, dim=-1)
        if isinstance(self._activation, CutGate):
            return down(self._activation(activated, multiplied))
        return down(ACTIVATIONS[self._activation](activated) * multiplied)


def _join_biases(linears: Sequence[Linear]) -> Tensor | None:
    """Return the biases of all linears one after the other, None where they have none."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return torch.stack(biases) if biases else None
