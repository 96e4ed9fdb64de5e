"""The ways through a decoder's layers by the native kernels, on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.engine.delta_net import DeltaNet
from specdec.engine.experts import ExpertLayer
from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import GATES, Norm, name_activation
from specdec.engine.linear import Linear
from specdec.engine.mamba2 import Mamba2
from specdec.engine.native import NativeKernels
from specdec.engine.native_border import StepPlan
from specdec.engine.native_models import PackedLayers
from specdec.engine.native_states import MAMBA2, SHORT_CONV, PackedRecurrence
from specdec.engine.short_conv import ShortConv
from specdec.engine.step import Step
from specdec.engine.torch_layers import (
    Layer,
    Outcome,
    Recurrent,
    Stack,
    TorchLayers,
    begin_runs,
    find_lines,
    find_past,
)
from specdec.model.config import ModelConfig

# Activations by the numbers of the kernels that run all layers: of a plain MLP and of a gated one.
PLAIN_ACTIVATIONS = {
    **dict.fromkeys([name for name, kernel in GATES.items() if kernel == "gelu"], 1),
    "gelu": 2,
    "relu": 3,
}
GATED_ACTIVATIONS = {name: int(kernel == "gelu") for name, kernel in GATES.items()}


def describe_coverage(model: ModelConfig) -> str:
    """Name the operations of a model that have kernels; torch's own operators do the others."""
    activation = name_activation(model)
    covered = ["products", "norms", "attention", *(["experts"] if model.experts else [])]
    covered += ["linear attention"] if model.linear_attention is not None else []
    covered += ["short convolutions"] if model.short_conv is not None else []
    covered += ["Mamba-2"] if model.mamba2 is not None else []
    if model.arithmetic.mlp != "plain" and activation in GATES:
        return ", ".join([*covered, f"gated {activation}"])
    if model.arithmetic.mlp == "plain" and activation in PLAIN_ACTIVATIONS and model.tp_size == 1:
        return ", ".join([*covered, activation])
    return f"{', '.join(covered)}; torch computes {activation}"


class KernelLayers(TorchLayers):
    """Execution by a kernel at a time: between them ranks add up and torch may activate."""

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
        inputs: Tensor | None = None,
    ) -> Outcome:
        """Run the layers as `TorchLayers.run` does."""
        x = x if is_normed else x.clone(memory_format=torch.contiguous_format)
        plan, norm = plan_step(self.kernels, step, cache), self.stack.final_norm
        x, h, observed_outputs = self._compute(
            x, step, cache, cache.layers, plan, observed_layers, first_input, norm, inputs
        )
        return h if is_normed else x, observed_outputs

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self.kernels.norm(x, norm)

    def _add(
        self, x: Tensor, partial: Tensor, own_norm: Norm | None, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        assert norm is not None
        delta = self.stack.sum(partial)
        return x, self.kernels.add_norm(x, delta, norm, own_norm, self.stack.share)

    def _attend(self, layer: Layer, product: Tensor, block: Tensor, placement: StepPlan) -> Tensor:
        stack = self.stack
        return self.kernels.attend(
            product.contiguous(), block, layer.attention, placement,
            stack.num_heads, *stack.get_heads(layer),
        )  # fmt: skip

    def _run_experts(self, experts: ExpertLayer, h: Tensor, routed: Tensor | None = None) -> Tensor:
        if experts.packed is None:
            return super()._run_experts(experts, h, routed)
        return self.kernels.mix_experts(h, experts.packed, routed)

    def _gate(self, inner: Tensor) -> Tensor:
        activation = self.stack.activation
        if activation not in GATES:
            return super()._gate(inner)
        return self.kernels.gate_mul(inner, activation)


class NativeLayers:
    """Execution of all layers in one call."""

    def __init__(self, stack: Stack, kernels: NativeKernels, activation: int) -> None:
        """activation: the kernels' number of the stack's."""
        self.stack, self.kernels = stack, kernels
        self.packed = _pack(stack, activation)

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
        states, runs = cache.states, begin_runs(step, cache)
        normed, observed_outputs = self.kernels.run_layers(
            x, self.packed, cache.blocks, plan_step(self.kernels, step, cache), observed_layers,
            first_input, None if is_last_observed else step.output_mask, states,
        )  # fmt: skip
        if states is not None and runs is not None:
            states.finish(runs)
        return normed if is_normed else x, observed_outputs


def choose_native(stack: Stack, kernels: NativeKernels) -> NativeLayers | KernelLayers:
    """Choose the quickest way that a stack can go by the kernels."""
    activation_numbers = GATED_ACTIVATIONS if stack.is_gated else PLAIN_ACTIVATIONS
    activation = activation_numbers.get(stack.activation)
    is_usual = stack.final_norm is not None and not stack.has_gates and not stack.is_uneven
    is_usual = is_usual and not any(isinstance(x.recurrence, DeltaNet) for x in stack.layers)
    # One call takes matrices of one type: a checkpoint may leave some modules unquantized.
    if stack.group is not None or activation is None or not is_usual or len(_list_types(stack)) > 1:
        return KernelLayers(stack, kernels)
    return NativeLayers(stack, kernels, activation)


def _list_types(stack: Stack) -> set[torch.dtype]:
    """List the types of a stack's packed matrices, of experts too."""
    types = set()
    for layer in stack.layers:
        for linear in (layer.qkv, layer.dense, layer.up, layer.down):
            if linear is not None and linear.packed is not None:
                types.add(linear.packed.dtype)
        if layer.experts is not None and layer.experts.packed is not None:
            types.add(layer.experts.packed.matrix_dtype)
    return types


def plan_step(kernels: NativeKernels, step: Step, cache: KVCache) -> StepPlan:
    """Return a step's indices as the kernels take them."""
    return kernels.plan_step(
        step.rows, step.mask_positions, find_lines(step, cache), find_past(step, cache),
        step.tree_mask,
    )  # fmt: skip


def _pack(stack: Stack, activation: int) -> PackedLayers:
    weights = []
    for layer in stack.layers:
        modules: dict[str, Linear | Norm | None] = {
            "norm": layer.input_norm, "qkv": layer.qkv, "dense": layer.dense,
            "post": layer.post_norm, "up": layer.up, "down": layer.down,
            "dense_norm": layer.dense_norm, "down_norm": layer.down_norm,
        }  # fmt: skip
        row: dict[str, Tensor | None] = {}
        for name, module in modules.items():
            if module is not None:
                row[name] = module.packed if isinstance(module, Linear) else module.weight
                row[f"{name}_bias"] = module.bias
        for name, norm in (("q_norm", layer.attention.q_norm), ("k_norm", layer.attention.k_norm)):
            row[name] = norm.weight if norm is not None else None
        weights.append(row)
    experts = {
        index: layer.experts.packed for index, layer in enumerate(stack.layers)
        if layer.experts is not None and layer.experts.packed is not None
    }  # fmt: skip
    recurrences = {
        index: _pack_recurrence(layer.recurrence, layer.input_norm.weight.dtype)
        for index, layer in enumerate(stack.layers) if layer.recurrence is not None
    }  # fmt: skip
    return PackedLayers(weights, stack, activation, experts, recurrences)


def _pack_recurrence(layer: Recurrent, dtype: torch.dtype) -> PackedRecurrence:
    if isinstance(layer, ShortConv):
        return PackedRecurrence(dtype, SHORT_CONV, layer, None, (layer.bias,))
    assert isinstance(layer, Mamba2)
    vectors = layer.conv_bias, layer.decay, layer.bias, layer.skip
    return PackedRecurrence(dtype, MAMBA2, layer, layer.norm, vectors)
