"""The decoder: executes a checkpoint's own tensors, one step over any tree of tokens.

Legend: B rows in the step, T tokens a row, D hidden, N heads, H head size, S cache positions,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.engine.float8 import Float8Linear
from specdec.engine.graphs import PackedStep, StepGraphs, StepShape
from specdec.engine.group import Group
from specdec.engine.int8 import Int8Linear
from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import ACTIVATIONS, Norm, attend, name_activation
from specdec.engine.linear import Linear, can_prepack
from specdec.engine.native import (
    GATED_ACTIVATIONS,
    GATES,
    PLAIN_ACTIVATIONS,
    NativeKernels,
    PackedLayers,
    StepPlan,
)
from specdec.engine.rotary import RotaryTable, rotate
from specdec.engine.step import Step
from specdec.engine.transfers import to_device
from specdec.engine.tree import BoolArray, IntArray
from specdec.errors import SpecDecError
from specdec.files.torch_tensors import TORCH_DTYPES
from specdec.model.config import ModelConfig
from specdec.model.quantization import INT8_SCALES, SCALES

# Tokens of one prompt pass; bounds the memory of its mask and scores. More than 64 make native
# products no faster, and every pass then takes the way of verify steps, to the last bit.
MAX_CHUNK_TOKENS, NATIVE_CHUNK_TOKENS = 512, 64
# Of a row in one step. The native attention compares all of them with one another.
MAX_NATIVE_TOKENS = 256
# Cache positions are visited in whole blocks of this many, so that few shapes occur.
POSITION_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class _Placement:
    """Where a step's tokens go in the cache, and what they see of it, on the device.

    rows: [B], 0 ... B - 1 where is_prefix; slots, lines: [B, T]; mask: [B, 1, T, S], over the cache
    positions first ... end - 1.
    """

    rows: Tensor
    is_prefix: bool
    slots: Tensor
    lines: Tensor
    mask: Tensor
    first: int
    end: int


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
    """A target of any family; weights come under the names of `list_engine_tensors`.

    head: another decoder's, which this one has too; the weights' own if None.

    Of a model that is split over ranks it is one rank's part. All ranks of the group make the same
    calls; hidden states are whole on every rank, logits on rank 0.
    """

    cache_class = KVCache

    def __init__(
        self,
        model: ModelConfig,
        weights: Mapping[str, Tensor],
        *,
        num_positions: int,
        device: torch.device,
        prepack: bool = True,
        kernels: NativeKernels | None = None,
        group: Group | None = None,
        head: Linear | None = None,
    ) -> None:
        assert model.tp_size == (group.size if group else 1)
        self.model = model
        self.group = group
        self.rank = group.rank if group else 0
        # This rank's own heads.
        self.num_heads = model.num_attention_heads // model.tp_size
        self.num_kv_heads = model.get_num_kv_heads()
        self.device = device
        self.num_positions = num_positions
        # Layers whose outputs are kept, and those of the last step side by side, [B, T, n * D].
        self.observed_layers: tuple[int, ...] = ()
        self.observed: Tensor | None = None
        self.dtype = TORCH_DTYPES[model.dtype]
        self.kernels = kernels
        prepack = prepack and can_prepack(self.dtype, device)
        self.is_prepacked = prepack
        arithmetic = model.arithmetic

        def linear(name: str, *, has_bias: bool = True) -> Linear:
            weight = weights[name + ".weight"]
            bias = weights.get(name + ".bias") if has_bias else None
            if weight.dtype is torch.float8_e4m3fn:
                weight_scales, input_scale = (weights[f"{name}.{kind}"] for kind in SCALES)
                return Float8Linear(weight, weight_scales, input_scale, bias)
            if weight.dtype is torch.int8:
                scales = weights[f"{name}.{INT8_SCALES}"]
                return Int8Linear(
                    weight, scales, bias, dtype=self.dtype, prepack=prepack, kernels=kernels
                )
            return Linear(weight, bias, prepack=prepack, kernels=kernels)

        def row_linear(name: str) -> Linear:
            """Of a product that is summed over the ranks: rank 0 adds the bias."""
            return linear(name, has_bias=self.rank == 0)

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
        known = GATED_ACTIVATIONS if self.is_gated else PLAIN_ACTIVATIONS
        self._native_activation = known.get(self.activation)
        self.layers = []
        for index in range(model.num_hidden_layers):
            prefix = f"transformer.layers.{index}."
            self.layers.append(
                _Layer(
                    input_norm=norm(prefix + "input_layernorm"),
                    qkv=linear(prefix + "attention.qkv"),
                    dense=row_linear(prefix + "attention.dense"),
                    post_norm=None if arithmetic.is_parallel else norm(prefix + "post_layernorm"),
                    up=linear(prefix + ("mlp.gate_up" if self.is_gated else "mlp.fc")),
                    down=row_linear(prefix + "mlp.proj"),
                )
            )
        self.final_norm = norm("transformer.ln_f")
        if head is not None:
            self.lm_head = head
        elif model.share_embedding_table:
            head_bias = weights["lm_head.bias"] if arithmetic.head_bias else None
            self.lm_head = Linear(self._cut_head(), head_bias, prepack=prepack, kernels=kernels)
        else:
            self.lm_head = linear("lm_head")
        self._packed_layers: PackedLayers | None = None
        # Steps are replayed from here where a device has graphs.
        self.graphs: StepGraphs | None = None
        self._has_native_layers = (
            kernels is not None and group is None and self._native_activation is not None
        )

    def make_cache(self, num_rows: int, num_positions: int) -> KVCache:
        """Allocate a cache of `num_positions` a row, rounded up to whole blocks."""
        blocks = -(-num_positions // POSITION_BLOCK)
        return self.cache_class(
            num_layers=self.model.num_hidden_layers,
            num_rows=num_rows,
            num_heads=self.num_kv_heads,
            num_positions=blocks * POSITION_BLOCK,
            head_size=self.model.head_size,
            dtype=self.dtype,
            device=self.device,
            lender=self.graphs,
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

    @property
    def max_chunk_tokens(self) -> int:
        """Tokens of a prompt that one pass should run at most."""
        return MAX_CHUNK_TOKENS if self.kernels is None else NATIVE_CHUNK_TOKENS

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Input embeddings, [..., D]."""
        return self._embed(tokens, positions)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        logits = self.lm_head(hidden)
        if self.group is None:
            return logits
        # Where the vocabulary does not divide, the last rank's rows end in padding.
        return self.group.gather(logits)[..., : self.model.vocab_size]

    def forward(self, step: Step, cache: KVCache, tokens: Tensor | None = None) -> Tensor:
        """Run a step, write its keys and values, return the normed last hidden state [B, T, D].

        tokens: [B, T] on the device, in place of the step's, where the host does not know them yet.
        """
        self._check_lengths(step, cache)
        if self.kernels is not None and step.tokens.shape[1] <= MAX_NATIVE_TOKENS:
            assert tokens is None
            return self._forward_native(step, cache, self.kernels)
        if tokens is None:
            tokens = to_device(step.tokens, self.device)
        x = self._embed(tokens, to_device(step.positions, self.device))
        return self.final_norm(self.run_layers(x, step, cache))

    def run_layers(
        self, x: Tensor, step: Step, cache: KVCache, first_input: Tensor | None = None
    ) -> Tensor:
        """Run the layers over [B, T, D], write keys and values; the result is not normed.

        first_input: what the first layer's attention reads instead of its normed input.
        """
        if self._has_native_layers and step.tokens.shape[1] <= MAX_NATIVE_TOKENS:
            x = x.clone(memory_format=torch.contiguous_format)  # which the call overwrites
            self._run_native_layers(x, step, cache, first_input)
            return x
        past = cache.past_lens[step.rows]  # [B]
        if self.graphs is not None and (shape := self.graphs.find_shape(step, cache)):
            found = self._replay_layers(self.graphs, shape, x, step, cache, first_input)
            if found is not None:
                return found
        device, window = self.device, self.model.sliding_window
        num_tokens, num_new = step.tree_mask.shape[1:]
        used = int(past.max()) + num_new
        used = min(-(-used // POSITION_BLOCK) * POSITION_BLOCK, cache.num_positions)
        # The block that holds the first position in any token's window.
        first = 0 if window is None else max(0, int(step.positions.min()) - window + 1)
        first = min(first, int(past.min())) // POSITION_BLOCK * POSITION_BLOCK
        mask = _build_full_mask(past, step.tree_mask, step.positions, used, window)[..., first:]
        newest = np.arange(num_new - num_tokens, num_new)
        place = _Placement(
            rows=to_device(step.rows, device),
            # Rows are sorted and distinct.
            is_prefix=len(step.rows) == cache.blocks.shape[2],
            slots=to_device(past[:, None] + newest, device),
            lines=to_device(self._find_lines(step, cache), device),
            mask=to_device(mask, device),
            first=first,
            end=used,
        )
        x, self.observed = self._compute_layers(x, cache.blocks, place, first_input)
        return x

    def _replay_layers(
        self,
        graphs: StepGraphs,
        shape: StepShape,
        x: Tensor,
        step: Step,
        cache: KVCache,
        first_input: Tensor | None,
    ) -> Tensor | None:
        """`run_layers` from a graph; None where there is no room for it."""

        def compute(
            shape: StepShape, packed: PackedStep, blocks: Tensor, inputs: Sequence[Tensor]
        ) -> tuple[Tensor, ...]:
            size, window = shape.num_positions, self.model.sliding_window
            bias = packed.build_bias(size, window, self.dtype)
            place = _Placement(
                rows=packed.cache_rows,
                is_prefix=shape.is_prefix,
                slots=packed.slots,
                lines=packed.lines,
                mask=bias.repeat(1, 1, self.num_heads // self.num_kv_heads, 1),
                first=0,
                end=size,
            )
            first = inputs[1] if len(inputs) > 1 else None
            out, observed = self._compute_layers(inputs[0], blocks, place, first)
            return (out,) if observed is None else (out, observed)

        found = graphs.run(
            shape,
            (self.observed_layers, None if first_input is None else first_input.shape[2:]),
            (step, cache.past_lens[step.rows], self._find_lines(step, cache)),
            [x] if first_input is None else [x, first_input],
            compute,
        )
        if found is None:
            return None
        self.observed = found[1] if len(found) > 1 else None
        return found[0]

    def _compute_layers(
        self, x: Tensor, blocks: Tensor, place: _Placement, first_input: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The layers on the device alone: their output, and those of the observed layers."""
        model, rows, slots, mask = self.model, place.rows, place.slots, place.mask
        num_rows, num_tokens = slots.shape
        num_heads = self.num_heads
        num_turned = num_heads + self.num_kv_heads  # queries and keys
        cos = sin = None
        if self.rotary is not None:
            cos = self.rotary.cos[place.lines].unsqueeze(2)  # [B, T, 1, R]
            sin = self.rotary.sin[place.lines].unsqueeze(2)
        seen = []
        for index, layer in enumerate(self.layers):
            h = first_input if first_input is not None and index == 0 else layer.input_norm(x)
            qkv = layer.qkv(h).view(num_rows, num_tokens, -1, model.head_size)
            turned, new_values = qkv[:, :, :num_turned], qkv[:, :, num_turned:]
            if cos is not None and sin is not None:
                turned = rotate(turned, cos, sin)
            queries, new_keys = turned[:, :, :num_heads], turned[:, :, num_heads:]
            keys, values = blocks[index, 0], blocks[index, 1]  # [R, N, S, H]
            keys[rows[:, None], :, slots] = new_keys
            values[rows[:, None], :, slots] = new_values
            keys = keys[:, :, place.first : place.end]
            values = values[:, :, place.first : place.end]
            if place.is_prefix:
                keys, values = keys[:num_rows], values[:num_rows]
            else:
                keys, values = keys[rows], values[rows]
            attended = layer.dense(attend(queries, keys, values, mask))
            if layer.post_norm is None:
                x = x + self._sum(attended + self._run_mlp(layer, h))
            else:
                x = x + self._sum(attended)
                x = x + self._sum(self._run_mlp(layer, layer.post_norm(x)))
            if index in self.observed_layers:
                seen.append(x)
        return x, torch.cat(seen, dim=-1) if seen else None

    def _forward_native(self, step: Step, cache: KVCache, kernels: NativeKernels) -> Tensor:
        model = self.model
        x = self._embed(torch.from_numpy(step.tokens), torch.from_numpy(step.positions))
        if self._has_native_layers:
            return self._run_native_layers(x, step, cache)
        plan = self._plan_step(step, cache, kernels)
        h = kernels.norm(x, self.layers[0].input_norm)
        seen = []
        for index, layer in enumerate(self.layers):
            attended = kernels.attend(
                layer.qkv(h), cache.blocks[index], self.rotary, plan,
                self.num_heads, self.num_kv_heads, model.head_size, model.sliding_window,
            )  # fmt: skip
            mixed = layer.dense(attended)
            if layer.post_norm is None:
                mixed = mixed + self._run_mlp(layer, h, kernels)
            else:
                h = kernels.add_norm(x, self._sum(mixed), layer.post_norm)
                mixed = self._run_mlp(layer, h, kernels)
            following = self.layers[index + 1 :]
            h = kernels.add_norm(
                x, self._sum(mixed), following[0].input_norm if following else self.final_norm
            )
            if index in self.observed_layers:
                seen.append(x.clone())
        self.observed = torch.cat(seen, dim=-1) if seen else None
        return h

    def _run_native_layers(
        self, x: Tensor, step: Step, cache: KVCache, first_input: Tensor | None = None
    ) -> Tensor:
        """Run the layers in one call; x becomes their output, its norm is returned."""
        assert self.kernels is not None
        assert self._native_activation is not None
        if self._packed_layers is None:
            self._packed_layers = self._pack_layers(self._native_activation)
        out, self.observed = self.kernels.run_layers(
            x, self._packed_layers, cache.blocks, self.rotary,
            self._plan_step(step, cache, self.kernels), self.observed_layers, first_input,
        )  # fmt: skip
        return out

    def _plan_step(self, step: Step, cache: KVCache, kernels: NativeKernels) -> StepPlan:
        return kernels.plan_step(
            step.rows, step.positions, self._find_lines(step, cache), cache.past_lens[step.rows],
            step.tree_mask,
        )  # fmt: skip

    def _pack_layers(self, activation: int) -> PackedLayers:
        model = self.model
        weights = []
        for layer in self.layers:
            row: list[Tensor | None] = []
            for part in (
                layer.input_norm, layer.qkv, layer.dense, layer.post_norm, layer.up, layer.down
            ):  # fmt: skip
                if part is None:
                    row += [None, None]
                else:
                    row += [part.packed if isinstance(part, Linear) else part.weight, part.bias]
            weights.append(row)
        return PackedLayers(
            weights, (self.final_norm.weight, self.final_norm.bias),
            hidden=model.hidden_size, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            head_size=model.head_size,
            inner=self.layers[0].up.num_outputs // (2 if self.is_gated else 1),
            activation=activation, is_gated=self.is_gated, window=model.sliding_window,
            epsilon=model.norm_epsilon,
        )  # fmt: skip

    def _sum(self, partial: Tensor) -> Tensor:
        """Add up what the ranks computed of a product."""
        return partial if self.group is None else self.group.sum(partial)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self._look_up(self.embedding, tokens)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        if self.position_embedding is not None:
            # Drafts may run past the last position; what is beyond it is never emitted.
            last = self.model.max_position_embeddings - 1
            x = x + self._look_up(self.position_embedding, positions.clamp(max=last))
        return self._sum(x) if self.model.use_parallel_embedding else x

    def _look_up(self, table: Tensor, indices: Tensor) -> Tensor:
        """Rows [..., D] of a table; of one that is split, zeros where other ranks hold the value.

        The sum over the ranks is then the row itself, to the last bit.
        """
        if self.group is None or not self.model.use_parallel_embedding:
            return torch.nn.functional.embedding(indices, table)
        height, width = table.shape
        if self.model.embedding_sharding_dim == 1:
            before = self.rank * width
            found = torch.nn.functional.embedding(indices, table)
            return torch.nn.functional.pad(found, (before, self.model.hidden_size - before - width))
        own = indices - self.rank * height
        is_elsewhere = (own < 0) | (own >= height)
        found = torch.nn.functional.embedding(own.clamp(0, height - 1), table)
        return found.masked_fill(is_elsewhere[..., None], 0.0)

    def _cut_head(self) -> Tensor:
        """This rank's rows of a head that is the embedding; zeros beyond the vocabulary."""
        if self.group is None or self.model.use_parallel_embedding:
            return self.embedding
        height = -(-self.model.vocab_size // self.group.size)
        rows = self.embedding[self.rank * height : (self.rank + 1) * height]
        return torch.nn.functional.pad(rows, (0, 0, 0, height - len(rows)))

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
    """[B, 1, T, S]: committed positions, then the newest as `tree_mask` [B, T, N] says.

    size: S. window: positions that a token sees, itself included.
    """
    batch, num_tokens, num_new = tree_mask.shape
    mask = np.zeros((batch, 1, num_tokens, size), np.bool_)
    mask |= (np.arange(size) < past[:, None])[:, None, None, :]
    if window is not None:
        lowest = positions[:, :, None] - window  # [B, T, 1]
        assert num_new == num_tokens
        mask &= (np.arange(size) > lowest)[:, None]
        tree_mask = tree_mask & (positions[:, None, :] > lowest)
    for row, start in enumerate(past):
        mask[row, 0, :, start : start + num_new] = tree_mask[row]
    return mask
