"""Gated DeltaNet (https://arxiv.org/abs/2412.06464, equation 10), a token at a time; here by torch.

Of each value head, S [I, J] is the state. A token with key k, value v, decay a and strength b:
S = a S; d = b (v - k^T S); S = S + k d^T; its output is q^T S.
Legend: B rows of the step, T tokens, n rows computed at once; the others as in linear_states.py.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from specdec.engine.head_states import HeadStateLayer
from specdec.engine.linear import Linear
from specdec.engine.linear_states import LinearStates, Runs

NORM_EPSILON = 1e-6  # of queries and keys, whatever the model's is


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNet(HeadStateLayer):
    """A rank's part of a layer of linear attention, between its first and its last product.

    ba: the product that strength and decay come from. norm: of each head's output, [J].
    """

    ba: Linear

    def mix(self, h: Tensor, qkvz: Tensor, states: LinearStates, runs: Runs) -> Tensor:
        """Run the layer over its input [B, T, D] and the first product of it, see `run`."""
        return self.run(qkvz, self.ba(h), states, runs)

    def run(self, qkvz: Tensor, ba: Tensor, states: LinearStates, runs: Runs) -> Tensor:
        """Run linear attention over the products [B, T, W] and [B, T, 2 V]; return [B, T, V * J].

        Tokens that belong to no run get zeros. The state is written up to the last certain token.
        """
        if self.kernels is not None:
            weights = self.taps, self.decay, self.bias
            return self.kernels.run_delta_net(qkvz, ba, states, self.index, weights, self.norm)
        return self.scan(qkvz, ba, states, runs)

    def split_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Norm queries and keys."""
        q, k, values = self.view_heads(mixed)
        return _norm(q) * self.sizes.key_size**-0.5, _norm(k), values

    def weigh(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Take strength and decay of the two halves of a product."""
        strength, rate = rates.chunk(2, dim=-1)
        decay = (self.decay * torch.nn.functional.softplus(rate + self.bias)).exp()
        return strength.sigmoid(), decay

    def find_delta(self, key: Tensor, value: Tensor, faded: Tensor, strength: Tensor) -> Tensor:
        """Take from a value what the state has for its key."""
        return strength * (value - (key[:, :, None] @ faded)[:, :, 0])

    def finish(self, outputs: Tensor, values: Tensor, gate: Tensor) -> Tensor:
        """Norm each head's output and multiply it with its gate, both [n, T, V, J]."""
        scale = torch.rsqrt(outputs.square().mean(-1, keepdim=True) + self.norm.epsilon)
        normed = self.norm.weight.float() * (outputs * scale)
        return (normed * torch.nn.functional.silu(gate.float())).to(gate.dtype)


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
