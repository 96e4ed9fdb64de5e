"""The MTP assistant: layers that have queries alone, and attend to the target's own keys.

Each layer reads the keys and values of the target's last layer of its type (sliding or full
attention) that has keys of its own. The input is the embedding of a token, as the target scales
it, and a state of the target's size, side by side through `pre_projection`; what the last layer
yields, normed, is the head's input, and through `post_projection` the state after the next token
of a draft. Nothing of a draft is written: all its tokens see the committed ones alone, and have the
position of the first, as transformers and llama.cpp have it.

    text     t0 t1 t2 t3        draft   (t3, s2) -> d4, h     (d4, post h) -> d5 ...
    keys     k0 k1 k2                   at position 3          at position 3

Legend: B rows, T tokens of a row, D the target's hidden size, H that of the layers, S cache
positions, C centroids, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.engine.decoder import Decoder
from specdec.engine.draft_net import (
    rank_logits,
    rank_packed,
    stack_gates,
    take_drafter_tensors,
    take_offsets,
)
from specdec.engine.integers import make_linear, take_tensor
from specdec.engine.kv_cache import POSITION_BLOCK, KVCache
from specdec.engine.layers import Attention, attend, name_activation
from specdec.engine.linear import Linear
from specdec.engine.module_maker import ModuleMaker
from specdec.engine.native_layers import KernelLayers
from specdec.engine.native_matrices import Weight
from specdec.engine.rotary import make_tables, rotate
from specdec.engine.step import Step
from specdec.engine.torch_layers import Layer, Stack, TorchLayers
from specdec.engine.transfers import to_device
from specdec.engine.tree import IntArray
from specdec.methods.mtp_assistant import MtpAssistantParams
from specdec.model.tensors import ASSISTANT_NET, CENTROIDS, HEAD, TOKEN_ORDER, TOKEN_ROWS

# A query sees a window's size of positions and one before the newest committed one: transformers
# counts the distance from that, both ends included.
WINDOW_ENDS = 2


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Positions of a cache that the tokens of a pass see, on the device.

    rows: of the cache, all of them or an index [B]; lines: [B, 1], of the rotary tables. views: by
    a layer's window, the first position that is read and the mask [B, 1, T, S] from there on.
    """

    rows: slice | Tensor
    lines: Tensor
    views: Mapping[int | None, tuple[int, Tensor]]
    end: int


class _ReadingLayers(TorchLayers):
    """Layers that attend to keys and values which others have written."""

    def read(self, x: Tensor, blocks: Sequence[Tensor], step: Step, cache: KVCache) -> Tensor:
        """Run the layers over [B, T, H]; return the last one's output, normed.

        blocks: the part of the cache that each layer reads, [2, R, N, S, head size].
        """
        reading = self._find_positions(step, cache, x.device)
        _, normed, _ = self._compute(
            x, step, cache, blocks, reading, (), None, self.stack.final_norm
        )
        return normed

    def _find_positions(self, step: Step, cache: KVCache, device: torch.device) -> _Reading:
        past = cache.past_lens[step.rows]
        end = min(-(-int(past.max()) // POSITION_BLOCK) * POSITION_BLOCK, cache.num_positions)
        positions, views = np.arange(end), {}
        for window in self.stack.list_windows():
            lowest = np.zeros_like(past) if window is None else np.maximum(0, past - window + 1)
            start = int(lowest.min()) // POSITION_BLOCK * POSITION_BLOCK
            seen = (positions >= lowest[:, None]) & (positions < past[:, None])
            mask = np.repeat(seen[:, None, None, start:], step.tokens.shape[1], axis=2)
            views[window] = start, to_device(mask, device)
        lines = past + cache.rotary_starts[step.rows]
        first, last = int(step.rows[0]), int(step.rows[-1]) + 1
        is_run = np.array_equal(step.rows, np.arange(first, last))  # of which no copy is made
        rows = slice(first, last) if is_run else to_device(step.rows, device)
        return _Reading(rows, to_device(lines[:, None], device), views, end)

    def _attend(self, layer: Layer, product: Tensor, block: Tensor, placement: Any) -> Tensor:
        """Attend to a layer's part of the cache; placement: a `_Reading`."""
        attention, (_, size) = layer.attention, self.stack.get_heads(layer)
        assert attention.q_norm is not None
        assert attention.rotary is not None
        queries = product.reshape(*product.shape[:-1], -1, size)
        lines, table = placement.lines, attention.rotary
        cos, sin = (numbers[lines][:, :, None] for numbers in (table.cos, table.sin))
        queries = rotate(self._norm(queries, attention.q_norm), cos, sin)
        start, mask = placement.views[attention.window]
        keys, values = (plane[placement.rows, :, start : placement.end] for plane in block)
        return attend(queries, keys, values, mask, attention.scale)


class _KernelReadingLayers(_ReadingLayers, KernelLayers):
    """Such layers whose products, norms and gates are native kernels'."""


class MtpAssistantNet:
    """The drafter's network. `weights` are an engine's; decoder: the target's."""

    def __init__(
        self, params: MtpAssistantParams, weights: Mapping[str, Weight], decoder: Decoder
    ) -> None:
        """Lay out the layers; raise SpecDecError where the target has no such keys and values."""
        model = decoder.model
        params.find_reading_problems(model).raise_all()
        self.params, self.target, owners = params, decoder, model.attending_layers
        # Each layer's place among those of the target that have keys of their own.
        self._places = [owners.index(source) for source in params.list_sources(model)]
        net, tensors = params.make_net_model(model), take_drafter_tensors(weights, ASSISTANT_NET)
        layout: dict[str, Any] = {"prepack": decoder.is_prepacked, "kernels": decoder.kernels}
        named = {f"transformer.{n.removeprefix('drafter.')}": w for n, w in tensors.items()}
        stack_gates(named, net)
        maker = ModuleMaker(
            model=net, weights=named, rank=0, **layout,
            tables=make_tables(net, decoder.num_positions, decoder.dtype, decoder.device),
        )  # fmt: skip
        stack = Stack(
            layers=[_make_layer(maker, index) for index in range(net.num_hidden_layers)],
            final_norm=maker.make_norm("transformer.ln_f"), num_heads=net.num_attention_heads,
            num_kv_heads=net.num_key_value_heads, head_size=net.head_size,
            activation=name_activation(net), is_gated=True, group=None, is_uneven=True,
        )  # fmt: skip
        self._layers = _ReadingLayers(stack)
        if decoder.kernels is not None:
            self._layers = _KernelReadingLayers(stack, decoder.kernels)
        self._pre_projection = make_linear(tensors, "drafter.pre_projection", **layout)
        self._post_projection = make_linear(tensors, "drafter.post_projection", **layout)
        self.head: Linear | CentroidHead
        if params.num_centroids:
            self.head = CentroidHead(
                make_linear(tensors, CENTROIDS.removesuffix(".weight"), **layout),
                take_tensor(tensors, TOKEN_ROWS), take_tensor(tensors, TOKEN_ORDER),
                params.num_best_centroids,
            )  # fmt: skip
            self.num_scored_tokens = params.num_scored_tokens
        else:
            self.head = make_linear(tensors, HEAD.removesuffix(".weight"), **layout)
            self.num_scored_tokens = self.head.num_outputs
        self._offsets = take_offsets(tensors, model.vocab_size)

    def begin(self, cache: KVCache, rows: IntArray, roots: IntArray, states: Tensor) -> Tensor:
        """Run the last emitted tokens [B] of rows; return the head's inputs [B, H].

        cache: the target's. states: [B, D], its own of the tokens before.
        """
        tokens = roots[:, None]
        positions = cache.past_lens[rows][:, None]
        step = Step(rows, tokens, positions, np.ones((len(rows), 1, 1), np.bool_))
        return self._run(step, states[:, None], cache)[:, 0]

    def forward(self, step: Step, features: Tensor, cache: KVCache) -> Tensor:
        """Run drafted tokens after the head's inputs [B, T, H] of those above; return theirs."""
        return self._run(step, self._post_projection(features.contiguous()), cache)

    def _run(self, step: Step, states: Tensor, cache: KVCache) -> Tensor:
        """Run tokens after states [B, T, D]; they see the committed positions, and nothing else.

        The step's positions and its mask say nothing here.
        """
        device = states.device
        embedded = self.target.embed(
            to_device(step.tokens, device), to_device(step.positions, device)
        )
        x = self._pre_projection(torch.cat((embedded, states), dim=-1))
        return self._layers.read(x, [cache.layers[place] for place in self._places], step, cache)

    def rank_tokens(
        self, hidden: Tensor, width: int, sharpness: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rank the `width` most probable tokens after the head's inputs [..., H], best first.

        As `DraftNet.rank_tokens`; of a head by centroids among the tokens that get a logit.
        """
        head = self.head
        if isinstance(head, CentroidHead):
            tokens, logits = head(hidden)
            places, scores = rank_logits(logits, width, None, sharpness)
            return tokens.gather(-1, places), scores
        if head.kernels is None:
            return rank_logits(head(hidden), width, self._offsets, sharpness)
        return rank_packed(head, hidden, width, self._offsets, sharpness)


class CentroidHead:
    """Head that scores the tokens of a state's best centroids, and no others.

    centroids: [C, H]. rows: [V, H], of all tokens. order: [V], the tokens of the first centroid,
    then those of the second, ...; all have as many.
    """

    def __init__(self, centroids: Linear, rows: Tensor, order: Tensor, num_best: int) -> None:
        self._centroids, self._rows, self._num_best = centroids, rows, num_best
        self._members = order.view(centroids.num_outputs, -1)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and their logits for states [..., H], both [..., scored tokens]."""
        best = self._centroids(hidden).topk(self._num_best, dim=-1).indices
        tokens = self._members[best].flatten(-2)
        logits = (self._rows[tokens] @ hidden[..., None]).squeeze(-1)
        return tokens, logits


def _make_layer(maker: ModuleMaker, index: int) -> Layer:
    """Make a layer, whose attention has queries and no keys."""
    model, prefix = maker.model, f"transformer.layers.{index}."
    is_sliding, sizes = model.is_sliding(index), model.resize(index)
    window = None
    if is_sliding:
        assert model.sliding_window is not None
        window = model.sliding_window + WINDOW_ENDS
    names = ("input", "post", "pre_feedforward", "post_feedforward")
    norms = [maker.make_norm(f"{prefix}{name}_layernorm") for name in names]
    return Layer(
        attention=Attention(
            scale=model.attention_scale, cap=None, window=window, rotary=maker.tables[is_sliding],
            q_norm=maker.make_norm(f"{prefix}attention.q_layernorm"),
            heads=(sizes.num_key_value_heads, sizes.head_size),
        ),
        input_norm=norms[0], dense_norm=norms[1], post_norm=norms[2], down_norm=norms[3],
        qkv=maker.make_linear(f"{prefix}attention.q"),
        dense=maker.make_linear(f"{prefix}attention.dense"),
        up=maker.make_linear(f"{prefix}mlp.gate_up"), down=maker.make_linear(f"{prefix}mlp.proj"),
        scalar=take_tensor(maker.weights, f"{prefix}scalar.weight"),
    )  # fmt: skip
