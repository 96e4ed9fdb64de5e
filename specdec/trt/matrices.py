"""Products with matrices of any kind: floating, int8, int4 and FP8, by dequantize layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.engine.integers import IntegerMatrix, take_matrix
from specdec.model.quantization import SCALES
from specdec.trt.network import NetworkWriter


def multiply(
    writer: NetworkWriter, x: Any, weights: Mapping[str, Tensor], name: str,
    sizes: Sequence[int] = (), *, has_bias: bool = True,
) -> list[Any]:  # fmt: skip
    """Compute x W^T + b, [..., N], by a linear's parts of so many rows each, or by all of it.

    FP8 rounds x as well, by the linear's one scale of inputs; parts may have a scale each.
    """
    matrix, rank = take_matrix(weights, name), len(x.shape)
    assert isinstance(matrix, Tensor | IntegerMatrix), (
        "matrices in GGML's blocks are refused by the build"
    )
    if isinstance(matrix, IntegerMatrix):
        rows = list(sizes) or [matrix.num_outputs]
        row_blocks = _widen(writer, matrix, rows)
    else:
        rows = list(sizes) or [len(matrix)]
        row_blocks = list(torch.split(matrix, rows))
        if matrix.dtype is torch.float8_e4m3fn:
            scales, input_scale = (weights[f"{name}.{kind}"].reshape(-1) for kind in SCALES)
            scale, block_scales = writer.constant(input_scale[0]), scales.expand(len(rows))
            x = writer.dequantize(writer.quantize(x, scale, matrix.dtype), scale)
            constants = (map(writer.constant, values) for values in (row_blocks, block_scales))
            row_blocks = list(map(writer.dequantize, *constants))
    products = [writer.matmul(x, writer.lift(block, rank), "TRANSPOSE") for block in row_blocks]
    if not has_bias or f"{name}.bias" not in weights:
        return products
    biases = [writer.lift(block, rank) for block in torch.split(weights[f"{name}.bias"], rows)]
    return list(map(writer.add, products, biases))


def _widen(writer: NetworkWriter, matrix: IntegerMatrix, rows: list[int]) -> list[Any]:
    """Widen parts of so many rows each, [N, depth]."""
    codes, scales = matrix.codes, torch.split(matrix.scales, rows)
    if matrix.bits == 8:
        return [
            writer.dequantize(writer.constant(block), writer.constant(scale[:, 0]), axis=0)
            for block, scale in zip(torch.split(codes, rows), scales, strict=True)
        ]
    depth = codes.shape[1]
    codes = torch.stack([codes << 4 >> 4, codes >> 4], 1).flatten(0, 1)  # a byte holds two rows'
    codes = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)  # and TensorRT's two columns'
    return [
        writer.dequantize(
            writer.constant(block, (len(block), depth)), writer.constant(scale.to(writer.dtype))
        )
        for block, scale in zip(torch.split(codes, rows), scales, strict=True)
    ]
