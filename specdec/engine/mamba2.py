"""Mamba-2 (https://arxiv.org/abs/2405.21060, section 7), a token at a time; here by torch.

Of each head, S [N, P] is the state, in the group's B and C of size N. A token with x, and a step of
length t = softplus(rate + bias): S = exp(A t) S + B (t x)^T; y = C^T S + D x. Then y silu(z) is
normed, over the heads of a group.
Legend: B rows of the step, T tokens, n rows computed at once; V heads of size J, K groups; the
others as in linear_states.py.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from specdec.engine.group import Group
from specdec.engine.head_states import HeadStateLayer
from specdec.engine.linear_states import LinearStates, Runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2(HeadStateLayer):
    """A rank's part of a Mamba-2 layer, between its first and its last product.

    skip: D, float32 [V]. conv_bias: float32 [C], None where there is none. norm: of outputs, [V J].
    group: of the ranks that share one group of heads, over all of which outputs are normed.
    """

    skip: Tensor
    conv_bias: Tensor | None = None
    group: Group | None = None

    def mix(self, _: Tensor, product: Tensor, states: LinearStates, runs: Runs) -> Tensor:
        """Run the layer over its first product, [B, T, W] of C, B, x, z and rates.

        Returns [B, T, V * J]. Tokens that belong to no run get zeros. The state is written up to
        the last certain token.
        """
        if self.kernels is not None:
            weights = self.taps, self.conv_bias, self.decay, self.bias, self.skip
            outputs = self.kernels.run_mamba2(
                product, states, self.index, weights, self.norm, is_normed=self.group is None
            )
        else:
            rates = product[..., -self.sizes.num_value_heads :]
            outputs = self.scan(product, rates, states, runs)
        return outputs if self.group is None else self._norm(outputs, self.group).to(product.dtype)

    def convolve(self, text: Tensor, size: int) -> Tensor:
        """Return the channels of the newest `size` tokens, [n, T, C], after the convolution."""
        mixed = torch.zeros((), device=text.device) if self.conv_bias is None else self.conv_bias
        for tap in range(self.sizes.num_taps):
            mixed = mixed + text[:, tap : tap + size] * self.taps[tap]
        return torch.nn.functional.silu(mixed)

    def split_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return C, B and x by heads."""
        return self.view_heads(mixed)

    def weigh(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the length of each head's step, and the decay that it makes."""
        lengths = torch.nn.functional.softplus(rates + self.bias)
        return lengths, (self.decay * lengths).exp()

    def find_delta(self, key: Tensor, value: Tensor, faded: Tensor, strength: Tensor) -> Tensor:
        """Multiply x by the length of the step."""
        return strength * value

    def finish(self, outputs: Tensor, values: Tensor, gate: Tensor) -> Tensor:
        """Add x, multiply by the gate, and norm, but for a group that other ranks share."""
        gated = (outputs + self.skip[:, None] * values) * torch.nn.functional.silu(gate.float())
        gated = gated.flatten(2)
        return gated if self.group is not None else self._norm(gated, None).to(gate.dtype)

    def _norm(self, gated: Tensor, group: Group | None) -> Tensor:
        """Norm float32 [..., V * J] over each group of heads, or over the only one of all ranks."""
        groups = gated.view(*gated.shape[:-1], self.sizes.num_key_heads, -1)
        squares, count = groups.square().sum(-1, keepdim=True), groups.shape[-1]
        if group is not None:
            squares, count = group.sum(squares), count * group.size
        normed = (groups * torch.rsqrt(squares / count + self.norm.epsilon)).flatten(-2)
        return self.norm.weight.float() * normed
