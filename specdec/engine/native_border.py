"""Border to the native kernels: the records that they read, and checks of what they are given.

The kernels trust sizes and addresses. What comes from an engine folder was checked when it was
loaded; the checks here are the last fence.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.engine.tree import BoolArray, IntArray

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
DOUBLE = ctypes.c_double
TILE = 32  # a multiple of the outputs side by side in a packed matrix, kTile in kernels/gemm.h
# A packed matrix begins at a multiple of so many bytes, a line of the processor's cache.
ALIGNMENT = 64
# Names of a layer's tensors, in the groups that have one shape: its matrices and its norms, each of
# which may have a bias, and the norms of its heads, which have none.
LAYER_MATRICES = ("qkv", "dense", "up", "down")
LAYER_NORMS = ("norm", "post", "dense_norm", "down_norm")
HEAD_NORMS = ("q_norm", "k_norm")
_INT64 = np.dtype(np.int64)


class LayerRecord(ctypes.Structure):
    """Weights of a layer, the kernels' `LayerRecord` in kernels/layers.h."""

    _fields_ = [
        *(
            (name + suffix, POINTER)
            for module in ("norm", "qkv", "dense", "post", "up", "down")
            for name, suffix in ((module, ""), (module, "_bias"))
        ),
        *((name, POINTER) for name in HEAD_NORMS),
        *((name + suffix, POINTER) for name in LAYER_NORMS[2:] for suffix in ("", "_bias")),
        ("cosine", POINTER), ("sine", POINTER), ("sinks", POINTER), ("window", INT),
        ("query_shift", INT), ("experts", POINTER), ("recurrence", POINTER),
    ]  # fmt: skip


class ExpertsRecord(ctypes.Structure):
    """A layer's experts that a rank holds, the kernels' `ExpertsRecord` in kernels/layers.h."""

    _fields_ = [
        *((name, POINTER) for name in ("router", "router_bias", "up_biases", "down_biases")),
        ("limit", DOUBLE), ("slope", DOUBLE),
        *((name, POINTER) for name in ("up", "down", "shared_up", "shared_down")),
        *((name, POINTER) for name in ("gate", "score_bias", "scales", "counters")),
        *((name, INT) for name in ("num", "top_k", "first_expert", "count", "I", "shared_I")),
        *((name, INT) for name in ("renormalizes", "uses_sigmoid", "uses_gelu")),
        ("weight_scale", DOUBLE), ("sum_epsilon", DOUBLE),
    ]  # fmt: skip


class Shape(ctypes.Structure):
    """Sizes of a call of `NativeKernels.run_layers`, the kernels' `Shape` in kernels/layers.h."""

    _fields_ = [
        (name, INT)
        for name in (
            *("B", "T", "C", "first_depth", "D", "N", "K", "H", "I", "R", "S", "rotated"),
            *("num_layers", "activation", "is_gated", "observing", "is_integer"),
            *("product_width", "mixed_width"),
        )
    ]


class Scalars(ctypes.Structure):
    """Factors of a decoder's layers, the kernels' `Scalars` in kernels/layers.h."""

    _fields_ = [(name, FLOAT) for name in ("epsilon", "scale", "cap", "share")]


class SearchShape(ctypes.Structure):
    """Sizes of ReDrafter's searches, the kernels' `SearchShape` in kernels/search.h."""

    _fields_ = [
        (name, INT)
        for name in ("B", "W", "L", "N", "V", "H", "X", "C", "is_integer", "is_embedding_packed")
    ]


class DeltaSizes(ctypes.Structure):
    """Sizes of a layer with head states, the kernels' `DeltaSizes` in kernels/head_states.h."""

    _fields_ = [(name, INT) for name in ("K", "V", "I", "J", "taps", "P")]


class ConvSizes(ctypes.Structure):
    """Sizes of a short convolution, the kernels' `ConvSizes` in kernels/short_conv.h."""

    _fields_ = [(name, INT) for name in ("C", "taps", "P")]


class RecurrenceRecord(ctypes.Structure):
    """A layer with a state, the kernels' `RecurrenceRecord` in kernels/recurrences.h."""

    _fields_ = [
        *((name, POINTER) for name in ("weights", "conv_bias", "rate", "bias", "skip", "norm")),
        ("epsilon", DOUBLE),
        *((name, INT) for name in ("kind", "index", "width", "out_width")),
    ]  # fmt: skip


class StatesRecord(ctypes.Structure):
    """A step's runs and states, the kernels' `StatesRecord` in kernels/recurrences.h."""

    _fields_ = [
        *((name, POINTER) for name in ("runs", "state", "window", "keys", "deltas", "decays")),
        ("inputs", POINTER),
        *((name, INT) for name in ("num_runs", "R", "C")),
        ("heads", DeltaSizes),
    ]  # fmt: skip


class PairNet(ctypes.Structure):
    """An EAGLE drafter, the kernels' `PairNet` in kernels/pair_draft.h."""

    _fields_ = [
        *((name, POINTER) for name in ("embedding", "embedding_types", "fc", "fc_bias")),
        *((name, POINTER) for name in ("read_norms", "embedding_norm", "feature_norm", "layers")),
        *((name, POINTER) for name in ("final_norm", "head", "drafted")),
        *((name, INT) for name in ("embedding_kind", "embedding_rows", "embedding_stride", "F")),
        *((name, INT) for name in ("num_read_norms", "V", "norms_residual", "norms_output")),
        ("is_fc_integer", INT), ("is_head_integer", INT), ("head_scale", DOUBLE),
        ("epsilon", DOUBLE),
    ]  # fmt: skip


class PairStep(ctypes.Structure):
    """Rows that an EAGLE drafter drafts for, the kernels' `PairStep` in kernels/pair_draft.h."""

    _fields_ = [
        *((name, POINTER) for name in ("states", "lines", "state_rows", "state_positions")),
        *((name, POINTER) for name in ("features", "rows", "past", "counts", "tokens")),
        ("temperatures", POINTER),
        *((name, INT) for name in ("num_states", "feature_positions", "B", "T")),
    ]


class PairTree(ctypes.Structure):
    """A tree that is to be drafted, the kernels' `PairTree` in kernels/pair_draft.h."""

    _fields_ = [
        ("levels", POINTER), *((name, INT) for name in ("L", "W", "N")), ("min_gain", DOUBLE),
    ]  # fmt: skip


RECORDS = (
    LayerRecord, ExpertsRecord, Shape, Scalars, SearchShape, DeltaSizes, ConvSizes,
    RecurrenceRecord, StatesRecord, PairNet, PairStep, PairTree,
)  # fmt: skip


def get_pointer(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's first number; None for no tensor."""
    return None if tensor is None else tensor.data_ptr()


def get_address(array: np.ndarray[Any, Any]) -> int:
    """Return the address of an array's first number; NumPy's own way takes longer."""
    return torch.from_numpy(array).data_ptr()


def check(name: str, tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> None:
    """Raise ValueError where a tensor is not of the type and shape that a kernel takes it for."""
    if tensor is None:
        return
    if (
        tensor.dtype is not dtype or tensor.shape != shape
        or not tensor.is_contiguous() or not tensor.is_cpu
    ):  # fmt: skip
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, strides"
            f" {list(tensor.stride())}; the kernels take {dtype} {list(shape)} on the CPU,"
            " contiguous"
        )


def check_all(dtype: torch.dtype, *rows: tuple[str, Tensor | None, tuple[int, ...]]) -> None:
    """Check a table of tensors of one type: name, tensor and shape in each row."""
    for name, tensor, shape in rows:
        check(name, tensor, dtype, *shape)


def check_packed(
    name: str, packed: Tensor, dtype: torch.dtype, num_outputs: int, depth: int
) -> None:
    """Raise ValueError where a packed matrix of integers or of `dtype` is not [outputs, depth]."""
    if packed.dtype is not torch.uint8:
        return check(name, packed, dtype, *get_packed_shape(num_outputs, depth, dtype))
    check(name, packed, torch.uint8, packed.numel())
    sizes = read_head(packed)[:2]
    if sizes != [num_outputs, depth]:
        raise ValueError(f"{name} is {sizes}, not {[num_outputs, depth]}")


def read_head(packed: Tensor) -> list[int]:
    """Return how a packed matrix of bytes begins: its outputs, its depth, and its integers' bits.

    A matrix of GGML's blocks has 0 bits. Reading by torch takes four times as long.
    """
    return list((INT * 3).from_address(packed.data_ptr()))


def get_packed_shape(num_outputs: int, depth: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of a packed matrix [num_outputs, depth], see `MatrixKernels.pack_matrix`."""
    numbers = 4 // dtype.itemsize
    return -(-num_outputs // TILE), -(-depth // numbers), TILE, numbers


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step's index arrays as the kernels take them, kept alive while pointers are used.

    num_newest: tokens that the step's mask is about: its own, and before them others. num_rows,
    num_positions, num_lines: the extent of a cache and of rotary tables that the indices reach.
    """

    arrays: tuple[np.ndarray[Any, Any], ...]
    pointers: tuple[int, ...]
    batch: int
    num_tokens: int
    num_newest: int
    num_rows: int
    num_positions: int
    num_lines: int

    def check(self, num_rows: int, num_positions: int, num_lines: float) -> None:
        """Raise ValueError where a step reaches beyond its cache or the rotary tables."""
        extent = (self.num_rows, self.num_positions, self.num_lines)
        if extent[0] > num_rows or extent[1] > num_positions or extent[2] > num_lines:
            room = (num_rows, num_positions, num_lines)
            raise ValueError(f"a step reaches {extent} rows, positions and angles of {room}")


def make_step_plan(
    rows: IntArray, positions: IntArray, lines: IntArray, past: IntArray, tree_mask: BoolArray
) -> StepPlan:
    """Check a step's indices and lay them side by side, see `NativeKernels.plan_step`."""
    batch, num_tokens, num_newest = tree_mask.shape
    shapes = [(batch,), (batch, num_newest), (batch, num_tokens), (batch,)]
    arrays = (rows, positions, lines, past)
    if [a.shape for a in arrays] != shapes or {a.dtype for a in arrays} != {_INT64}:
        raise ValueError(f"a step's indices are {[(a.dtype, a.shape) for a in arrays]}")
    lists, mask = [a.ravel().tolist() for a in arrays], np.ascontiguousarray(tree_mask)
    numbers = [*lists[0], *lists[1], *lists[2], *lists[3]]
    if num_newest < num_tokens or mask.dtype != np.bool_ or min(numbers) < 0:
        raise ValueError(f"a step of {num_tokens} tokens has a mask of {num_newest} as"
                         f" {mask.dtype}, or has indices below 0")  # fmt: skip
    indices = np.array(numbers, np.int64)
    offsets = (0, batch, batch * (1 + num_newest), batch * (1 + num_newest + num_tokens))
    start = get_address(indices)
    return StepPlan(
        (indices, mask), (*(start + 8 * offset for offset in offsets), get_address(mask)),
        batch, num_tokens, num_newest, num_rows=max(lists[0]) + 1,
        num_positions=max(lists[3]) + num_newest, num_lines=max(lists[2]) + 1,
    )  # fmt: skip
