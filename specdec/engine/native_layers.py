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
    begin_runs,
    find_lines,
    find_past,
    finish_runs,
)


class KernelLayers(TorchLayers):
    """A kernel at a time: between them ranks add up, and torch computes unusual activations."""

    def __init__(self, stack: Stack, kernels: NativeKernels) -> None:
        super().__init__(stack)
        self.kernels = kernels

    def run_normed(
        self, x: Tensor, step: Step, cache: KVCache, observed_layers: tuple[int, ...]
    ) -> Outcome:
        """`run`, the last output normed; x [B, T, D] is overwritten."""
        stack, kernels = self.stack, self.kernels
        plan, runs = plan_step(kernels, step, cache), begin_runs(step, cache)
        norm = stack.final_norm
        h = x if norm is None else kernels.norm(x, stack.layers[0].input_norm)
        seen = []
        for index, (layer, at) in enumerate(zip(stack.layers, stack.places, strict=True)):
            if layer.linear is None:
                attended = self._attend_by_kernel(layer, h, cache.blocks[at], plan)
            else:
                assert cache.states is not None
                assert runs is not None
                attended = layer.linear.run(layer.qkv(h), layer.linear.ba(h), cache.states, runs)
            mixed = layer.dense(attended)
            if norm is None:
                assert layer.post_norm is not None
                x = kernels.add_norm(x, stack.sum(mixed), layer.input_norm)
                x = h = kernels.add_norm(x, stack.sum(self._run_mlp(layer, x)), layer.post_norm)
                if index in observed_layers:
                    seen.append(h.clone())  # which the next layer overwrites
                continue
            if layer.post_norm is None:
                mixed = mixed + self._run_mlp(layer, h)
            else:
                h = kernels.add_norm(
                    x, stack.sum(mixed), layer.post_norm, layer.dense_norm, stack.share
                )
                mixed = self._run_mlp(layer, h)
            following = stack.layers[index + 1 :]
            h = kernels.add_norm(
                x, stack.sum(mixed), following[0].input_norm if following else norm,
                layer.down_norm, stack.share,
            )  # fmt: skip
            if index in observed_layers:
                seen.append(x.clone())
        finish_runs(runs, cache)
        return h, torch.cat(seen, dim=-1) if seen else None

    def _attend_by_kernel(self, layer: Layer, h: Tensor, block: Tensor, plan: StepPlan) -> Tensor:
        stack, product = self.stack, layer.qkv(h)
        width = (stack.num_heads + 2 * stack.num_kv_heads) * stack.head_size
        qkv = product[..., :width].contiguous() if stack.has_gates else product
        out = self.kernels.attend(
            qkv, block, layer.attention, plan, stack.num_heads, stack.num_kv_heads, stack.head_size
        )
        return out * product[..., width:].sigmoid() if stack.has_gates else out

    def _run_mlp(self, layer: Layer, h: Tensor) -> Tensor:
        activation = self.stack.activation
        if layer.experts is not None and layer.experts.packed is not None:
            return self.kernels.mix_experts(h, layer.experts.packed)
        if self.stack.is_gated and activation in GATES:
            assert layer.up is not None
            assert layer.down is not None
            return layer.down(self.kernels.gate_mul(layer.up(h), activation))
        return super()._run_mlp(layer, h)


class NativeLayers:
    """All layers in one call."""

    def __init__(self, stack: Stack, kernels: NativeKernels, activation: int) -> None:
        """activation: the kernels' number of the stack's."""
        self.stack, self.kernels = stack, kernels
        self._packed = _pack(stack, activation)

    def run_normed(
        self, x: Tensor, step: Step, cache: KVCache, observed_layers: tuple[int, ...]
    ) -> Outcome:
        """`run`, the last output normed; x [B, T, D] is overwritten."""
        return self._call(x, step, cache, observed_layers, None)

    def run(
        self,
        x: Tensor,
        step: Step,
        cache: KVCache,
        observed_layers: tuple[int, ...],
        first_input: Tensor | None = None,
    ) -> Outcome:
        """Run the layers as `TorchLayers.run` does."""
        x = x.clone(memory_format=torch.contiguous_format)  # which the call overwrites
        _, observed = self._call(x, step, cache, observed_layers, first_input)
        return x, observed

    def _call(
        self,
        x: Tensor,
        step: Step,
        cache: KVCache,
        observed_layers: tuple[int, ...],
        first_input: Tensor | None,
    ) -> Outcome:
        is_last_observed = len(self.stack.layers) - 1 in observed_layers
        return self.kernels.run_layers(
            x, self._packed, cache.blocks, plan_step(self.kernels, step, cache), observed_layers,
            first_input, None if is_last_observed else step.wanted,
        )  # fmt: skip


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
        step.rows, step.positions, find_lines(step, cache), find_past(step, cache),
        step.tree_mask,
    )  # fmt: skip


def _pack(stack: Stack, activation: int) -> PackedLayers:
    final = stack.final_norm
    assert final is not None
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
    up, experts = stack.layers[0].up, [layer.experts for layer in stack.layers]
    return PackedLayers(
        weights, (final.weight, final.bias), hidden=len(final.weight), num_heads=stack.num_heads,
        num_kv_heads=stack.num_kv_heads, head_size=stack.head_size,
        inner=up.num_outputs // (2 if stack.is_gated else 1) if up is not None else 0,
        experts=[e.packed for e in experts if e is not None and e.packed is not None],
        activation=activation, is_gated=stack.is_gated,
        attending=[layer.attention for layer in stack.layers], share=stack.share,
        epsilon=final.epsilon,
    )  # fmt: skip
