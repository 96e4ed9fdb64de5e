"""The EAGLE drafter: decoder layers that run on the target's features, a token ahead of them.

EAGLE-1, https://arxiv.org/abs/2401.15077: the feature is the target's last hidden state, and `fc`
makes a layer's input of it and the next token's embedding; what comes out is the next feature,
which the target's head reads. EAGLE-3, https://arxiv.org/abs/2503.01840: the feature is what `fc`
makes of the outputs of some of the target's layers; the first layer's attention reads embedding and
feature side by side, each normed; what comes out is the next feature, and normed, the head's input.
EAGLE-3.1 may norm what `fc` reads, and feed the normed state on instead of the bare one. P-EAGLE,
https://arxiv.org/abs/2602.01469: pairs of a mask token and a feature that was learned follow the
last true pair, and draft the tokens after its own in the same pass.

    text       t0 t1 t2 t3        pairs      (f0, t1) (f1, t2) (f2, t3)
    features   f0 f1 f2           positions     0        1        2

The pair at position p drafts the token at p + 2. Legend: B rows, T pairs, D the drafter's hidden
size, F width of what is read of the target, V drafted vocabulary.
"""

from __future__ import annotations

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
from specdec.methods.eagle import MASK_HIDDEN, EagleParams
from specdec.model.config import ModelConfig
from specdec.model.tensors import EAGLE_NET, HEAD


def take_net(
    params: EagleParams, weights: Mapping[str, Weight]
) -> tuple[EagleParams, dict[str, Weight]]:
    """Return the drafter as an engine has it, which may draft fewer tokens, and its tensors."""
    drafter_tensors = take_drafter_tensors(weights, EAGLE_NET)
    params = params.shorten(get_height(drafter_tensors[HEAD]))
    if params.eagle3 is None:  # which has neither norm: they are never applied
        embedding = take_tensor(drafter_tensors, "drafter.vocab_embedding.weight")
        blank = torch.ones(embedding.shape[1], dtype=embedding.dtype, device=embedding.device)
        drafter_tensors |= {
            "drafter.layers.0.input_layernorm.weight": blank,
            "drafter.ln_f.weight": blank,
        }
    return params, drafter_tensors


class EagleNet(DraftNet):
    """The drafter's network. `weights` are an engine's, the target's embedding and head included.

    options: as in `DraftNet`.
    """

    def __init__(
        self, params: EagleParams, weights: Mapping[str, Weight], model: ModelConfig, **options: Any
    ) -> None:
        params, drafter_tensors = take_net(params, weights)
        self.params, self.is_third = params, params.eagle3 is not None
        net = params.make_net_model(model)
        super().__init__(drafter_tensors, weights, net, model, **options)
        if self.is_third:  # which learns by a head of its own
            self.head_scale = 1.0
        self.hidden_norm: Norm | None = None
        # Norms of what `fc` reads: one of all of it, or one of each layer's part.
        self.read_norms: list[Norm] = []
        self.is_output_normed = False
        if params.eagle3 is not None:
            names = params.eagle3.list_read_norms()
            self.read_norms = [
                Norm(take_tensor(drafter_tensors, f"drafter.{n}"), None, net.norm_epsilon)
                for n in names
            ]
            self.is_output_normed = params.eagle3.norm_output
            weight = take_tensor(drafter_tensors, "drafter.layers.0.hidden_norm.weight")
            self.hidden_norm = Norm(weight, None, net.norm_epsilon)
        self.mask_feature: Tensor | None = None  # [D]
        if params.mask_token_id is not None:
            with torch.inference_mode():
                self.mask_feature = self.make_features(
                    take_tensor(drafter_tensors, MASK_HIDDEN)[0]
                )[0]

    @property
    def hidden_size(self) -> int:
        return self.params.net.hidden_size

    def make_features(self, states: Tensor) -> Tensor:
        """Make features [..., D] of the target's hidden states [..., F]."""
        if not self.is_third:
            return states
        if self.read_norms:
            layer_states = states.chunk(len(self.read_norms), dim=-1)
            normed = [
                self.decoder.norm(layer_state, norm)
                for norm, layer_state in zip(self.read_norms, layer_states, strict=True)
            ]
            states = torch.cat(normed, dim=-1)
        return self.fc(states)

    def forward(self, step: Step, features: Tensor, cache: KVCache) -> Tensor:
        """Run pairs of a feature [B, T, D] and the next token; return the next features [B, T, D].

        The step's tokens and positions are the pairs'.
        """
        tokens = to_device(step.tokens, features.device)
        embedded = self.decoder.read_rows(self.decoder.embedding, tokens)
        if self.hidden_norm is None:
            x = first_input = self.fc(torch.cat((embedded, features), dim=-1))
        else:
            assert self.params.eagle3 is not None
            normed = self.decoder.norm(features, self.hidden_norm)
            normed_embedding = self.decoder.norm(embedded, self.decoder.stack.layers[0].input_norm)
            first_input = torch.cat((normed_embedding, normed), dim=-1)
            x = normed if self.params.eagle3.norm_before_residual else features
        x = self.decoder.run_layers(x, step, cache, first_input)
        return self.decoder.norm(x, self.final_norm) if self.is_output_normed else x

    def make_head_input(self, hidden: Tensor) -> Tensor:
        is_bare = self.is_third and not self.is_output_normed
        return super().make_head_input(
            self.decoder.norm(hidden, self.final_norm) if is_bare else hidden
        )
