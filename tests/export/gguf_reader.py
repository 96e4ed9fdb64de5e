"""GGUF, read as its specification says, by code that shares none with the writer."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch

READ = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q"}
DTYPES = {0: torch.float32, 1: torch.float16, 27: torch.int64, 30: torch.bfloat16}
Q8_0 = 8


class Reader:
    def __init__(self, path: Path) -> None:
        self.data, self.at = path.read_bytes(), 0

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def take_text(self) -> str:
        length = self.take("<Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def take_value(self, kind: int) -> Any:
        if kind == 8:
            return self.take_text()
        if kind == 9:
            inner, count = self.take("<I"), self.take("<Q")
            return [self.take_value(inner) for _ in range(count)]
        return self.take(READ[kind])


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Values and tensors; those in blocks of eight bits come out in float32."""
    reader = Reader(path)
    assert reader.data[:4] == b"GGUF"
    reader.at = 4
    assert reader.take("<I") == 3
    num_tensors, num_values = reader.take("<Q"), reader.take("<Q")
    values = {}
    for _ in range(num_values):
        key = reader.take_text()
        values[key] = reader.take_value(reader.take("<I"))
    heads = []
    for _ in range(num_tensors):
        name = reader.take_text()
        shape = [reader.take("<Q") for _ in range(reader.take("<I"))]
        heads.append((name, shape[::-1], reader.take("<I"), reader.take("<Q")))
    start, data = -(-reader.at // 32) * 32, bytearray(reader.data)
    tensors = {}
    for name, shape, kind, offset in heads:
        assert offset % 32 == 0
        count, at = int(torch.tensor(shape).prod()), start + offset
        if kind == Q8_0:  # a half-precision scale before each 32 numbers
            blocks = torch.frombuffer(data, dtype=torch.int8, count=count // 32 * 34, offset=at)
            blocks = blocks.view(-1, 34)
            scales = blocks[:, :2].contiguous().view(torch.float16).float()
            tensors[name] = (blocks[:, 2:].float() * scales).view(shape)
        else:
            found = torch.frombuffer(data, dtype=DTYPES[kind], count=count, offset=at)
            tensors[name] = found.view(shape)
    return values, tensors
