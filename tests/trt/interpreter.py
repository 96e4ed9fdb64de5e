"""Runs a TensorRT network on the CPU: read back layer by layer through TensorRT's own API.

Each layer is computed by torch as TensorRT's documentation describes it, and each output must have
the shape and the type that TensorRT inferred for it. A cache is updated where it lies, as on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Compute = Callable[..., Any]


class Interpreter:
    """A network that `run` computes; what it is given and returns are torch's tensors, by name."""

    def __init__(
        self, trt: Any, network: Any, ranges: Mapping[str, Sequence[Sequence[int]]] | None = None
    ) -> None:
        """ranges: least, usual and most of inputs' sizes, as the engine's profile has them."""
        self.trt, self.ranges = trt, ranges or {}
        self.meet: Callable[[Tensor], list[Tensor]] | None = None  # what all ranks have, in order
        self.types = {
            trt.float32: torch.float32, trt.float16: torch.float16, trt.bfloat16: torch.bfloat16,
            trt.int32: torch.int32, trt.int64: torch.int64, trt.int8: torch.int8,
            trt.bool: torch.bool, trt.fp8: torch.float8_e4m3fn, trt.DataType.INT4: torch.int8,
        }  # fmt: skip
        self.inputs = [network.get_input(i) for i in range(network.num_inputs)]
        self.outputs = [network.get_output(i) for i in range(network.num_outputs)]
        self.input_names = {tensor.name for tensor in self.inputs}
        self.network = network
        self.caches: Mapping[str, Tensor] = {}
        self.layers = [self._read(network.get_layer(i)) for i in range(network.num_layers)]

    def fits(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the engine's profile allows an input of this shape."""
        if name not in self.ranges:
            return True
        least, _, most = self.ranges[name]
        return all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True))

    def bind_caches(self, key: Any, list_caches: Callable[[], Mapping[str, Tensor]]) -> None:
        """Take caches that steps read and update."""
        self.caches = list_caches()

    def keep_kernels(self) -> None:
        """There are none."""

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute all outputs."""
        inputs = {**inputs, **self.caches}
        names = {tensor.name for tensor in self.inputs}
        assert names == set(inputs), names ^ set(inputs)
        known: dict[str, Any] = {}
        for tensor in self.inputs:
            self._check(tensor, inputs[tensor.name])
            assert self.fits(tensor.name, inputs[tensor.name].shape), tensor.name
            known[tensor.name] = inputs[tensor.name]
        for sources, outputs, compute in self.layers:
            found = compute(*[known[name] for name in sources])
            for tensor, value in zip(outputs, found, strict=True):
                if isinstance(value, Tensor):
                    self._check(tensor, value)
                known[tensor.name] = value
        return {tensor.name: known[tensor.name] for tensor in self.outputs}

    def _check(self, tensor: Any, value: Tensor) -> None:
        shape = tuple(tensor.shape)
        fits = len(shape) == value.ndim and all(
            inferred in (-1, size) for inferred, size in zip(shape, value.shape, strict=True)
        )
        assert fits, f"{tensor.name}: {tuple(value.shape)}, TensorRT infers {shape}"
        kind = self.types[tensor.dtype]
        assert value.dtype is kind, f"{tensor.name}: {value.dtype}, TensorRT infers {kind}"

    def _read(self, layer: Any) -> tuple[list[str], list[Any], Compute]:
        name = layer.type.name
        kind = {
            "KV_CACHE_UPDATE": "IKVCacheUpdateLayer", "CONSTANT": "IConstantLayer",
            "ELEMENTWISE": "IElementWiseLayer", "TOPK": "ITopKLayer",
            "ATTENTION_INPUT": "ILayer", "ATTENTION_OUTPUT": "ILayer", "SOFTMAX": "ISoftMaxLayer",
        }.get(name, f"I{name.title().replace('_', '')}Layer")  # fmt: skip
        layer.__class__ = getattr(self.trt, kind)
        sources = [layer.get_input(i) for i in range(layer.num_inputs)]
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        names = [source.name for source in sources if source is not None]
        compute: Compute = getattr(self, f"_make_{name.lower()}")(layer)
        if name in ("ATTENTION_INPUT",):
            return names, outputs, lambda *parts: [parts]
        return names, outputs, lambda *parts: _listed(compute(*parts))

    def _make_constant(self, layer: Any) -> Compute:
        weights, shape = layer.weights, tuple(layer.shape)
        kind = layer.get_output(0).dtype
        value = _read_weights(weights, self.types[kind], shape, kind == self.trt.DataType.INT4)
        return lambda: value

    def _make_gather(self, layer: Any) -> Compute:
        axis, num_batch = layer.axis, layer.num_elementwise_dims

        def gather(table: Tensor, indices: Tensor) -> Tensor:
            if num_batch == 0:
                found = table.index_select(axis, indices.flatten().long())
                return found.reshape(*table.shape[:axis], *indices.shape, *table.shape[axis + 1 :])
            return torch.stack([
                each.index_select(axis - num_batch, own.flatten().long()).reshape(
                    *each.shape[: axis - num_batch], *own.shape,
                    *each.shape[axis - num_batch + 1 :]
                )
                for each, own in zip(table, indices, strict=True)
            ])  # fmt: skip

        assert num_batch in (0, 1)
        assert layer.mode == self.trt.GatherMode.DEFAULT
        return gather

    def _make_shuffle(self, layer: Any) -> Compute:
        first, second = tuple(layer.first_transpose), tuple(layer.second_transpose)
        shape = tuple(layer.reshape_dims)

        def shuffle(x: Tensor) -> Tensor:
            x = x.permute(first[: x.ndim])
            sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(shape)]
            x = x.reshape(sizes)
            return x.permute(second[: x.ndim])

        return shuffle

    def _make_elementwise(self, layer: Any) -> Compute:
        operations: dict[str, Compute] = {
            "SUM": torch.add, "PROD": torch.mul, "SUB": torch.sub, "DIV": torch.div,
            "FLOOR_DIV": lambda a, b: torch.div(a, b, rounding_mode="floor"),
            "MIN": torch.minimum, "MAX": torch.maximum, "EQUAL": torch.eq,
        }  # fmt: skip
        operation = operations[layer.op.name]

        def combine(a: Tensor, b: Tensor) -> Tensor:
            assert a.dtype is b.dtype
            assert a.ndim == b.ndim
            return operation(a, b)

        return combine

    def _make_unary(self, layer: Any) -> Compute:
        operations: dict[str, Compute] = {
            "SQRT": torch.sqrt, "RECIP": torch.reciprocal, "LOG": torch.log, "EXP": torch.exp,
        }  # fmt: skip
        return operations[layer.op.name]

    def _make_activation(self, layer: Any) -> Compute:
        gelu = torch.nn.functional.gelu
        operations: dict[str, Compute] = {
            "RELU": torch.relu, "SIGMOID": torch.sigmoid, "TANH": torch.tanh, "GELU_ERF": gelu,
            "GELU_TANH": lambda x: gelu(x, approximate="tanh"),
        }  # fmt: skip
        return operations[type(layer).type.__get__(layer).name]  # hidden by every layer's `type`

    def _make_reduce(self, layer: Any) -> Compute:
        axes = [axis for axis in range(8) if layer.axes >> axis & 1]
        operation = {"AVG": torch.mean, "SUM": torch.sum, "MAX": torch.amax}[layer.op.name]
        keeps = layer.keep_dims
        return lambda x: operation(x, dim=axes, keepdim=keeps)  # type: ignore[operator]

    def _make_cast(self, layer: Any) -> Compute:
        kind = self.types[layer.to_type]
        return lambda x: x.to(kind)

    def _make_matrix_multiply(self, layer: Any) -> Compute:
        turns = [op.name == "TRANSPOSE" for op in (layer.op0, layer.op1)]

        def multiply(a: Tensor, b: Tensor) -> Tensor:
            assert a.dtype is b.dtype
            assert a.ndim == b.ndim
            a, b = (x.mT if turn else x for x, turn in zip((a, b), turns, strict=True))
            return a @ b

        return multiply

    def _make_normalization(self, layer: Any) -> Compute:
        axes = [axis for axis in range(8) if layer.axes >> axis & 1]
        epsilon = layer.epsilon

        def norm(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
            assert axes == [x.ndim - 1]
            assert scale.ndim == bias.ndim == x.ndim
            centred = x - x.mean(-1, keepdim=True)
            variance = centred.square().mean(-1, keepdim=True)
            return centred / torch.sqrt(variance + epsilon) * scale + bias

        return norm

    def _make_rotary_embedding(self, layer: Any) -> Compute:
        assert not layer.interleaved
        size = layer.rotary_embedding_dim

        def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
            width = size or x.shape[-1]
            assert cos.shape[1] == sin.shape[1] == width // 2
            cos, sin = (table[positions][:, None] for table in (cos, sin))  # [B, 1, T, R / 2]
            sizes = [width // 2, width // 2, x.shape[-1] - width]
            first, second, passed = torch.split(x, sizes, -1)
            return torch.cat(
                (first * cos - second * sin, second * cos + first * sin, passed), dim=-1
            )

        return rotate

    def _make_kv_cache_update(self, layer: Any) -> Compute:
        def update(cache: Tensor, new: Tensor, places: Tensor) -> Tensor:
            size = new.shape[2]
            for row, place in enumerate(places.tolist()):
                assert 0 <= place <= cache.shape[2] - size
                cache[row, :, place : place + size] = new[row]
            return cache

        return update

    def _make_attention_input(self, layer: Any) -> Compute:
        return lambda *parts: parts

    def _make_attention_output(self, layer: Any) -> Compute:
        def attend(parts: Sequence[Tensor]) -> Tensor:
            q, keys, values, mask, *lengths = parts
            for ends in lengths:  # after which a kernel reads nothing
                is_there = (torch.arange(mask.shape[-1]) < ends[:, None])[:, None, :, None]
                mask = mask & is_there.mT
                keys, values = (x.masked_fill(~is_there, 0) for x in (keys, values))
            times = q.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(times, 1) for x in (keys, values))
            scores = (q @ keys.mT).float().masked_fill(~mask, -torch.inf)
            return scores.softmax(-1).to(values.dtype) @ values

        return attend

    def _make_dist_collective(self, layer: Any) -> Compute:
        """The API does not tell a layer's kind: one that joins parts has an output so much longer.

        Nor does it tell how a sum reduces.
        """
        num_ranks = layer.num_ranks
        before, after = (each.shape[0] for each in (layer.get_input(0), layer.get_output(0)))
        assert after in (before, num_ranks * before)

        def exchange(x: Tensor) -> Tensor:
            assert self.meet is not None
            parts = self.meet(x)
            assert len(parts) == num_ranks
            return torch.stack(parts).sum(0) if after == before else torch.cat(parts)

        return exchange

    def _make_select(self, layer: Any) -> Compute:
        return torch.where

    def _make_softmax(self, layer: Any) -> Compute:
        (axis,) = [axis for axis in range(8) if layer.axes >> axis & 1]
        return lambda x: x.softmax(axis)

    def _make_topk(self, layer: Any) -> Compute:
        (axis,) = [axis for axis in range(8) if layer.axes >> axis & 1]
        count = layer.k

        def choose(x: Tensor) -> list[Tensor]:
            values, places = x.topk(count, dim=axis)
            return [values, places.int()]

        return choose

    def _make_concatenation(self, layer: Any) -> Compute:
        axis = layer.axis
        return lambda *parts: torch.cat(parts, dim=axis)

    def _make_quantize(self, layer: Any) -> Compute:
        kind = self.types[layer.to_type]
        assert kind is torch.float8_e4m3fn

        def quantize(x: Tensor, scale: Tensor) -> Tensor:
            return (x.float() / scale).clamp(-448, 448).to(kind)

        return quantize

    def _make_dequantize(self, layer: Any) -> Compute:
        kind, axis = self.types[layer.to_type], layer.axis

        def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
            wide, scale = codes.float(), scale.float()
            if scale.ndim == 1 and codes.ndim == 2:
                assert axis == 0
                scale = scale[:, None]
            elif scale.ndim == 2:
                scale = scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
            return (wide * scale).to(kind)

        return dequantize


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def _read_weights(
    weights: Any, dtype: torch.dtype, shape: tuple[int, ...], has_four_bits: bool
) -> Tensor:
    """A constant's values: from the memory that TensorRT was given, which lasts as the network."""
    if hasattr(weights, "ctypes"):  # an array of a type that numpy has
        return torch.from_numpy(weights.copy()).reshape(shape)
    inner = ctypes.c_void_p.from_address(id(weights) + 16).value  # the C++ struct
    assert inner is not None
    address = ctypes.c_void_p.from_address(inner + 8).value
    assert address is not None
    count = ctypes.c_int64.from_address(inner + 16).value
    size = count // 2 if has_four_bits else count * dtype.itemsize
    raw = torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=torch.uint8)
    if not has_four_bits:
        return raw.view(dtype).reshape(shape)
    signed = raw.view(torch.int8)
    return torch.stack((signed << 4 >> 4, signed >> 4), 1).reshape(shape)
