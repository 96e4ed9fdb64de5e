"""Products with matrices of integers: int8 with a scale per row, int4 with scales by groups.

weight[n, d] = scale[n, d // group] * (code[n, d] - zero[n, d // group]). The kernels round the
inputs of such products too, in float32: each group of a token's inputs to the integers from -127
to 127 that are nearest, ties to even, where 127 is the group's largest magnitude. So products are
sums of integers, exact and quick, and the same for one token as for many. Without kernels inputs
are not rounded: torch sums one token's products otherwise than many's, and rounding would make a
difference in the last bit into one of half a percent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from specdec.engine.blocks import BlockMatrix
from specdec.engine.linear import Linear
from specdec.engine.native import NativeKernels
from specdec.engine.native_matrices import KernelMatrix, Weight
from specdec.model.blocks import BLOCK_TYPES
from specdec.model.int4 import ENGINE_GROUPS, INPUT_SCALE, PERMUTATION, ZERO_POINT
from specdec.model.quantization import INT8_SCALES, WEIGHT_SCALE

# Inputs that share a scale where the weight has one a row.
ROW_GROUP = 64
# Rows of a matrix that are widened at a time where there are no kernels.
BLOCK_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class IntegerMatrix:
    """A matrix [N, depth] as its file has it.

    codes: int8 [N, depth], or of 4 bits [N / 2, depth], see specdec/model/int4.py; scales: float32
    [N, groups], one group or more; zeros: uint8 [N, groups], 8 if None; input_scales: float32
    [depth], by which inputs are multiplied; order: int32 [depth], the input of each column.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    input_scales: Tensor | None = None
    order: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        return len(self.scales)

    @property
    def group(self) -> int:
        """Number of inputs that the kernels round by one scale."""
        num_groups = self.scales.shape[1]
        size = self.codes.shape[1] // num_groups
        return ROW_GROUP if num_groups == 1 else min(size, max(ENGINE_GROUPS))

    def list_sizes(self) -> tuple[int, ...]:
        """List the numbers that the packed matrix begins with, see `Integers` in integers.h."""
        has_options = (t is not None for t in (self.zeros, self.input_scales, self.order))
        has_row_scales = self.scales.shape[1] == 1
        depth = self.codes.shape[1]
        return self.num_outputs, depth, self.bits, self.group, has_row_scales, *has_options

    def measure(self, kernels: NativeKernels) -> int:
        """Return the bytes of the packed matrix."""
        return kernels.measure_integers(self.list_sizes())

    def pack(self, kernels: NativeKernels) -> Tensor:
        """Lay out for the kernels, which scale by their own groups."""
        scales, zeros = self.scales, self.zeros
        num_groups = scales.shape[1]
        if num_groups > 1 and (finer := self.codes.shape[1] // num_groups // self.group) > 1:
            scales = scales.repeat_interleave(finer, 1)
            zeros = None if zeros is None else zeros.repeat_interleave(finer, 1)
        return kernels.pack_integers(
            self.codes, scales, zeros, bits=self.bits, group=self.group,
            input_scales=self.input_scales, order=self.order,
        )  # fmt: skip

    def halve(self) -> tuple[IntegerMatrix, IntegerMatrix]:
        """Split the matrix into the halves of its columns, which groups do not cross."""
        assert self.zeros is self.input_scales is self.order is None
        scales = [self.scales] * 2 if self.scales.shape[1] == 1 else self.scales.chunk(2, 1)
        left_half, right_half = (
            IntegerMatrix(self.bits, codes.contiguous(), half_scales.contiguous())
            for codes, half_scales in zip(self.codes.chunk(2, 1), scales, strict=True)
        )
        return left_half, right_half

    def widen(self, start: int, stop: int) -> Tensor:
        """Return rows of the weight, float32 [rows, depth], the columns as they are stored."""
        scales = self.scales[start:stop, :, None]
        if self.bits == 8:
            return self.codes[start:stop].float() * scales[:, 0]
        pairs = self.codes[start // 2 : -(-stop // 2)]
        signed = torch.stack([pairs << 4 >> 4, pairs >> 4], 1).flatten(0, 1)
        signed = signed[start % 2 :][: stop - start].float()
        groups = signed.reshape(*scales.shape[:2], -1)
        if self.zeros is not None:
            groups = groups + 8 - self.zeros[start:stop, :, None]
        return (groups * scales).reshape(signed.shape)


# Numbers that are not of the model's type.
Quantized = IntegerMatrix | BlockMatrix
Matrix = Tensor | Quantized | KernelMatrix


def find_tensor(weights: Mapping[str, Weight], name: str) -> Tensor | None:
    """Return a tensor that is not packed; None where there is none of that name."""
    tensor = weights.get(name)
    assert tensor is None or isinstance(tensor, Tensor), name
    return tensor


def take_tensor(weights: Mapping[str, Weight], name: str) -> Tensor:
    """Return a tensor that is not packed."""
    tensor = weights[name]
    assert isinstance(tensor, Tensor), name
    return tensor


def take_tensors(weights: Mapping[str, Weight]) -> dict[str, Tensor]:
    """Return all tensors, none of which is packed."""
    return {name: take_tensor(weights, name) for name in weights}


def get_height(weight: Weight) -> int:
    """Return the number of a matrix's rows, packed or not."""
    assert not isinstance(weight, tuple)
    return weight.shape[0]


def take_matrix(weights: Mapping[str, Weight], name: str) -> Matrix:
    """Return the matrix of a linear as an engine's weights have it."""
    weight = weights[name + ".weight"]
    if isinstance(weight, KernelMatrix):
        return weight
    return view_matrix(take_tensor(weights, name + ".weight"), list_neighbors(weights, name))


def list_neighbors(weights: Mapping[str, Weight], name: str) -> dict[str, Tensor]:
    """List what stands beside a matrix of integers or blocks, by kind."""
    kinds = (BLOCK_TYPES, INT8_SCALES, WEIGHT_SCALE, ZERO_POINT, INPUT_SCALE, PERMUTATION)
    tensors = {kind: find_tensor(weights, f"{name}.{kind}") for kind in kinds}
    return {kind: tensor for kind, tensor in tensors.items() if tensor is not None}


def view_matrix(codes: Tensor, neighbors: Mapping[str, Tensor]) -> Tensor | Quantized:
    """Return the matrix of a tensor and of what stands beside it, by kind."""
    if BLOCK_TYPES in neighbors:
        return BlockMatrix(codes, neighbors[BLOCK_TYPES])
    if codes.dtype is not torch.int8:
        return codes
    if INT8_SCALES in neighbors:
        return IntegerMatrix(8, codes, neighbors[INT8_SCALES][:, None])
    further_tensors = (neighbors.get(kind) for kind in (ZERO_POINT, INPUT_SCALE, PERMUTATION))
    return IntegerMatrix(4, codes, neighbors[WEIGHT_SCALE], *further_tensors)


def split_neighbors(neighbors: Mapping[str, Tensor], num_experts: int) -> list[dict[str, Tensor]]:
    """Split what stands beside the tensor of all experts: types of all rows, scales of each."""
    tensors = {
        kind: tensor.chunk(num_experts) if kind == BLOCK_TYPES else tensor.unbind()
        for kind, tensor in neighbors.items()
    }
    return [{kind: tensors[kind][expert] for kind in tensors} for expert in range(num_experts)]


def list_matrices(weights: Mapping[str, Tensor], name: str) -> list[Tensor | Quantized]:
    """List the matrices of a linear: one, or one for each expert of a tensor [E, out, in]."""
    weight, neighbors = weights[f"{name}.weight"], list_neighbors(weights, name)
    if weight.dim() < 3:
        return [view_matrix(weight, neighbors)]
    return [
        view_matrix(expert_weight, expert_neighbors)
        for expert_weight, expert_neighbors in zip(
            weight, split_neighbors(neighbors, len(weight)), strict=True
        )
    ]


def list_experts(weights: Mapping[str, Weight], name: str) -> Sequence[Matrix]:
    """List the matrices of all experts of a linear, packed or not."""
    weight = weights[f"{name}.weight"]
    if isinstance(weight, tuple):
        return weight
    tensors = list_neighbors(weights, name)
    tensors["weight"] = take_tensor(weights, f"{name}.weight")
    return list_matrices({f"{name}.{kind}": tensor for kind, tensor in tensors.items()}, name)


def join_rows(matrices: Sequence[Matrix], start: int) -> Tensor | IntegerMatrix:
    """Stack the rows from `start` on of matrices of one kind."""
    tensors = [
        matrix.unpack(start) if isinstance(matrix, KernelMatrix) else matrix[start:]
        for matrix in matrices if isinstance(matrix, Tensor | KernelMatrix)
    ]  # fmt: skip
    if tensors:
        return torch.cat(tensors)
    integer_matrices = [matrix for matrix in matrices if isinstance(matrix, IntegerMatrix)]
    bits = integer_matrices[0].bits
    return IntegerMatrix(
        bits, torch.cat([matrix.codes[start * bits // 8 :] for matrix in integer_matrices]),
        torch.cat([matrix.scales[start:] for matrix in integer_matrices]),
    )  # fmt: skip


def lay_out(
    matrix: Matrix, bias: Tensor | None = None, *, prepack: bool, kernels: NativeKernels | None
) -> Linear:
    """Make a linear of a matrix of any kind."""
    if isinstance(matrix, KernelMatrix):
        assert kernels is not None
        return PackedLinear(matrix, bias, kernels)
    if not isinstance(matrix, Tensor):
        return IntegerLinear(matrix, bias, kernels)
    return Linear(matrix, bias, prepack=prepack, kernels=kernels)


def make_linear(
    weights: Mapping[str, Weight], name: str, *, prepack: bool, kernels: NativeKernels | None
) -> Linear:
    """Make the linear of this name of an engine's weights."""
    matrix, bias = take_matrix(weights, name), find_tensor(weights, f"{name}.bias")
    return lay_out(matrix, bias, prepack=prepack, kernels=kernels)


def widen_integers(
    weights: Mapping[str, Weight], names: Iterable[str], dtype: torch.dtype
) -> dict[str, Weight]:
    """Return weights in which integer matrices of these names are of another type."""
    widened = dict(weights)
    for name in names:
        weight = weights.get(name)
        if isinstance(weight, KernelMatrix) and weight.numbers.dtype is torch.uint8:
            widened[name] = weight.unpack().to(dtype)
        elif isinstance(weight, Tensor) and weight.dtype in (torch.int8, torch.uint8):
            matrix = take_matrix(weights, name.removesuffix(".weight"))
            assert isinstance(matrix, Quantized)
            widened[name] = matrix.widen(0, matrix.num_outputs).to(dtype)
    return widened


class PackedLinear(Linear):
    """x W^T + b with a matrix that the engine holds packed."""

    def __init__(self, matrix: KernelMatrix, bias: Tensor | None, kernels: NativeKernels) -> None:
        self.bias = bias
        self.num_outputs = matrix.shape[0]
        self.kernels = kernels
        self.weight = None
        self.packed = matrix.numbers


class IntegerLinear(Linear):
    """x W^T + b with a matrix of integers, or of blocks of them.

    Without kernels each product widens the matrix to float32 again, block by block: that is slow.
    """

    def __init__(
        self, matrix: Quantized, bias: Tensor | None, kernels: NativeKernels | None
    ) -> None:
        self.bias = bias
        self.num_outputs = matrix.num_outputs
        self.kernels = kernels
        self.weight = None
        self.packed = None if kernels is None else matrix.pack(kernels)
        self.matrix = matrix if kernels is None else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.matrix is None:
            return super().__call__(x)
        matrix, inputs = self.matrix, x.float()
        if matrix.input_scales is not None:
            inputs = inputs * matrix.input_scales
        if matrix.order is not None:
            inputs = inputs[..., matrix.order]
        products = [
            inputs @ matrix.widen(start, min(start + BLOCK_ROWS, self.num_outputs)).T
            for start in range(0, self.num_outputs, BLOCK_ROWS)
        ]
        y = torch.cat(products, -1)
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)
