"""Fused kernels of a decoder's layers on a CUDA device: each does the work of several of torch's.

They are Triton's (https://doi.org/10.1145/3315508.3329973), which comes with torch's CUDA builds.
A step of few tokens reads its weights once, and its many small operators take as long as that: here
a residual sum is normed where it is made, and queries are rotated and keys and values written into
the cache straight from their product.

A program computes of one token one row, head or block, and reads nothing of other tokens. How it is
compiled and launched depends on the model's sizes alone, since tensors begin at aligned addresses.
So a token's result does not depend on what else is in the step. Results are rounded to the model's
type where torch's operators round.

Legend: B rows, T tokens per row, D hidden, N heads, K K/V heads, H head size, R rotated dimensions.
"""

# Kernels are typed when they are compiled.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import GATES, Attention, Norm
from specdec.engine.step import Step
from specdec.engine.torch_layers import Layer, Outcome, TorchLayers

GATE_BLOCK = 512  # elements of a program


@triton.jit
def _scale(x, epsilon, size):
    """Return the factor of a row's root-mean-square norm; x is zero beyond its size."""
    return tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)


@triton.jit
def _add_norm_kernel(  # noqa: PLR0913 - Triton takes pointers and strides one by one
    x, delta, delta_weight, weight, total, normed, share, epsilon, offset,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a token's total = x + share * delta, [D], and its norm; of x where delta is None.

    delta_weight: of a norm of delta, or None.
    """
    columns = tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + columns
    row = tl.load(x + offsets, mask=is_inside, other=0.0).to(tl.float32)
    if delta is not None:
        delta_row = tl.load(delta + offsets, mask=is_inside, other=0.0).to(tl.float32)
        if delta_weight is not None:
            norm_weight = (
                tl.load(delta_weight + columns, mask=is_inside, other=0.0).to(tl.float32) + offset
            )
            delta_row = delta_row * _scale(delta_row, epsilon, SIZE) * norm_weight
            delta_row = delta_row.to(x.dtype.element_ty).to(tl.float32)
        row = (row + share * delta_row).to(x.dtype.element_ty).to(tl.float32)
        tl.store(total + offsets, row, mask=is_inside)
    scaled = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32) + offset
    tl.store(normed + offsets, row * _scale(row, epsilon, SIZE) * scaled, mask=is_inside)


@triton.jit
def _gate_kernel(inner, gated, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    """Store a block of a(gate) * up of a token; inner: gate and up, [2 * SIZE]; gated: [SIZE].

    a(x) = x / (1 + exp(-z)), where z is x, or for gelu by tanh a cubic polynomial of it.
    """
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    token = tl.program_id(0).to(tl.int64) * SIZE
    gate = tl.load(inner + 2 * token + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(inner + 2 * token + SIZE + columns, mask=is_inside, other=0.0).to(tl.float32)
    z = gate
    if IS_GELU:  # 2 sqrt(2 / pi)
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = (gate / (1.0 + tl.exp(-z))).to(inner.dtype.element_ty).to(tl.float32)
    tl.store(gated + token + columns, active * up, mask=is_inside)


@triton.jit(do_not_specialize_on_alignment=["lines", "rows", "slots"])
def _turn_kernel(  # noqa: PLR0913 - Triton takes pointers and strides one by one
    product, q_weight, k_weight, cos, sin, lines, rows, slots, queries, block,
    epsilon, offset, query_shift, width, plane_stride, row_stride, head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    ROTATED_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store one head of one token: a query normed and rotated, a key likewise into the cache.

    A value is copied there. query_shift: lines from a key's to a query's. SIZE: H; ROTATED_SIZE: R.
    width: from token to token of the product.
    plane_stride: from a key to its value in the cache; row_stride, head_stride: of rows and heads.
    Norms and rotation are left out where they are None.
    """
    row, head = tl.program_id(1), tl.program_id(2)
    token = (row * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    source = product + token * width + head * SIZE
    kind = product.dtype.element_ty
    x = tl.load(source + columns, mask=is_inside, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        is_rotated = columns < ROTATED_SIZE
        # Each half is paired with the other: where a dimension's partner is.
        partners = tl.where(
            columns < ROTATED_SIZE // 2, columns + ROTATED_SIZE // 2, columns - ROTATED_SIZE // 2
        )
        y = x
        if cos is not None:
            y = tl.load(source + partners, mask=is_rotated, other=0.0).to(tl.float32)
        if q_weight is not None:
            is_query = head < NUM_HEADS
            scale = _scale(x, epsilon, SIZE)
            norm_weight = tl.load(q_weight + columns, mask=is_inside & is_query, other=0.0)
            norm_weight += tl.load(k_weight + columns, mask=is_inside & (is_query == 0), other=0.0)
            x = (x * scale * (norm_weight.to(tl.float32) + offset)).to(kind).to(tl.float32)
            norm_weight = tl.load(q_weight + partners, mask=is_rotated & is_query, other=0.0)
            norm_weight += tl.load(
                k_weight + partners, mask=is_rotated & (is_query == 0), other=0.0
            )
            y = (y * scale * (norm_weight.to(tl.float32) + offset)).to(kind).to(tl.float32)
        if cos is not None:
            line = tl.load(lines + token) + tl.where(head < NUM_HEADS, query_shift, 0)
            angle = line * ROTATED_SIZE + columns
            c = tl.load(cos + angle, mask=is_rotated, other=1.0).to(tl.float32)
            s = tl.load(sin + angle, mask=is_rotated, other=0.0).to(tl.float32)
            y = tl.where(columns < ROTATED_SIZE // 2, -y, y)
            x = (x * c).to(kind).to(tl.float32) + (y * s).to(kind).to(tl.float32)
    if head < NUM_HEADS:
        query_index = (row * NUM_HEADS + head) * tl.num_programs(0) + tl.program_id(0)
        tl.store(queries + query_index.to(tl.int64) * SIZE + columns, x, mask=is_inside)
    else:
        is_value = (head >= NUM_HEADS + NUM_KV_HEADS).to(tl.int32)
        target = block + is_value * plane_stride + tl.load(rows + row) * row_stride
        target += (head - NUM_HEADS - is_value * NUM_KV_HEADS).to(tl.int64) * head_stride
        tl.store(target + tl.load(slots + token) * SIZE + columns, x, mask=is_inside)


def add_norm(
    x: Tensor, delta: Tensor | None, norm: Norm, delta_norm: Norm | None = None, share: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return x + share * delta, [..., D], and its norm; x itself where delta is None.

    delta_norm: of delta, before it is added. The norms are root-mean-square ones, of one kind.
    """
    assert delta_norm is None or (delta_norm.epsilon, delta_norm.offset) == (
        norm.epsilon,
        norm.offset,
    )
    x, size = x.contiguous(), x.shape[-1]
    normed, total = torch.empty_like(x), x
    if delta is not None:
        delta, total = delta.contiguous(), torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _add_norm_kernel[(x.numel() // size,)](
        x, delta, None if delta_norm is None else delta_norm.weight, norm.weight, total, normed,
        share, norm.epsilon, norm.offset,
        SIZE=size, BLOCK=block, num_warps=min(max(block // 256, 1), 16),
    )  # fmt: skip
    return total, normed


def gate(inner: Tensor, activation: str) -> Tensor:
    """Activate the first half of [..., 2 * n] and multiply it by the other: [..., n]."""
    inner, size = inner.contiguous(), inner.shape[-1] // 2
    gated = inner.new_empty(*inner.shape[:-1], size)
    _gate_kernel[gated.numel() // size, triton.cdiv(size, GATE_BLOCK)](
        inner, gated, SIZE=size, BLOCK=GATE_BLOCK, IS_GELU=GATES[activation] == "gelu", num_warps=2
    )
    return gated


def turn(
    product: Tensor, block: Tensor, attention: Attention, placement: Any, num_heads: int
) -> Tensor:
    """Norm and rotate queries and keys; write keys and values into a layer's part of the cache.

    product: [B, T, (N + 2 K) * H] and perhaps more; block: [2, rows, K, positions, H]; placement: a
    `_Placement`. Returns the queries, [B, T, N, H].
    """
    num_rows, num_tokens = product.shape[:2]
    num_kv_heads, size = block.shape[2], block.shape[4]
    queries = product.new_empty(num_rows, num_heads, num_tokens, size)  # as attention reads them
    cos, sin = (
        (None, None) if attention.rotary is None else (attention.rotary.cos, attention.rotary.sin)
    )
    weights: tuple[Tensor | None, Tensor | None] = None, None
    epsilon = offset = 0.0
    if attention.q_norm is not None and attention.k_norm is not None:
        weights = attention.q_norm.weight, attention.k_norm.weight
        epsilon, offset = attention.q_norm.epsilon, attention.q_norm.offset
    _turn_kernel[num_tokens, num_rows, num_heads + 2 * num_kv_heads](
        product, *weights, cos, sin, placement.lines, placement.rows, placement.slots,
        queries, block, epsilon, offset,
        0 if attention.rotary is None else attention.rotary.query_shift,
        product.stride(1), *block.stride()[:3],
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, SIZE=size,
        ROTATED_SIZE=0 if cos is None else cos.shape[-1],
        BLOCK=triton.next_power_of_2(size), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return queries.transpose(1, 2)


class FusedLayers(TorchLayers):
    """Execution of layers one by one; what no kernel here computes, torch does."""

    def run(
        self, x: Tensor, step: Step, cache: KVCache, *arguments: Any, **options: Any
    ) -> Outcome:
        """Run the layers as `TorchLayers.run` does."""
        with torch.cuda.device_of(x):  # on which Triton starts kernels
            return super().run(x, step, cache, *arguments, **options)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return norm(x) if norm.bias is not None else add_norm(x, None, norm)[1]

    def _add(
        self, x: Tensor, partial: Tensor, own_norm: Norm | None, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        if norm is None or norm.bias is not None:
            return super()._add(x, partial, own_norm, norm)
        return add_norm(x, self.stack.sum(partial), norm, own_norm, self.stack.share)

    def _write(self, layer: Layer, product: Tensor, block: Tensor, placement: Any) -> Tensor:
        return turn(product, block, layer.attention, placement, self.stack.num_heads)

    def _gate(self, inner: Tensor) -> Tensor:
        activation = self.stack.activation
        return gate(inner, activation) if activation in GATES else super()._gate(inner)
