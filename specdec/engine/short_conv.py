"""Gated short convolution (https://arxiv.org/abs/2511.23404), which LFM2 has in place of attention.

Of each channel, b gates the input x of the convolution and c its output: with u = b x of the newest
tokens, y_t = c_t (bias + sum over taps of w_tap u_{t - taps + 1 + tap}). The state of a text is u
of its last taps - 1 tokens, so that of a draft no more than u has to be kept.
Legend: B rows of the step, T tokens, C channels, n runs; the others as in linear_states.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.engine.linear_states import LinearStates, Runs, take_tokens
from specdec.engine.native import NativeKernels
from specdec.engine.transfers import to_device
from specdec.model.short_conv import ShortConvSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConv:
    """A rank's part of a layer with a short convolution, between its first and its last product.

    index: which of these layers it is. taps: float32 [taps, C], the oldest token's first. bias:
    float32 [C], None where there is none.
    """

    sizes: ShortConvSizes
    index: int
    taps: Tensor
    bias: Tensor | None = None
    kernels: NativeKernels | None = None

    def mix(self, _: Tensor, product: Tensor, states: LinearStates, runs: Runs) -> Tensor:
        """Run the layer over its first product, [B, T, 3 C] of b, c and x; return [B, T, C].

        Tokens that belong to no run get zeros. The state is written up to the last certain token.
        """
        if self.kernels is not None:
            return self.kernels.run_short_conv(product, states, self.index, self.taps, self.bias)
        batch, size, width = product.shape
        flat, most = product.reshape(batch * size, width), int(runs.counts.max())
        steps = np.arange(most)
        is_real = steps < runs.counts[:, None]
        token_index = to_device(
            np.where(is_real, runs.first_tokens[:, None] + steps, 0), product.device
        )
        in_gate, out_gate, x = flat[token_index].chunk(3, dim=-1)  # [n, T, C]
        mixed = self._convolve(in_gate * x, states, runs).float() * out_gate.float()
        outputs = flat.new_zeros((len(flat), width // 3))
        mask = to_device(is_real, product.device)
        outputs[token_index[mask]] = mixed[mask].to(flat.dtype)
        return outputs.view(batch, size, width // 3)

    def _convolve(self, inputs: Tensor, states: LinearStates, runs: Runs) -> Tensor:
        """Convolve u of each run [n, T, C] after that of the tokens before, and note it."""
        size, num_before = inputs.shape[1], self.sizes.num_taps - 1
        rows, log = to_device(runs.rows, inputs.device), states.log[-1]
        earlier = torch.cat((states.window[self.index, rows], log[self.index, rows]), dim=1)
        text = torch.cat((take_tokens(earlier, runs.folded, num_before), inputs), dim=1)
        states.window[self.index, rows] = take_tokens(text, runs.certain, num_before)
        if num_logged := log.shape[2]:
            longer = pad(text, (0, 0, 0, num_logged))
            log[self.index, rows] = take_tokens(longer, runs.certain + num_before, num_logged)
        wide_text = text.float()
        mixed = wide_text[:, :size] * self.taps[0]
        for tap in range(1, self.sizes.num_taps):
            mixed = mixed + wide_text[:, tap : tap + size] * self.taps[tap]
        return mixed if self.bias is None else mixed + self.bias
