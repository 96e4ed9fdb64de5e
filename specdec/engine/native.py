"""Native kernels of a model's steps: calls over a plain C interface, each checked before."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.engine.layers import GATES, Attention, Norm
from specdec.engine.linear_states import LinearStates
from specdec.engine.native_border import (
    ConvSizes,
    SearchShape,
    Shape,
    StepPlan,
    check,
    check_all,
    check_packed,
    get_address,
    get_pointer,
    make_step_plan,
)
from specdec.engine.native_library import provide_library
from specdec.engine.native_matrices import MatrixKernels
from specdec.engine.native_models import (
    DynamicTrees,
    PackedDrafter,
    PackedExperts,
    PackedLayers,
    count_lines,
)
from specdec.engine.native_states import describe_heads, describe_states
from specdec.engine.transfers import make_zeros
from specdec.engine.tree import BoolArray, FloatArray, IntArray
from specdec.errors import SpecDecError
from specdec.model.linear_attention import HeadStateSizes
from specdec.system import logs

logger = logs.get_logger(__name__)


def load_kernels(info: Mapping[str, str], dtype: torch.dtype) -> NativeKernels:
    """Load the kernels of this version for this CPU, compiled with `info` or now.

    Raises SpecDecError where they are not in the user's cache and cannot be compiled.
    """
    with provide_library(info) as library:
        try:
            return NativeKernels(library, dtype)
        except SpecDecError:
            if library.exists():
                raise
    with provide_library(info) as library:  # another process has cleared the cache meanwhile
        return NativeKernels(library, dtype)


def _list_states(states: LinearStates, index: int) -> tuple[Tensor, ...]:
    """Return the state, the window and the logs of a layer, in the order that kernels take."""
    return states.state[index], states.window[index], *(log[index] for log in states.log)


class NativeKernels(MatrixKernels):
    """The compiled kernels of an engine, for one dtype; tensors are contiguous, on the CPU."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        super().__init__(path, dtype)
        use_amx = self._ask_for_amx() if dtype is torch.bfloat16 else -1
        self.uses_amx = use_amx == 1
        if use_amx == 0:
            logger.warning(
                "this system lets no process use the processor's AMX (bfloat16 products): the same"
                " bits are computed without it, long steps at several times the cost"
            )

    def _ask_for_amx(self) -> int:
        """Return 1 where products use AMX, 0 where the system refuses it, else -1."""
        return int(self._call("use_amx"))

    def plan_step(
        self,
        rows: IntArray,
        positions: IntArray,
        lines: IntArray,
        past: IntArray,
        tree_mask: BoolArray,
    ) -> StepPlan:
        """Prepare a step's indices: rows, past [B]; lines [B, T]; tree_mask [B, T, N].

        lines: of the rotary tables. positions: [B, N], of the N newest tokens, which are the
        columns of tree_mask, the step's own last.
        """
        return make_step_plan(rows, positions, lines, past, tree_mask)

    def lend_blocks(self, cache: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros for a cache, in large pages where there are some: read faster if long."""
        blocks = make_zeros(shape, dtype, torch.device("cpu"))
        self._call("ask_for_huge_pages", blocks.data_ptr(), blocks.nbytes)
        return blocks

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Return the norm of [..., D]."""
        return self.add_norm(x, None, norm)

    def add_norm(
        self, x: Tensor, delta: Tensor | None, norm: Norm,
        delta_norm: Norm | None = None, share: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """Add `delta` to `x` in place and return the norm of the sum. x, delta: [..., D].

        delta_norm: of delta first, with the epsilon of `norm`. share: what delta is multiplied by.
        """
        size = x.shape[-1]
        check_all(self.dtype, ("x", x, x.shape), ("delta", delta, x.shape))
        delta_weights = (None, None) if delta_norm is None else (delta_norm.weight, delta_norm.bias)
        weights = (*delta_weights, norm.weight, norm.bias)
        for tensor in weights:
            check("a norm's weight or bias", tensor, self.dtype, size)
        delta_weight, delta_bias, weight, bias = map(get_pointer, weights)
        normed = torch.empty_like(x)
        self._call(
            "add_norm",
            x.data_ptr(), get_pointer(delta), delta_weight, delta_bias, share, weight, bias,
            normed.data_ptr(), x.numel() // size, size, norm.epsilon, norm.offset,
        )  # fmt: skip
        return normed

    def cap_logits(self, logits: Tensor, scale: float, limit: float) -> Tensor:
        """Turn logits x in place into limit tanh(scale x / limit), with one rounding."""
        check("logits", logits, self.dtype, *logits.shape)
        self._call_with_threads("cap_logits", logits.data_ptr(), logits.numel(), scale, limit)
        return logits

    def gate_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """Multiply the first half of [..., 2 I], activated, by the second half: [..., I]."""
        check("gate_up", gate_up, self.dtype, *gate_up.shape)
        inner = gate_up.shape[-1] // 2
        gated = gate_up.new_empty((*gate_up.shape[:-1], inner))
        kernel = f"{GATES[activation]}_mul"
        self._call(kernel, gate_up.data_ptr(), gated.data_ptr(), gated.numel() // inner, inner)
        return gated

    def attend(
        self,
        qkv: Tensor,
        cache: Tensor,
        attention: Attention,
        plan: StepPlan,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
    ) -> Tensor:
        """Norm, rotate, write keys and values, attend over the visible positions only.

        qkv: [B, T, (N + 2K) H], overwritten; cache: [2, R, K, S, H] of one layer.
        Returns [B, T, N H].
        """
        width = (num_heads + 2 * num_kv_heads) * head_size
        _, num_rows, _, num_positions, _ = cache.shape
        q_norm, k_norm, rotary = attention.q_norm, attention.k_norm, attention.rotary
        norms = [None if norm is None else norm.weight for norm in (q_norm, k_norm)]
        check_all(
            self.dtype,
            ("qkv", qkv, (plan.batch, plan.num_tokens, width)),
            ("cache", cache, (2, num_rows, num_kv_heads, num_positions, head_size)),
            *(("the weight of a norm of heads", weight, (head_size,)) for weight in norms),
            ("sinks", attention.sinks, (num_heads,)),
        )
        plan.check(num_rows, num_positions, count_lines(rotary, self.dtype))
        output = qkv.new_empty((plan.batch, plan.num_tokens, num_heads * head_size))
        cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
        epsilon, offset = (0.0, 0.0) if q_norm is None else (q_norm.epsilon, q_norm.offset)
        self._call(
            "attend",
            qkv.data_ptr(), cache.data_ptr(), *map(get_pointer, (*norms, cos, sin)),
            *plan.pointers, output.data_ptr(),
            plan.batch, plan.num_tokens, plan.num_newest, num_heads, num_kv_heads, head_size,
            num_rows, num_positions, 0 if cos is None else cos.shape[1], attention.window or 0,
            attention.scale, attention.cap or 0.0, epsilon, offset,
            0 if rotary is None else rotary.query_shift, get_pointer(attention.sinks),
        )  # fmt: skip
        return output

    def run_delta_net(
        self, qkvz: Tensor, ba: Tensor, states: LinearStates, index: int,
        weights: tuple[Tensor, Tensor, Tensor], norm: Norm,
    ) -> Tensor:  # fmt: skip
        """Run a layer of linear attention over [B, T, W] and [B, T, 2 V], as `DeltaNet.run` does.

        The runs are those that the states have begun; the layer's states are written.

        index: which of these layers it is. weights: float32, of the convolution [taps, C], and the
        rate and the bias of the decay, [V].
        """
        sizes, (batch, num_tokens) = states.sizes, qkvz.shape[:2]
        assert isinstance(sizes, HeadStateSizes)
        width, heads, channels = sizes.sections[2], sizes.num_value_heads, sizes.num_channels
        check_all(
            self.dtype,
            ("qkvz", qkvz, (batch, num_tokens, channels + width)),
            ("ba", ba, (batch, num_tokens, 2 * heads)),
            ("a norm's weight", norm.weight, (sizes.value_size,)),
        )
        shapes = (sizes.num_taps, channels), (heads,), (heads,)
        for tensor, shape in zip(weights, shapes, strict=True):
            check("taps or decay", tensor, torch.float32, *shape)
        layer_states = _list_states(states, index)
        output = qkvz.new_zeros((batch, num_tokens, width))
        record = describe_heads(sizes, states.log[0].shape[2])
        self._call(
            "run_delta_net",
            qkvz.data_ptr(), ba.data_ptr(), output.data_ptr(), states.table.ctypes.data,
            len(states.table),
            *(tensor.data_ptr() for tensor in (*layer_states, *weights, norm.weight)), norm.epsilon,
            ctypes.addressof(record),
        )  # fmt: skip
        return output

    def run_mamba2(
        self, product: Tensor, states: LinearStates, index: int,
        weights: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor], norm: Norm, *,
        is_normed: bool,
    ) -> Tensor:  # fmt: skip
        """Run a Mamba-2 layer over [B, T, W], as `Mamba2.mix` does.

        The runs are those that the states have begun; the layer's states are written.

        index: which of these layers it is. weights: float32, of the convolution [taps, C], its bias
        [C] or None, and A, the bias of the rates, and D, [V]. is_normed: otherwise outputs are
        float32, and what the norm would read.
        """
        sizes, (batch, num_tokens) = states.sizes, product.shape[:2]
        assert isinstance(sizes, HeadStateSizes)
        width, heads, channels = sizes.sections[2], sizes.num_value_heads, sizes.num_channels
        check_all(
            self.dtype,
            ("product", product, (batch, num_tokens, channels + width + heads)),
            ("a norm's weight", norm.weight, (width,)),
        )
        shapes = (sizes.num_taps, channels), (channels,), (heads,), (heads,), (heads,)
        for tensor, shape in zip(weights, shapes, strict=True):
            check("taps, biases, decay or skip", tensor, torch.float32, *shape)
        layer_states = _list_states(states, index)
        dtype = self.dtype if is_normed else torch.float32
        output = product.new_zeros((batch, num_tokens, width), dtype=dtype)
        record = describe_heads(sizes, states.log[0].shape[2])
        self._call(
            "run_mamba2",
            product.data_ptr(), output.data_ptr(), states.table.ctypes.data, len(states.table),
            *map(get_pointer, (*layer_states, *weights, norm.weight)), norm.epsilon, is_normed,
            ctypes.addressof(record),
        )  # fmt: skip
        return output

    def run_short_conv(
        self, product: Tensor, states: LinearStates, index: int, taps: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Run a layer's short convolution over [B, T, 3 C], as `ShortConv.mix` does.

        The runs are those that the states have begun; the layer's states are written.

        index: which of these layers it is. taps, bias: float32, [taps, C] and [C].
        """
        channels, num_taps = states.sizes.num_channels, states.sizes.num_taps
        window, inputs = states.window[index], states.log[-1][index]
        num_rows, num_logged = inputs.shape[:2]
        check_all(
            self.dtype,
            ("product", product, (*product.shape[:2], 3 * channels)),
            ("the window", window, (num_rows, num_taps - 1, channels)),
            ("logged inputs", inputs, (num_rows, num_logged, channels)),
        )
        check("taps", taps, torch.float32, num_taps, channels)
        check("the convolution's bias", bias, torch.float32, channels)
        output = product.new_zeros((*product.shape[:2], channels))
        record = ConvSizes(channels, num_taps, num_logged)
        self._call(
            "run_short_conv",
            product.data_ptr(), output.data_ptr(), states.table.ctypes.data, len(states.table),
            window.data_ptr(), inputs.data_ptr(), taps.data_ptr(), get_pointer(bias),
            ctypes.addressof(record),
        )  # fmt: skip
        return output

    def mix_experts(
        self, x: Tensor, experts: PackedExperts, routed: Tensor | None = None
    ) -> Tensor:
        """Return the sum of a rank's experts of a layer for [..., D], see kernels/layers.h.

        routed: what the router reads, x if None.
        """
        x, routed = x.contiguous(), None if routed is None else routed.contiguous()
        for name, tensor in (("x", x), ("what a router reads", routed)):
            check(name, tensor, self.dtype, *x.shape[:-1], experts.hidden)
        output = torch.empty_like(x)
        self._call_with_threads(
            "mix_experts",
            x.data_ptr(), x.numel() // experts.hidden, experts.hidden, ctypes.byref(experts.record),
            output.data_ptr(), experts.is_integer, get_pointer(routed),
        )  # fmt: skip
        return output

    def run_layers(
        self,
        x: Tensor,
        layers: PackedLayers,
        cache: Tensor,
        plan: StepPlan,
        observed_layers: Sequence[int],
        first_input: Tensor | None = None,
        output_mask: BoolArray | None = None,
        states: LinearStates | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run all layers of a decoder over one step, in one call.

        x: [B, T, D], overwritten by the last layer's output; cache: [layers, 2, R, K, S, H], of
        those that attend; states: of the others, which have begun the step, None where all attend.
        first_input: [B, T, F], what the first layer's attention reads, its normed input if None.
        output_mask: [B, T], the tokens whose last output is computed; that of others is zeros. Not
        where the last layer is observed.
        Returns the last layer's output normed, [B, T, D], and the outputs of `observed_layers`,
        [B, T, n * D].
        """
        self._check_layers(x, layers, cache, plan, first_input)
        layers.check_states(states, cache.shape[2])
        if any(not 0 <= layer < layers.num_layers for layer in observed_layers):
            raise ValueError(f"layers {observed_layers} of {layers.num_layers}")
        if output_mask is not None:
            output_mask = np.ascontiguousarray(output_mask)
            if output_mask.shape != x.shape[:2] or output_mask.dtype != np.bool_:
                raise ValueError(
                    f"wanted tokens are {output_mask.dtype} {output_mask.shape}, of {x.shape}"
                )
            if layers.num_layers - 1 in observed_layers:
                raise ValueError("the last layer is observed, and not wanted of all tokens")
        normed = x.new_empty(x.shape)
        outputs = x.new_empty((len(observed_layers), *x.shape)) if observed_layers else None
        layer_numbers = np.array(observed_layers, np.int64)
        shape = Shape(
            plan.batch, plan.num_tokens, plan.num_newest,
            0 if first_input is None else first_input.shape[-1], *layers.sizes,
            cache.shape[2], cache.shape[4], layers.rotated, layers.num_layers,
            layers.activation, layers.is_gated, len(observed_layers), layers.is_integer,
            *layers.widths,
        )  # fmt: skip
        record = None if states is None else ctypes.byref(describe_states(states, self.dtype))
        self._call_with_threads(
            "run_layers",
            x.data_ptr(), get_pointer(first_input), normed.data_ptr(), layers.records,
            layers.final, cache.data_ptr(), *plan.pointers, get_address(layer_numbers),
            get_pointer(outputs), None if output_mask is None else get_address(output_mask),
            ctypes.byref(shape), ctypes.byref(layers.scalars), record,
        )  # fmt: skip
        return normed, None if outputs is None else torch.cat(list(outputs), dim=-1)

    def _check_layers(
        self, x: Tensor, layers: PackedLayers, cache: Tensor, plan: StepPlan,
        first_input: Tensor | None,
    ) -> None:  # fmt: skip
        """Raise ValueError where the tensors of a step do not go with the layers."""
        hidden, _, num_kv_heads, head_size, _ = layers.sizes
        depth = hidden if first_input is None else first_input.shape[-1]
        if layers.dtype is not self.dtype:
            raise ValueError(f"layers of {layers.dtype} do not go with {self.dtype}")
        num_outputs = layers.num_first_outputs
        check_packed("the first matrix", layers.first_matrix, self.dtype, num_outputs, depth)
        num_rows, num_positions = cache.shape[2], cache.shape[4]
        cache_shape = layers.num_attending, 2, num_rows, num_kv_heads, num_positions, head_size
        check_all(
            self.dtype,
            ("x", x, (plan.batch, plan.num_tokens, hidden)),
            ("the first layer's input", first_input, (*x.shape[:2], depth)),
            ("the cache", cache, cache_shape),
        )
        plan.check(num_rows, num_positions, layers.num_lines)

    def find_greatest(self, logits: Tensor) -> IntArray:
        """Return the place of the greatest of logits [..., V], of equal ones the first: [...].

        As `find_best` of ranking.py, for which torch and NumPy need a copy in float32.
        """
        check("logits", logits, self.dtype, *logits.shape)
        places = np.empty(logits.shape[:-1], np.int64)
        self._call_with_threads(
            "find_greatest", logits.data_ptr(), places.size, logits.shape[-1], get_address(places)
        )
        return places

    def draft_pairs(self, *arguments: Any) -> int:
        """Draft by an EAGLE drafter in one call; `PackedEagle.draft` checks what it is given."""
        return int(self._call_with_threads("draft_pairs", *arguments))

    def search_beams(
        self, drafter: PackedDrafter, hidden: Tensor, tokens: Tensor, width: int, length: int
    ) -> Tensor:
        """Search ReDrafter's beams in one call: hidden [B, D], tokens [B] -> drafts [B, W, L]."""
        beams = torch.empty((len(tokens), width, length), dtype=torch.int64)
        self._call_search(drafter, hidden, tokens, (width, length, 0), beams.data_ptr())
        return beams

    def search_trees(
        self, drafter: PackedDrafter, hidden: Tensor, tokens: Tensor, width: int, length: int,
        num_tokens: int, temperatures: FloatArray, min_gain: float,
    ) -> DynamicTrees:  # fmt: skip
        """Search ReDrafter's trees in one call: hidden [B, D], tokens [B], temperatures [B].

        min_gain: another level is drafted while the newest promises more tokens than that.
        """
        batch = len(tokens)
        temperatures = np.ascontiguousarray(temperatures, np.float64)
        if temperatures.shape != (batch,) or not temperatures.min() > 0 or num_tokens < 1:
            raise ValueError(f"{num_tokens} tokens of {batch} rows, temperatures {temperatures}")
        nodes = np.empty((3, batch, num_tokens), np.int64)
        chances = np.empty((batch, num_tokens))
        num_levels = self._call_search(
            drafter, hidden, tokens, (width, length, num_tokens), nodes.ctypes.data,
            (temperatures.ctypes.data, min_gain, chances.ctypes.data),
        )  # fmt: skip
        num_nodes = min(num_tokens, width + (num_levels - 1) * width**2)
        return DynamicTrees(nodes[..., :num_nodes], chances[:, :num_nodes], num_levels)

    def _call_search(
        self, drafter: PackedDrafter, hidden: Tensor, tokens: Tensor, shape: tuple[int, int, int],
        drafts: int, tree_options: tuple[int | None, float, int | None] = (None, 0.0, None),
    ) -> int:  # fmt: skip
        """Search beams or trees and return the number of levels.

        shape: width, length, tokens of a tree. drafts: the address of beams or nodes. tree_options:
        the addresses of temperatures and of chances, and between them the least gain.
        """
        batch, (width, length, _) = len(tokens), shape
        hidden, tokens = hidden.contiguous(), tokens.contiguous()
        vocab_size, size = drafter.embedding.shape
        if drafter.dtype is not self.dtype:
            raise ValueError(f"a drafter of {drafter.dtype} for kernels of {self.dtype}")
        check("hidden", hidden, self.dtype, batch, size)
        check("tokens", tokens, torch.int64, batch)
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise ValueError(f"tokens {tokens.tolist()} of {vocab_size}")
        if not 0 < width <= drafter.num_candidates or length < 1:
            raise ValueError(
                f"{width} beams of {length} tokens, of {drafter.num_candidates} candidates"
            )
        sizes = SearchShape(batch, *shape, *drafter.sizes)
        temperatures, min_gain, chances = tree_options
        num_levels: int = self._call_with_threads(
            "search",
            drafter.table.data_ptr(), hidden.data_ptr(), tokens.data_ptr(),
            drafter.matrices.ctypes.data, drafter.biases.ctypes.data, drafter.blocks.ctypes.data,
            len(drafter.blocks) // 2, get_pointer(drafter.tokens),
            temperatures, min_gain, drafts, chances, ctypes.byref(sizes),
        )  # fmt: skip
        return num_levels
