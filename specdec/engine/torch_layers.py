"""A decoder's layers, and the way through them by torch's own operators, on any device.

Legend: B rows in the step, T tokens per row, D hidden, S cache positions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.engine.delta_net import DeltaNet
from specdec.engine.experts import ExpertLayer
from specdec.engine.graphs import PackedStep, StepGraphs, StepShape
from specdec.engine.group import Group
from specdec.engine.kv_cache import POSITION_BLOCK, KVCache
from specdec.engine.layers import ACTIVATIONS, Attention, Norm, attend
from specdec.engine.linear import Linear
from specdec.engine.linear_states import LinearStates, Runs
from specdec.engine.mamba2 import Mamba2
from specdec.engine.rotary import RotaryTable, rotate
from specdec.engine.short_conv import ShortConv
from specdec.engine.step import Step
from specdec.engine.transfers import to_device
from specdec.engine.tree import BoolArray, IntArray

# The last layer's output [B, T, D], and those of the observed layers side by side, [B, T, n * D].
Outcome = tuple[Tensor, Tensor | None]
Recurrent = DeltaNet | ShortConv | Mamba2  # in place of attention over the cache


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Norms of a layer's MLP and of the experts beside it: of the outputs, and of what is read.

    router_norm: of what the router reads.
    """

    mlp_norm: Norm
    expert_norm: Norm
    input_norm: Norm
    router_norm: Norm


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Reading of a token's own numbers by a layer: gate [P, D], activated times them, proj [D, P].

    norm: of what is added to the layer's output.
    """

    gate: Linear
    proj: Linear
    norm: Norm


@dataclasses.dataclass(frozen=True)
class Layer:
    """Weights of a decoder's layer.

    up: of a plain MLP, or gate and up stacked. post_norm: None where attention and MLP share the
    input norm. dense_norm, down_norm: norms of the outputs of `dense` and `down`, None for none.
    experts: in place of up and down. recurrence: what keeps a state in place of attention over the
    cache, with qkv for its first product. source: the earlier layer whose
    keys and values this one reads; qkv has queries alone then. mixture: norms of an MLP and of
    experts beside it. inputs: how the layer reads a token's own numbers. scalar: of its output.
    """

    attention: Attention
    input_norm: Norm
    qkv: Linear
    dense: Linear
    post_norm: Norm | None
    up: Linear | None
    down: Linear | None
    dense_norm: Norm | None = None
    down_norm: Norm | None = None
    experts: ExpertLayer | None = None
    recurrence: Recurrent | None = None
    source: int | None = None
    mixture: Mixture | None = None
    inputs: LayerInputs | None = None
    scalar: Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """The layers of one rank, with its own heads.

    final_norm: None where each layer's norms are after attention and MLP, the last one's too.
    share: factor of the outputs of attention and MLP when they are added to a layer's input.
    has_gates: whether qkv has gates of the attention's outputs after the values. is_uneven:
    whether layers differ in their heads, or have a part that no usual layer has.
    """

    layers: list[Layer]
    final_norm: Norm | None
    num_heads: int
    num_kv_heads: int
    head_size: int
    activation: str
    is_gated: bool
    group: Group | None
    share: float = 1.0
    has_gates: bool = False
    is_uneven: bool = False

    def get_heads(self, layer: Layer) -> tuple[int, int]:
        """Return a layer's K/V heads and their size."""
        return layer.attention.heads or (self.num_kv_heads, self.head_size)

    @functools.cached_property
    def sources(self) -> set[int | None]:
        """The layers whose keys and values later ones read; None among them means nothing."""
        return {layer.source for layer in self.layers}

    def deal(self, blocks: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the part of the cache that each layer reads; None for one with a state."""
        own_blocks, parts = iter(blocks), list[Tensor | None]()
        for layer in self.layers:
            if layer.source is not None:
                parts.append(parts[layer.source])
            else:
                parts.append(next(own_blocks) if layer.recurrence is None else None)
        return parts

    def sum(self, partial: Tensor) -> Tensor:
        """Add up what the ranks computed of a product."""
        return partial if self.group is None else self.group.sum(partial)

    def list_windows(self) -> set[int | None]:
        """List the windows of the layers."""
        return {layer.attention.window for layer in self.layers if layer.recurrence is None}


@dataclasses.dataclass(frozen=True)
class _Placement:
    """Cache positions of a step's tokens, and the positions that they see, on the device.

    rows: [B], 0 ... B - 1 where is_prefix; slots, lines: [B, T]; views: by a layer's window, the
    first cache position that any token sees and the mask [B, 1, T, S] from there to end - 1.
    angles: of the tables that were used before.
    """

    rows: Tensor
    is_prefix: bool
    slots: Tensor
    lines: Tensor
    views: dict[int | None, tuple[int, Tensor]]
    end: int
    angles: dict[RotaryTable, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)


class TorchLayers:
    """Execution of layers one by one, by torch; from recorded graphs where a device has them."""

    adds_in_place = False  # whether a layer's output takes the place of its input

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.graphs: StepGraphs | None = None

    def run(
        self,
        x: Tensor,
        step: Step,
        cache: KVCache,
        observed_layers: tuple[int, ...],
        first_input: Tensor | None = None,
        *,
        is_normed: bool = False,
        inputs: Tensor | None = None,
    ) -> Outcome:
        """Run the layers over [B, T, D] and write keys and values.

        first_input: what the first layer's attention reads instead of its normed input. is_normed:
        the result is normed, and x may be overwritten. inputs: each layer's own numbers of tokens,
        [B, T, L, P], where layers have some.
        """
        norm = self.stack.final_norm if is_normed else None
        replayed = self._replay(x, step, cache, observed_layers, first_input, norm)
        if replayed is not None:
            return replayed
        placement = self._locate(step, cache, x.device)
        _, h, observed_outputs = self._compute(
            x, step, cache, cache.layers, placement, observed_layers, first_input, norm, inputs
        )
        return h, observed_outputs

    def _locate(self, step: Step, cache: KVCache, device: torch.device) -> _Placement:
        past = find_past(step, cache)
        num_tokens, num_new = step.tree_mask.shape[1:]
        num_used = int(past.max()) + num_new
        num_used = min(-(-num_used // POSITION_BLOCK) * POSITION_BLOCK, cache.num_positions)
        views = {}
        for window in self.stack.list_windows():
            # The block that holds the first position in any token's window.
            first_position = 0 if window is None else max(0, int(step.positions.min()) - window + 1)
            first_position = min(first_position, int(past.min())) // POSITION_BLOCK * POSITION_BLOCK
            mask = build_full_mask(past, step.tree_mask, step.mask_positions, num_used, window)
            views[window] = first_position, to_device(mask[..., first_position:], device)
        newest = np.arange(num_new - num_tokens, num_new)
        return _Placement(
            rows=to_device(step.rows, device),
            # Rows are sorted and distinct, but where a text goes on in several.
            is_prefix=step.past is None and len(step.rows) == len(cache.past_lens),
            slots=to_device(past[:, None] + newest, device),
            lines=to_device(find_lines(step, cache), device),
            views=views,
            end=num_used,
        )

    def _replay(
        self,
        x: Tensor,
        step: Step,
        cache: KVCache,
        observed_layers: tuple[int, ...],
        first_input: Tensor | None,
        last_norm: Norm | None,
    ) -> Outcome | None:
        """Run the layers from a recorded graph; return None where there is none."""
        stack, graphs = self.stack, self.graphs
        if graphs is None or step.past is not None or stack.is_uneven:
            return None
        if (step_shape := graphs.find_shape(step, cache)) is None:
            return None

        def compute(
            shape: StepShape, packed: PackedStep, blocks: Tensor, inputs: Sequence[Tensor]
        ) -> tuple[Tensor, ...]:
            size, repeats = shape.num_positions, stack.num_heads // stack.num_kv_heads
            views = {
                window: (0, packed.build_bias(size, window, x.dtype).repeat(1, 1, repeats, 1))
                for window in stack.list_windows()
            }
            placement = _Placement(
                rows=packed.cache_rows,
                is_prefix=shape.is_prefix,
                slots=packed.slots,
                lines=packed.lines,
                views=views,
                end=size,
            )
            layer_input = inputs[1] if len(inputs) > 1 else None
            _, normed, observed_outputs = self._compute(
                inputs[0],
                step,
                cache,
                list(blocks),
                placement,
                observed_layers,
                layer_input,
                last_norm,
            )
            return (normed,) if observed_outputs is None else (normed, observed_outputs)

        results = graphs.run(
            step_shape,
            (observed_layers, first_input is None or first_input.shape[2:], last_norm is None),
            (step, cache.past_lens[step.rows], find_lines(step, cache)),
            [x] if first_input is None else [x, first_input],
            compute,
        )
        if results is None:
            return None
        return results[0], results[1] if len(results) > 1 else None

    def _compute(  # noqa: PLR0913 - all that a step has
        self,
        x: Tensor,
        step: Step,
        cache: KVCache,
        blocks: Sequence[Tensor],
        placement: Any,
        observed_layers: tuple[int, ...],
        first_input: Tensor | None,
        last_norm: Norm | None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the layers on the device alone.

        placement: where keys go and what is seen, for `_attend`. last_norm: None where nothing is
        normed after the last layer. Returns the last output, the same normed, the observed ones.
        """
        stack, states, observed_outputs = self.stack, cache.states, []
        runs = begin_runs(step, cache)
        is_post_norm = stack.final_norm is None
        if first_input is not None:
            h = first_input
        else:
            h = x if is_post_norm else self._norm(x, stack.layers[0].input_norm)
        norms = [*(layer.input_norm for layer in stack.layers[1:]), last_norm]
        numbers = [None] * len(norms) if inputs is None else inputs.unbind(-2)
        parts, kept_products = stack.deal(blocks), dict[int | None, Tensor]()
        for index, (layer, next_norm) in enumerate(zip(stack.layers, norms, strict=True)):
            product = self._project(layer, h, kept_products.get(layer.source))
            if index in stack.sources:
                first_key = stack.num_heads * stack.get_heads(layer)[1]
                kept_products[index] = product[..., first_key:].clone()
            mixed = self._mix(layer, h, product, parts[index], placement, (states, runs))
            x, h = self._finish_layer(layer, x, h, (mixed, numbers[index]), next_norm)
            if index in observed_layers:
                observed_outputs.append(x.clone() if self.adds_in_place else x)
        if states is not None and runs is not None:
            states.finish(runs)
        return x, h, torch.cat(observed_outputs, dim=-1) if observed_outputs else None

    def _project(self, layer: Layer, h: Tensor, source_product: Tensor | None) -> Tensor:
        """Compute a layer's queries, keys and values; those of a source, but for the queries.

        Values are normed. Keys of a source are not rotated yet: they are written once more, to the
        same places as the same numbers.
        """
        product = layer.qkv(h)
        if source_product is not None:
            return torch.cat((product, source_product), dim=-1)
        if (norm := layer.attention.v_norm) is None:
            return product
        num_kv_heads, size = self.stack.get_heads(layer)
        first_value = product.shape[-1] - num_kv_heads * size
        values = product[..., first_value:].contiguous()
        values = values.view(*product.shape[:-1], num_kv_heads, size)
        return torch.cat((product[..., :first_value], self._norm(values, norm).flatten(-2)), dim=-1)

    def _mix(
        self, layer: Layer, h: Tensor, product: Tensor, block: Tensor | None, placement: Any,
        recurrence: tuple[LinearStates | None, Runs | None],
    ) -> Tensor:  # fmt: skip
        """Attend, or mix by a state, and return the output of `dense`.

        product: of queries, keys, values and gates, or what a layer with a state reads.
        """
        stack, (states, runs) = self.stack, recurrence
        if layer.recurrence is not None:
            assert states is not None
            assert runs is not None
            return layer.dense(layer.recurrence.mix(h, product, states, runs))
        assert block is not None
        num_kv_heads, size = stack.get_heads(layer)
        width = (stack.num_heads + 2 * num_kv_heads) * size
        mixed = self._attend(layer, product[..., :width], block, placement)
        return layer.dense(mixed * product[..., width:].sigmoid() if stack.has_gates else mixed)

    def _finish_layer(
        self, layer: Layer, x: Tensor, h: Tensor, added: tuple[Tensor, Tensor | None],
        next_norm: Norm | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Add attention and MLP to a layer's input; return the sum, and the next layer's input.

        added: what attention yields, and the token's own numbers [B, T, P], if the layer reads any.
        """
        mixed, numbers = added
        if self.stack.is_uneven:
            return self._finish_uneven(layer, x, mixed, numbers, next_norm)
        if self.stack.final_norm is None:
            _, x = self._add(x, mixed, None, layer.input_norm)
            _, x = self._add(x, self._run_mlp(layer, x), None, layer.post_norm)
            return x, x
        if layer.post_norm is None:
            mixed = mixed + self._run_mlp(layer, h)
        else:
            x, h = self._add(x, mixed, layer.dense_norm, layer.post_norm)
            mixed = self._run_mlp(layer, h)
        return self._add(x, mixed, layer.down_norm, next_norm)

    def _finish_uneven(
        self, layer: Layer, x: Tensor, mixed: Tensor, numbers: Tensor | None,
        next_norm: Norm | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Add all that a layer with parts of its own adds to its input, as `_finish_layer` does."""
        assert layer.post_norm is not None
        assert layer.down_norm is not None
        x, h = self._add(x, mixed, layer.dense_norm, layer.post_norm)
        delta = self.stack.sum(self._run_mlp(layer, h))
        if (mixture := layer.mixture) is not None:
            assert layer.experts is not None
            read, routed = (self._norm(x, n) for n in (mixture.input_norm, mixture.router_norm))
            of_experts = self.stack.sum(self._run_experts(layer.experts, read, routed))
            delta = self._norm(delta, mixture.mlp_norm)
            delta = delta + self._norm(of_experts, mixture.expert_norm)
        x = x + self._norm(delta, layer.down_norm)
        if (own := layer.inputs) is not None:
            assert numbers is not None
            gated = ACTIVATIONS[self.stack.activation](own.gate(x)) * numbers
            x = x + self._norm(own.proj(gated), own.norm)
        if layer.scalar is not None:
            x = x * layer.scalar
        return x, x if next_norm is None else self._norm(x, next_norm)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return norm(x)

    def _add(
        self, x: Tensor, partial: Tensor, own_norm: Norm | None, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Add what the ranks computed to a layer's input; return the sum, and the sum normed.

        own_norm: norm of what is added, before it is added.
        """
        delta = self.stack.sum(partial)
        delta = delta if own_norm is None else own_norm(delta)
        x = torch.add(x, delta, alpha=self.stack.share)
        return x, x if norm is None else norm(x)

    def _attend(self, layer: Layer, product: Tensor, block: Tensor, placement: Any) -> Tensor:
        """Write keys and values into a layer's part of the cache, [2, R, N, S, H], and attend.

        product: [B, T, heads of queries, keys and values * H]. placement: a `_Placement`.
        """
        rows, attention = placement.rows, layer.attention
        queries = self._write(layer, product, block, placement)
        first_position, mask = placement.views[attention.window]
        keys, values = (
            plane[:, :, first_position : placement.end] for plane in block
        )  # [R, N, S, H]
        if placement.is_prefix:
            keys, values = keys[: len(rows)], values[: len(rows)]
        else:
            keys, values = keys[rows], values[rows]
        return attend(queries, keys, values, mask, attention.scale, attention.cap, attention.sinks)

    def _write(self, layer: Layer, product: Tensor, block: Tensor, placement: Any) -> Tensor:
        """Write keys and values as `_attend` does; return the queries that attend, [B, T, N, H]."""
        stack, rows, slots = self.stack, placement.rows, placement.slots
        num_heads, (num_kv_heads, head_size) = stack.num_heads, stack.get_heads(layer)
        num_rotated = num_heads + num_kv_heads  # queries and keys
        qkv = product.view(*product.shape[:-1], -1, head_size)
        rotated, new_values = qkv[:, :, :num_rotated], qkv[:, :, num_rotated:]
        attention = layer.attention
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = rotated[:, :, :num_heads], rotated[:, :, num_heads:]
            rotated = torch.cat((attention.q_norm(q), attention.k_norm(k)), dim=2)
        if (table := attention.rotary) is not None:
            if table not in placement.angles:  # [B, T, 1, R], or [B, T, heads, R]
                placement.angles[table] = find_angles(
                    table, placement.lines, num_heads, num_kv_heads
                )
            rotated = rotate(rotated, *placement.angles[table])
        queries, new_keys = rotated[:, :, :num_heads], rotated[:, :, num_heads:]
        block[0][rows[:, None], :, slots] = new_keys
        block[1][rows[:, None], :, slots] = new_values
        return queries

    def _run_mlp(self, layer: Layer, h: Tensor) -> Tensor:
        if layer.experts is not None and layer.mixture is None:
            return self._run_experts(layer.experts, h)
        assert layer.up is not None
        assert layer.down is not None
        inner = layer.up(h)
        if self.stack.is_gated:
            return layer.down(self._gate(inner))
        return layer.down(ACTIVATIONS[self.stack.activation](inner))

    def _run_experts(self, experts: ExpertLayer, h: Tensor, routed: Tensor | None = None) -> Tensor:
        return experts(h, routed)

    def _gate(self, inner: Tensor) -> Tensor:
        """Activate the first half of [..., 2 * n] and multiply it by the other."""
        gate, up = inner.chunk(2, dim=-1)
        return ACTIVATIONS[self.stack.activation](gate) * up


def begin_runs(step: Step, cache: KVCache) -> Runs | None:
    """Begin a step of the states of linear attention; None where a cache has none."""
    if cache.states is None:
        return None
    past = find_past(step, cache)
    return cache.states.begin(step.rows, step.positions, past, step.counts, step.certain_counts)


def find_past(step: Step, cache: KVCache) -> IntArray:
    """Return the number of cached positions that each row of a step sees, [B]."""
    return cache.past_lens[step.rows] if step.past is None else step.past


def find_lines(step: Step, cache: KVCache) -> IntArray:
    """Return the lines of the rotary tables for a step's tokens, [B, T]."""
    lines: IntArray = step.positions + cache.rotary_starts[step.rows][:, None]
    return lines


def find_angles(
    table: RotaryTable, lines: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor]:
    """Find the cosines and sines of a step's tokens, whose lines are [B, T]: [B, T, 1, R].

    They are [B, T, heads of queries and keys, R] where queries have lines of their own.
    """
    lines = lines.unsqueeze(-1)
    if table.query_shift:
        heads = torch.arange(num_heads + num_kv_heads, device=lines.device)
        lines = lines + (heads < num_heads) * table.query_shift
    return table.cos[lines], table.sin[lines]


def build_full_mask(
    past: IntArray, tree_mask: BoolArray, positions: IntArray, size: int, window: int | None
) -> BoolArray:
    """Build the mask [B, 1, T, S] of committed positions and of the newest tokens.

    The newest tokens are seen as `tree_mask` [B, T, N] says.

    positions: [B, N], of the newest tokens, of which the last T are the step's own. size: S.
    window: positions that a token sees, itself included.
    """
    batch, num_tokens, num_new = tree_mask.shape
    mask = np.zeros((batch, 1, num_tokens, size), np.bool_)
    mask |= (np.arange(size) < past[:, None])[:, None, None, :]
    if window is not None:
        assert positions.shape == (batch, num_new)
        lowest = positions[:, num_new - num_tokens :, None] - window  # [B, T, 1]
        mask &= (np.arange(size) > lowest)[:, None]
        tree_mask = tree_mask & (positions[:, None, :] > lowest)
    for row, start in enumerate(past):
        mask[row, 0, :, start : start + num_new] = tree_mask[row]
    return mask
