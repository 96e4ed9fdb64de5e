"""Memory of host and device, and transfers: to the device without waiting, back in one place.

A copy from pageable memory, `.item()`, `.tolist()` and `.cpu()` all make the host wait until a CUDA
device has done everything before them. Code of a step uses `to_device` and `to_host` instead.
"""

from __future__ import annotations

import errno
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
LEAST_MAPPED = 1 << 20  # bytes from which zeros are pages that the system clears when they are used


class Waits:
    """Count of how often the host took something back from a device, or would have waited."""

    def __init__(self) -> None:
        self.count = 0


WAITS = Waits()


def make_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; large ones on a CPU take no time, and memory only where they are used.

    Raise MemoryError where the system grants no such range.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < LEAST_MAPPED:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"no {num_bytes:,} bytes of memory for {tuple(shape)} numbers") from None
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


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
