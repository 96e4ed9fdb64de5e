"""The ways through a decoder's layers by the native kernels, on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import Norm
from specdec.engine.linear import Linear
from specdec.engine.native import (
    GATED_ACTIVATIONS,
    GATES,
    PLAIN_ACTIVATIONS,
    NativeKernels,
    PackedLayers,
    StepPlan,
)
from specdec.engine.step import Step
from specdec.engine.torch_layers import (
    Layer,
    Outcome,
    Stack,
    TorchLayers,
    find_lines,
    find_past,
)


class KernelLayers(TorchLayers):
    """A kernel at a time: between them ranks add up, and torch computes unusual activations."""

    adds_in_place = True

    def __init__(self, stack: Stack, kernels: NativeKernels) -> None:
        super().__init__(stack)
        self.kernels = kernels

    def run(
        self,
        x: Tensor,
        step: Step,
        cache: KVCache,
        observed_layers: tuple[int, ...],
        first_input: Tensor | None = None,
        *,
        is_normed: bool = False,
    ) -> Outcome:
        """Run the layers as `TorchLayers.run` does."""
        x = x if is_normed else x.clone(memory_format=torch.contiguous_format)
        plan, norm = plan_step(self.kernels, step, cache), self.stack.final_norm
        x, h, seen = self._compute(
            x, step, cache, cache.blocks, plan, observed_layers, first_input, norm
        )
        return h if is_normed else x, seen

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self.kernels.norm(x, norm)

    def _add(
        self, x: Tensor, partial: Tensor, own_norm: Norm | None, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        assert norm is not None
        added = self.stack.sum(partial)
        return x, self.kernels.add_norm(x, added, norm, own_norm, self.stack.share)

    def _attend(self, layer: Layer, product: Tensor, block: Tensor, place: StepPlan) -> Tensor:
        stack = self.stack
        return self.kernels.attend(
            product.contiguous(), block, layer.attention, place,
            stack.num_heads, stack.num_kv_heads, stack.head_size,
        )  # fmt: skip

    def _run_mlp(self, layer: Layer, h: Tensor) -> Tensor:
        if layer.experts is not None and layer.experts.packed is not None:
            return self.kernels.mix_experts(h, layer.experts.packed)
        return super()._run_mlp(layer, h)

    def _gate(self, inner: Tensor) -> Tensor:
        activation = self.stack.activation
        if activation not in GATES:
            return super()._gate(inner)
        return self.kernels.gate_mul(inner, activation)


class NativeLayers:
    """All layers in one call."""

    def __init__(self, stack: Stack, kernels: NativeKernels, activation: int) -> None:
        """activation: the kernels' number of the stack's."""
        self.stack, self.kernels = stack, kernels
        self._packed = _pack(stack, activation)

    def run(
        self,
        x: Tensor,
        step: Step,
        cache: KVCache,
        observed_layers: tuple[int, ...],
        first_input: Tensor | None = None,
        *,
        is_normed: bool = False,
    ) -> Outcome:
        """Run the layers as `TorchLayers.run` does."""
        x = x if is_normed else x.clone(memory_format=torch.contiguous_format)
        is_last_observed = len(self.stack.layers) - 1 in observed_layers
        normed, seen = self.kernels.run_layers(
            x, self._packed, cache.blocks, plan_step(self.kernels, step, cache), observed_layers,
            first_input, None if is_last_observed else step.wanted,
        )  # fmt: skip
        return normed if is_normed else x, seen


def choose_native(stack: Stack, kernels: NativeKernels) -> NativeLayers | KernelLayers:
    """The quickest way that a stack can go by the kernels."""
    known = GATED_ACTIVATIONS if stack.is_gated else PLAIN_ACTIVATIONS
    activation = known.get(stack.activation)
    types = {
        part.packed.dtype
        for layer in stack.layers
        for part in (layer.qkv, layer.dense, layer.up, layer.down)
        if part is not None and part.packed is not None
    } | {
        layer.experts.packed.matrix_dtype
        for layer in stack.layers
        if layer.experts is not None and layer.experts.packed is not None
    }  # of which one call takes one: a checkpoint may leave some modules unquantized
    if (
        stack.group is not None or activation is None or stack.final_norm is None or len(types) > 1
        or stack.has_gates or any(layer.linear is not None for layer in stack.layers)
    ):  # fmt: skip
        return KernelLayers(stack, kernels)
    return NativeLayers(stack, kernels, activation)


def plan_step(kernels: NativeKernels, step: Step, cache: KVCache) -> StepPlan:
    """A step's indices, as the kernels take them."""
    return kernels.plan_step(
        step.rows, step.mask_positions, find_lines(step, cache), find_past(step, cache),
        step.tree_mask,
    )  # fmt: skip


def _pack(stack: Stack, activation: int) -> PackedLayers:
    weights = []
    for layer in stack.layers:
        parts: dict[str, Linear | Norm | None] = {
            "norm": layer.input_norm, "qkv": layer.qkv, "dense": layer.dense,
            "post": layer.post_norm, "up": layer.up, "down": layer.down,
            "dense_norm": layer.dense_norm, "down_norm": layer.down_norm,
        }  # fmt: skip
        row: dict[str, Tensor | None] = {}
        for name, part in parts.items():
            if part is not None:
                row[name] = part.packed if isinstance(part, Linear) else part.weight
                row[f"{name}_bias"] = part.bias
        for name, norm in (("q_norm", layer.attention.q_norm), ("k_norm", layer.attention.k_norm)):
            row[name] = norm.weight if norm is not None else None
        weights.append(row)
    experts = [layer.experts for layer in stack.layers]
    packed = [e.packed for e in experts if e is not None and e.packed is not None]
    return PackedLayers(weights, stack, activation, packed)
