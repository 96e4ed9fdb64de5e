"""Transfers between host and device: to the device without waiting, to the host in one place.

A copy from pageable memory, `.item()`, `.tolist()` and `.cpu()` all make the host wait until a CUDA
device has done everything before them. Code of a step uses these two functions instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


class Waits:
    """Count of how often the host took something back from a device, or would have waited."""

    def __init__(self) -> None:
        self.count = 0


WAITS = Waits()


def to_device(values: Array | Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """Return values as a tensor on the device; the host goes on at once."""
    array = np.ascontiguousarray(values)
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if device.type != "cuda":
        return tensor
    # The allocator of pinned memory keeps it until the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)


class Arrival:
    """Tensors of one device on their way to the host, which may go on meanwhile."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copied_event: Any = None
        device = tensors[0].device
        if device.type != "cuda":
            self._copies = tensors
            return
        self._copies = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for tensor in tensors
        )
        make_event: Any = torch.cuda.Event
        self._copied_event = make_event()
        self._copied_event.record(torch.cuda.current_stream(device))

    def wait(self) -> tuple[Array, ...]:
        """Return them as arrays once they are there."""
        WAITS.count += 1
        if self._copied_event is not None:
            self._copied_event.synchronize()
        return tuple(copy.numpy() for copy in self._copies)


def to_host(*tensors: Tensor) -> tuple[Array, ...]:
    """Return tensors of one device as arrays: the host waits once for all of them."""
    return Arrival(*tensors).wait()
