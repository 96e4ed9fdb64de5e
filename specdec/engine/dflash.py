"""The DFlash drafter: decoder layers that fill a whole block of tokens in one pass.

DFlash, https://arxiv.org/abs/2602.06036. What `fc` makes of the outputs of some of the target's
layers, normed, is the context: every layer computes keys and values of it, by the weights that it
has for its own tokens. A pass runs the last emitted token and mask tokens after it; each sees the
context of all tokens before the block, and all of the block. The target's head reads what comes of
the mask tokens' places: the tokens there. DSpark, https://github.com/deepseek-ai/DeepSpec, adds to
the logits of a place what the token in the place before it makes likely: a row of one matrix for
that token, by another.

    text       t0 t1 t2 t3        context    c0 c1 c2     of the target's states at t0 t1 t2
                                  block      t3 m  m  m   at positions 3 4 5 6, drafts 4 5 6

Legend: B rows, N tokens of any rows, S tokens of a block, P drafted places of it, L layers, K K/V
heads, H head size, D hidden, F width of what is read of the target, V drafted vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.engine.draft_net import DraftNet, rank_logits, take_drafter_tensors
from specdec.engine.integers import (
    get_height,
    join_rows,
    lay_out,
    make_linear,
    take_matrix,
    take_tensor,
)
from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import Norm
from specdec.engine.linear import Linear
from specdec.engine.native_matrices import Weight
from specdec.engine.rotary import rotate
from specdec.engine.step import Step
from specdec.engine.transfers import to_device
from specdec.engine.tree import IntArray
from specdec.methods.dflash import DFlashParams
from specdec.model.config import ModelConfig
from specdec.model.tensors import DFLASH_NET, HEAD, MARKOV_EMBEDDING, MARKOV_HEAD


class DFlashNet(DraftNet):
    """The drafter's network. `weights` are an engine's, the target's embedding and head included.

    options: as in `DraftNet`.
    """

    def __init__(
        self,
        params: DFlashParams,
        weights: Mapping[str, Weight],
        model: ModelConfig,
        **options: Any,
    ) -> None:
        drafter_tensors = take_drafter_tensors(weights, DFLASH_NET)
        # An engine's may draft fewer tokens than the checkpoint's.
        self.params = params = dataclasses.replace(
            params, draft_vocab_size=get_height(drafter_tensors[HEAD])
        )
        net = params.make_net_model(model)
        super().__init__(drafter_tensors, weights, net, model, **options)
        self.hidden_norm = Norm(
            take_tensor(drafter_tensors, "drafter.hidden_norm.weight"), None, net.norm_epsilon
        )
        # The rows of every layer's projections that make keys and values, as one matrix.
        num_query_rows = net.num_attention_heads * net.head_size
        names = [f"drafter.layers.{n}.attention.qkv" for n in range(net.num_hidden_layers)]
        bias = None
        if net.has_qkv_bias:
            biases = [take_tensor(drafter_tensors, f"{name}.bias") for name in names]
            bias = torch.cat([layer_bias[num_query_rows:] for layer_bias in biases])
        rows = join_rows([take_matrix(drafter_tensors, name) for name in names], num_query_rows)
        self.context = lay_out(rows, bias, **self.layout)
        self.markov: Linear | None = None
        if params.markov_rank:
            self.rows_before = take_tensor(drafter_tensors, MARKOV_EMBEDDING)
            name = MARKOV_HEAD.removesuffix(".weight")
            self.markov = make_linear(drafter_tensors, name, **self.layout)

    def write_context(
        self, cache: KVCache, rows: Tensor, positions: Tensor, states: Tensor
    ) -> None:
        """Write keys and values of what the target's layers yielded: states [N, F].

        rows, positions: [N], of the cache, on its device.
        """
        stack = self.decoder.stack
        keys_and_values = self.context(self.hidden_norm(self.fc(states)))
        keys_and_values = keys_and_values.view(
            len(states), len(stack.layers), 2, stack.num_kv_heads, stack.head_size
        )
        for index, layer in enumerate(stack.layers):
            keys, values = keys_and_values[:, index].unbind(1)  # [N, K, H]
            attention = layer.attention
            assert attention.k_norm is not None
            assert attention.rotary is not None
            angles = (
                attention.rotary.cos[positions].unsqueeze(1),
                attention.rotary.sin[positions].unsqueeze(1),
            )
            cache.blocks[index, 0][rows, :, positions] = rotate(attention.k_norm(keys), *angles)
            cache.blocks[index, 1][rows, :, positions] = values

    def run_blocks(self, cache: KVCache, rows: IntArray, roots: IntArray) -> Tensor:
        """Fill a block after the context of each row; roots [B]: their last emitted tokens.

        Returns the states of the drafted places, [B, P, D]. What the block writes
        into the cache counts for nothing afterwards.
        """
        size = self.params.block_size
        tokens = np.full((len(rows), size), self.params.mask_token_id, np.int64)
        tokens[:, 0] = roots
        step = Step(
            rows=rows,
            tokens=tokens,
            positions=cache.past_lens[rows][:, None] + np.arange(size),
            tree_mask=np.ones((len(rows), size, size), np.bool_),
        )
        return self.decoder.forward(step, cache)[:, size - self.params.num_positions :]

    def rank_after(
        self, logits: Tensor, previous_tokens: IntArray, width: int
    ) -> tuple[Tensor, Tensor]:
        """Rank tokens of a place as `rank_tokens`, after each token [B, N] of the place before.

        logits: [B, V], what the head alone says of the place; returns [B, N, width].
        """
        assert self.markov is not None
        rows = torch.nn.functional.embedding(
            to_device(previous_tokens, logits.device), self.rows_before
        )
        logits = logits[:, None].float() + self.markov(rows).float()
        return rank_logits(logits, width, self.offsets)
