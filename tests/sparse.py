"""Models of real shapes whose weights are holes: no byte of them is on the disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


def write_sparse(path: Path, shapes: Mapping[str, list[int]], dtype: str) -> None:
    """Write a safetensors file of such tensors, all of them zeros that take no room."""
    header: dict[str, Any] = {}
    position = 0
    for name, shape in shapes.items():
        end = position + NUM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
