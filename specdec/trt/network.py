"""Writes a network of TensorRT's layers: strongly typed, its weights where the file has them.

Legend: B rows, T tokens of each, N heads, H head size, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecDecError
from specdec.trt.library import make_logger


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The limits of a network.

    rows: of a step; tokens: of a row; typical_tokens: tokens of a row that kernels are chosen for;
    positions: of a row's cache; states: that a head takes at once.
    """

    rows: int
    tokens: int
    typical_tokens: int
    positions: int
    states: int


def name_types(trt: Any) -> dict[torch.dtype, Any]:
    """Map torch's types to TensorRT's names."""
    shared_names = ("float32", "float16", "bfloat16", "int32", "int64", "int8", "bool")
    return {torch.float8_e4m3fn: trt.fp8} | {
        getattr(torch, n): getattr(trt, n) for n in shared_names
    }


class NetworkWriter:
    """A network under construction. A method returns a tensor of the network.

    ranges: by input, its least, usual and most sizes. num_bytes: of the weights so far.
    """

    def __init__(
        self, trt: Any, builder: Any, dtype: torch.dtype, sizes: Sizes, rank: int = 0
    ) -> None:
        """dtype: of the weights and states. rank: whose part of a model this network is."""
        self.trt, self.types, self.dtype, self.rank = trt, name_types(trt), dtype, rank
        self.sizes, self._builder = sizes, builder
        self.meets_ranks = False  # until a layer exchanges something with other ranks
        # True where attention takes the lengths of keys and values, after which nothing is read.
        self.has_lengths = hasattr(trt.IAttention, "key_value_lengths")
        flag = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.network = builder.create_network(flag)
        self.ranges: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.num_bytes = 0
        self._constants_in_use: list[Tensor] = []  # TensorRT reads them when the engine is built
        self._constants: dict[Any, Any] = {}

    def add_input(self, name: str, dtype: torch.dtype, *shape: int | str) -> Any:
        """Add an input; "B", "T" and "M" in its shape stand for all rows, tokens and states."""
        sizes = self.sizes
        spread = {
            "B": (1, sizes.rows, sizes.rows), "T": (1, sizes.typical_tokens, sizes.tokens),
            "M": (1, min(64, sizes.states), sizes.states),
        }  # fmt: skip
        ranges = [spread[n] if isinstance(n, str) else (n, n, n) for n in shape]
        self.ranges[name] = tuple(zip(*ranges, strict=True))
        fixed = [low if low == high else -1 for low, _, high in ranges]
        return self.network.add_input(name, self.types[dtype], fixed)

    def mark_output(self, tensor: Any, name: str) -> None:
        tensor.name = name
        self.network.mark_output(tensor)

    def constant(self, values: Tensor, four_bits: Sequence[int] | None = None) -> Any:
        """Return a constant; the same memory is the same constant.

        four_bits: the shape where a byte holds two integers, the first in its low bits.
        """
        values = values.contiguous()
        shape, kind = tuple(four_bits or values.shape), self.types[values.dtype]
        key = values.data_ptr(), shape, values.dtype
        if key not in self._constants:
            kind = kind if four_bits is None else self.trt.DataType.INT4
            weights = self.trt.Weights(kind, values.data_ptr(), math.prod(shape))
            self._constants[key] = self._take(self.network.add_constant(shape, weights))
            self._constants_in_use.append(values)
            self.num_bytes += values.numel() * values.element_size()
        return self._constants[key]

    def number(self, value: float, num_dims: int, dtype: torch.dtype | None = None) -> Any:
        """Return a constant of one element that spreads over a tensor of so many dimensions."""
        return self.constant(torch.full((1,) * num_dims, value, dtype=dtype or self.dtype))

    def combine(self, kind: str, left: Any, second: Any) -> Any:
        """Combine two tensors by SUM, PROD or another operation, element by element."""
        operation = getattr(self.trt.ElementWiseOperation, kind)
        return self._take(self.network.add_elementwise(left, second, operation))

    def add(self, left: Any, second: Any) -> Any:
        return self.combine("SUM", left, second)

    def multiply(self, left: Any, second: Any) -> Any:
        return self.combine("PROD", left, second)

    def scale(self, x: Any, factor: float) -> Any:
        if factor == 1:
            return x
        dtype = next(dtype_name for dtype_name, kind in self.types.items() if kind == x.dtype)
        return self.multiply(x, self.number(factor, len(x.shape), dtype))

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        kind = self.types[dtype]
        return x if x.dtype == kind else self._take(self.network.add_cast(x, kind))

    def unary(self, kind: str, x: Any) -> Any:
        return self._take(self.network.add_unary(x, getattr(self.trt.UnaryOperation, kind)))

    def activate(self, kind: str, x: Any) -> Any:
        """Apply RELU, SIGMOID, TANH, GELU_ERF, GELU_TANH, or SILU."""
        if kind == "SILU":
            return self.multiply(x, self.activate("SIGMOID", x))
        return self._take(self.network.add_activation(x, getattr(self.trt.ActivationType, kind)))

    def cap(self, x: Any, limit: float) -> Any:
        """Compute limit tanh(x / limit)."""
        return self.scale(self.activate("TANH", self.scale(x, 1 / limit)), limit)

    def matmul(self, x: Any, y: Any, turn: str = "NONE") -> Any:
        """Compute x y over all dimensions but the last two; x y^T where `turn` is TRANSPOSE."""
        kinds = self.trt.MatrixOperation
        return self._take(self.network.add_matrix_multiply(x, kinds.NONE, y, getattr(kinds, turn)))

    def reshape(self, x: Any, shape: Sequence[int], **orders: Sequence[int]) -> Any:
        """Reshape a tensor; 0 in a shape keeps the dimension at its place.

        orders: `first_transpose`, `second_transpose`, of dimensions before and after.
        """
        return self._take(self.network.add_shuffle(x), **orders, reshape_dims=shape)

    def lift(self, values: Any, num_dims: int) -> Any:
        """Return a constant or another tensor with `num_dims` dimensions: ones before its own."""
        shape = (*(1,) * (num_dims - len(values.shape)), *values.shape)
        is_constant = isinstance(values, Tensor)
        return self.constant(values.reshape(shape)) if is_constant else self.reshape(values, shape)

    def gather(self, table: Any, indices: Any, axis: int = 0, num_batch: int = 0) -> Any:
        """Take entries of a table along an axis; the first `num_batch` dimensions are both's."""
        layer = self.network.add_gather(table, indices, axis)
        return self._take(layer, num_elementwise_dims=num_batch)

    def join(self, tensors: Sequence[Any], axis: int) -> Any:
        if len(tensors) == 1:
            return tensors[0]
        return self._take(self.network.add_concatenation(list(tensors)), axis=axis)

    def softmax(self, x: Any, axis: int) -> Any:
        return self._take(self.network.add_softmax(x), axes=1 << axis)

    def select(self, condition: Any, if_true: Any, if_false: Any) -> Any:
        return self._take(self.network.add_select(condition, if_true, if_false))

    def top(self, x: Any, count: int, axis: int) -> tuple[Any, Any]:
        """Return the greatest values along an axis, and their places as int32."""
        layer = self.network.add_topk(x, self.trt.TopKOperation.MAX, count, 1 << axis)
        self._take(layer)
        return layer.get_output(0), layer.get_output(1)

    def reduce(self, kind: str, x: Any, axis: int) -> Any:
        """Reduce a tensor by SUM, AVG or MAX along an axis, which stays as one."""
        operation = getattr(self.trt.ReduceOperation, kind)
        return self._take(self.network.add_reduce(x, operation, 1 << axis, True))

    def rms_norm(self, x: Any, weight: Tensor, epsilon: float) -> Any:
        """Return the root-mean-square norm of the last dimension, in float32."""
        wide, rank = self.cast(x, torch.float32), len(x.shape)
        square = self.reduce("AVG", self.multiply(wide, wide), rank - 1)
        square = self.add(square, self.number(epsilon, rank, torch.float32))
        scaled = self.multiply(wide, self.unary("RECIP", self.unary("SQRT", square)))
        return self.multiply(self.cast(scaled, self.dtype), self.lift(weight, rank))

    def layer_norm(self, x: Any, weight: Tensor, bias: Tensor, epsilon: float) -> Any:
        """Return the layer norm of the last dimension, in float32."""
        rank = len(x.shape)
        scale, shift = (self.lift(vector.float(), rank) for vector in (weight, bias))
        wide = self.cast(x, torch.float32)
        layer = self.network.add_normalization_v2(wide, scale, shift, 1 << (rank - 1))
        return self.cast(self._take(layer, epsilon=epsilon), self.dtype)

    def rotate(self, x: Any, tables: tuple[Any, Any], positions: Any, size: int) -> Any:
        """Rotate the first `size` of H by rows of the tables, halves paired; x: [B, N, T, H]."""
        num_rotated = 0 if size == x.shape[-1] else size
        layer = self.network.add_rotary_embedding(x, *tables, False, num_rotated)
        layer.set_input(3, positions)
        return self._take(layer)

    def update_cache(self, cache: Any, new_values: Any, write_indices: Any) -> Any:
        """Write [B, N, T, H] into a cache [B, N, S, H] from a row's place on; it stays in place."""
        mode = self.trt.KVCacheMode.LINEAR
        return self._take(self.network.add_kv_cache_update(cache, new_values, write_indices, mode))

    def attend(self, q: Any, keys: Any, values: Any, mask: Any, lengths: Any = None) -> Any:
        """Attend by queries that are scaled; a token sees where the mask is true.

        lengths: [B], positions of each row that hold anything; None for all.
        """
        trt = self.trt
        norm, kind = trt.AttentionNormalizationOp.SOFTMAX, getattr(trt, "CausalMaskKind", None)
        if kind is None:
            layer = self.network.add_attention(q, keys, values, norm, False)
        else:
            layer = self.network.add_attention_v2(q, keys, values, norm, kind.NONE)
        # Decomposed where no fused kernel has these sizes.
        attributes = {} if lengths is None else {"key_value_lengths": lengths}
        return self._take(layer, mask=mask, decomposable=True, **attributes)

    def dequantize(self, codes: Any, scales: Any, **axis: int) -> Any:
        """Compute codes * scales: one scale, one for each row along `axis`, or for each block."""
        layer = self.network.add_dequantize(codes, scales, self.types[self.dtype])
        return self._take(layer, **axis)

    def quantize(self, x: Any, scale: Any, dtype: torch.dtype) -> Any:
        return self._take(self.network.add_quantize(x, scale, self.types[dtype]))

    def sum_ranks(self, x: Any, num_ranks: int) -> Any:
        """Return the sum of what so many ranks have, on all of them."""
        return x if num_ranks == 1 else self._meet("ALL_REDUCE", "SUM", x, num_ranks)

    def join_ranks(self, x: Any, num_ranks: int) -> Any:
        """Return the ranks' parts side by side along the last dimension, on all of them."""
        if num_ranks == 1:
            return x
        last_axis, keep = len(x.shape) - 1, (0,) * len(x.shape)  # parts are joined along the first
        x = self.reshape(x, keep, first_transpose=(last_axis, *range(last_axis)))
        x = self._meet("ALL_GATHER", "NONE", x, num_ranks)
        return self.reshape(x, keep, first_transpose=(*range(1, last_axis + 1), 0))

    def _meet(self, kind: str, reduction: str, x: Any, num_ranks: int) -> Any:
        """Add a collective layer over all ranks' tensors, which every rank runs at one time."""
        kinds, reductions = self.trt.CollectiveOperation, self.trt.ReduceOperation
        self.meets_ranks = True
        layer = self.network.add_dist_collective(
            x, getattr(kinds, kind), getattr(reductions, reduction), -1, None
        )
        return self._take(layer, num_ranks=num_ranks)

    def _take(self, layer: Any, **attributes: Any) -> Any:
        """Set a layer's attributes; return its first output, SpecDecError where it is refused."""
        for name, value in attributes.items() if layer is not None else ():
            setattr(layer, name, value)
        if layer is None or layer.get_output(0).shape is None:
            raise SpecDecError(
                "TensorRT refuses a layer of this network", "report this with the model's config"
            )
        return layer.get_output(0)

    def build(self, capabilities: Sequence[str]) -> Any:
        """Build and serialize the engine; raise SpecDecError with TensorRT's own message.

        capabilities: what it is to run on; empty for the GPU of this machine.
        """
        trt, builder = self.trt, self._builder
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)  # which would round float32 products
        multi = getattr(trt.PreviewFeature, "MULTIDEVICE_RUNTIME_10_16", None)
        if self.meets_ranks and multi is not None:  # full TensorRT 10.16 asks for it
            config.set_preview_feature(multi, True)
        profile = builder.create_optimization_profile()
        for name, sizes in self.ranges.items():
            profile.set_shape(name, *sizes)
        config.add_optimization_profile(profile)
        if capabilities:
            config.num_compute_capabilities = len(capabilities)
            for index, capability in enumerate(capabilities):
                kind = getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}")
                config.set_compute_capability(kind, index)
        engine = builder.build_serialized_network(self.network, config)
        if engine is None:
            raise SpecDecError(
                f"TensorRT builds no engine of this network: {builder.logger.tell()[:600]}",
                "build with --backend torch, or report this with the model's config.json",
            )
        return engine


def can_meet_ranks(trt: Any) -> bool:
    """Return whether this release takes layers that exchange tensors with other ranks."""
    writer = NetworkWriter(trt, trt.Builder(make_logger(trt)), torch.float32, Sizes(1, 1, 1, 1, 1))
    try:
        writer.sum_ranks(writer.number(1, 1), 2)
    except (AttributeError, SpecDecError):
        return False
    return True
