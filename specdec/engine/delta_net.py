"""Gated DeltaNet (https://arxiv.org/abs/2412.06464, equation 10), a token at a time; here by torch.

Of each value head, S [I, J] is the state. A token with key k, value v, decay a and strength b:
S = a S; d = b (v - k^T S); S = S + k d^T; its output is q^T S.
Legend: B rows of the step, T tokens, n rows computed at once; the others as in linear_states.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from specdec.engine.layers import Norm
from specdec.engine.linear import Linear
from specdec.engine.linear_states import LinearStates, Runs, take_tokens
from specdec.engine.native import NativeKernels
from specdec.engine.transfers import to_device
from specdec.model.linear_attention import LinearAttention

NORM_EPSILON = 1e-6  # of queries and keys, whatever the model's is


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """A rank's part of a layer of linear attention, between its first and its last product.

    index: which of these layers it is. ba: the product that strength and decay come from.
    taps: float32 [taps, C], the oldest token's first. decay, bias: float32 [V], the first negative.
    norm: of each head's output, [J].
    """

    sizes: LinearAttention
    index: int
    ba: Linear
    taps: Tensor
    decay: Tensor
    bias: Tensor
    norm: Norm
    kernels: NativeKernels | None = None

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
        batch, num_tokens = qkvz.shape[:2]
        flat, strengths = qkvz.flatten(0, 1), ba.flatten(0, 1)
        width = self.sizes.sections[2]
        outputs = qkvz.new_zeros((batch * num_tokens, width))
        # Runs that are certain as a whole, and others by how much of them is.
        group_keys = np.where(runs.certain == runs.counts, -1, runs.certain)
        for num_certain in sorted(set(group_keys.tolist())):
            group = np.flatnonzero(group_keys == num_certain)
            counts = runs.counts[group]
            steps = np.arange(counts.max())
            is_real = steps < counts[:, None]
            token_numbers = runs.first_tokens[group, None] + np.where(is_real, steps, 0)
            token_index = to_device(token_numbers, qkvz.device)  # [n, T]
            mask = to_device(is_real, qkvz.device)
            group_runs = Runs(*(field[group] for field in runs))
            group_outputs = self._compute(
                flat[token_index], strengths[token_index], mask, states, group_runs
            )
            outputs[token_index[mask]] = group_outputs[mask]
        return outputs.view(batch, num_tokens, width)

    def _compute(
        self, qkvz: Tensor, ba: Tensor, mask: Tensor, states: LinearStates, runs: Runs
    ) -> Tensor:
        """Run rows [n, T, ...] of equally many certain tokens; mask: [n, T], of real tokens."""
        sizes, index, device = self.sizes, self.index, qkvz.device
        size, rows = qkvz.shape[1], to_device(runs.rows, device)
        folds, num_certain = int(runs.folded.max()), runs.certain
        log = [kind_log[index, rows, :folds] for kind_log in states.log]
        inputs = qkvz[..., : sizes.num_channels]
        earlier_inputs = torch.cat((states.window[index, rows], log[3]), dim=1)
        text = torch.cat(
            (take_tokens(earlier_inputs, runs.folded, sizes.num_taps - 1), inputs), dim=1
        )
        states.window[index, rows] = take_tokens(text, num_certain, sizes.num_taps - 1)
        q, k, v = self._convolve(text, size)
        is_folded = to_device(np.arange(folds) < runs.folded[:, None], device)[..., None]
        state = states.state[index, rows]  # [n, V, I, J]
        decays = torch.where(is_folded, log[2], 1.0)
        deltas = torch.where(is_folded[..., None], log[1], 0.0)
        for t in range(folds):
            key, delta = self._share(log[0][:, t]), deltas[:, t]
            state = state * decays[:, t, :, None, None] + key[..., None] * delta[:, :, None]
        # Tokens that are not there change nothing.
        strength, rate = ba.float().chunk(2, dim=-1)
        strength = strength.sigmoid() * mask[..., None]
        decay = (self.decay * torch.nn.functional.softplus(rate + self.bias)).exp()
        decay = torch.where(mask[..., None], decay, 1.0)
        outputs, first_draft = [], int(num_certain.max())
        for t in range(size):
            if t == first_draft:
                states.state[index, rows] = state
            key = self._share(k[:, t])
            faded = state * decay[:, t, :, None, None]
            predicted = (key[:, :, None] @ faded)[:, :, 0]
            delta = strength[:, t, :, None] * (v[:, t] - predicted)
            state = faded + key[..., None] * delta[:, :, None]
            outputs.append((self._share(q[:, t])[:, :, None] @ state)[:, :, 0])
            if t >= first_draft:
                logged_values = (k[:, t], delta, decay[:, t], inputs[:, t])
                for kind_log, value in zip(states.log, logged_values, strict=True):
                    kind_log[index, rows, t - first_draft] = value
        if first_draft >= size:
            states.state[index, rows] = state
        run_outputs = torch.stack(outputs, dim=1)
        return self._finish(
            run_outputs, qkvz[..., sizes.num_channels :].view(run_outputs.shape)
        ).flatten(2)

    def _convolve(self, text: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return normed queries and keys [n, T, K, I], and values [n, T, V, J], of new tokens."""
        sizes, text = self.sizes, text.float()
        mixed = sum(
            (text[:, tap : tap + size] * self.taps[tap] for tap in range(sizes.num_taps)),
            start=torch.zeros((), device=text.device),
        )
        q, k, v = torch.split(torch.nn.functional.silu(mixed), list(sizes.sections), dim=-1)
        shape = (*q.shape[:2], sizes.num_key_heads, sizes.key_size)
        q, k = _norm(q.reshape(shape)), _norm(k.reshape(shape))
        values = v.reshape(*v.shape[:2], sizes.num_value_heads, sizes.value_size)
        return q * sizes.key_size**-0.5, k, values

    def _share(self, of_keys: Tensor) -> Tensor:
        """Repeat vectors of key heads, [n, K, I], for value heads that share them, [n, V, I]."""
        times = self.sizes.num_value_heads // self.sizes.num_key_heads
        return of_keys.repeat_interleave(times, dim=1) if times > 1 else of_keys

    def _finish(self, outputs: Tensor, gate: Tensor) -> Tensor:
        """Norm each head's output and multiply it with its gate, both [n, T, V, J]."""
        scale = torch.rsqrt(outputs.square().mean(-1, keepdim=True) + self.norm.epsilon)
        normed = self.norm.weight.float() * (outputs * scale)
        return (normed * torch.nn.functional.silu(gate.float())).to(gate.dtype)


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
