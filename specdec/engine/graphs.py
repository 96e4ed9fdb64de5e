"""Calls of fixed shapes, recorded once and replayed: CUDA graphs.

A decoder's step is hundreds of small kernels, and starting them from Python takes longer than the
device needs for them. A recorded call starts them all at once. Its inputs must lie where they lay
when it was recorded: inputs are copied into buffers that belong to the graph, and the cache is one
that stays in its place (`StepGraphs.lend_blocks`).

Nothing but `CudaRecorder` needs a CUDA device: the tests replay on the CPU, from a tape of torch's
own operators whose arguments are as fixed as a graph's.

Legend: B rows, T tokens, N columns of a tree mask, S cache positions, D hidden.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Step
from specdec.engine.transfers import to_device, to_host
from specdec.engine.tree import IntArray
from specdec.errors import SpecDecError, summarize
from specdec.system.memory import pause_collection

Outputs = tuple[Tensor, ...]

MAX_GRAPHS = 128  # of an engine, its drafter's included
MAX_STEP_TOKENS = 64  # a row; longer steps are prompts
MAX_ALL_TOKENS = 512  # of all rows
LEAST_POSITIONS = 64  # that attention goes over
# Between a replay and its computation, relative to the largest value: the kernels are the same.
CHECK_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


class CudaRecorder:
    """Recorder of CUDA graphs. They share one pool of memory: only one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, compute: Callable[[], Outputs]) -> Outputs:
        """Make a call that will be recorded later; its results count.

        It is made on the stream that it will be recorded on: libraries set themselves up.
        """
        current_stream = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current_stream)
        with torch.cuda.stream(self._stream):
            outputs = compute()
        current_stream.wait_stream(self._stream)
        return outputs

    def record(self, compute: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        """Return where results will lie, and what makes the call again; nothing is computed."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            outputs = compute()
        return outputs, graph.replay

    def start_over(self) -> None:
        """Take note that no graph is left, and use another pool: that one is torch's to free."""
        self._pool = torch.cuda.graph_pool_handle()


class _Graph:
    """Buffers of one call's inputs; its results and its replay once it is recorded."""

    def __init__(self, inputs: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> None:
        self.outputs: Outputs = ()
        self.replay: Callable[[], None] | None = None
        self.buffers = [
            torch.zeros(tuple(shape), dtype=tensor.dtype, device=tensor.device)
            for tensor, shape in zip(inputs, shapes, strict=True)
        ]

    def feed(self, inputs: Sequence[Tensor]) -> None:
        """Copy inputs, which may be smaller, to the start of their buffers."""
        for buffer, tensor in zip(self.buffers, inputs, strict=True):
            buffer[tuple(slice(size) for size in tensor.shape)].copy_(tensor, non_blocking=True)

    def count_bytes(self) -> int:
        tensors = (*self.buffers, *self.outputs)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Graphs:
    """The recorded calls of an engine on one device, by owner and by what is fixed of a call.

    A call of a new key is computed as it would be without graphs, but on the graph's buffers; the
    second of the same key is recorded, and it and all later ones are replayed. So what occurs once
    is not recorded. The first replay is held against the computation that it stands for.
    """

    def __init__(self, recorder: CudaRecorder, *, max_graphs: int = MAX_GRAPHS) -> None:
        self.recorder = recorder
        self.max_graphs = max_graphs
        self.is_enabled = True
        self.num_recorded = self.num_replayed = self.num_warm_ups = 0
        self.pool_bytes = 0  # that recording took from the device, results and scratch
        # Calls that were computed without a graph, by reason.
        self.num_eager: Counter[str] = Counter()
        self._graphs: dict[tuple[object, Hashable], _Graph] = {}

    def call(
        self,
        owner: object,
        key: Hashable,
        inputs: Sequence[Tensor],
        compute: Callable[..., Outputs],
        *,
        shapes: Sequence[Sequence[int]] | None = None,
        crop: Sequence[int] = (),
    ) -> Outputs | None:
        """Return what `compute(*inputs)` returns, or None where there is no room for its graph.

        Inputs may change from call to call, in values alone; owner, by identity, and key must
        hold everything else that `compute` depends on. shapes: of the buffers that `compute`
        is given, where inputs may be smaller. crop: sizes that the results are cut to.
        """
        if not self.is_enabled:
            self.num_eager["switched off"] += 1
            return None
        graph = self._graphs.get((owner, key))
        if graph is None:
            if len(self._graphs) >= self.max_graphs:
                self.num_eager[f"over {self.max_graphs} graphs"] += 1
                return None
            with torch.inference_mode(False):  # else they could be written in that mode alone
                graph = _Graph(inputs, shapes or [tensor.shape for tensor in inputs])
            self._graphs[owner, key] = graph
            graph.feed(inputs)
            self.num_warm_ups += 1
            outputs = self.recorder.warm_up(lambda: compute(*graph.buffers))
        else:
            graph.feed(inputs)
            is_new = graph.replay is None
            if is_new:
                self._record(graph, owner, compute)
            assert graph.replay is not None
            graph.replay()
            self.num_replayed += 1
            if is_new:
                _check_replay(graph, owner, compute(*graph.buffers))
            outputs = graph.outputs
        # Copies: the next replay writes where this one did.
        crop_slices = tuple(slice(size) for size in crop)
        return tuple(output[crop_slices].clone() for output in outputs)

    def _record(self, graph: _Graph, owner: object, compute: Callable[..., Outputs]) -> None:
        bytes_before = self._measure()
        # Garbage that is collected meanwhile may be another engine's memory on the device, and
        # to free that ends the recording.
        try:
            with pause_collection():
                graph.outputs, graph.replay = self.recorder.record(lambda: compute(*graph.buffers))
        except RuntimeError as error:
            raise SpecDecError(
                f"a CUDA graph for {type(owner).__name__} could not be recorded:"
                f" {summarize(error)}",
                "build the engine with --optimize none to run it without graphs",
            ) from error
        self.pool_bytes += self._measure() - bytes_before
        self.num_recorded += 1

    def _measure(self) -> int:
        device = self.recorder.device
        if device.type != "cuda":
            return 0
        torch.cuda.empty_cache()  # as recording does: what that frees is not taken
        return torch.cuda.memory_reserved(device)

    def forget(self, owner: object) -> None:
        """Drop the graphs of an owner: something that they had fixed is no longer there."""
        remaining_graphs = {
            key: graph for key, graph in self._graphs.items() if key[0] is not owner
        }
        is_last = self._graphs and not any(graph.replay for graph in remaining_graphs.values())
        self._graphs = remaining_graphs
        if is_last:
            self.recorder.start_over()

    def describe(self) -> dict[str, object]:
        """Describe the graphs: their number, their calls, and memory in bytes."""
        return {
            "graphs": sum(graph.replay is not None for graph in self._graphs.values()),
            "recorded": self.num_recorded,
            "replayed": self.num_replayed,
            "warm_ups": self.num_warm_ups,
            "eager": dict(self.num_eager),
            "buffer_bytes": sum(graph.count_bytes() for graph in self._graphs.values()),
            "pool_bytes": self.pool_bytes,
        }


def _check_replay(graph: _Graph, owner: object, expected: Outputs) -> None:
    """Raise SpecDecError where a graph does not compute what was recorded.

    Whole numbers are choices, which a rounding may change: they are not compared.
    """
    figures = []  # of each result: how far apart, and how far it may be
    for replayed_output, computed_output in zip(graph.outputs, expected, strict=True):
        if computed_output.dtype.is_floating_point:
            limit = CHECK_TOLERANCE[computed_output.dtype] * computed_output.float().abs().max()
            figures.append(
                torch.stack(
                    [(replayed_output.float() - computed_output.float()).abs().max(), limit]
                )
            )
    for difference, limit in to_host(*figures) if figures else ():
        if not difference <= limit:  # or NaN
            raise SpecDecError(
                f"a CUDA graph for {type(owner).__name__} does not compute what it was recorded"
                f" from: {difference:.3g} apart, at most {limit:.3g} expected",
                "build the engine with --optimize none to run it without graphs, and report this",
            )


def round_tokens(count: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << (count - 1).bit_length()


def round_positions(count: int) -> int:
    """Round a length of attention up, by a quarter at most or by 63 positions."""
    unit = max(LEAST_POSITIONS, round_tokens(count) // 8)
    return -(-count // unit) * unit


@dataclasses.dataclass(frozen=True)
class StepShape:
    """Sizes that are fixed of a recorded step.

    Tokens beyond a row's are copies of its last, rows beyond the step's copies of its first: they
    compute, and write, what is computed and written anyway. is_prefix: the rows are 0 ... B - 1,
    and the cache is read where it lies; else it is gathered.
    """

    num_rows: int
    num_tokens: int
    num_new: int
    num_positions: int
    is_prefix: bool

    @property
    def num_numbers(self) -> int:
        """Number of int64 that `pack` returns, with eight elements of the mask in each."""
        tokens = self.num_rows * self.num_tokens
        numbers = self.num_tokens + self.num_rows * (3 + self.num_new) + 3 * tokens
        return numbers + -(-tokens * self.num_new // 8)

    def pack(self, step: Step, past: IntArray, lines: IntArray) -> IntArray:
        """Pack all that a step's layers read in one array: one copy to the device."""
        num_rows, num_tokens, num_new = step.tree_mask.shape
        row = np.arange(self.num_rows)
        row[num_rows:] = 0
        token = np.minimum(np.arange(self.num_tokens), num_tokens - 1)
        slots = past[:, None] + np.arange(num_new - num_tokens, num_new)
        columns = np.zeros((self.num_rows, self.num_new), np.int64)
        columns[:, :num_new] = step.mask_positions[row]
        mask = np.zeros((self.num_rows, self.num_tokens, self.num_new), np.bool_)
        mask[:, :, :num_new] = step.tree_mask[row[:, None], token]
        packed = np.zeros(self.num_numbers, np.int64)
        arrays = [row, token, step.rows[row], past[row], columns]
        arrays += [table[row[:, None], token] for table in (step.positions, slots, lines)]
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        packed[: len(flat)] = flat
        packed[len(flat) :].view(np.bool_)[: mask.size] = mask.reshape(-1)
        return packed

    def unpack(self, packed: Tensor) -> PackedStep:
        """Split a packed step into its arrays, on the device."""
        rows, tokens = self.num_rows, self.num_tokens
        sizes = [rows, tokens, rows, rows, rows * self.num_new, *[rows * tokens] * 3]
        ends = list(itertools.accumulate(sizes))
        arrays = [packed[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        row, token, cache_rows, past = arrays[:4]
        columns = arrays[4].view(rows, self.num_new)
        positions, slots, lines = (array.view(rows, tokens) for array in arrays[5:])
        mask = packed[ends[-1] :].view(torch.bool)[: rows * tokens * self.num_new]
        tree_mask = mask.view(rows, tokens, self.num_new)
        return PackedStep(row, token, cache_rows, past, columns, positions, slots, lines, tree_mask)


@dataclasses.dataclass(frozen=True)
class PackedStep:
    """A step on the device: the step's row and token that each stands for, then as in `Step`.

    row, cache_rows, past: [B]; token: [T]; mask_positions: [B, N]; positions, slots, lines: [B, T];
    tree_mask: [B, T, N].
    """

    row: Tensor
    token: Tensor
    cache_rows: Tensor
    past: Tensor
    mask_positions: Tensor
    positions: Tensor
    slots: Tensor
    lines: Tensor
    tree_mask: Tensor

    def build_bias(self, size: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Build the bias of attention's scores, [B, 1, T, S]: 0 where a token sees, else -inf.

        window: positions that a token sees, itself included.
        """
        num_rows, num_tokens, num_new = self.tree_mask.shape
        device, tree_mask = self.past.device, self.tree_mask
        behind = torch.arange(1, size + 1, device=device)  # each position
        # Columns of a table: what is committed, the entries of the step, what is after them.
        column = (behind - self.past[:, None]).clamp_(0, num_new + 1)[:, None]  # [B, 1, S]
        if window is not None:
            lowest = self.positions[:, :, None] - window + 1  # [B, T, 1]
            tree_mask = tree_mask & (self.mask_positions[:, None, :] >= lowest)
        table = torch.full(
            (num_rows, num_tokens, num_new + 2), -torch.inf, dtype=dtype, device=device
        )
        table[..., 0] = 0.0
        table[..., 1:-1].masked_fill_(tree_mask, 0.0)
        bias = table.gather(2, column.expand(num_rows, num_tokens, size))
        if window is not None:
            bias.masked_fill_((column == 0) & (behind <= lowest), -torch.inf)
        return bias[:, None]


class StepGraphs:
    """The graphs of one decoder's steps, and the cache that they were recorded over."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self._blocks: Tensor | None = None
        self._borrower: weakref.ref[KVCache] | None = None

    def lend_blocks(
        self, cache: KVCache, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """Lend zeros for a cache [layers, 2, R, N, S, H] that stay in their place; None while lent.

        They are kept, and grow, in rows and positions, to the largest that was asked for. They are
        given back when the cache is gone.
        """
        if self._borrower is not None and self._borrower() is not None:
            return None
        layers, two, num_rows, num_heads, num_positions, head_size = shape
        lent_shape = self._blocks.shape if self._blocks is not None else (0,) * 6
        if num_rows > lent_shape[2] or num_positions > lent_shape[4]:
            self.graphs.forget(self)
            self._blocks = None  # before the next is allocated
            rows, positions = (
                max(num_rows, lent_shape[2]),
                max(round_positions(num_positions), lent_shape[4]),
            )
            with torch.inference_mode(False):
                self._blocks = torch.empty(
                    (layers, two, rows, num_heads, positions, head_size), dtype=dtype,
                    device=self.graphs.recorder.device,
                )  # fmt: skip
        assert self._blocks is not None
        self._borrower = weakref.ref(cache)
        self._blocks.zero_()
        return self._blocks[:, :, :num_rows, :, :num_positions]

    def find_shape(self, step: Step, cache: KVCache) -> StepShape | None:
        """Find the shape of the graph for a step; None for steps that are computed without one."""
        num_rows, num_tokens, num_new = step.tree_mask.shape
        is_prefix = bool((step.rows == np.arange(num_rows)).all())
        # Rows in their place cannot be others' copies as well: no more than there are.
        rows = num_rows if is_prefix else round_tokens(num_rows)
        tokens = round_tokens(num_tokens)
        rounded_new = tokens if num_new == num_tokens else round_tokens(num_new)
        reasons = {
            "switched off": not self.graphs.is_enabled,
            "another cache": self._borrower is None or self._borrower() is not cache,
            f"over {MAX_STEP_TOKENS} tokens a row": num_tokens > MAX_STEP_TOKENS,
            f"over {MAX_ALL_TOKENS} tokens": rows * tokens > MAX_ALL_TOKENS,
        }
        if reason := next((reason for reason, is_so in reasons.items() if is_so), None):
            self.graphs.num_eager[reason] += 1
            return None
        assert self._blocks is not None
        num_used = int(cache.past_lens[step.rows].max()) + num_new
        positions = min(round_positions(num_used), self._blocks.shape[4])
        return StepShape(rows, tokens, rounded_new, positions, is_prefix)

    def run(
        self,
        shape: StepShape,
        key: Hashable,
        arrays: tuple[Step, IntArray, IntArray],
        inputs: Sequence[Tensor],
        compute: Callable[[StepShape, PackedStep, Tensor, Sequence[Tensor]], Outputs],
    ) -> Outputs | None:
        """Call `compute(shape, step, blocks, inputs)`, each input [B, T, ...] padded to the shape.

        arrays: the step, its rows' committed lengths, lines of the rotary table. key: whatever else
        the call depends on.
        """
        step = arrays[0]
        blocks = self._blocks
        assert blocks is not None

        def pad_and_compute(packed: Tensor, *rows_of_step: Tensor) -> Outputs:
            unpacked = shape.unpack(packed)
            row, token = unpacked.row[:, None], unpacked.token
            return compute(shape, unpacked, blocks, [x[row, token] for x in rows_of_step])

        packed = to_device(shape.pack(*arrays), self.graphs.recorder.device)
        lead = (shape.num_rows, shape.num_tokens)
        return self.graphs.call(
            self,
            (shape, key),
            [packed, *inputs],
            pad_and_compute,
            shapes=[packed.shape, *((*lead, *x.shape[2:]) for x in inputs)],
            crop=step.tokens.shape,
        )
