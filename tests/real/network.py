"""TensorRT-LLM's networks, computed: trtllm-build's own main up to the engine, in a process apart.

`Machine` starts that process, hands it command lines that specdec-build makes, and lets the
networks of all ranks compute with torch. What the plugins compute is written here from what their
sources say of them. Keys and values lie in the pages that the inputs name. A page is of NaN until
it is written, so that a network that reads a place too far shows it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.real.programs import load_command
from tests.real.stubs import install
from tests.real.tensorrt import make_tensorrt
from tests.trt.interpreter import Compute, Interpreter

INPUTS = (
    "qkv", "sequence_length", "past_lengths", "windows", "sink", "context_lengths", "indirection",
    "request_types", "pages", "host_pages", "pool_pointers", "pool_mapping",
)  # fmt: skip
ROPE_TYPES = (1, 2, 3)  # GPT-J's pairs, GPT-NeoX's halves, and those with long factors


class RealInterpreter(Interpreter):
    """The layers and plugins that TensorRT-LLM's networks have; `ring` joins the ranks."""

    def __init__(self, trt: Any, network: Any, places: Sequence[Any], ring: Ring, rank: int):
        self.places = {place.layer.name: place for place in places}
        self.pools: dict[int, Tensor] = {}
        self.ring, self.rank = ring, rank
        super().__init__(trt, network)
        self.layers = sort_layers(self.layers, {tensor.name for tensor in self.inputs})

    def _read(self, layer: Any) -> tuple[list[str], list[Any], Compute]:
        place = self.places.get(layer.name)
        if place is None or not hasattr(self, f"_plug_{place.plugin.kind.lower()}"):
            return super()._read(layer)
        make = getattr(self, f"_plug_{place.plugin.kind.lower()}")
        compute = make(place.plugin.fields)
        names = [tensor.name for tensor in place.inputs]
        return names, [layer.get_output(0)], lambda *parts: [compute(*parts)]

    def _plug_cumsumlastdim(self, fields: dict[str, Any]) -> Compute:
        return lambda x: x.cumsum(-1, dtype=x.dtype)

    def _plug_allreduce(self, fields: dict[str, Any]) -> Compute:
        assert fields["fusion_op"] == 0
        return lambda x, *_: sum(self.ring.exchange(self.rank, x))

    def _plug_allgather(self, fields: dict[str, Any]) -> Compute:
        return lambda x: torch.cat(self.ring.exchange(self.rank, x))

    def _plug_lookup(self, fields: dict[str, Any]) -> Compute:
        def look_up(tokens: Tensor, table: Tensor) -> Tensor:
            """Rows of this rank's part of the table, zero for the others' tokens."""
            own = tokens - fields["rank"] * len(table)
            held = (own >= 0) & (own < len(table))
            return table[own.clamp(0, len(table) - 1).long()] * held[..., None]

        return look_up

    def _plug_gptattention(self, fields: dict[str, Any]) -> Compute:
        assert (fields["paged_kv_cache"], fields["remove_input_padding"]) == (1, 1)
        names = list(INPUTS)
        if fields["position_embedding_type"] in ROPE_TYPES:
            names += ["frequencies", "cos_sin"]
        names += ["host_context_lengths"]
        if fields["is_spec_decoding_enabled"]:
            names += ["lengths", "mask", "offsets"]
        names += ["knobs"]

        def attend(*parts: Tensor) -> Tensor:
            given = dict(zip(names, parts, strict=True))
            return self._attend(fields, given)

        return attend

    def _attend(self, fields: dict[str, Any], given: dict[str, Tensor]) -> Tensor:
        """Attention of packed rows, prompts first: [T, (H + 2 G) D] to [T, H D]."""
        heads, kv_heads, size = (fields[n] for n in ("num_heads", "num_kv_heads", "head_size"))
        widths = [heads, kv_heads, kv_heads]
        qkv = torch.split(given["qkv"].view(-1, sum(widths), size), widths, 1)
        prompts = given["request_types"].tolist().count(0)
        assert given["request_types"].tolist() == sorted(given["request_types"].tolist())
        found, start, drafted = [], 0, 0
        for row, total in enumerate(given["sequence_length"].tolist()):
            count, mask, offsets = 1, None, torch.zeros(1, dtype=torch.int)
            if row < prompts:
                count = int(given["host_context_lengths"][row])
                offsets = torch.arange(count)
            elif "mask" in given:
                count = int(given["lengths"][row - prompts])
                mask = unpack_mask(given["mask"][drafted : drafted + count], count)
                offsets = given["offsets"][row - prompts, :count]
                drafted += count
            past, end = total - count, start + count
            q, k, v = (x[start:end] for x in qkv)
            if "cos_sin" in given:
                table = given["cos_sin"].view(-1, fields["rotary_embedding_dim"] // 2, 2)
                turned = table[past + offsets.long()]
                paired = fields["position_embedding_type"] == 1
                q, k = (rotate(x, turned, paired) for x in (q, k))
            keys, values = self._store(fields, given["pages"][0, row], past, k, v)
            if mask is None:
                mask = torch.ones(count, count, dtype=torch.bool).tril()
            seen = torch.cat((torch.ones(count, past, dtype=torch.bool), mask), 1)
            places = torch.cat((torch.arange(past), past + offsets))
            far = (past + offsets)[:, None] - places >= int(given["windows"][fields["layer_idx"]])
            found.append(score(fields, q, keys, values, seen & ~far))
            start = end
        assert start == len(given["qkv"])
        return torch.cat(found).reshape(start, heads * size)

    def _store(
        self, fields: dict[str, Any], pages: Tensor, past: int, *new: Tensor
    ) -> tuple[Tensor, ...]:
        """Write keys and values [n, G, D] after the `past` ones; return all [past + n, G, D]."""
        size, layer = fields["tokens_per_block"], fields["layer_idx"]
        if layer not in self.pools:
            shape = (64, size, *new[0].shape[1:])
            self.pools[layer] = torch.full(shape, torch.nan)
        return tuple(
            write_pages(self.pools[layer], own, past, x) for own, x in zip(pages, new, strict=True)
        )

    def move(self, pages: Tensor, start: int, kept: Sequence[int]) -> None:
        """Move what was kept of a step's places to the step's start, as after acceptance."""
        for pool in self.pools.values():
            for own in pages:
                places = torch.arange(start, start + len(kept))
                source = start + torch.tensor(kept)
                flat = pool.flatten(0, 1)
                flat[locate(pool, own, places)] = flat[locate(pool, own, source)]

    def _make_shape(self, layer: Any) -> Compute:
        return lambda x: torch.tensor(x.shape, dtype=torch.int64)

    def _make_identity(self, layer: Any) -> Compute:
        return lambda x: x

    def _make_unary(self, layer: Any) -> Compute:
        return torch.logical_not if layer.op.name == "NOT" else super()._make_unary(layer)

    def _make_elementwise(self, layer: Any) -> Compute:
        more: dict[str, Compute] = {
            "MAX": torch.maximum, "MIN": torch.minimum, "EQUAL": torch.eq, "LESS": torch.lt,
            "GREATER": torch.gt, "AND": torch.logical_and, "OR": torch.logical_or,
            "POW": torch.pow, "DIV": lambda a, b: (
                a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")
            ),
        }  # fmt: skip
        operation = more.get(layer.op.name)
        return operation or super()._make_elementwise(layer)

    def _make_reduce(self, layer: Any) -> Compute:
        axes, keeps = [axis for axis in range(8) if layer.axes >> axis & 1], layer.keep_dims
        if layer.op.name == "SUM":
            return lambda x: x.sum(axes, keepdim=keeps, dtype=x.dtype)
        compute = super()._make_reduce(layer)
        if layer.op.name != "MAX" or axes != [0] or keeps:
            return compute
        # The longest of no drafted rows is bounded by 0 in the layer after it.
        return lambda x: compute(x) if len(x) else torch.full(x.shape[1:], -1, dtype=x.dtype)

    def _make_shuffle(self, layer: Any) -> Compute:
        first, second = tuple(layer.first_transpose), tuple(layer.second_transpose)
        fixed: Any = None
        copies_zeros = layer.zero_is_placeholder
        # Where only dimensions change places RTX 1.7 has None, 1.4 a list of -1 numbers.
        with contextlib.suppress(TypeError, ValueError):
            fixed = list(layer.reshape_dims)

        def shuffle(x: Tensor, shape: Tensor | None = None) -> Tensor:
            x = x.permute(first[: x.ndim])
            if shape is not None or fixed is not None:
                sizes = fixed if shape is None else shape.tolist()
                if copies_zeros:
                    sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
                x = x.reshape(sizes)
            return x.permute(second[: x.ndim])

        return shuffle

    def _make_slice(self, layer: Any) -> Compute:
        given = [i for i in range(layer.num_inputs) if layer.get_input(i) is not None]
        assert layer.mode == self.trt.SampleMode.STRICT_BOUNDS
        fixed = {
            i: getattr(layer, name)
            for i, name in enumerate(("start", "shape", "stride"), 1)
            if i not in given
        }

        def cut(*parts: Tensor) -> Tensor:
            x, own = parts[0], dict(zip(given, parts, strict=True))
            bounds = [own[i].tolist() if i in own else list(fixed[i]) for i in range(1, 4)]
            for axis, (start, size, stride) in enumerate(zip(*bounds, strict=True)):
                places = start + stride * torch.arange(size)
                x = x.index_select(axis, places)
            return x

        return cut

    def _make_gather(self, layer: Any) -> Compute:
        mode, batched, axis = layer.mode, layer.num_elementwise_dims, layer.axis
        if mode == self.trt.GatherMode.DEFAULT:
            return super()._make_gather(layer)
        if mode == self.trt.GatherMode.ELEMENT:
            return lambda x, places: x.gather(axis, places.long().where(
                places >= 0, places.long() + x.shape[axis]))  # fmt: skip

        def gather(x: Tensor, places: Tensor) -> Tensor:
            if batched == 0:
                return x[tuple(places.long().unbind(-1))]
            rows = [gather_row[tuple(own.long().unbind(-1))] for gather_row, own in zip(
                x, places, strict=True)]  # fmt: skip
            return torch.stack(rows) if rows else x.new_zeros((0, *places.shape[1:-1],
                *x.shape[1 + places.shape[-1] :]))  # fmt: skip

        assert batched in (0, 1)
        return gather

    def _make_fill(self, layer: Any) -> Compute:
        given = [i for i in range(layer.num_inputs) if layer.get_input(i) is not None]
        kind = self.types[layer.get_output(0).dtype]
        assert layer.operation == self.trt.FillOperation.LINSPACE
        fixed = (layer.shape, layer.alpha, layer.beta)

        def fill(*parts: Tensor) -> Tensor:
            own = dict(zip(given, parts, strict=True))
            (size,) = own[0].tolist() if 0 in own else fixed[0]
            first = own[1] if 1 in own else torch.tensor(fixed[1])
            step = own[2].flatten() if 2 in own else torch.tensor(fixed[2])
            return (first + step * torch.arange(size)).to(kind)

        return fill

    def _make_non_zero(self, layer: Any) -> Compute:
        return lambda x: x.nonzero().mT.int()

    def _make_scatter(self, layer: Any) -> Compute:
        assert layer.mode == self.trt.ScatterMode.ELEMENT
        axis = layer.axis
        return lambda x, places, new: x.scatter(axis, places.long(), new)

    def _make_topk(self, layer: Any) -> Compute:
        """Of equal values the first ones: the networks' argmax rests on that."""
        (axis,) = [axis for axis in range(8) if layer.axes >> axis & 1]
        fixed = layer.k
        assert layer.op == self.trt.TopKOperation.MAX

        def choose(x: Tensor, count: Tensor | None = None) -> list[Tensor]:
            values, places = x.sort(dim=axis, descending=True, stable=True)
            size = fixed if count is None else int(count)
            return [values.narrow(axis, 0, size), places.narrow(axis, 0, size).int()]

        return choose


def sort_layers(layers: list[Any], known: set[str]) -> list[Any]:
    """In the order of computing: some were added before the layers that they read."""
    found: list[Any] = []
    while layers:
        waiting = []
        for layer in layers:
            if known.issuperset(layer[0]):
                found.append(layer)
                known.update(tensor.name for tensor in layer[1])
            else:
                waiting.append(layer)
        assert len(waiting) < len(layers)
        layers = waiting
    return found


def unpack_mask(words: Tensor, count: int) -> Tensor:
    """[n, ceil(most / 32)] words of 32 bits to the first `count` bits of each, [n, count]."""
    bits = words[:, :, None] >> torch.arange(32) & 1
    return bits.flatten(1)[:, :count].bool()


def rotate(x: Tensor, turned: Tensor, paired: bool) -> Tensor:
    """x: [n, H, D]; turned: cosines and sines, [n, R / 2, 2]."""
    half = turned.shape[1]
    cos, sin = turned[:, None].unbind(-1)
    own, passed = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (own[..., ::2], own[..., 1::2]) if paired else own.chunk(2, -1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    own = torch.stack(parts, -1).flatten(-2) if paired else torch.cat(parts, -1)
    return torch.cat((own, passed), -1)


def score(fields: dict[str, Any], q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """[n, H, D] of queries, [m, G, D] of keys and values, and what each query sees, [n, m]."""
    times = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(times, 1) for x in (keys, values))
    scores = torch.einsum("nhd,mhd->hnm", q, keys)
    scores = scores / (fields["head_size"] ** 0.5 * fields["q_scaling"])
    if limit := fields["qk_tanh_scale"]:
        scores = limit * torch.tanh(scores / limit)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, values)


def locate(pool: Tensor, pages: Tensor, places: Tensor) -> Tensor:
    """Where a sequence's places lie in a pool whose pages follow each other."""
    size = pool.shape[1]
    return pages[places // size].long() * size + places % size


def write_pages(pool: Tensor, pages: Tensor, past: int, new: Tensor) -> Tensor:
    """Write `new` [n, G, D] after `past` places; return all, [past + n, G, D]."""
    flat, places = pool.flatten(0, 1), torch.arange(past + len(new))
    flat[locate(pool, pages, places[past:])] = new
    return flat[locate(pool, pages, places)]


class Ring:
    """What the ranks exchange, each of which computes in a thread of its own."""

    def __init__(self, size: int) -> None:
        self.parts: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=120)

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        """Return all ranks' parts."""
        self.parts[rank] = part
        self.barrier.wait()
        found = list(self.parts)
        self.barrier.wait()
        return found


class Workshop:
    """In the process apart: TensorRT-LLM, and the networks that its trtllm-build has made."""

    def __init__(self, source: Path) -> None:
        self.trt, self.placed = make_tensorrt()
        sys.modules["tensorrt"] = self.trt
        install(source)
        self.command = load_command()
        self.models: list[list[RealInterpreter]] = []

    def build(self, argv: Sequence[str]) -> tuple[int, dict[str, tuple[int, ...]]]:
        """Be trtllm-build; return the networks' number here, and their inputs' shapes."""
        cache = Path(argv[argv.index("--output_dir") + 1], "model.cache")  # else where pytest runs
        sys.argv = [*argv, "--output_timing_cache", str(cache)]
        self.placed.networks.clear()
        self.command.main()
        ring = Ring(len(self.placed.networks))
        self.models.append([
            RealInterpreter(self.trt, network, self.placed.places[id(network)], ring, rank)
            for rank, network in enumerate(self.placed.networks)
        ])  # fmt: skip
        inputs = self.models[-1][0].inputs
        return len(self.models) - 1, {tensor.name: tuple(tensor.shape) for tensor in inputs}

    def call(self, model: int, name: str, *given: Any) -> list[Any]:
        """Call a method of all ranks' networks, each in a thread of its own."""
        ranks = self.models[model]
        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(lambda rank: getattr(rank, name)(*given), ranks))


def serve(pipe: Any, source: Path) -> None:
    """Answer calls of the workshop until the process is ended."""
    torch.set_num_threads(1)
    workshop = Workshop(source)
    while True:
        name, given = pipe.recv()
        try:
            pipe.send((True, getattr(workshop, name)(*given)))
        except Exception:  # noqa: BLE001 - told to whoever asked
            pipe.send((False, traceback.format_exc()))


class Machine:
    """The process that has TensorRT-LLM."""

    def __init__(self, source: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, source), daemon=True)
        self.process.start()

    def call(self, name: str, *given: Any) -> Any:
        self.pipe.send((name, given))
        is_well, found = self.pipe.recv()
        assert is_well, found
        return found

    def close(self) -> None:
        self.process.terminate()
        self.process.join()
