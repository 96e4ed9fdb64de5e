"""Networks of drafters with decoder layers: layers, embedding, head, offsets.

A drafter's tensor that equals one of the target's is not held twice.

Legend: D the drafter's hidden size, V drafted vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.engine.decoder import Decoder
from specdec.engine.integers import find_tensor, make_linear, take_tensor
from specdec.engine.layers import Norm
from specdec.engine.linear import Linear
from specdec.engine.native_matrices import Weight, are_equal
from specdec.engine.ranking import find_top
from specdec.errors import SpecDecError
from specdec.model.config import ModelConfig
from specdec.model.tensors import EMBEDDING, HEAD, HEAD_BIAS, OFFSETS


def take_drafter_tensors(weights: Mapping[str, Weight], prefix: str) -> dict[str, Weight]:
    """Return a drafter's tensors among an engine's, without their prefix."""
    return {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }


class DraftNet:
    """A drafter's network: decoder layers, whole on whatever rank drafts, and what feeds them."""

    def __init__(
        self,
        drafter_tensors: Mapping[str, Weight],
        weights: Mapping[str, Weight],
        net: ModelConfig,
        model: ModelConfig,
        *,
        head: Linear | None = None,
        **options: Any,
    ) -> None:
        """Make the network of an engine's weights.

        drafter_tensors: the drafter's, without their prefix. weights: an engine's, with the
        target's embedding and head.

        net, model: the drafter's sizes and the target's. head: the target's, where it is whole.
        options: of `Decoder`.
        """
        net = make_whole(net)
        decoder_tensors = name_decoder_tensors(drafter_tensors, weights, net)
        head = head if head is not None and _is_head(drafter_tensors, weights) else None
        self.decoder = Decoder(net, decoder_tensors, head=head, **options)
        assert self.decoder.stack.final_norm is not None
        self.final_norm: Norm = self.decoder.stack.final_norm
        self.layout: dict[str, Any] = {
            "prepack": self.decoder.is_prepacked,
            "kernels": self.decoder.kernels,
        }
        self.fc = make_linear(drafter_tensors, "drafter.fc", **self.layout)
        # Logits are multiplied as the target's are, by which most drafters learn (Granite).
        self.head_scale = model.output_multiplier_scale
        self.offsets = take_offsets(drafter_tensors, model.vocab_size)

    def make_head_input(self, hidden: Tensor) -> Tensor:
        """Return the head's input for hidden states [..., D] of the last layer."""
        return hidden if self.head_scale == 1 else hidden * self.head_scale

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] of the tokens after hidden states [..., D]."""
        return self.decoder.compute_logits(self.make_head_input(hidden))

    def rank_tokens(
        self, hidden: Tensor, width: int, sharpness: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rank the `width` most probable tokens after hidden states [..., D], best first.

        Returns the target's tokens and their log-probabilities, both [..., width]. sharpness: by
        which logits are multiplied first, of the states' dimensions; None is one.
        """
        head = self.decoder.lm_head
        if head.kernels is None or (sharpness is not None and head.bias is not None):
            return rank_logits(self.compute_logits(hidden), width, self.offsets, sharpness)
        return rank_packed(head, self.make_head_input(hidden), width, self.offsets, sharpness)


def make_whole(model: ModelConfig) -> ModelConfig:
    """Return the configuration of a model on one rank."""
    return dataclasses.replace(model, tp_size=1, use_parallel_embedding=False)


def name_decoder_tensors(
    drafter_tensors: Mapping[str, Weight], weights: Mapping[str, Weight], net: ModelConfig
) -> dict[str, Weight]:
    """Name a drafter's tensors as a decoder's; an embedding like the target's is the target's."""
    decoder = {
        f"transformer.{name.removeprefix('drafter.')}": weight
        for name, weight in drafter_tensors.items()
        if name.startswith("drafter.")
    }
    decoder |= {
        name: drafter_tensors[name] for name in drafter_tensors if name.startswith("lm_head.")
    }
    if EMBEDDING in weights and are_equal(decoder[EMBEDDING], weights[EMBEDDING]):
        decoder[EMBEDDING] = weights[EMBEDDING]
    stack_gates(decoder, net)
    return decoder


def stack_gates(tensors: dict[str, Weight], net: ModelConfig) -> None:
    """Stack the two matrices of each gated feed-forward layer as `gate_up`, in place."""
    # By kind of feed-forward layer, the tensors that a decoder has stacked.
    stacked_parts = {"gated": (".fc.", ".gate."), "fused": (".fc.",)}.get(net.arithmetic.mlp, ())
    for name in [name for name in tensors if stacked_parts and ".mlp.fc." in name]:
        stacked_names = [name.replace(".fc.", part) for part in stacked_parts]
        stacked = [take_tensor(tensors, stacked_name) for stacked_name in stacked_names]
        for stacked_name in stacked_names:
            del tensors[stacked_name]
        tensors[name.replace(".fc.", ".gate_up.")] = torch.cat(stacked)


def _is_head(drafter_tensors: Mapping[str, Weight], weights: Mapping[str, Weight]) -> bool:
    """Tell whether a drafter's head is the target's, which may be the target's embedding."""
    bias, targets = find_tensor(drafter_tensors, HEAD_BIAS), find_tensor(weights, HEAD_BIAS)
    if bias is None or targets is None:
        same_bias = bias is targets
    else:
        same_bias = torch.equal(bias, targets)
    return same_bias and are_equal(drafter_tensors[HEAD], weights.get(HEAD, weights[EMBEDDING]))


def take_offsets(drafter_tensors: Mapping[str, Weight], vocab_size: int) -> Tensor | None:
    """Return offsets [V] from drafted tokens to the target's; None for an unreduced vocabulary.

    Raises SpecDecError where that maps a token beyond the target's vocabulary.
    """
    offsets = find_tensor(drafter_tensors, OFFSETS)
    if offsets is None:
        return None
    numbers = torch.arange(len(offsets), device=offsets.device)
    # Compared with bounds, not added: a sum of two large numbers might wrap around.
    outside = (offsets < -numbers) | (offsets >= vocab_size - numbers)
    if outside.any():
        token = int(outside.nonzero()[0])
        raise SpecDecError(
            f"d2t maps drafted token {token} to {int(offsets[token]) + token}, the target has"
            f" vocab_size {vocab_size} ({int(outside.sum())} of {len(offsets)} are outside)",
            "the drafter's weights are damaged or of another target: convert and build it again",
        )
    return offsets


def rank_packed(
    head: Linear, x: Tensor, width: int, offsets: Tensor | None = None,
    sharpness: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rank the `width` most probable tokens by a head that native kernels have packed.

    As `DraftNet.rank_tokens` returns them. Sharper inputs have sharper logits, but for a bias.
    """
    assert head.kernels is not None
    assert head.packed is not None
    x = x if sharpness is None else x * sharpness
    tokens, scores = head.kernels.rank_outputs(x, head.packed, head.bias, head.num_outputs, width)
    return name_tokens(tokens, offsets), scores


def rank_logits(
    logits: Tensor, width: int, offsets: Tensor | None = None, sharpness: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rank the `width` most probable of logits [..., V], as `DraftNet.rank_tokens` does."""
    logits = logits.float() if sharpness is None else logits.float() * sharpness.float()
    scores, tokens = find_top(logits.log_softmax(-1), width)
    return name_tokens(tokens, offsets), scores


def name_tokens(tokens: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the target's tokens for drafted ones."""
    return tokens if offsets is None else tokens + offsets[tokens]
