"""Layers with a state for each head, a token at a time by torch: Gated DeltaNet and Mamba-2.

Of each value head, S [I, J] is the state. A token with key k, query q, decay a and delta d, which
each kind of layer makes in its own way: S = a S + k d^T; its output is made of q^T S.
Legend: B rows of the step, T tokens, n rows computed at once; the others as in linear_states.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from specdec.engine.layers import Norm
from specdec.engine.linear_states import LinearStates, Runs, take_tokens
from specdec.engine.native import NativeKernels
from specdec.engine.transfers import to_device
from specdec.model.linear_attention import HeadStateSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadStateLayer:
    """A rank's part of a layer with a state for each head, between its first and last product.

    index: which of these layers it is. taps: float32 [taps, C], the oldest token's first. decay,
    bias: float32 [V], the first negative. norm: of outputs.
    """

    sizes: HeadStateSizes
    index: int
    taps: Tensor
    decay: Tensor
    bias: Tensor
    norm: Norm
    kernels: NativeKernels | None = None

    def split_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [n, T, K, I], and values [n, T, V, J], of convolved channels."""
        raise NotImplementedError

    def weigh(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the strength of each token's update and its decay, both [n, T, V]."""
        raise NotImplementedError

    def find_delta(self, key: Tensor, value: Tensor, faded: Tensor, strength: Tensor) -> Tensor:
        """Return a token's delta [n, V, J]; faded: the state times its decay."""
        raise NotImplementedError

    def finish(self, outputs: Tensor, values: Tensor, gate: Tensor) -> Tensor:
        """Return what the last product reads of outputs, all [n, T, V, J]."""
        raise NotImplementedError

    def scan(self, product: Tensor, rates: Tensor, states: LinearStates, runs: Runs) -> Tensor:
        """Run the layer over products [B, T, W] of its input; return [B, T, V * J].

        The first C + V * J numbers of a product are the convolution's input and the gate. Tokens
        that belong to no run get zeros. The state is written up to the last certain token.
        """
        batch, num_tokens = product.shape[:2]
        flat, flat_rates = product.flatten(0, 1), rates.flatten(0, 1)
        width, outputs = self.sizes.sections[2], None
        # Runs that are certain as a whole, and others by how much of them is.
        group_keys = np.where(runs.certain == runs.counts, -1, runs.certain)
        for num_certain in sorted(set(group_keys.tolist())):
            group = np.flatnonzero(group_keys == num_certain)
            counts = runs.counts[group]
            steps = np.arange(counts.max())
            is_real = steps < counts[:, None]
            token_numbers = runs.first_tokens[group, None] + np.where(is_real, steps, 0)
            token_index = to_device(token_numbers, product.device)  # [n, T]
            mask = to_device(is_real, product.device)
            group_runs = Runs(*(field[group] for field in runs))
            group_outputs = self._compute(
                flat[token_index], flat_rates[token_index], mask, states, group_runs
            )
            if outputs is None:
                outputs = group_outputs.new_zeros((batch * num_tokens, width))
            outputs[token_index[mask]] = group_outputs[mask]
        assert outputs is not None
        return outputs.view(batch, num_tokens, width)

    def _compute(
        self, product: Tensor, rates: Tensor, mask: Tensor, states: LinearStates, runs: Runs
    ) -> Tensor:
        """Run rows [n, T, ...] of equally many certain tokens; mask: [n, T], of real tokens."""
        sizes, index, device = self.sizes, self.index, product.device
        size, rows = product.shape[1], to_device(runs.rows, device)
        folds, num_certain = int(runs.folded.max()), runs.certain
        log = [kind_log[index, rows, :folds] for kind_log in states.log]
        inputs = product[..., : sizes.num_channels]
        earlier_inputs = torch.cat((states.window[index, rows], log[3]), dim=1)
        text = torch.cat(
            (take_tokens(earlier_inputs, runs.folded, sizes.num_taps - 1), inputs), dim=1
        )
        states.window[index, rows] = take_tokens(text, num_certain, sizes.num_taps - 1)
        q, k, v = self.split_heads(self.convolve(text.float(), size))
        is_folded = to_device(np.arange(folds) < runs.folded[:, None], device)[..., None]
        state = states.state[index, rows]  # [n, V, I, J]
        decays = torch.where(is_folded, log[2], 1.0)
        deltas = torch.where(is_folded[..., None], log[1], 0.0)
        for t in range(folds):
            key, delta = self._share(log[0][:, t]), deltas[:, t]
            state = state * decays[:, t, :, None, None] + key[..., None] * delta[:, :, None]
        # Tokens that are not there change nothing.
        strength, decay = self.weigh(rates.float())
        strength = strength * mask[..., None]
        decay = torch.where(mask[..., None], decay, 1.0)
        outputs, first_draft = [], int(num_certain.max())
        for t in range(size):
            if t == first_draft:
                states.state[index, rows] = state
            key = self._share(k[:, t])
            faded = state * decay[:, t, :, None, None]
            delta = self.find_delta(key, v[:, t], faded, strength[:, t, :, None])
            state = faded + key[..., None] * delta[:, :, None]
            outputs.append((self._share(q[:, t])[:, :, None] @ state)[:, :, 0])
            if t >= first_draft:
                logged_values = (k[:, t], delta, decay[:, t], inputs[:, t])
                for kind_log, value in zip(states.log, logged_values, strict=True):
                    kind_log[index, rows, t - first_draft] = value
        if first_draft >= size:
            states.state[index, rows] = state
        run_outputs = torch.stack(outputs, dim=1)
        first_gate = sizes.num_channels
        gate = product[..., first_gate : first_gate + sizes.sections[2]].view(run_outputs.shape)
        return self.finish(run_outputs, v, gate).flatten(2)

    def convolve(self, text: Tensor, size: int) -> Tensor:
        """Return the channels of the newest `size` tokens, [n, T, C], after the convolution."""
        mixed = sum(
            (text[:, tap : tap + size] * self.taps[tap] for tap in range(self.sizes.num_taps)),
            start=torch.zeros((), device=text.device),
        )
        return torch.nn.functional.silu(mixed)

    def _share(self, of_keys: Tensor) -> Tensor:
        """Repeat vectors of key heads, [n, K, I], for value heads that share them, [n, V, I]."""
        times = self.sizes.num_value_heads // self.sizes.num_key_heads
        return of_keys.repeat_interleave(times, dim=1) if times > 1 else of_keys

    def view_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cut convolved channels [n, T, C] into the heads of queries, keys and values."""
        sizes, shape = self.sizes, mixed.shape[:2]
        q, k, v = torch.split(mixed, list(sizes.sections), dim=-1)
        head_shape = (*shape, sizes.num_key_heads, sizes.key_size)
        values = v.reshape(*shape, sizes.num_value_heads, sizes.value_size)
        return q.reshape(head_shape), k.reshape(head_shape), values
