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
from specdec.engine.linear_states import LinearStates, Runs
from specdec.engine.native import NativeKernels
from specdec.engine.transfers import to_device
from specdec.engine.tree import IntArray
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

    def run(self, qkvz: Tensor, ba: Tensor, states: LinearStates, runs: Runs) -> Tensor:
        """What the products [B, T, W] and [B, T, 2 V] yield: [B, T, V * J].

        Tokens that belong to no run get zeros. The state is written up to the kept tokens.
        """
        if self.kernels is not None:
            weights = self.taps, self.decay, self.bias
            return self.kernels.run_delta_net(qkvz, ba, states, self.index, weights, self.norm)
        batch, num_tokens = qkvz.shape[:2]
        flat, strengths = qkvz.flatten(0, 1), ba.flatten(0, 1)
        width = self.sizes.sections[2]
        out = qkvz.new_zeros((batch * num_tokens, width))
        # Runs that are certain as a whole, and others by how much of them is.
        kinds = np.where(runs.kept == runs.counts, -1, runs.kept)
        for kind in sorted(set(kinds.tolist())):
            some = np.flatnonzero(kinds == kind)
            counts = runs.counts[some]
            steps = np.arange(counts.max())
            is_real = steps < counts[:, None]
            places = runs.firsts[some, None] + np.where(is_real, steps, 0)
            at = to_device(places, qkvz.device)  # [n, T]
            mask = to_device(is_real, qkvz.device)
            chosen = Runs(*(part[some] for part in runs))
            found = self._compute(flat[at], strengths[at], mask, states, chosen)
            out[at[mask]] = found[mask]
        return out.view(batch, num_tokens, width)

    def _compute(
        self, qkvz: Tensor, ba: Tensor, mask: Tensor, states: LinearStates, runs: Runs
    ) -> Tensor:
        """The same of rows [n, T, ...] whose real tokens the mask [n, T] tells."""
        sizes, index, device = self.sizes, self.index, qkvz.device
        size, rows = qkvz.shape[1], to_device(runs.rows, device)
        folds, kept = int(runs.folded.max()), runs.kept
        log = [part[index, rows, :folds] for part in states.log]
        inputs = qkvz[..., : sizes.num_channels]
        before = torch.cat((states.window[index, rows], log[3]), dim=1)
        text = torch.cat((_take(before, runs.folded, sizes.num_taps - 1), inputs), dim=1)
        states.window[index, rows] = _take(text, kept, sizes.num_taps - 1)
        q, k, v = self._convolve(text, size)
        is_folded = to_device(np.arange(folds) < runs.folded[:, None], device)[..., None]
        state = states.state[index, rows]  # [n, V, I, J]
        decays = torch.where(is_folded, log[2], 1.0)
        deltas = torch.where(is_folded[..., None], log[1], 0.0)
        for at in range(folds):
            key, delta = self._share(log[0][:, at]), deltas[:, at]
            state = state * decays[:, at, :, None, None] + key[..., None] * delta[:, :, None]
        # Tokens that are not there change nothing.
        strength, rate = ba.float().chunk(2, dim=-1)
        strength = strength.sigmoid() * mask[..., None]
        decay = (self.decay * torch.nn.functional.softplus(rate + self.bias)).exp()
        decay = torch.where(mask[..., None], decay, 1.0)
        outputs, last = [], int(kept.max())
        for at in range(size):
            if at == last:
                states.state[index, rows] = state
            key = self._share(k[:, at])
            faded = state * decay[:, at, :, None, None]
            seen = (key[:, :, None] @ faded)[:, :, 0]
            delta = strength[:, at, :, None] * (v[:, at] - seen)
            state = faded + key[..., None] * delta[:, :, None]
            outputs.append((self._share(q[:, at])[:, :, None] @ state)[:, :, 0])
            if at >= last:
                new = (k[:, at], delta, decay[:, at], inputs[:, at])
                for part, value in zip(states.log, new, strict=True):
                    part[index, rows, at - last] = value
        if last >= size:
            states.state[index, rows] = state
        out = torch.stack(outputs, dim=1)
        return self._finish(out, qkvz[..., sizes.num_channels :].view(out.shape)).flatten(2)

    def _convolve(self, text: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed, [n, T, K, I], and values [n, T, V, J] of the newest tokens."""
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
        """What key heads have, [n, K, I], for the value heads that share them, [n, V, I]."""
        times = self.sizes.num_value_heads // self.sizes.num_key_heads
        return of_keys.repeat_interleave(times, dim=1) if times > 1 else of_keys

    def _finish(self, outputs: Tensor, gate: Tensor) -> Tensor:
        """Norm each head's output and multiply it with its gate, both [n, T, V, J]."""
        scale = torch.rsqrt(outputs.square().mean(-1, keepdim=True) + self.norm.epsilon)
        normed = self.norm.weight.float() * (outputs * scale)
        return (normed * torch.nn.functional.silu(gate.float())).to(gate.dtype)


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def _take(tokens: Tensor, starts: IntArray, count: int) -> Tensor:
    """`count` tokens of each row [n, ..., C] from `starts` on."""
    at = to_device(starts[:, None] + np.arange(count), tokens.device)
    return tokens[torch.arange(len(tokens), device=tokens.device)[:, None], at]
