"""Maker of a decoder's modules: its layers and tables, from weights by their canonical names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.engine.blocks import BlockMatrix
from specdec.engine.delta_net import DeltaNet
from specdec.engine.experts import ExpertLayer, Router
from specdec.engine.float8 import Float8Linear
from specdec.engine.group import Group
from specdec.engine.integers import (
    IntegerMatrix,
    find_tensor,
    lay_out,
    list_experts,
    take_matrix,
    take_tensor,
)
from specdec.engine.layers import Attention, CutGate, Norm, name_activation
from specdec.engine.linear import Linear
from specdec.engine.mamba2 import Mamba2
from specdec.engine.native import NativeKernels
from specdec.engine.native_matrices import KernelMatrix, Weight
from specdec.engine.rotary import RotaryTable
from specdec.engine.short_conv import ShortConv
from specdec.engine.torch_layers import Layer, LayerInputs, Mixture, Recurrent, Stack
from specdec.model.config import ModelConfig, Recurrence
from specdec.model.linear_attention import LinearAttention
from specdec.model.mamba2 import Mamba2Sizes
from specdec.model.quantization import SCALES
from specdec.model.short_conv import ShortConvSizes
from specdec.model.tensors import (
    ADDED_EXPERTS,
    CONV_MODULE,
    DENSE_MODULE,
    LAYER_INPUT_NORM,
    LAYER_INPUTS,
    LINEAR_MODULE,
    MAMBA_MODULE,
    ROUTER,
    ROUTER_BIAS,
    SCORE_BIAS,
)

Table = Tensor | BlockMatrix | KernelMatrix  # whose rows are looked up


@dataclasses.dataclass(frozen=True)
class InputTable:
    """Tables of what all layers read of tokens, [V, L * P], and how embeddings add to it.

    proj: of embeddings. norm: of each layer's P numbers of that.
    """

    table: Table
    proj: Linear
    norm: Norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleMaker:
    """Maker of a decoder's modules from its weights, laid out for the machine.

    tables: of rotations, the second one that of layers with a window.
    """

    model: ModelConfig
    weights: Mapping[str, Weight]
    rank: int
    tables: tuple[RotaryTable | None, RotaryTable | None]
    prepack: bool
    kernels: NativeKernels | None

    def make_linear(self, name: str, *, is_summed: bool = False) -> Linear:
        """Make a linear; is_summed: its products are summed over the ranks, the first adds bias."""
        weights, prepack, kernels = self.weights, self.prepack, self.kernels
        weight = weights[name + ".weight"]
        bias = None if is_summed and self.rank else find_tensor(weights, name + ".bias")
        if isinstance(weight, Tensor) and weight.dtype is torch.float8_e4m3fn:
            weight_scales, input_scale = (take_tensor(weights, f"{name}.{kind}") for kind in SCALES)
            return Float8Linear(weight, weight_scales, input_scale, bias)
        return lay_out(take_matrix(weights, name), bias, prepack=prepack, kernels=kernels)

    def make_norm(self, name: str) -> Norm:
        has_bias = self.model.arithmetic.norm == "layer"
        bias = take_tensor(self.weights, name + ".bias") if has_bias else None
        arithmetic = self.model.arithmetic
        return Norm(
            take_tensor(self.weights, name + ".weight"), bias, self.model.norm_epsilon,
            arithmetic.norm_offset,
        )  # fmt: skip

    def make_stack(self, group: Group | None) -> Stack:
        """Make all layers of the rank."""
        model, arithmetic = self.model, self.model.arithmetic
        return Stack(
            layers=[self.make_layer(index, group) for index in range(model.num_hidden_layers)],
            final_norm=None if arithmetic.is_post_norm else self.make_norm("transformer.ln_f"),
            num_heads=model.num_attention_heads // model.tp_size,
            num_kv_heads=model.get_num_kv_heads(),
            head_size=model.head_size,
            activation=name_activation(model),
            is_gated=arithmetic.mlp != "plain",
            group=group,
            share=model.residual_multiplier,
            has_gates=arithmetic.gates_attention,
            is_uneven=model.layer_sizes is not None,
        )

    def make_layer_inputs(self) -> InputTable | None:
        """Make the tables that layers read besides one another; None where there are none."""
        if self.model.layer_sizes is None or not self.model.layer_sizes.input_size:
            return None
        table = take_matrix(self.weights, LAYER_INPUTS.removesuffix(".weight"))
        assert not isinstance(table, IntegerMatrix)
        proj = self.make_linear("transformer.layer_input_proj")
        return InputTable(table, proj, self.make_norm(LAYER_INPUT_NORM))

    def _make_uneven(self, index: int, prefix: str) -> dict[str, Any]:
        """Make the parts that no usual layer has, by the names of `Layer`."""
        model, parts = self.model, dict[str, Any](source=self.model.get_source(index))
        if model.layer_sizes is not None and model.layer_sizes.input_size:
            parts["inputs"] = LayerInputs(
                self.make_linear(prefix + "input_gate"), self.make_linear(prefix + "input_proj"),
                self.make_norm(prefix + "post_input_layernorm"),
            )  # fmt: skip
        if model.arithmetic.scales_layers:
            parts["scalar"] = take_tensor(self.weights, prefix + "scalar.weight")
        if model.arithmetic.adds_experts:
            names = ("post_layernorm", "experts.post_layernorm", "experts.pre_layernorm")
            own_norm, post_norm, pre_norm = (
                self.make_norm(f"{prefix}mlp.{name}") for name in names
            )
            router_norm = self._make_plain_norm(model.hidden_size)
            parts["mixture"] = Mixture(own_norm, post_norm, pre_norm, router_norm)
        return parts

    def _make_plain_norm(self, size: int) -> Norm:
        """Make a norm without weights."""
        like = take_tensor(self.weights, "transformer.ln_f.weight")
        return Norm(like.new_ones(size), None, self.model.norm_epsilon)

    def make_layer(self, index: int, group: Group | None = None) -> Layer:
        prefix, arithmetic = f"transformer.layers.{index}.", self.model.arithmetic
        post_norm = None if arithmetic.is_parallel else self.make_norm(prefix + "post_layernorm")
        dense_norm = down_norm = None
        if arithmetic.inner_norms:
            dense_norm, post_norm = post_norm, self.make_norm(prefix + "pre_feedforward_layernorm")
            down_norm = self.make_norm(prefix + "post_feedforward_layernorm")
        up, down = "mlp.fc" if arithmetic.mlp == "plain" else "mlp.gate_up", "mlp.proj"
        if arithmetic.mlp == "experts":
            up, down = f"{DENSE_MODULE}fc", f"{DENSE_MODULE}proj"
        has_experts = self.model.get_experts(index) is not None
        has_mlp = not has_experts or arithmetic.adds_experts
        recurrence, mixer, product = self._make_recurrence(index, prefix, group)
        parts = self._make_uneven(index, prefix)
        product = product if parts["source"] is None else "q"
        return Layer(
            attention=self.make_attention(
                index, prefix + "attention.", has_norms=recurrence is None
            ),
            input_norm=self.make_norm(prefix + "input_layernorm"),
            qkv=self.make_linear(prefix + mixer + product),
            dense=self.make_linear(f"{prefix}{mixer}dense", is_summed=True),
            recurrence=recurrence,
            post_norm=post_norm,
            up=self.make_linear(prefix + up) if has_mlp else None,
            down=self.make_linear(prefix + down, is_summed=True) if has_mlp else None,
            experts=self._make_experts(prefix) if has_experts else None,
            dense_norm=dense_norm,
            down_norm=down_norm,
            **parts,
        )

    def _make_recurrence(
        self, index: int, prefix: str, group: Group | None
    ) -> tuple[Recurrent | None, str, str]:
        """Make what a layer has in place of attention; return it, its module and first product."""
        sizes, layer_types = self.model.get_recurrence(index), self.model.layer_types
        if sizes is None or layer_types is None:
            return None, "attention.", "qkv"
        number = layer_types[:index].count(layer_types[index])
        if isinstance(sizes, ShortConvSizes):
            short_conv = self._make_short_conv(sizes, number, prefix + CONV_MODULE)
            return short_conv, CONV_MODULE, "in_proj"
        if isinstance(sizes, Mamba2Sizes):
            mamba2 = self._make_mamba2(sizes, number, prefix + MAMBA_MODULE, group)
            return mamba2, MAMBA_MODULE, "in_proj"
        delta_net = self._make_delta_net(sizes, number, prefix + LINEAR_MODULE)
        return delta_net, LINEAR_MODULE, "qkvz"

    def _make_mamba2(
        self, sizes: Mamba2Sizes, number: int, prefix: str, group: Group | None
    ) -> Mamba2:
        model, weights = self.model, self.weights
        rank_sizes = sizes.split(model.tp_size)
        bias = take_tensor(weights, prefix + "channels.bias").float() if sizes.conv_bias else None
        return Mamba2(
            sizes=rank_sizes,
            index=number,
            taps=self._take_taps(rank_sizes, prefix),
            conv_bias=bias,
            decay=-take_tensor(weights, prefix + "A_log").exp(),
            bias=take_tensor(weights, prefix + "dt_bias"),
            skip=take_tensor(weights, prefix + "D"),
            norm=Norm(take_tensor(weights, prefix + "norm.weight"), None, model.norm_epsilon),
            group=None if sizes.splits_groups(model.tp_size) else group,
            kernels=self.kernels,
        )

    def _make_short_conv(self, sizes: ShortConvSizes, number: int, prefix: str) -> ShortConv:
        rank_sizes = sizes.split(self.model.tp_size)
        bias = take_tensor(self.weights, prefix + "conv.bias").float() if sizes.has_bias else None
        return ShortConv(
            sizes=rank_sizes,
            index=number,
            taps=self._take_taps(rank_sizes, prefix),
            bias=bias,
            kernels=self.kernels,
        )

    def _take_taps(self, sizes: Recurrence, prefix: str) -> Tensor:
        """Take the taps of a convolution [taps, C], which is stored channel by channel."""
        taps = take_tensor(self.weights, prefix + "conv.weight").float()
        return taps.view(sizes.num_channels, sizes.num_taps).T.contiguous()

    def _make_delta_net(self, sizes: LinearAttention, number: int, prefix: str) -> DeltaNet:
        model, weights = self.model, self.weights
        rank_sizes = sizes.split(model.tp_size)
        return DeltaNet(
            sizes=rank_sizes,
            index=number,
            ba=self.make_linear(prefix + "ba"),
            taps=self._take_taps(rank_sizes, prefix),
            decay=-take_tensor(weights, prefix + "A_log").exp(),
            bias=take_tensor(weights, prefix + "dt_bias"),
            norm=Norm(take_tensor(weights, prefix + "norm.weight"), None, model.norm_epsilon),
            kernels=self.kernels,
        )

    def make_attention(self, index: int, prefix: str, *, has_norms: bool = True) -> Attention:
        model, arithmetic = self.model, self.model.arithmetic
        is_sliding, sizes = model.is_sliding(index), model.resize(index)
        is_rotated = index not in arithmetic.layers_without_positions
        q_norm = k_norm = None
        if arithmetic.qk_norm and has_norms:
            source = model.get_source(index)
            key_prefix = prefix if source is None else f"transformer.layers.{source}.attention."
            q_norm, k_norm = (
                self._make_head_norm(name)
                for name in (f"{prefix}q_layernorm", f"{key_prefix}k_layernorm")
            )
        has_heads = model.layer_sizes is not None
        has_sinks = arithmetic.has_sinks and has_norms
        return Attention(
            scale=model.attention_scale, cap=model.attn_logit_softcapping,
            window=model.sliding_window if is_sliding else None,
            rotary=self.tables[is_sliding] if is_rotated else None, q_norm=q_norm, k_norm=k_norm,
            sinks=take_tensor(self.weights, f"{prefix}sinks").clone() if has_sinks else None,
            v_norm=self._make_plain_norm(sizes.head_size) if arithmetic.norms_values else None,
            heads=(sizes.get_num_kv_heads(), sizes.head_size) if has_heads else None,
        )  # fmt: skip

    def _make_head_norm(self, name: str) -> Norm:
        weight = take_tensor(self.weights, f"{name}.weight")
        return Norm(weight, None, self.model.norm_epsilon, self.model.arithmetic.norm_offset)

    def _make_experts(self, prefix: str) -> ExpertLayer:
        sizes, weights = self.model.experts, self.weights
        assert sizes is not None
        arithmetic, shared_expert = self.model.arithmetic, None
        module = prefix + (ADDED_EXPERTS if arithmetic.adds_experts else "mlp.")
        up, down = (self._make_matrices(module + name) for name in ("fc", "proj"))
        activation: str | CutGate = name_activation(self.model)
        if arithmetic.gate_limit is not None:
            activation = CutGate(arithmetic.gate_limit, arithmetic.gate_slope)
        if sizes.shared_inner:
            name = prefix + sizes.shared_name
            # Not in a file that may be let go.
            gate = find_tensor(weights, f"{name}_gate.weight")
            gate = None if gate is None else gate.clone()
            up_linear, down_linear = (self.make_linear(f"{name}.{kind}") for kind in ("fc", "proj"))
            shared_expert = up_linear, down_linear, gate
        return ExpertLayer(
            sizes, self.rank, activation, self._make_router(prefix), up, down, shared_expert,
            self.kernels,
        )  # fmt: skip

    def _make_router(self, prefix: str) -> Router:
        """Make a layer's router, whose weights take in the scales of what it reads."""
        weights, weight = self.weights, take_tensor(self.weights, prefix + ROUTER)
        if not self.model.arithmetic.adds_experts:
            biases = (find_tensor(weights, prefix + name) for name in (ROUTER_BIAS, SCORE_BIAS))
            return Router(weight, *biases)
        scale = take_tensor(weights, prefix + "mlp.router.scale").float()
        scales = take_tensor(weights, prefix + "mlp.router.per_expert_scale").float()
        return Router(weight * (scale * self.model.hidden_size**-0.5), scales=scales)

    def _make_matrices(self, name: str) -> list[Linear]:
        """Make the linears of the rank's experts, whose matrices lie in one tensor."""
        matrices = list_experts(self.weights, name)
        return [
            lay_out(matrix, bias, prepack=self.prepack, kernels=self.kernels)
            for matrix, bias in zip(matrices, self._cut_biases(name, len(matrices)), strict=True)
        ]

    def _cut_biases(self, name: str, count: int) -> Sequence[Tensor | None]:
        """Return the biases of the rank's experts: of sums over ranks the first part's alone."""
        sizes, biases = self.model.experts, find_tensor(self.weights, f"{name}.bias")
        assert sizes is not None
        part, is_summed = sizes.get_part(self.rank), name.endswith("proj")
        if biases is None or (is_summed and part):
            return [None] * count
        experts = sizes.list_rank_experts(self.rank)
        rows = biases.view(sizes.num, -1)[experts.start : experts.stop]
        if not is_summed:  # the part's rows of both halves
            rows = torch.cat([half.chunk(sizes.tp_size, 1)[part] for half in rows.chunk(2, 1)], 1)
        return list(rows.clone().unbind())
