"""What drafters with decoder layers of their own share: layers, embedding, head, offsets.

Legend: D the drafter's hidden size, V drafted vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.engine.decoder import Decoder
from specdec.engine.linear import Linear
from specdec.errors import SpecDecError
from specdec.model.config import ModelConfig
from specdec.model.tensors import EMBEDDING, HEAD, HEAD_BIAS, OFFSETS


def take_own(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """A drafter's tensors among an engine's, without their prefix."""
    return {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }


def make_decoder(
    own: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    net: ModelConfig,
    head: Linear | None,
    **options: Any,
) -> Decoder:
    """The layers of a drafter, whole, on whatever rank drafts.

    own: as `take_own` returns it. weights: an engine's, the target's embedding and head among them:
    what equals one of these is not held twice. head: the target's, where it is whole. options: of
    the decoder.
    """
    decoder = {
        f"transformer.{name.removeprefix('drafter.')}": weight
        for name, weight in own.items()
        if name.startswith("drafter.")
    }
    decoder |= {name: own[name] for name in own if name.startswith("lm_head.")}
    if head is not None and not _is_head(own, weights):
        head = None
    if EMBEDDING in weights and torch.equal(decoder[EMBEDDING], weights[EMBEDDING]):
        decoder[EMBEDDING] = weights[EMBEDDING]
    for layer in range(net.num_hidden_layers):
        mlp = f"transformer.layers.{layer}.mlp."
        for name in [name for name in decoder if name.startswith(f"{mlp}fc.")]:
            stacked = (decoder.pop(name), decoder.pop(name.replace(".fc.", ".gate.")))
            decoder[name.replace(".fc.", ".gate_up.")] = torch.cat(stacked)
    net = dataclasses.replace(net, tp_size=1, use_parallel_embedding=False)
    return Decoder(net, decoder, head=head, **options)


def _is_head(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
    """Whether a drafter's head is the target's, whose own may be its embedding."""
    if own[HEAD].dtype is torch.int8:  # rounded for drafts
        return False
    bias, targets = own.get(HEAD_BIAS), weights.get(HEAD_BIAS)
    if bias is None or targets is None:
        same_bias = bias is targets
    else:
        same_bias = torch.equal(bias, targets)
    return same_bias and torch.equal(own[HEAD], weights.get(HEAD, weights[EMBEDDING]))


def take_offsets(own: Mapping[str, Tensor], vocab_size: int) -> Tensor | None:
    """What a reduced vocabulary adds to a drafted token, [V]; None where it is not reduced.

    Raises SpecDecError where that maps a token beyond the target's vocabulary.
    """
    offsets = own.get(OFFSETS)
    if offsets is None:
        return None
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
    return offsets


def rank_tokens(
    decoder: Decoder, x: Tensor, width: int, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The `width` most probable tokens that the head reads of x [..., D], best first.

    Returns the target's tokens and their log-probabilities, both [..., width].
    """
    head = decoder.lm_head
    if head.kernels is not None:
        return rank_packed(head, x, width, offsets)
    return rank_logits(decoder.compute_logits(x).float(), width, offsets)


def rank_packed(
    head: Linear, x: Tensor, width: int, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same of a head that native kernels have packed."""
    assert head.kernels is not None
    assert head.packed is not None
    tokens, scores = head.kernels.rank_outputs(x, head.packed, head.bias, head.num_outputs, width)
    return name_tokens(tokens, offsets), scores


def rank_logits(logits: Tensor, width: int, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same of logits [..., V]."""
    scores, tokens = logits.log_softmax(-1).topk(width, dim=-1)
    return name_tokens(tokens, offsets), scores


def name_tokens(tokens: Tensor, offsets: Tensor | None) -> Tensor:
    """The target's tokens of drafted ones."""
    return tokens if offsets is None else tokens + offsets[tokens]
