"""Layers with a state, and the states of a step, as the native kernels take them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.engine.layers import Norm
from specdec.engine.linear_states import LinearStates
from specdec.engine.native_border import (
    DeltaSizes,
    RecurrenceRecord,
    StatesRecord,
    check,
    check_all,
    get_pointer,
)
from specdec.model.linear_attention import HeadStateSizes

if TYPE_CHECKING:  # both import the kernels' modules
    from specdec.engine.mamba2 import Mamba2
    from specdec.engine.short_conv import ShortConv

SHORT_CONV, MAMBA2 = 0, 1  # kinds of layers by their numbers in kernels/recurrences.h


class PackedRecurrence:
    """A layer with a state as the kernels that run all layers take it.

    width, output_width: numbers of a token that the layer's first product yields, and that its last
    one reads. The tensors are kept alive.
    """

    def __init__(
        self, dtype: torch.dtype, kind: int, layer: ShortConv | Mamba2, norm: Norm | None,
        vectors: tuple[Tensor | None, ...] = (),
    ) -> None:  # fmt: skip
        """vectors: float32, the bias of the convolution [C], decay, bias and skip, [V] each."""
        sizes, heads = layer.sizes, 0
        channels = output_width = sizes.num_channels
        self.width = 3 * channels
        if isinstance(sizes, HeadStateSizes):
            heads, output_width = sizes.num_value_heads, sizes.sections[2]
            self.width = channels + output_width + heads
        self.output_width, self.sizes, self.index = output_width, sizes, layer.index
        check("taps", layer.taps, torch.float32, sizes.num_taps, channels)
        for vector, size in zip(vectors, (channels, heads, heads, heads), strict=False):
            check("a bias, decay or skip", vector, torch.float32, size)
        weight = None if norm is None else norm.weight
        check("a norm's weight", weight, dtype, output_width)
        self._tensors = layer.taps, vectors, weight
        pointers = [get_pointer(tensor) for tensor in (*vectors, None, None, None)][:4]
        self.record = RecurrenceRecord(
            get_pointer(layer.taps), *pointers, get_pointer(weight),
            0.0 if norm is None else norm.epsilon, kind, layer.index, self.width, output_width,
        )  # fmt: skip

    @property
    def address(self) -> int:
        """Address of the record."""
        return ctypes.addressof(self.record)


def describe_states(states: LinearStates, dtype: torch.dtype) -> StatesRecord:
    """Return a record of the runs that states have begun, and of all layers' states."""
    sizes, (num_layers, num_rows) = states.sizes, states.window.shape[:2]
    channels, num_taps, num_logged = sizes.num_channels, sizes.num_taps, states.log[-1].shape[2]
    start = num_layers, num_rows
    check_all(
        dtype,
        ("windows", states.window, (*start, num_taps - 1, channels)),
        ("logged inputs", states.log[-1], (*start, num_logged, channels)),
    )
    check_all(
        torch.float32,
        ("states", states.state, (*start, *sizes.state_shape)),
        *(
            ("a log", log, (*start, num_logged, *shape))
            for log, shape in zip(states.log[:-1], sizes.logged_shapes, strict=True)
        ),
    )
    record = StatesRecord(states.table.ctypes.data, states.state.data_ptr())
    record.window, record.inputs = states.window.data_ptr(), states.log[-1].data_ptr()
    record.num_runs, record.R, record.C = len(states.table), num_rows, channels
    if isinstance(sizes, HeadStateSizes):
        record.keys, record.deltas, record.decays = (log.data_ptr() for log in states.log[:-1])
        record.heads = describe_heads(sizes, num_logged)
    else:
        record.heads = DeltaSizes(taps=num_taps, P=num_logged)
    return record


def describe_heads(sizes: HeadStateSizes, num_logged: int) -> DeltaSizes:
    """Return the sizes of a layer with a state for each head, as kernels take them."""
    return DeltaSizes(
        sizes.num_key_heads, sizes.num_value_heads, sizes.key_size, sizes.value_size,
        sizes.num_taps, num_logged,
    )  # fmt: skip
