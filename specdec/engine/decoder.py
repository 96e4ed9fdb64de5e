"""The decoder: executes a checkpoint's own tensors, one step over any tree of tokens.

Legend: B rows in the step, T tokens a row, D hidden, N heads, H head size, S cache positions,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import (
    Linear,
    RotaryTable,
    attend,
    can_prepack,
    compute_inverse_frequencies,
    rms_norm,
    rotate,
)
from specdec.engine.native import NativeKernels
from specdec.engine.tree import BoolArray, IntArray
from specdec.schema import ModelConfig
from specdec.torch_tensors import TORCH_DTYPES

# Tokens of one prompt pass; bounds the memory of its mask and scores.
MAX_CHUNK_TOKENS = 512
# The native attention takes 16 queries at a time over a row's keys: right for verify steps; longer
# steps are prompts, for which torch's blocked attention is made.
MAX_NATIVE_TOKENS = 64
# Cache positions are visited in whole blocks of this many, so that few shapes occur.
POSITION_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Step:
    """One forward pass: row b of the step is row rows[b] of the cache.

    tokens, positions: [B, T]; tree_mask: [B, T, T], true where a token sees a token of this step;
    every token sees all committed positions of its row. Padding tokens see themselves.
    """

    rows: IntArray
    tokens: IntArray
    positions: IntArray
    tree_mask: BoolArray


@dataclasses.dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    dense: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A Llama-architecture target; weights come under the names of `list_engine_tensors`."""

    def __init__(
        self,
        model: ModelConfig,
        weights: Mapping[str, Tensor],
        *,
        num_positions: int,
        device: torch.device,
        prepack: bool = True,
        kernels: NativeKernels | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.dtype = TORCH_DTYPES[model.dtype]
        self.kernels = kernels
        prepack = prepack and can_prepack(self.dtype, device)
        self.is_prepacked = prepack

        def linear(name: str) -> Linear:
            return Linear(weights[name + ".weight"], weights.get(name + ".bias"), prepack=prepack)

        self.embedding = weights["transformer.vocab_embedding.weight"]
        self.layers = []
        for index in range(model.num_hidden_layers):
            prefix = f"transformer.layers.{index}."
            self.layers.append(
                _Layer(
                    input_norm=weights[prefix + "input_layernorm.weight"],
                    qkv=linear(prefix + "attention.qkv"),
                    dense=linear(prefix + "attention.dense"),
                    post_norm=weights[prefix + "post_layernorm.weight"],
                    gate_up=linear(prefix + "mlp.gate_up"),
                    down=linear(prefix + "mlp.proj"),
                )
            )
        self.final_norm = weights["transformer.ln_f.weight"]
        self.lm_head = linear("lm_head")
        inverse = compute_inverse_frequencies(
            model.head_size, model.rotary_base, model.rotary_scaling
        )
        self.rotary = RotaryTable(inverse, num_positions, self.dtype, device)

    def make_cache(self, num_rows: int, num_positions: int) -> KVCache:
        """Allocate a cache of `num_positions` a row, rounded up to whole blocks."""
        blocks = -(-num_positions // POSITION_BLOCK)
        return KVCache(
            num_layers=self.model.num_hidden_layers,
            num_rows=num_rows,
            num_heads=self.model.get_num_kv_heads(),
            num_positions=blocks * POSITION_BLOCK,
            head_size=self.model.head_size,
            dtype=self.dtype,
            device=self.device,
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings, [..., D]."""
        return torch.nn.functional.embedding(tokens, self.embedding)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return self.lm_head(hidden)

    def forward(self, step: Step, cache: KVCache) -> Tensor:
        """Run a step, write its keys and values, return the normed last hidden state [B, T, D]."""
        if self.kernels is not None and step.tokens.shape[1] <= MAX_NATIVE_TOKENS:
            return self._forward_native(step, cache, self.kernels)
        model, device = self.model, self.device
        past = cache.past_lens[step.rows]  # [B]
        num_tokens = step.tokens.shape[1]
        used = int(past.max()) + num_tokens
        used = min(-(-used // POSITION_BLOCK) * POSITION_BLOCK, cache.num_positions)
        mask = torch.from_numpy(_build_full_mask(past, step.tree_mask, used)).to(device)
        positions = torch.from_numpy(step.positions).to(device)
        cos = self.rotary.cos[positions].unsqueeze(2)  # [B, T, 1, H]
        sin = self.rotary.sin[positions].unsqueeze(2)
        rows = torch.from_numpy(step.rows).to(device)
        slots = torch.from_numpy(past[:, None] + np.arange(num_tokens)).to(device)  # [B, T]
        all_rows = len(step.rows) == cache.blocks.shape[2]  # rows are sorted and distinct
        num_heads, num_kv_heads = model.num_attention_heads, model.num_key_value_heads
        x = self.embed(torch.from_numpy(step.tokens).to(device))
        for index, layer in enumerate(self.layers):
            h = rms_norm(x, layer.input_norm, model.norm_epsilon)
            qkv = layer.qkv(h).view(*step.tokens.shape, -1, model.head_size)
            rotated = rotate(qkv[:, :, : num_heads + num_kv_heads], cos, sin)
            keys, values = cache.blocks[index, 0], cache.blocks[index, 1]  # [R, N, S, H]
            keys[rows[:, None], :, slots] = rotated[:, :, num_heads:]
            values[rows[:, None], :, slots] = qkv[:, :, num_heads + num_kv_heads :]
            keys, values = keys[:, :, :used], values[:, :, :used]
            if not all_rows:
                keys, values = keys[rows], values[rows]
            attended = attend(rotated[:, :, :num_heads], keys, values, mask)
            x = x + layer.dense(attended)
            h = rms_norm(x, layer.post_norm, model.norm_epsilon)
            gate, up = layer.gate_up(h).chunk(2, dim=-1)
            x = x + layer.down(torch.nn.functional.silu(gate) * up)
        return rms_norm(x, self.final_norm, model.norm_epsilon)

    def _forward_native(self, step: Step, cache: KVCache, kernels: NativeKernels) -> Tensor:
        model = self.model
        epsilon = model.norm_epsilon
        plan = kernels.plan_step(
            step.rows, step.positions, cache.past_lens[step.rows], step.tree_mask
        )
        x = self.embed(torch.from_numpy(step.tokens))
        h = kernels.rms_norm(x, self.layers[0].input_norm, epsilon)
        for index, layer in enumerate(self.layers):
            attended = kernels.attend(
                layer.qkv(h), cache.blocks[index], self.rotary.cos, self.rotary.sin, plan,
                model.num_attention_heads, model.num_key_value_heads, model.head_size,
            )  # fmt: skip
            h = kernels.add_rms_norm(x, layer.dense(attended), layer.post_norm, epsilon)
            mixed = layer.down(kernels.silu_mul(layer.gate_up(h)))
            following = self.layers[index + 1 :]
            norm = following[0].input_norm if following else self.final_norm
            h = kernels.add_rms_norm(x, mixed, norm, epsilon)
        return h


def _build_full_mask(past: IntArray, tree_mask: BoolArray, num_positions: int) -> BoolArray:
    """[B, 1, T, S]: committed positions, then this step's tokens as `tree_mask` says."""
    batch, num_tokens, _ = tree_mask.shape
    mask = np.zeros((batch, 1, num_tokens, num_positions), np.bool_)
    mask |= (np.arange(num_positions) < past[:, None])[:, None, None, :]
    for row, start in enumerate(past):
        mask[row, 0, :, start : start + num_tokens] = tree_mask[row]
    return mask
