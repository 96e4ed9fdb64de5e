"""The networks of a target: its layers over one step, and its head, from the architecture's flags.

The layers' network reads tokens and their places, and writes keys and values into caches that stay
where they are. A token of a step sees what the mask says, so a step is a piece of a prompt or a
draft tree. The head is a network of its own: logits are computed of the tokens that are read only,
and a drafter may have the target's head.

Legend: B rows, T tokens of each, N heads, S cache positions, H head size, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.engine.decoder import cut_head
from specdec.engine.layers import name_activation
from specdec.engine.rotary import make_tables
from specdec.model.config import ModelConfig
from specdec.model.tensors import EMBEDDING, HEAD
from specdec.trt.matrices import multiply
from specdec.trt.network import NetworkWriter

CPU = torch.device("cpu")
# TensorRT's name of what `hidden_act` may be, by the keys of ACTIVATIONS.
ACTIVATIONS = {
    "silu": "SILU", "swiglu": "SILU", "relu": "RELU", "gelu": "GELU_ERF", "gelu_tanh": "GELU_TANH",
    "gelu_new": "GELU_TANH", "gelu_fast": "GELU_TANH", "gelu_pytorch_tanh": "GELU_TANH",
}  # fmt: skip
# The flags of `Architecture` that the networks follow; another is refused by name.
COMPUTED = frozenset({
    "norm", "positions", "mlp", "is_parallel", "qkv_bias", "dense_bias", "mlp_bias", "head_bias",
    "scales_embedding", "exact_gelu", "activations", "norm_epsilon", "qk_norm", "is_post_norm",
    "inner_norms", "window_pattern", "layers_without_positions",
})  # fmt: skip


def list_masks(model: ModelConfig) -> dict[str, int | None]:
    """Return the masks' inputs, each with the window of its layers, None for all tokens."""
    kinds = {model.is_sliding(layer) for layer in range(model.num_hidden_layers)}
    windows = {False: ("mask", None), True: ("window_mask", model.sliding_window)}
    return dict(windows[kind] for kind in sorted(kinds))


class LayersWriter:
    """Writes a model's layers into a network, with the inputs that they read besides states."""

    def __init__(
        self, writer: NetworkWriter, model: ModelConfig, weights: Mapping[str, Tensor]
    ) -> None:
        self.writer, self.model, self.weights = writer, model, weights
        self._num_heads = model.num_attention_heads // model.tp_size
        self._num_kv_heads = model.get_num_kv_heads()
        self.tokens = writer.add_input("tokens", torch.int64, "B", "T")
        self.positions = writer.add_input("positions", torch.int64, "B", "T")
        self._write_indices = writer.add_input("write_indices", torch.int32, "B")
        self._masks = {
            name: writer.add_input(name, torch.bool, "B", 1, "T", writer.sizes.positions)
            for name in list_masks(model)
        }
        self._lengths: Any = None
        if writer.has_lengths and model.attn_logit_softcapping is None:
            self._lengths = writer.add_input("lengths", torch.int32, "B")
        # Cosines and sines of half a head, of layers without a window and with one.
        self._tables: list[tuple[Any, ...]] = []
        if model.arithmetic.positions == "rotary":
            half = model.rotary_size // 2
            tables = make_tables(model, writer.sizes.positions, writer.dtype, CPU)
            layer_tables = []
            for table in dict.fromkeys(tables):
                starts = dict.fromkeys((table.query_shift, 0))
                num_lines = len(table.cos) // len(starts)
                scales = [
                    tuple(
                        writer.constant(table_half[start : start + num_lines, :half])
                        for table_half in (table.cos, table.sin)
                    )
                    for start in starts
                ]
                layer_tables.append((scales[0], scales[-1]))  # of queries and keys
            self._tables = [layer_tables[0], layer_tables[-1]]

    def embed(self) -> Any:
        """Return the input embeddings, [B, T, D]."""
        writer, model = self.writer, self.model
        x = self._look_up(EMBEDDING, self.tokens)
        scale = model.embedding_multiplier
        if model.arithmetic.scales_embedding:  # rounded first, as the family was trained
            scale *= float(torch.tensor(model.hidden_size**0.5, dtype=writer.dtype))
        x = writer.scale(x, scale)
        if model.arithmetic.positions == "learned":
            name = "transformer.position_embedding.weight"
            x = writer.add(x, self._look_up(name, self.positions))
        meet = writer.join_ranks if model.embedding_sharding_dim == 1 else writer.sum_ranks
        return meet(x, model.tp_size) if model.use_parallel_embedding else x

    def _look_up(self, name: str, indices: Any) -> Any:
        """Look up rows [B, T, ...] of a table; zeros where another rank has the row."""
        writer, model, table = self.writer, self.model, self.weights[name]
        rows = writer.constant(table)
        has_all = not model.use_parallel_embedding or model.embedding_sharding_dim == 1
        if has_all or model.tp_size == 1:
            return writer.gather(rows, indices)

        first_token, zero, last_index = (
            writer.number(value, 2, torch.int64)
            for value in (writer.rank * len(table), 0, len(table) - 1)
        )
        shard_indices = writer.combine("SUB", indices, first_token)
        clamped_indices = writer.combine(
            "MIN", writer.combine("MAX", shard_indices, zero), last_index
        )
        is_own = writer.reshape(writer.combine("EQUAL", shard_indices, clamped_indices), (0, 0, 1))
        return writer.select(is_own, writer.gather(rows, clamped_indices), writer.number(0, 3))

    def norm(self, x: Any, name: str) -> Any:
        weight, epsilon = self.weights[name + ".weight"], self.model.norm_epsilon
        if self.model.arithmetic.norm == "layer":
            return self.writer.layer_norm(x, weight, self.weights[name + ".bias"], epsilon)
        return self.writer.rms_norm(x, weight, epsilon)

    def run(
        self, x: Any, observed_layers: Sequence[int] = (), first_input: Any = None
    ) -> tuple[Any, list[Any]]:
        """Return all layers; the last output, not normed, and those of observed layers.

        first_input: what the first layer's attention reads instead of its normed input.
        """
        layer_outputs = []
        for index in range(self.model.num_hidden_layers):
            x = self._run_layer(index, x, first_input if index == 0 else None)
            if index in observed_layers:
                layer_outputs.append(x)
        return x, layer_outputs

    def _run_layer(self, index: int, x: Any, first_input: Any) -> Any:
        arithmetic, prefix = self.model.arithmetic, f"transformer.layers.{index}."
        if arithmetic.is_post_norm:
            x = self.norm(self._add(x, self._attend(index, x)), prefix + "input_layernorm")
            return self.norm(self._add(x, self._run_mlp(prefix, x)), prefix + "post_layernorm")
        h = self.norm(x, prefix + "input_layernorm") if first_input is None else first_input
        attended = self._attend(index, h)
        if arithmetic.is_parallel:
            return self._add(x, self.writer.add(attended, self._run_mlp(prefix, h)))
        if not arithmetic.inner_norms:
            x = self._add(x, attended)
            h = self.norm(x, prefix + "post_layernorm")
            return self._add(x, self._run_mlp(prefix, h))
        x = self._add(x, attended, prefix + "post_layernorm")
        h = self._run_mlp(prefix, self.norm(x, prefix + "pre_feedforward_layernorm"))
        return self._add(x, h, prefix + "post_feedforward_layernorm")

    def _add(self, x: Any, partial: Any, norm: str | None = None) -> Any:
        """Add the ranks' summed update to a layer's input, after a norm where there is one."""
        update = self.writer.sum_ranks(partial, self.model.tp_size)
        update = update if norm is None else self.norm(update, norm)
        return self.writer.add(x, self.writer.scale(update, self.model.residual_multiplier))

    def _multiply_summed(self, x: Any, name: str) -> Any:
        """Return a rank's part of a product that ranks sum: the first one adds the bias."""
        (y,) = multiply(self.writer, x, self.weights, name, has_bias=self.writer.rank == 0)
        return y

    def _run_mlp(self, prefix: str, h: Any) -> Any:
        model, writer = self.model, self.writer
        kind = ACTIVATIONS[name_activation(model)]
        if model.arithmetic.mlp == "plain":
            (up,) = multiply(writer, h, self.weights, prefix + "mlp.fc")
            up = writer.activate(kind, up)
        else:
            inner = [model.intermediate_size // model.tp_size] * 2
            gate, up = multiply(writer, h, self.weights, prefix + "mlp.gate_up", inner)
            up = writer.multiply(writer.activate(kind, gate), up)
        return self._multiply_summed(up, prefix + "mlp.proj")

    def _attend(self, index: int, h: Any) -> Any:
        """Return the attention [B, T, D] of a layer, which writes its keys and values."""
        model, writer = self.model, self.writer
        prefix, size = f"transformer.layers.{index}.attention.", model.head_size
        counts = [self._num_heads, *[self._num_kv_heads] * 2]
        rows = [count * size for count in counts]
        projections = multiply(writer, h, self.weights, prefix + "qkv", rows)
        q, k, v = (
            writer.reshape(projection, (0, 0, count, size), second_transpose=(0, 2, 1, 3))
            for projection, count in zip(projections, counts, strict=True)
        )
        if model.arithmetic.qk_norm:
            q, k = (
                self.norm(x, f"{prefix}{projection}_layernorm")
                for projection, x in (("q", q), ("k", k))
            )
        is_sliding = model.is_sliding(index)
        if self._tables and index not in model.arithmetic.layers_without_positions:
            q, k = (
                writer.rotate(x, tables, self.positions, model.rotary_size)
                for x, tables in zip((q, k), self._tables[is_sliding], strict=True)
            )
        past, shape = [], ("B", counts[1], writer.sizes.positions, size)
        for kind, values_of_step in (("key", k), ("value", v)):
            cache = writer.add_input(f"past_{kind}_{index}", writer.dtype, *shape)
            past.append(writer.update_cache(cache, values_of_step, self._write_indices))
            writer.mark_output(past[-1], f"present_{kind}_{index}")
        keys, values = past
        q = writer.scale(q, model.attention_scale)
        mask = self._masks["window_mask" if is_sliding else "mask"]
        if model.attn_logit_softcapping is None:
            attended = writer.attend(q, keys, values, mask, self._lengths)
        else:
            attended = self._attend_capped(q, keys, values, mask, model.attn_logit_softcapping)
        attended = writer.reshape(attended, (0, 0, counts[0] * size), first_transpose=(0, 2, 1, 3))
        return self._multiply_summed(attended, prefix + "dense")

    def _attend_capped(self, q: Any, keys: Any, values: Any, mask: Any, limit: float) -> Any:
        """Attend with capped scores, by single layers: no native layer caps them."""
        writer, model = self.writer, self.model
        num_kv, size = self._num_kv_heads, model.head_size
        group = self._num_heads // num_kv
        q = writer.reshape(q, (0, num_kv, group, -1, size))
        shape = (0, num_kv, 1, writer.sizes.positions, size)
        keys, values = (writer.reshape(tensor, shape) for tensor in (keys, values))
        mask = writer.reshape(mask, (0, 1, 1, -1, writer.sizes.positions))
        scores = writer.cast(writer.matmul(q, keys, "TRANSPOSE"), torch.float32)
        lowest = writer.number(-torch.inf, 5, torch.float32)
        scores = writer.select(mask, writer.cap(scores, limit), lowest)
        shares = writer.cast(writer.softmax(scores, 4), writer.dtype)
        attended = writer.matmul(shares, values)
        return writer.reshape(attended, (0, self._num_heads, -1, size))


def write_target(
    writer: NetworkWriter, model: ModelConfig, weights: Mapping[str, Tensor],
    observed_layers: Sequence[int] = (),
) -> None:  # fmt: skip
    """Write the layers' network: `hidden_states` [B, T, D], also `layers` [B, T, n * D]."""
    layers = LayersWriter(writer, model, weights)
    x, layer_outputs = layers.run(layers.embed(), observed_layers)
    if not model.arithmetic.is_post_norm:
        x = layers.norm(x, "transformer.ln_f")
    writer.mark_output(x, "hidden_states")
    if layer_outputs:
        writer.mark_output(writer.join(layer_outputs, 2), "layers")


def write_head(
    writer: NetworkWriter, model: ModelConfig, weights: Mapping[str, Tensor],
    *, prepare: Callable[[Any], Any] | None = None, scale: float = 1.0,
) -> None:  # fmt: skip
    """Return the head's network: `logits` [M, V] of `states` [M, D].

    prepare: what is done to the states first; scale: what they are multiplied by then.
    """
    states = writer.add_input("states", writer.dtype, "M", model.hidden_size)
    x = writer.scale(states if prepare is None else prepare(states), scale)
    if HEAD not in weights:
        table = cut_head(weights[EMBEDDING], model, writer.rank)
        assert isinstance(table, Tensor)
        weights = {**weights, HEAD: table}
    (logits,) = multiply(writer, x, weights, "lm_head")
    logits = writer.join_ranks(logits, model.tp_size)
    factor, limit = model.output_multiplier_scale, model.final_logit_softcapping
    logits = writer.scale(logits if limit is None else writer.cast(logits, torch.float32), factor)
    if limit is not None:
        logits = writer.cast(writer.cap(logits, limit), writer.dtype)
    writer.mark_output(logits, "logits")
