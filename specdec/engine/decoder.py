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

from specdec.engine.float8 import Float8Linear
from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import (
    ACTIVATIONS,
    Linear,
    Norm,
    attend,
    can_prepack,
    name_activation,
)
from specdec.engine.native import GATES, NativeKernels
from specdec.engine.rotary import RotaryTable, rotate
from specdec.engine.tree import BoolArray, IntArray
from specdec.errors import SpecDecError
from specdec.quantization import SCALES
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
    """up: of a plain MLP, or gate and up stacked. post_norm: None where attention and MLP share."""

    input_norm: Norm
    qkv: Linear
    dense: Linear
    post_norm: Norm | None
    up: Linear
    down: Linear


class Decoder:
    """A target of any family; weights come under the names of `list_engine_tensors`."""

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
        arithmetic = model.arithmetic

        def linear(name: str) -> Linear:
            weight, bias = weights[name + ".weight"], weights.get(name + ".bias")
            if weight.dtype is torch.float8_e4m3fn:
                weight_scales, input_scale = (weights[f"{name}.{kind}"] for kind in SCALES)
                return Float8Linear(weight, weight_scales, input_scale, bias)
            return Linear(weight, bias, prepack=prepack)

        def norm(name: str) -> Norm:
            bias = weights[name + ".bias"] if arithmetic.norm == "layer" else None
            return Norm(weights[name + ".weight"], bias, model.norm_epsilon)

        self.embedding = weights["transformer.vocab_embedding.weight"]
        self.position_embedding: Tensor | None = None
        self.rotary: RotaryTable | None = None
        if arithmetic.positions == "learned":
            self.position_embedding = weights["transformer.position_embedding.weight"]
        else:
            self.rotary = RotaryTable(model, num_positions, self.dtype, device)
        self.embedding_scale: Tensor | None = None
        if arithmetic.scales_embedding:
            # Rounded to the model's type first, as the family was trained.
            self.embedding_scale = torch.tensor(model.hidden_size**0.5, dtype=self.dtype)
        self.activation = name_activation(model)
        self.is_gated = arithmetic.mlp != "plain"
        self.layers = []
        for index in range(model.num_hidden_layers):
            prefix = f"transformer.layers.{index}."
            self.layers.append(
                _Layer(
                    input_norm=norm(prefix + "input_layernorm"),
                    qkv=linear(prefix + "attention.qkv"),
                    dense=linear(prefix + "attention.dense"),
                    post_norm=None if arithmetic.is_parallel else norm(prefix + "post_layernorm"),
                    up=linear(prefix + ("mlp.gate_up" if self.is_gated else "mlp.fc")),
                    down=linear(prefix + "mlp.proj"),
                )
            )
        self.final_norm = norm("transformer.ln_f")
        if model.share_embedding_table:
            head_bias = weights["lm_head.bias"] if arithmetic.head_bias else None
            self.lm_head = Linear(self.embedding, head_bias, prepack=prepack)
        else:
            self.lm_head = linear("lm_head")

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

    def start_row(self, cache: KVCache, row: int, prompt_len: int) -> None:
        """Give a cache row to a request whose prompt has so many tokens.

        Decides which rotary table the request has; a prefix that the row holds from another request
        is dropped where it was rotated by another table.
        """
        start = self.rotary.find_start(prompt_len) if self.rotary else 0
        if start != cache.rotary_starts[row]:
            cache.past_lens[row] = 0
        cache.rotary_starts[row] = start

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Input embeddings, [..., D]."""
        x = torch.nn.functional.embedding(tokens, self.embedding)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        if self.position_embedding is not None:
            # Drafts may run past the last position; what is beyond it is never emitted.
            last = self.position_embedding.shape[0] - 1
            x = x + torch.nn.functional.embedding(
                positions.clamp(max=last), self.position_embedding
            )
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return self.lm_head(hidden)

    def forward(self, step: Step, cache: KVCache) -> Tensor:
        """Run a step, write its keys and values, return the normed last hidden state [B, T, D]."""
        self._check_lengths(step, cache)
        if self.kernels is not None and step.tokens.shape[1] <= MAX_NATIVE_TOKENS:
            return self._forward_native(step, cache, self.kernels)
        model, device, window = self.model, self.device, self.model.sliding_window
        past = cache.past_lens[step.rows]  # [B]
        num_tokens = step.tokens.shape[1]
        used = int(past.max()) + num_tokens
        used = min(-(-used // POSITION_BLOCK) * POSITION_BLOCK, cache.num_positions)
        # The block that holds the first position in any token's window.
        first = 0 if window is None else max(0, int(step.positions.min()) - window + 1)
        first = min(first, int(past.min())) // POSITION_BLOCK * POSITION_BLOCK
        mask = torch.from_numpy(
            _build_full_mask(past, step.tree_mask, step.positions, used, window)[..., first:]
        ).to(device)
        rows = torch.from_numpy(step.rows).to(device)
        slots = torch.from_numpy(past[:, None] + np.arange(num_tokens)).to(device)  # [B, T]
        all_rows = len(step.rows) == cache.blocks.shape[2]  # rows are sorted and distinct
        num_heads = model.num_attention_heads
        num_turned = num_heads + model.num_key_value_heads  # queries and keys
        cos = sin = None
        if self.rotary is not None:
            lines = torch.from_numpy(self._find_lines(step, cache)).to(device)
            cos = self.rotary.cos[lines].unsqueeze(2)  # [B, T, 1, R]
            sin = self.rotary.sin[lines].unsqueeze(2)
        x = self.embed(
            torch.from_numpy(step.tokens).to(device), torch.from_numpy(step.positions).to(device)
        )
        for index, layer in enumerate(self.layers):
            h = layer.input_norm(x)
            qkv = layer.qkv(h).view(*step.tokens.shape, -1, model.head_size)
            turned, new_values = qkv[:, :, :num_turned], qkv[:, :, num_turned:]
            if cos is not None and sin is not None:
                turned = rotate(turned, cos, sin)
            queries, new_keys = turned[:, :, :num_heads], turned[:, :, num_heads:]
            keys, values = cache.blocks[index, 0], cache.blocks[index, 1]  # [R, N, S, H]
            keys[rows[:, None], :, slots] = new_keys
            values[rows[:, None], :, slots] = new_values
            keys, values = keys[:, :, first:used], values[:, :, first:used]
            if not all_rows:
                keys, values = keys[rows], values[rows]
            attended = layer.dense(attend(queries, keys, values, mask))
            if layer.post_norm is None:
                x = x + (attended + self._run_mlp(layer, h))
            else:
                x = x + attended
                x = x + self._run_mlp(layer, layer.post_norm(x))
        return self.final_norm(x)

    def _forward_native(self, step: Step, cache: KVCache, kernels: NativeKernels) -> Tensor:
        model = self.model
        plan = kernels.plan_step(
            step.rows, step.positions, self._find_lines(step, cache), cache.past_lens[step.rows],
            step.tree_mask,
        )  # fmt: skip
        x = self.embed(torch.from_numpy(step.tokens), torch.from_numpy(step.positions))
        h = kernels.norm(x, self.layers[0].input_norm)
        for index, layer in enumerate(self.layers):
            attended = kernels.attend(
                layer.qkv(h), cache.blocks[index], self.rotary, plan,
                model.num_attention_heads, model.num_key_value_heads, model.head_size,
                model.sliding_window,
            )  # fmt: skip
            mixed = layer.dense(attended)
            if layer.post_norm is None:
                mixed = mixed + self._run_mlp(layer, h, kernels)
            else:
                h = kernels.add_norm(x, mixed, layer.post_norm)
                mixed = self._run_mlp(layer, h, kernels)
            following = self.layers[index + 1 :]
            h = kernels.add_norm(
                x, mixed, following[0].input_norm if following else self.final_norm
            )
        return h

    def _run_mlp(self, layer: _Layer, h: Tensor, kernels: NativeKernels | None = None) -> Tensor:
        inner = layer.up(h)
        if self.is_gated and kernels is not None and self.activation in GATES:
            return layer.down(kernels.gate_mul(inner, self.activation))
        activate = ACTIVATIONS[self.activation]
        if self.is_gated:
            gate, up = inner.chunk(2, dim=-1)
            return layer.down(activate(gate) * up)
        return layer.down(activate(inner))

    def _find_lines(self, step: Step, cache: KVCache) -> IntArray:
        lines: IntArray = step.positions + cache.rotary_starts[step.rows][:, None]
        return lines

    def _check_lengths(self, step: Step, cache: KVCache) -> None:
        """Raise SpecDecError for a sequence that has outgrown its rotary table."""
        switch = self.rotary.switch_len if self.rotary else None
        if switch is None:
            return
        is_short = cache.rotary_starts[step.rows] == 0
        past = cache.past_lens[step.rows]
        if (is_short & (past >= switch)).any():
            raise SpecDecError(
                f"a sequence of more than {switch} tokens began with a prompt of fewer: longrope"
                " scaling changes all keys there",
                "ask for fewer tokens, or give a longer prompt",
            )


def _build_full_mask(
    past: IntArray, tree_mask: BoolArray, positions: IntArray, size: int, window: int | None
) -> BoolArray:
    """[B, 1, T, S]: committed positions, then this step's tokens as `tree_mask` says.

    size: S. window: positions that a token sees, itself included.
    """
    batch, num_tokens, _ = tree_mask.shape
    mask = np.zeros((batch, 1, num_tokens, size), np.bool_)
    mask |= (np.arange(size) < past[:, None])[:, None, None, :]
    if window is not None:
        lowest = positions[:, :, None] - window  # [B, T, 1]
        mask &= (np.arange(size) > lowest)[:, None]
        tree_mask = tree_mask & (positions[:, None, :] > lowest)
    for row, start in enumerate(past):
        mask[row, 0, :, start : start + num_tokens] = tree_mask[row]
    return mask
