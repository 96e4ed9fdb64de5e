"""The head of multi-token prediction (MTP): a layer of the target's kind, a token ahead of it.

`fc` makes the layer's input of the embedding of a token and the target's last state of the token
before it, each normed; what comes out, normed, is read by the head, and stands for the target's
state where the next token is drafted. The states are those after the final norm, as vLLM,
transformers and llama.cpp have them.

    text     t0 t1 t2 t3          pairs      (s0, t1) (s1, t2) (s2, t3)
    states   s0 s1 s2             positions     0        1        2

The pair at position p drafts the token at p + 2. Legend: B rows, T pairs, D hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.engine.draft_net import DraftNet, take_drafter_tensors
from specdec.engine.integers import get_height, take_tensor
from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import Norm
from specdec.engine.native_matrices import Weight
from specdec.engine.step import Step
from specdec.engine.transfers import to_device
from specdec.methods.mtp import NORMS, MtpParams
from specdec.model.config import ModelConfig
from specdec.model.tensors import HEAD, MTP_NET


class MtpNet(DraftNet):
    """The head's network. `weights` are an engine's, the target's embedding and head included.

    options: as in `DraftNet`.
    """

    def __init__(
        self, params: MtpParams, weights: Mapping[str, Weight], model: ModelConfig, **options: Any
    ) -> None:
        self.params, self.hidden_size = params, model.hidden_size
        drafter_tensors = take_drafter_tensors(weights, MTP_NET)
        # An engine's may draft fewer tokens than the checkpoint's.
        net = dataclasses.replace(
            params.make_net_model(model), vocab_size=get_height(drafter_tensors[HEAD])
        )
        super().__init__(drafter_tensors, weights, net, model, **options)
        offset = net.arithmetic.norm_offset
        self.norms = [
            Norm(
                take_tensor(drafter_tensors, f"drafter.{name}.weight"),
                None,
                net.norm_epsilon,
                offset,
            )  # fmt: skip
            for name in NORMS
        ]

    def make_features(self, states: Tensor) -> Tensor:
        """Return the features of the target's states [..., D]: the states themselves."""
        return states

    def forward(self, step: Step, features: Tensor, cache: KVCache) -> Tensor:
        """Run pairs of a state [B, T, D] and the next token; return states [B, T, D] like those.

        The step's tokens and positions are the pairs'.
        """
        positions = to_device(step.positions, features.device)
        embedded = self.decoder.embed(to_device(step.tokens, features.device), positions)
        if self.params.is_reversed:
            embedded = embedded.masked_fill((positions == 0)[..., None], 0.0)
        pair = [norm(x_half) for norm, x_half in zip(self.norms, (embedded, features), strict=True)]
        if self.params.is_reversed:
            pair.reverse()
        x = self.fc(torch.cat(pair, dim=-1))
        return self.final_norm(self.decoder.run_layers(x, step, cache))
