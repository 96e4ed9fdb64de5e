"""Modules of a model as the native kernels take them: layers, experts and a ReDrafter drafter."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.engine.layers import CutGate
from specdec.engine.linear_states import LinearStates
from specdec.engine.native_border import (
    HEAD_NORMS,
    LAYER_MATRICES,
    LAYER_NORMS,
    ExpertsRecord,
    LayerRecord,
    Scalars,
    check,
    check_all,
    check_packed,
    get_packed_shape,
    get_pointer,
)
from specdec.engine.native_matrices import KernelMatrix, MatrixKernels
from specdec.engine.native_states import PackedRecurrence
from specdec.engine.rotary import RotaryTable
from specdec.engine.tree import FloatArray, IntArray


def count_lines(table: RotaryTable | None, dtype: torch.dtype) -> float:
    """Count the positions of a rotary table; raise ValueError where it is not of a type."""
    if table is None:
        return math.inf
    check_all(dtype, ("cos", table.cos, table.cos.shape), ("sin", table.sin, table.cos.shape))
    return len(table.cos) - table.query_shift


# Up and down, packed, and the gate.
SharedExpert = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Sizes of a layer's experts: the model's hidden size, and the inner ones of an expert.

    first_expert: the number of the rank's first expert among those of the layer. gate: None for
    silu, and for gelu where `uses_gelu` says so.
    """

    hidden: int
    top_k: int
    first_expert: int
    inner: int
    shared_inner: int
    renormalizes: bool
    gate: CutGate | None = None
    uses_sigmoid: bool = False
    uses_gelu: bool = False
    weight_scale: float = 1.0
    sum_epsilon: float = 0.0


@dataclasses.dataclass(frozen=True)
class ExpertBiases:
    """Biases of a layer's experts, and their scales, each of which may be absent.

    router: float32 [E]; up, down: of the rank's experts, [count, 2 I] and [count, D]. scores:
    float32 [E], of the choice alone. scales: float32 [E], factors of the experts' weights.
    """

    router: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None
    scores: Tensor | None = None
    scales: Tensor | None = None


class PackedExperts:
    """A rank's experts of a layer as the kernels take them: a record of pointers and sizes.

    router: float32 [E, hidden]; up, down: packed, of the rank's experts; shared_expert: packed up
    and down, and the gate [1, hidden] or None, or None; counters: steps, tokens and experts that
    these chose, which the kernels count up. The tensors are kept alive.
    """

    def __init__(
        self, kernels: MatrixKernels, router: Tensor, up: Sequence[Tensor | None],
        down: Sequence[Tensor | None],
        shared_expert: SharedExpert | None, sizes: ExpertSizes,
        counters: np.ndarray[Any, Any], biases: ExpertBiases | None = None,
    ) -> None:  # fmt: skip
        assert up[0] is not None
        self.matrix_dtype, self.hidden = up[0].dtype, sizes.hidden
        self._check_matrices(kernels.dtype, up, down, shared_expert, sizes)
        self._check_numbers(len(router), len(up), len(down), sizes, counters)
        biases = biases or ExpertBiases()
        for bias in (biases.router, biases.scores, biases.scales):
            check("biases or scales of a router", bias, torch.float32, len(router))
        for bias, width in ((biases.up, 2 * sizes.inner), (biases.down, sizes.hidden)):
            check("the biases of experts", bias, kernels.dtype, len(up), width)
        limit, slope = (0.0, 0.0) if sizes.gate is None else dataclasses.astuple(sizes.gate)
        self.is_integer = int(self.matrix_dtype is torch.uint8)
        packed = kernels.pack_router(router)
        pointers = [
            np.array([get_pointer(tensor) for tensor in tensors], np.uint64)
            for tensors in (up, down)
        ]
        self._tensors = (packed, up, down, shared_expert, pointers, counters, biases)
        self.record = ExpertsRecord(
            packed.data_ptr(), *map(get_pointer, (biases.router, biases.up, biases.down)),
            limit, slope, *(array.ctypes.data for array in pointers),
            *(get_pointer(tensor) for tensor in shared_expert or (None, None, None)),
            get_pointer(biases.scores), get_pointer(biases.scales), counters.ctypes.data,
            len(router), sizes.top_k,
            sizes.first_expert, len(up), sizes.inner, sizes.shared_inner, sizes.renormalizes,
            sizes.uses_sigmoid, sizes.uses_gelu, sizes.weight_scale, sizes.sum_epsilon,
        )  # fmt: skip

    def _check_matrices(
        self, dtype: torch.dtype, up: Sequence[Tensor | None], down: Sequence[Tensor | None],
        shared_expert: SharedExpert | None, sizes: ExpertSizes,
    ) -> None:  # fmt: skip
        hidden = sizes.hidden
        matrices = [(up, 2 * sizes.inner, hidden), (down, hidden, sizes.inner)]
        if shared_expert is not None:
            matrices += [
                ([shared_expert[0]], 2 * sizes.shared_inner, hidden),
                ([shared_expert[1]], hidden, sizes.shared_inner),
            ]
            check("a shared expert's gate", shared_expert[2], dtype, 1, hidden)
        for tensors, num_outputs, depth in matrices:
            for tensor in tensors:
                if tensor is None or tensor.dtype is not self.matrix_dtype:
                    raise ValueError("an expert's matrix is not packed, or as another type")
                check_packed("an expert's matrix", tensor, dtype, num_outputs, depth)

    @staticmethod
    def _check_numbers(
        num_experts: int, num_up: int, num_down: int, sizes: ExpertSizes,
        counters: np.ndarray[Any, Any],
    ) -> None:  # fmt: skip
        top_k, start = sizes.top_k, sizes.first_expert
        is_inside = 0 <= start <= start + num_up <= num_experts
        if not 0 < top_k <= num_experts or not is_inside or num_up != num_down:
            raise ValueError(
                f"{top_k} experts of {num_experts}, {num_up} and {num_down} from {start} on"
            )
        if counters.dtype != np.int64 or counters.shape != (3,):
            raise ValueError(f"counters are {counters.dtype} {counters.shape}")


class PackedLayers:
    """A decoder's layers as `NativeKernels.run_layers` takes them.

    weights: of each layer its tensors by the names of `LayerRecord`, absent ones left out or None.
    They are kept alive. The matrices are of one type, integers or that of all else. stack: a
    `Stack` of torch_layers.py, which imports this module; its layers attend alike but for window
    and table. activation: its number. experts: of each layer that has no up and down, by its
    number. recurrences: of each layer that does not attend.
    """

    def __init__(
        self, weights: Sequence[Mapping[str, Tensor | None]], stack: Any, activation: int,
        experts: Mapping[int, PackedExperts], recurrences: Mapping[int, PackedRecurrence],
    ) -> None:  # fmt: skip
        assert stack.final_norm is not None
        final = stack.final_norm.weight, stack.final_norm.bias
        hidden, head_size, is_gated = len(final[0]), stack.head_size, stack.is_gated
        num_heads, num_kv_heads = stack.num_heads, stack.num_kv_heads
        num_ups = 2 if is_gated else 1  # matrices in `up`
        inner = max(layer.up.num_outputs if layer.up else 0 for layer in stack.layers) // num_ups
        self._tensors, self._experts = (weights, final), experts
        self._recurrences = recurrences
        norm, qkv = weights[0]["norm"], weights[0]["qkv"]
        assert norm is not None
        assert qkv is not None
        self.dtype = norm.dtype
        self.is_integer = qkv.dtype is torch.uint8
        self.first_matrix = qkv  # an EAGLE net's first layer may read more than others
        layer_widths = self._list_widths(stack)
        self.num_first_outputs = layer_widths[0][0]
        # The most that a layer's first product yields of a token, and that its second one reads.
        self.widths = tuple(map(max, zip(*layer_widths, strict=True)))
        self._check_layers(layer_widths, hidden, (inner, num_ups), head_size)
        check_all(self.dtype, *(("the last norm", tensor, (hidden,)) for tensor in final))
        self._check_experts(hidden)
        scale, cap = stack.layers[0].attention.scale, stack.layers[0].attention.cap
        self.scalars = Scalars(stack.final_norm.epsilon, scale, cap or 0.0, stack.share)
        self._final = np.array([get_pointer(t) or 0 for t in final], np.uint64)
        self.final = self._final.ctypes.data  # where its norm's pointers are
        self.sizes = (hidden, num_heads, num_kv_heads, head_size, inner)
        self._fill_records([layer.attention for layer in stack.layers])
        self.num_layers = len(weights)
        self.num_attending = self.num_layers - len(self._recurrences)
        self.activation, self.is_gated = activation, int(is_gated)

    def _check_layers(
        self, widths: Sequence[tuple[int, int]], hidden: int, inner: tuple[int, int], head_size: int
    ) -> None:
        """Check each layer's tensors. inner: of an MLP, and the matrices of that size in `up`."""
        for index, tensors in enumerate(self._tensors[0]):
            width, mixed_width = widths[index]
            shapes = {
                "qkv": (width, hidden), "dense": (hidden, mixed_width),
                "up": (inner[0] * inner[1], hidden), "down": (hidden, inner[0]),
            }  # fmt: skip
            self._check_layer(index, tensors, shapes, head_size)

    def _list_widths(self, stack: Any) -> list[tuple[int, int]]:
        """List what each layer's first product yields of a token, and what its second one reads."""
        attended = stack.num_heads * stack.head_size
        usual_widths = attended + 2 * stack.num_kv_heads * stack.head_size, attended
        layers = [self._recurrences.get(index) for index in range(len(stack.layers))]
        return [usual_widths if x is None else (x.width, x.output_width) for x in layers]

    def _check_layer(
        self, index: int, tensors: Mapping[str, Tensor | None],
        shapes: Mapping[str, tuple[int, int]], head_size: int,
    ) -> None:  # fmt: skip
        """Raise ValueError where a layer's tensors are not as the others' are, see `shapes`."""
        hidden = shapes["down"][0]
        vectors = [(name, hidden) for norm in LAYER_NORMS for name in (norm, f"{norm}_bias")]
        for name, size in [*vectors, *((name, head_size) for name in HEAD_NORMS)]:
            check(f"{name} of layer {index}", tensors.get(name), self.dtype, size)
        for name in LAYER_MATRICES:
            label, matrix = f"{name} of layer {index}", tensors.get(name)
            check(f"the bias of {label}", tensors.get(f"{name}_bias"), self.dtype, shapes[name][0])
            if matrix is None and index in self._experts and name in ("up", "down"):
                continue
            if matrix is None or (matrix.dtype is torch.uint8) != self.is_integer:
                raise ValueError(f"{label} is not of the first matrix's type")
            if matrix is not self.first_matrix:
                check_packed(label, matrix, self.dtype, *shapes[name])

    def _check_experts(self, hidden: int) -> None:
        dtype = self.first_matrix.dtype
        if any((e.hidden, e.matrix_dtype) != (hidden, dtype) for e in self._experts.values()):
            raise ValueError(f"experts of another size or type than {hidden} and {dtype}")

    def check_states(self, states: LinearStates | None, num_rows: int) -> None:
        """Raise ValueError where states do not go with the layers, or with a cache's rows."""
        found = () if states is None else states.window.shape[:2]
        expected = (len(self._recurrences), num_rows) if self._recurrences else ()
        of_layers = next(iter(self._recurrences.values())).sizes if self._recurrences else None
        if found != expected or (states is not None and states.sizes != of_layers):
            raise ValueError(f"states of {found} layers and rows, of {expected}, or other sizes")

    def _fill_records(self, attentions: Sequence[Any]) -> None:
        """Write a record for each layer, of its tensors' addresses and of how it attends."""
        tables = list(dict.fromkeys(attention.rotary for attention in attentions))
        self.rotated = next((table.cos.shape[1] for table in tables if table), 0)
        self.num_lines = min(count_lines(table, self.dtype) for table in tables)
        weights = self._tensors[0]
        self.records = (LayerRecord * len(weights))()
        for index, attention in enumerate(attentions):
            record = self.records[index]
            for name, tensor in weights[index].items():
                setattr(record, name, get_pointer(tensor))
            if (table := attention.rotary) is not None:
                record.cosine, record.sine = table.cos.data_ptr(), table.sin.data_ptr()
                record.query_shift = table.query_shift
            check("sinks", attention.sinks, self.dtype, self.sizes[1])
            record.sinks = get_pointer(attention.sinks)
            record.window = attention.window or 0
            if index in self._experts:
                record.experts = ctypes.addressof(self._experts[index].record)
            if index in self._recurrences:
                record.recurrence = self._recurrences[index].address


@dataclasses.dataclass(frozen=True)
class DynamicTrees:
    """Dynamic trees of rows without their roots, which are node 0 of each.

    nodes: [3, B, N], tokens, parents and depths. chances: [B, N], of a node where its parent is
    right. num_levels: that were drafted.
    """

    nodes: IntArray
    chances: FloatArray
    num_levels: int


class PackedDrafter:
    """A ReDrafter drafter's weights as the searches of `NativeKernels` take them.

    linears: by name, all packed by these kernels and of one type, integers or that of all else;
    absent ones are those the drafter has not. tokens: int64, of the head's outputs, None where
    these are all tokens.
    """

    def __init__(
        self, linears: Mapping[str, Any], embedding: Tensor | KernelMatrix, *, num_layers: int,
        exit_dim: int, num_candidates: int, kernels: MatrixKernels, tokens: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.dtype = kernels.dtype
        table_shape: tuple[int, ...]
        vocab_size, size = embedding.shape
        num_outputs = vocab_size if tokens is None else len(tokens)
        names = ("rnn_w", "rnn_u", "context_proj", "state_proj", "lm_head")
        blocks = [f"layers.{i}.linear" for i in range(num_layers)]
        shapes = {
            "rnn_w": (size, size), "rnn_u": (size, size), "context_proj": (exit_dim, size),
            "state_proj": (exit_dim, size), "lm_head": (num_outputs, exit_dim),
            **dict.fromkeys(blocks, (exit_dim, exit_dim)),
        }  # fmt: skip
        is_packed = isinstance(embedding, KernelMatrix)
        table_shape = (vocab_size, size)
        if is_packed:
            table_shape = get_packed_shape(vocab_size, size, self.dtype)
        self.table = embedding.numbers if isinstance(embedding, KernelMatrix) else embedding
        check("the embedding", self.table, self.dtype, *table_shape)
        check("drafted tokens", tokens, torch.int64, num_outputs)
        if tokens is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise ValueError(f"drafted tokens beyond {vocab_size}")
        if not 0 < num_candidates <= num_outputs:
            raise ValueError(f"{num_candidates} candidates of {num_outputs}")
        self._linears = dict(linears)
        is_integer = self._check_linears(shapes)
        self.embedding, self.tokens, self.num_candidates = embedding, tokens, num_candidates
        self.matrices = np.array(self._list_pointers(names, "packed"), np.uint64)
        biases = self._list_pointers(["rnn_u", "context_proj"], "bias")
        self.biases = np.array(biases, np.uint64)
        pairs = zip(
            self._list_pointers(blocks, "packed"), self._list_pointers(blocks, "bias"), strict=True
        )
        self.blocks = np.array([pointer for pair in pairs for pointer in pair], np.uint64)
        self.sizes = (num_outputs, size, exit_dim, num_candidates, is_integer, is_packed)

    def _check_linears(self, shapes: Mapping[str, tuple[int, int]]) -> bool:
        """Check matrices and biases; return whether the matrices are of integers."""
        for name, linear in self._linears.items():
            if linear.packed is None or linear.num_outputs != shapes[name][0]:
                raise ValueError(
                    f"drafter.{name} has {linear.num_outputs} outputs, or is not packed"
                )
            check_packed(f"drafter.{name}", linear.packed, self.dtype, *shapes[name])
            check(f"the bias of drafter.{name}", linear.bias, self.dtype, linear.num_outputs)
        dtypes = {linear.packed.dtype for linear in self._linears.values()}
        if len(dtypes) != 1:
            raise ValueError(f"a drafter's matrices are packed as {dtypes}")
        return torch.uint8 in dtypes

    def _list_pointers(self, names: Sequence[str], kind: str) -> list[int]:
        """Return the addresses of linears' matrices or biases; 0 for those that are absent."""
        tensors = [getattr(self._linears.get(name), kind, None) for name in names]
        return [get_pointer(tensor) or 0 for tensor in tensors]
