"""Writer of an engine's weight files whose matrices are packed, see specdec/engine/packed.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from specdec.engine.integers import Quantized, list_matrices, split_neighbors, view_matrix
from specdec.engine.layout import PACKED_FOLDER
from specdec.engine.native import NativeKernels
from specdec.engine.native_border import ALIGNMENT, get_packed_shape
from specdec.engine.packed import identify_packing, sketch_matrices
from specdec.engine.weight_files import encode_tensors, make_metadata
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo, write_tensor_file
from specdec.files.torch_tensors import to_array, to_tensor, view_tensor
from specdec.model.blocks import BLOCK_TYPES
from specdec.model.config import ModelConfig
from specdec.model.int4 import PERMUTATION
from specdec.model.quantization import INT8
from specdec.model.tensors import DFLASH_NET, EMBEDDING, ROUTER

# Matrices that the kernels read as they are, or that a drafter cuts before they are packed.
NOT_PACKED = (ROUTER, "shared_expert_gate.weight", "drafter.input_proj.weight")

ReadTensor = Callable[[str], Array | Iterable[Array]]


def list_packed(tensors: Mapping[str, TensorInfo], model: ModelConfig) -> list[str]:
    """Return the tensors of a weight file that stand in the engine packed.

    What a drafter stacks or cuts is packed when it is loaded, and so is what has an order of its
    inputs, which is checked then.
    """
    names = [
        name for name, info in tensors.items()
        if is_matrix(name, info, model) and not is_cut(name, info, model)
        and f"{name.removesuffix('weight')}{PERMUTATION}" not in tensors
    ]  # fmt: skip
    is_head = model.share_embedding_table and (model.tp_size == 1 or model.use_parallel_embedding)
    return names + [EMBEDDING] if is_head and EMBEDDING in tensors else names


def is_matrix(name: str, info: TensorInfo, model: ModelConfig) -> bool:
    """Return whether a tensor is a matrix that the kernels multiply by, each in one piece."""
    is_weight = name.endswith(".weight") and not name.endswith(NOT_PACKED)
    if not is_weight or len(info.shape) < 2 or info.dtype not in (model.dtype, INT8, "uint8"):
        return False
    is_stacked = ".mlp." in name and not name.startswith("transformer.")  # by a drafter
    return "embedding" not in name and not is_stacked


def is_cut(name: str, info: TensorInfo, model: ModelConfig) -> bool:
    """Return whether DFlash stacks rows of a matrix of integers, which are not unpacked for it."""
    is_stacked = name.startswith(DFLASH_NET) and name.endswith(".attention.qkv.weight")
    return is_stacked and info.dtype != model.dtype


class PackedWriter:
    """Writer of one weight file of an engine whose matrices are packed by these kernels.

    tensors: of the file as it is without that; read: what returns one of them.
    """

    def __init__(
        self, tensors: Mapping[str, TensorInfo], read: ReadTensor, model: ModelConfig,
        kernels: NativeKernels,
    ) -> None:  # fmt: skip
        self._tensors, self._read, self._kernels = tensors, read, kernels
        names = list_packed(tensors, model)
        self._neighbors = {name: self._list_neighbors(name) for name in names}
        replaced_names = [n for name in names for n in (name, *self._neighbors[name])]
        self._replaced = {
            name: tensors[name] for name in replaced_names if not name.endswith(BLOCK_TYPES)
        }

    def write(self, folder: Path, name: str, build_id: str) -> dict[str, str]:
        """Write both files of this name into an engine; return their sha256 sums by name."""
        plain = {key: info for key, info in self._tensors.items() if key not in self._replaced}
        packed = {key: self._plan(key) for key in self._neighbors}
        packed_name = f"{PACKED_FOLDER}/{name}"
        metadata = make_metadata(packed_name, build_id, packed) | {
            "packing": identify_packing(self._kernels), "replaced": encode_tensors(self._replaced),
        }  # fmt: skip
        (folder / PACKED_FOLDER).mkdir(exist_ok=True)
        return {
            name: write_tensor_file(
                folder / name, plain, self._read, make_metadata(name, build_id, plain)
            ),
            packed_name: write_tensor_file(
                folder / packed_name, packed, self._pack, metadata, ALIGNMENT
            ),
        }

    def _list_neighbors(self, name: str) -> list[str]:
        """List the tensors beside a matrix that are packed with it, or tell how it is packed."""
        module = name.removesuffix(".weight")
        return [
            key for key in self._tensors
            if key.rpartition(".")[0] == module and key not in (name, f"{module}.bias")
        ]  # fmt: skip

    def _plan(self, name: str) -> TensorInfo:
        types = None
        if (key := f"{name.removesuffix('.weight')}.{BLOCK_TYPES}") in self._tensors:
            types = to_tensor(self._read_whole(key), "uint8")
        first_matrix = sketch_matrices(name, self._replaced, types)[0]
        experts = self._tensors[name].shape[:-2]
        if not isinstance(first_matrix, Tensor):
            return TensorInfo("uint8", (*experts, round_up(first_matrix.measure(self._kernels))))
        num_rows, depth = first_matrix.shape
        shape = get_packed_shape(num_rows, depth, first_matrix.dtype)
        return TensorInfo(self._tensors[name].dtype, (*experts, *shape))

    def _pack(self, name: str) -> Iterator[Array]:
        """Yield a matrix as it is packed, those of experts one after another."""
        for matrix in self._open_matrices(name):
            if isinstance(matrix, Tensor):
                yield to_array(self._kernels.pack_matrix(matrix))
            else:
                packed = to_array(matrix.pack(self._kernels))
                yield packed
                yield np.zeros(round_up(len(packed)) - len(packed), np.uint8)

    def _open_matrices(self, name: str) -> Iterator[Tensor | Quantized]:
        """Yield the matrices that linears multiply with, of all experts for an expert tensor."""
        info, module = self._tensors[name], name.removesuffix(".weight")
        # By these the matrix is rounded: they are read first.
        neighbors = {
            key.rpartition(".")[2]: view_tensor(self._read_whole(key), self._tensors[key].dtype)
            for key in self._neighbors[name]
        }
        produced = self._read(name)
        if isinstance(produced, np.ndarray):
            tensors = {f"{module}.{kind}": tensor for kind, tensor in neighbors.items()}
            yield from list_matrices({name: view_tensor(produced, info.dtype), **tensors}, module)
            return
        is_many = len(info.shape) > 2
        rows = split_neighbors(neighbors, info.shape[0]) if is_many else [neighbors]
        for array, expert_neighbors in zip(produced, rows, strict=True):
            yield view_matrix(view_tensor(array, info.dtype), expert_neighbors)

    def _read_whole(self, name: str) -> Array:
        array = self._read(name)
        assert isinstance(array, np.ndarray), name
        return array


def round_up(num_bytes: int) -> int:
    """Round a size up to whole lines, so that what follows is aligned."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
