"""The EAGLE drafter: decoder layers that run on the target's features, a token ahead of them.

EAGLE-1, https://arxiv.org/abs/2401.15077: the feature is the target's last hidden state, and `fc`
makes a layer's input of it and the next token's embedding; what comes out is the next feature,
which the target's head reads. EAGLE-3, https://arxiv.org/abs/2503.01840: the feature is what `fc`
makes of the outputs of some of the target's layers; the first layer's attention reads embedding and
feature side by side, each normed; what comes out is the next feature, and normed, the head's input.
EAGLE-3.1 may norm what `fc` reads, and feed the normed state on in place of the bare one.

    text       t0 t1 t2 t3        pairs      (f0, t1) (f1, t2) (f2, t3)
    features   f0 f1 f2           positions     0        1        2

The pair at position p drafts the token at p + 2. Legend: B rows, T pairs, D the drafter's hidden
size, F width of what is read of the target, V drafted vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import Norm
from specdec.engine.linear import Linear
from specdec.engine.native import NativeKernels
from specdec.engine.step import Step
from specdec.engine.transfers import to_device
from specdec.errors import SpecDecError
from specdec.methods.eagle import EagleParams
from specdec.model.config import ModelConfig
from specdec.model.tensors import EAGLE_NET, EMBEDDING, HEAD, HEAD_BIAS

_LAYER0 = "transformer.layers.0."


def _check_offsets(offsets: Tensor, vocab_size: int) -> None:
    """Raise SpecDecError where d2t [V] maps a drafted token beyond the target's vocabulary."""
    numbers = torch.arange(len(offsets), device=offsets.device)
    # Compared with bounds, not added: a sum of two large numbers might wrap around.
    outside = (offsets < -numbers) | (offsets >= vocab_size - numbers)
    if outside.any():
        first = int(outside.nonzero()[0])
        raise SpecDecError(
            f"d2t maps drafted token {first} to {int(offsets[first]) + first}, the target has"
            f" vocab_size {vocab_size} ({int(outside.sum())} of {len(offsets)} are outside)",
            "the drafter's weights are damaged or of another target: convert and build it again",
        )


def _is_head(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
    """Whether a drafter's head is the target's, whose own may be its embedding."""
    bias, targets = own.get(HEAD_BIAS), weights.get(HEAD_BIAS)
    if bias is None or targets is None:
        same_bias = bias is targets
    else:
        same_bias = torch.equal(bias, targets)
    return same_bias and torch.equal(own[HEAD], weights.get(HEAD, weights[EMBEDDING]))


class EagleNet:
    """The drafter's network. `weights` are an engine's, the target's embedding and head included.

    What equals one of the target's is not held twice; head: the target's, where it is whole.
    """

    def __init__(
        self,
        params: EagleParams,
        weights: Mapping[str, Tensor],
        model: ModelConfig,
        *,
        num_positions: int,
        device: torch.device,
        prepack: bool = True,
        kernels: NativeKernels | None = None,
        head: Linear | None = None,
    ) -> None:
        self.params = params
        self.is_third = params.eagle3 is not None
        # EAGLE-1 learns by the target's own head, whose logits the target may scale (Granite).
        self.head_scale = 1.0 if self.is_third else model.output_multiplier_scale
        own = {
            name.removeprefix(EAGLE_NET): weight
            for name, weight in weights.items()
            if name.startswith(EAGLE_NET)
        }
        decoder = {
            f"transformer.{name.removeprefix('drafter.')}": weight
            for name, weight in own.items()
            if name.startswith("drafter.")
        }
        decoder |= {name: own[name] for name in (HEAD, HEAD_BIAS) if name in own}
        if head is not None and not _is_head(own, weights):
            head = None
        if EMBEDDING in weights and torch.equal(decoder[EMBEDDING], weights[EMBEDDING]):
            decoder[EMBEDDING] = weights[EMBEDDING]
        for layer in range(params.net.num_hidden_layers):
            mlp = f"transformer.layers.{layer}.mlp."
            stacked = (decoder.pop(f"{mlp}fc.weight"), decoder.pop(f"{mlp}gate.weight"))
            decoder[f"{mlp}gate_up.weight"] = torch.cat(stacked)
        if not self.is_third:  # which has neither norm: they are never applied
            size = decoder[EMBEDDING].shape[1]
            blank = torch.ones(size, dtype=decoder[EMBEDDING].dtype, device=device)
            decoder |= {f"{_LAYER0}input_layernorm.weight": blank, "transformer.ln_f.weight": blank}
        # Whole, on whatever rank drafts.
        net = dataclasses.replace(
            params.make_net_model(model), tp_size=1, use_parallel_embedding=False
        )
        self.decoder = Decoder(
            net, decoder, num_positions=num_positions, device=device, prepack=prepack,
            kernels=kernels, head=head,
        )  # fmt: skip
        prepack = self.decoder.is_prepacked
        final_norm = self.decoder.stack.final_norm
        assert final_norm is not None
        self.final_norm: Norm = final_norm
        self.fc = Linear(
            own["drafter.fc.weight"], own.get("drafter.fc.bias"), prepack=prepack, kernels=kernels
        )
        self.hidden_norm: Norm | None = None
        # Norms of what `fc` reads: one of all of it, or one of each layer's part.
        self.read_norms: list[Norm] = []
        self.is_output_normed = False
        if params.eagle3 is not None:
            names = params.eagle3.list_read_norms()
            self.read_norms = [Norm(own[f"drafter.{n}"], None, net.norm_epsilon) for n in names]
            self.is_output_normed = params.eagle3.norm_output
        if self.is_third:
            name = f"{_LAYER0}hidden_norm.weight"
            self.hidden_norm = Norm(decoder[name], None, net.norm_epsilon)
        self.offsets = own.get("d2t")
        if self.offsets is not None:
            _check_offsets(self.offsets, model.vocab_size)

    @property
    def hidden_size(self) -> int:
        return self.params.net.hidden_size

    def make_features(self, states: Tensor) -> Tensor:
        """Features [..., D] from what is read of the target [..., F]."""
        if not self.is_third:
            return states
        if self.read_norms:
            parts = states.chunk(len(self.read_norms), dim=-1)
            normed = [norm(part) for norm, part in zip(self.read_norms, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        return self.fc(states)

    def forward(self, step: Step, features: Tensor, cache: KVCache) -> Tensor:
        """Run pairs of a feature [B, T, D] and the next token; return the next features [B, T, D].

        The step's tokens and positions are the pairs'.
        """
        tokens = to_device(step.tokens, features.device)
        embedded = torch.nn.functional.embedding(tokens, self.decoder.embedding)
        if self.hidden_norm is None:
            x = first = self.fc(torch.cat((embedded, features), dim=-1))
        else:
            assert self.params.eagle3 is not None
            normed = self.hidden_norm(features)
            first = torch.cat((self.decoder.stack.layers[0].input_norm(embedded), normed), dim=-1)
            x = normed if self.params.eagle3.norm_before_residual else features
        x = self.decoder.run_layers(x, step, cache, first)
        return self.final_norm(x) if self.is_output_normed else x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of the token after the pairs that `forward` made `hidden` from."""
        return self.decoder.compute_logits(self._make_head_input(hidden))

    def _make_head_input(self, hidden: Tensor) -> Tensor:
        is_bare = self.is_third and not self.is_output_normed
        hidden = self.final_norm(hidden) if is_bare else hidden
        return hidden if self.head_scale == 1 else hidden * self.head_scale

    def rank_tokens(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The `width` most probable tokens, best first, and their log-probabilities."""
        head = self.decoder.lm_head
        if head.kernels is not None and head.packed is not None:
            tokens, scores = head.kernels.rank_outputs(
                self._make_head_input(hidden), head.packed, head.bias, head.num_outputs, width
            )
        else:
            logits = self.compute_logits(hidden).float()
            scores, tokens = logits.log_softmax(-1).topk(width, dim=-1)
        if self.offsets is not None:
            tokens = tokens + self.offsets[tokens]
        return tokens, scores
