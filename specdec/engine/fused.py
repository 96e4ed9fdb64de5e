"""A decoder's layers on a CUDA device: kernels that each do what several of torch's do.

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
from specdec.engine.layers import Attention, Norm
from specdec.engine.native import GATES
from specdec.engine.step import Step
from specdec.engine.torch_layers import Layer, Outcome, TorchLayers

GATE_BLOCK = 512  # elements of a program


@triton.jit
def _scale(x, epsilon, size):
    """What the root-mean-square norm multiplies a row by; x is zero beyond its size."""
    return tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)


@triton.jit
def _add_norm_kernel(
    x, added, own_weight, weight, total, normed, share, epsilon, offset,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's total = x + share * added, [D], and it normed; x is normed where nothing is added.

    own_weight: of a norm of what is added, or None.
    """
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + at
    row = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        part = tl.load(added + place, mask=inside, other=0.0).to(tl.float32)
        if own_weight is not None:
            own = tl.load(own_weight + at, mask=inside, other=0.0).to(tl.float32) + offset
            part = part * _scale(part, epsilon, SIZE) * own
            part = part.to(x.dtype.element_ty).to(tl.float32)
        row = (row + share * part).to(x.dtype.element_ty).to(tl.float32)
        tl.store(total + place, row, mask=inside)
    scaled = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(normed + place, row * _scale(row, epsilon, SIZE) * scaled, mask=inside)


@triton.jit
def _gate_kernel(inner, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    """A block of a(gate) * up of a token; inner is gate and up, [2 * SIZE], out [SIZE].

    a(x) = x / (1 + exp(-z)), where z is x, or for gelu by tanh a cubic polynomial of it.
    """
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    token = tl.program_id(0).to(tl.int64) * SIZE
    gate = tl.load(inner + 2 * token + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + 2 * token + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    z = gate
    if IS_GELU:  # 2 sqrt(2 / pi)
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = (gate / (1.0 + tl.exp(-z))).to(inner.dtype.element_ty).to(tl.float32)
    tl.store(out + token + at, active * up, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["lines", "rows", "slots"])
def _turn_kernel(
    product, q_weight, k_weight, cos, sin, lines, rows, slots, queries, block,
    epsilon, offset, width, plane_stride, row_stride, head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    TURNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one token: a query is normed, rotated and stored, a key so into the cache.

    A value is copied there. SIZE: H; TURNED: R. width: from token to token of the product. Of the
    cache: plane_stride from a key to its value, and those of rows and heads. Norms and rotation are
    left out where they are None.
    """
    row, head = tl.program_id(1), tl.program_id(2)
    token = (row * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    source = product + token * width + head * SIZE
    kind = product.dtype.element_ty
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        turned = at < TURNED
        # Each half is paired with the other: where a dimension's partner is.
        other = tl.where(at < TURNED // 2, at + TURNED // 2, at - TURNED // 2)
        y = x
        if cos is not None:
            y = tl.load(source + other, mask=turned, other=0.0).to(tl.float32)
        if q_weight is not None:
            is_query = head < NUM_HEADS
            scale = _scale(x, epsilon, SIZE)
            own = tl.load(q_weight + at, mask=inside & is_query, other=0.0)
            own += tl.load(k_weight + at, mask=inside & (is_query == 0), other=0.0)
            x = (x * scale * (own.to(tl.float32) + offset)).to(kind).to(tl.float32)
            own = tl.load(q_weight + other, mask=turned & is_query, other=0.0)
            own += tl.load(k_weight + other, mask=turned & (is_query == 0), other=0.0)
            y = (y * scale * (own.to(tl.float32) + offset)).to(kind).to(tl.float32)
        if cos is not None:
            angle = tl.load(lines + token) * TURNED + at
            c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
            s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
            y = tl.where(at < TURNED // 2, -y, y)
            x = (x * c).to(kind).to(tl.float32) + (y * s).to(kind).to(tl.float32)
    if head < NUM_HEADS:
        place = (row * NUM_HEADS + head) * tl.num_programs(0) + tl.program_id(0)
        tl.store(queries + place.to(tl.int64) * SIZE + at, x, mask=inside)
    else:
        is_value = (head >= NUM_HEADS + NUM_KV_HEADS).to(tl.int32)
        target = block + is_value * plane_stride + tl.load(rows + row) * row_stride
        target += (head - NUM_HEADS - is_value * NUM_KV_HEADS).to(tl.int64) * head_stride
        tl.store(target + tl.load(slots + token) * SIZE + at, x, mask=inside)


def add_norm(
    x: Tensor, added: Tensor | None, norm: Norm, own: Norm | None = None, share: float = 1.0
) -> tuple[Tensor, Tensor]:
    """x + share * added, [..., D], and it normed; x itself where nothing is added.

    own: of what is added, before it is. The norms are root-mean-square ones, of one kind.
    """
    assert own is None or (own.epsilon, own.offset) == (norm.epsilon, norm.offset)
    x, size = x.contiguous(), x.shape[-1]
    normed, total = torch.empty_like(x), x
    if added is not None:
        added, total = added.contiguous(), torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _add_norm_kernel[(x.numel() // size,)](
        x, added, None if own is None else own.weight, norm.weight, total, normed,
        share, norm.epsilon, norm.offset,
        SIZE=size, BLOCK=block, num_warps=min(max(block // 256, 1), 16),
    )  # fmt: skip
    return total, normed


def gate(inner: Tensor, activation: str) -> Tensor:
    """Activate the first half of [..., 2 * n] and multiply it by the other: [..., n]."""
    inner, size = inner.contiguous(), inner.shape[-1] // 2
    out = inner.new_empty(*inner.shape[:-1], size)
    _gate_kernel[out.numel() // size, triton.cdiv(size, GATE_BLOCK)](
        inner, out, SIZE=size, BLOCK=GATE_BLOCK, IS_GELU=GATES[activation] == "gelu", num_warps=2
    )
    return out


def turn(product: Tensor, block: Tensor, how: Attention, place: Any, num_heads: int) -> Tensor:
    """Norm and rotate queries and keys; write keys and values into a layer's part of the cache.

    product: [B, T, (N + 2 K) * H] and perhaps more; block: [2, rows, K, positions, H]; place: a
    `_Placement`. Returns the queries, [B, T, N, H].
    """
    num_rows, num_tokens = product.shape[:2]
    num_kv_heads, size = block.shape[2], block.shape[4]
    queries = product.new_empty(num_rows, num_heads, num_tokens, size)  # as attention reads them
    cos, sin = (None, None) if how.rotary is None else (how.rotary.cos, how.rotary.sin)
    weights: tuple[Tensor | None, Tensor | None] = None, None
    epsilon = offset = 0.0
    if how.q_norm is not None and how.k_norm is not None:
        weights = how.q_norm.weight, how.k_norm.weight
        epsilon, offset = how.q_norm.epsilon, how.q_norm.offset
    _turn_kernel[num_tokens, num_rows, num_heads + 2 * num_kv_heads](
        product, *weights, cos, sin, place.lines, place.rows, place.slots, queries, block,
        epsilon, offset, product.stride(1), *block.stride()[:3],
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, SIZE=size,
        TURNED=0 if cos is None else cos.shape[-1], BLOCK=triton.next_power_of_2(size), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return queries.transpose(1, 2)


class FusedLayers(TorchLayers):
    """The layers one by one; what no kernel here computes, torch does."""

    def run(self, x: Tensor, step: Step, cache: KVCache, *more: Any, **options: Any) -> Outcome:
        """Run the layers as `TorchLayers.run` does."""
        with torch.cuda.device_of(x):  # on which Triton starts kernels
            return super().run(x, step, cache, *more, **options)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return norm(x) if norm.bias is not None else add_norm(x, None, norm)[1]

    def _add(
        self, x: Tensor, partial: Tensor, own_norm: Norm | None, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        if norm is None or norm.bias is not None:
            return super()._add(x, partial, own_norm, norm)
        return add_norm(x, self.stack.sum(partial), norm, own_norm, self.stack.share)

    def _write(self, layer: Layer, product: Tensor, block: Tensor, place: Any) -> Tensor:
        return turn(product, block, layer.attention, place, self.stack.num_heads)

    def _gate(self, inner: Tensor) -> Tensor:
        activation = self.stack.activation
        return gate(inner, activation) if activation in GATES else super()._gate(inner)
