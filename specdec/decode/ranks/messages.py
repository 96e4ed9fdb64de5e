"""Messages from rank 0 of a tensor-parallel engine to the other ranks: calls with arguments.

A message is one broadcast, and a second one where it is long.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import torch

from specdec.engine.group import Group
from specdec.files.reading import Array

FRAME_BYTES = 4096  # of the first broadcast; a verify step of a few requests fits


@dataclasses.dataclass(frozen=True)
class Message:
    """Call of a method by name.

    values: arguments that are plain numbers and texts. arrays: arguments of any shape.
    """

    call: str
    values: dict[str, Any]
    arrays: dict[str, Array] = dataclasses.field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the message as bytes: their number and the header's, the header, the arrays."""
        arrays = {name: np.asarray(array, order="C") for name, array in self.arrays.items()}
        shapes = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
        header = json.dumps([self.call, self.values, shapes]).encode()
        body = header + b"".join(array.tobytes() for array in arrays.values())
        sizes = np.array([16 + len(body), len(header)], np.int64)
        return sizes.tobytes() + body

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """Read what `encode` returned; bytes beyond it are ignored."""
        header_size = int(np.frombuffer(data, np.int64, 2)[1])
        call, values, shapes = json.loads(data[16 : 16 + header_size])
        offset = 16 + header_size
        arrays = {}
        for name, dtype, shape in shapes:
            array = np.frombuffer(data, np.dtype(dtype), int(np.prod(shape)), offset)
            arrays[name] = array.reshape(shape).copy()
            offset += array.nbytes
        return cls(call, values, arrays)


def send(group: Group, message: Message) -> None:
    """Send a message to all other ranks."""
    data = message.encode()
    frame = torch.zeros(max(FRAME_BYTES, len(data)), dtype=torch.uint8)
    frame[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    group.broadcast(frame[:FRAME_BYTES])
    if len(data) > FRAME_BYTES:
        group.broadcast(frame[FRAME_BYTES:])


def receive(group: Group) -> Message:
    """Wait for rank 0's next message."""
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
    group.broadcast(frame)
    data = frame.numpy().tobytes()
    num_more_bytes = int(np.frombuffer(data, np.int64, 1)[0]) - FRAME_BYTES
    if num_more_bytes > 0:
        frame = torch.empty(num_more_bytes, dtype=torch.uint8)
        group.broadcast(frame)
        data += frame.numpy().tobytes()
    return Message.decode(data)
