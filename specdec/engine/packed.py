"""Matrices that the build lays out for its machine's kernels, mapped when the engine is loaded.

An engine with packed matrices has each of them in this form alone, in a file of its folder `packed`
under the tensor's name. `identify_packing` tells which kernels read them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from specdec.engine.integers import IntegerMatrix, Quantized, list_matrices
from specdec.engine.native import NativeKernels
from specdec.engine.native_border import TILE, get_packed_shape
from specdec.engine.native_matrices import KernelMatrix, Weight
from specdec.engine.weight_files import WeightFile
from specdec.errors import SpecDecError
from specdec.files.tensor_file import TensorInfo
from specdec.files.torch_tensors import to_array, to_tensor, view_tensor
from specdec.model.blocks import BLOCK_TYPES

# Bumped where packed matrices mean something else though `identify_packing` sees the same bytes; it
# is not ABI_VERSION, so that new kernels read what older ones with the same layout packed.
PACKING_VERSION = 15
LINE_BYTES = 64  # lists in a packed matrix begin at multiples of these, `kLine` in threads.h
# Of `identify_packing`, by library and type: a loaded library never changes, nor is it unloaded.
PACKINGS: dict[tuple[int, torch.dtype], str] = {}


def sketch_matrices(
    name: str, infos: Mapping[str, TensorInfo], types: Tensor | None
) -> list[Tensor | Quantized]:
    """List the matrices of a weight without their numbers, one for each expert.

    infos: of the weight and of what stands beside it in a file that is not packed. types: of the
    rows, where these are in GGML's blocks.
    """
    module = name.removesuffix(".weight")
    sketches = {
        tensor: torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")
        for tensor, info in infos.items()
        if tensor.rpartition(".")[0] == module
    }
    if types is not None:
        sketches[f"{module}.{BLOCK_TYPES}"] = types
    return list_matrices(sketches, module)


def map_packed(
    file: WeightFile, names: Collection[str], kernels: NativeKernels
) -> dict[str, Weight]:
    """Map a file's packed matrices of these names.

    Raises SpecDecError where one cannot be what the kernels made of such a matrix.
    """
    if file.packed is None:
        return {}
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in file.replaced.items():
        modules.setdefault(name.rpartition(".")[0], {})[name] = info
    weights: dict[str, Weight] = {}
    for name, info in file.packed.tensors.items():
        if name not in names:
            continue
        module, types = name.removesuffix(".weight"), None
        if (key := f"{module}.{BLOCK_TYPES}") in file.plain.tensors:
            types = to_tensor(file.plain.read(key), "uint8")
        numbers = view_tensor(file.packed.read(name), info.dtype)
        sketches = sketch_matrices(name, modules[module], types)
        is_many = len(file.replaced[name].shape) > 2
        if is_many and info.shape[:1] != (len(sketches),):
            raise SpecDecError(
                f"{file.packed.path} has {list(info.shape)} for {len(sketches)} experts, {name}",
                "build the engine again",
            )
        matrices = tuple(
            take_packed(expert_numbers, sketch, f"{file.packed.path}: {name}", kernels)
            for expert_numbers, sketch in zip(
                numbers if is_many else [numbers], sketches, strict=True
            )
        )
        weights[name] = matrices if is_many else matrices[0]
    return weights


def take_packed(
    numbers: Tensor, sketch: Tensor | Quantized, label: str, kernels: NativeKernels
) -> KernelMatrix:
    """Take numbers for a packed matrix; SpecDecError where they are not of such a matrix.

    sketch: the matrix as it was before, without its numbers.
    """
    if isinstance(sketch, Tensor):
        num_rows, depth = sketch.shape
        shape = get_packed_shape(num_rows, depth, sketch.dtype)
        is_right = numbers.dtype is sketch.dtype and numbers.shape == shape
    elif isinstance(sketch, IntegerMatrix):
        num_rows, depth = sketch.num_outputs, sketch.codes.shape[1]
        is_right = has_headers(numbers, [(0, sketch.list_sizes())], sketch.measure(kernels))
        is_right = is_right and has_order(numbers, sketch)
    else:
        num_rows, depth = sketch.shape
        headers, offsets = kernels.plan_blocks(sketch.list_parts(), depth)
        sizes = [tuple(header.tolist()) for header in headers]
        is_right = has_headers(numbers, list(zip(offsets, sizes, strict=False)), offsets[-1])
    if not is_right:
        raise SpecDecError(
            f"{label} is {numbers.dtype} {list(numbers.shape)}, which is not a matrix"
            f" {[num_rows, depth]} as the kernels pack it",
            "the file is damaged: build the engine again",
        )
    return KernelMatrix(numbers, (num_rows, depth), kernels)


def has_headers(
    numbers: Tensor, headers: list[tuple[int, tuple[int, ...]]], num_bytes: int
) -> bool:
    """Return whether bytes have headers at these offsets, and are as many as needed or more."""
    if numbers.dtype is not torch.uint8 or numbers.dim() != 1 or len(numbers) < num_bytes:
        return False
    return all(
        numbers[offset : offset + 8 * len(sizes)].view(torch.int64).tolist() == [*sizes]
        for offset, sizes in headers
    )


def has_order(numbers: Tensor, sketch: IntegerMatrix) -> bool:
    """Return whether a packed matrix of these sizes names inputs alone where it orders them.

    Kernels fetch a column's input by this number, whatever it is. See `Integers` in integers.h.
    """
    if sketch.order is None:
        return True
    depth = sketch.codes.shape[1]
    list_bytes = -(-4 * depth // LINE_BYTES) * LINE_BYTES
    start = 8 * len(sketch.list_sizes()) + (0 if sketch.input_scales is None else list_bytes)
    order = numbers[start : start + 4 * depth].view(torch.int32)
    return 0 <= int(order.min()) and int(order.max()) < depth


def identify_packing(kernels: NativeKernels) -> str:
    """Identify how kernels lay matrices out, once in a process, see `hash_packing`."""
    key = (kernels.handle, kernels.dtype)
    if key not in PACKINGS:
        PACKINGS[key] = hash_packing(kernels)
    return PACKINGS[key]


def hash_packing(kernels: NativeKernels) -> str:
    """Return a sum over some matrices that kernels packed.

    It is the same on two machines only if matrices that were packed on one are right on the other.
    """
    digest = hashlib.sha256(f"{PACKING_VERSION} {kernels.dtype}".encode())

    def add(packed: Tensor) -> None:
        digest.update(to_array(packed).tobytes())

    for rows, depth in ((2 * TILE + 6, 71), (4 * TILE, 2 * TILE)):
        numbers = torch.arange(rows * depth, dtype=torch.int16)  # below all that are not finite
        if kernels.dtype is torch.float32:
            add(kernels.pack_matrix(numbers.float().view(rows, depth)))
        else:
            add(kernels.pack_matrix(numbers.view(kernels.dtype).view(rows, depth)))
        for bits, group, has_more in ((8, 64, False), (4, 64, False), (4, 32, True)):
            codes = numbers.to(torch.int8).view(rows, depth)[: rows * bits // 8].contiguous()
            num_groups = -(-depth // group) if has_more else 1
            scales = numbers[: rows * num_groups].float().view(rows, num_groups)
            zeros = scales.to(torch.uint8) if has_more else None
            inputs = torch.arange(depth)
            add(
                kernels.pack_integers(
                    codes, scales, zeros, bits=bits, group=group,
                    input_scales=inputs.float() if has_more else None,
                )
            )  # fmt: skip
    return digest.hexdigest()[:32]
