"""Between torch tensors and the arrays of `storage`, which carry bfloat16 as uint16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.storage import Array

# The types that weights are executed and trained in, by the names in a checkpoint's config.json.
TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def to_array(tensor: Tensor) -> Array:
    """Return a CPU tensor in its storage type; the memory is shared where it is contiguous."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:  # numpy has no such type
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy()
    return array


def to_tensor(array: Array, dtype: str) -> Tensor:
    """Return a copy of an array in storage type as a tensor. dtype: a key of TORCH_DTYPES."""
    return torch.from_numpy(array.copy()).view(TORCH_DTYPES[dtype])
