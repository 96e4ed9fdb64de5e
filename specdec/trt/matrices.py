"""Products with matrices of any kind: floating, int8, int4 and FP8, by dequantize layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.engine.integers import IntegerMatrix, take_matrix
from specdec.model.quantization import SCALES
from specdec.trt.network import NetworkWriter


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a matrix [N, depth].

    values: floating, FP8, or integers, int8 [N, depth] also where these have four bits. scales:
    float32, [N] of int8, [N, groups] of int4, [1] of FP8, whose inputs have `input_scale` [1].
    """

    values: Tensor
    bits: int = 16
    scales: Tensor | None = None
    input_scale: Tensor | None = None


def take_rows(weights: Mapping[str, Tensor], name: str, sizes: Sequence[int]) -> list[Rows]:
    """The matrix of a linear, cut into parts of so many rows."""
    matrix = take_matrix(weights, name)
    if isinstance(matrix, IntegerMatrix):
        codes = matrix.codes
        if matrix.bits == 4:  # a byte holds two rows' codes
            codes = torch.stack([codes << 4 >> 4, codes >> 4], 1).flatten(0, 1)
        scales = matrix.scales[:, 0] if matrix.bits == 8 else matrix.scales
        parts = zip(torch.split(codes, list(sizes)), torch.split(scales, list(sizes)), strict=True)
        return [Rows(values, matrix.bits, own) for values, own in parts]
    assert isinstance(matrix, Tensor), "matrices in GGML's blocks are refused by the build"
    values = torch.split(matrix, list(sizes))
    if matrix.dtype is not torch.float8_e4m3fn:
        return [Rows(each) for each in values]
    scales, input_scale = (weights[f"{name}.{kind}"].reshape(-1) for kind in SCALES)
    own = (
        list(scales.chunk(len(scales)))
        if len(scales) == len(sizes) > 1
        else [scales[:1]] * len(sizes)
    )
    return [Rows(v, 8, s, input_scale) for v, s in zip(values, own, strict=True)]


def multiply(writer: NetworkWriter, x: Any, rows: Rows, bias: Tensor | None = None) -> Any:
    """x W^T + b, [..., depth] -> [..., N]."""
    if rows.input_scale is not None:
        assert rows.scales is not None
        scale = writer.constant(rows.input_scale.reshape(()))
        x = writer.dequantize(writer.quantize(x, scale, torch.float8_e4m3fn), scale)
        codes = writer.constant(rows.values)
        weight = writer.dequantize(codes, writer.constant(rows.scales.reshape(())))
    elif rows.scales is None:
        weight = writer.constant(rows.values)
    elif rows.bits == 8:
        weight = writer.dequantize(writer.constant(rows.values), writer.constant(rows.scales), 0)
    else:
        pairs = rows.values.reshape(-1, 2)
        packed = (pairs[:, 0] & 15) | (pairs[:, 1] << 4)
        codes = writer.four_bits(packed, rows.values.shape)
        weight = writer.dequantize(codes, writer.constant(rows.scales.to(writer.dtype)))
    rank = len(x.shape)
    if rank > 2:
        weight = writer.reshape(weight, (*(1,) * (rank - 2), *rows.values.shape))
    y = writer.matmul(x, weight, transposes=True)
    return y if bias is None else writer.add(y, writer.lift(bias, rank))
