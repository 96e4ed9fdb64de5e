"""Between torch tensors and the arrays of `storage`, which carry bfloat16 as uint16 bits."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from specdec.files.reading import Array
from specdec.files.tensor_file import DTYPES

# The types that weights are executed and trained in, by the names in a checkpoint's config.json.
TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def to_array(tensor: Tensor) -> Array:
    """Return a CPU tensor in its storage type; memory and strides are the tensor's own."""
    storage = np.dtype(DTYPES[str(tensor.dtype).removeprefix("torch.")][1])
    array: Array = tensor.detach().view(getattr(torch, storage.name)).numpy()
    return array


def to_tensor(array: Array, dtype: str) -> Tensor:
    """Return a copy of an array in storage type as a tensor. dtype: a float type's name."""
    view: torch.dtype = getattr(torch, dtype)
    return torch.from_numpy(array.copy()).view(view)


def view_tensor(array: Array, dtype: str) -> Tensor:
    """Return an array in storage type as a tensor on the same memory, which nobody may write to."""
    view: torch.dtype = getattr(torch, dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).view(view)
