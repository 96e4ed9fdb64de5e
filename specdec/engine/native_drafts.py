"""EAGLE's drafts by the native kernels: all passes of a step's draft in one call.

Legend: B rows, T new pairs of each at most, n new states, F width of a state, D the drafter's
hidden size, N drafted nodes.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.engine.blocks import BlockMatrix
from specdec.engine.eagle import EagleNet
from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import Norm
from specdec.engine.linear import Linear
from specdec.engine.native import NativeKernels
from specdec.engine.native_border import (
    PairNet,
    PairStep,
    PairTree,
    Shape,
    check,
    check_all,
    check_packed,
    get_address,
    get_pointer,
)
from specdec.engine.native_matrices import KernelMatrix
from specdec.engine.native_models import PackedLayers
from specdec.engine.tree import FloatArray, IntArray

# Kinds of embeddings by their numbers in kernels/pair_draft.h.
PLAIN_ROWS, PACKED_ROWS, PACKED_BLOCKS, BLOCK_ROWS = range(4)


@dataclasses.dataclass(frozen=True)
class TreeLayout:
    """A tree as the kernels draft it, see `PairTree` in kernels/pair_draft.h.

    levels: of a static tree; None for a dynamic one. depth, width: of the tree, where the width is
    that of the nodes that are run. num_tokens, num_run: drafted nodes, and those that are run.
    max_ranked: most tokens that are ranked after a node.
    """

    levels: IntArray | None
    depth: int
    width: int
    num_tokens: int
    num_run: int
    max_ranked: int


@dataclasses.dataclass(frozen=True)
class NewStates:
    """States of the target of which features are still to be made.

    states: [.., F]. lines: of each new one, in these. rows, positions: of its feature.
    """

    states: Tensor
    lines: Sequence[int]
    rows: Sequence[int]
    positions: Sequence[int]


@dataclasses.dataclass(frozen=True)
class NewPairs:
    """Pairs that are not in a drafter's cache yet, of B rows: at least one of each.

    tokens: of each row, those of its pairs. temperatures: [B], by which drafts are judged.
    """

    rows: Sequence[int]
    tokens: Sequence[Sequence[int]]
    temperatures: FloatArray


@dataclasses.dataclass(frozen=True)
class PairDrafts:
    """Drafts of rows, their roots first.

    nodes: tokens, parents and depths, [3, B, 1 + N]; of a static tree the tokens alone count.
    log_chances: [B, 1 + N], of each node below its parent. num_levels: that were drafted.
    """

    nodes: IntArray
    log_chances: FloatArray
    num_levels: int


def pack_drafter(net: Any) -> PackedEagle | None:
    """Return a drafter as the kernels draft with it; None where they do not."""
    kernels = net.decoder.kernels if isinstance(net, EagleNet) else None
    if kernels is None or not _is_usual(net):
        return None
    layers = net.decoder.packed_layers
    if layers is None or layers.num_attending < layers.num_layers:
        return None
    return PackedEagle(net, kernels, layers)


def _is_usual(net: EagleNet) -> bool:
    """Tell whether a drafter has matrices, norms and positions by which kernels draft."""
    decoder, final_norm = net.decoder, net.final_norm
    for linear in (net.fc, decoder.lm_head):
        if linear.kernels is None or linear.packed is None:
            return False
    # Masked pairs are drafted from in one pass; rotary tables that change may do so in a draft.
    has_switch = decoder.rotary is not None and decoder.rotary.switch_len is not None
    if decoder.lm_head.bias is not None or net.mask_feature is not None or has_switch:
        return False
    return final_norm.offset == 0 and all(
        (norm.bias, norm.epsilon, norm.offset) == (None, final_norm.epsilon, 0)
        for norm in _list_input_norms(net)
    )


def _list_input_norms(net: EagleNet) -> list[Norm]:
    """List the norms before the layers: of states, of features and of the embedding."""
    if net.hidden_norm is None:
        return net.read_norms
    return [*net.read_norms, net.hidden_norm, net.decoder.stack.layers[0].input_norm]


class PackedEagle:
    """An EAGLE drafter's weights as the kernels take them; all tensors are kept alive."""

    def __init__(self, net: EagleNet, kernels: NativeKernels, layers: PackedLayers) -> None:
        decoder, head, fc = net.decoder, net.decoder.lm_head, net.fc
        self.kernels, self.layers, self.dtype = kernels, layers, kernels.dtype
        self.hidden_size, self.num_outputs = net.hidden_size, head.num_outputs
        self.vocab_size = decoder.embedding.shape[0]
        self.state_size = self._check_matrices(fc, head, is_third=net.is_third)
        kind, table, types = self._find_embedding(decoder.embedding)
        drafted, num_read = self._name_outputs(net.offsets), len(net.read_norms)
        norms = [norm.weight for norm in _list_input_norms(net)]
        for index, norm in enumerate(norms):
            size = self.state_size // num_read if index < num_read else self.hidden_size
            check("a norm before the layers", norm, self.dtype, size)
        read_norms = np.array([(norm.data_ptr(), 0) for norm in norms[:num_read]], np.uint64)
        feature_norm, embedding_norm = norms[num_read:] or (None, None)
        eagle3 = net.params.eagle3
        assert fc.packed is not None
        assert head.packed is not None
        self._tensors = net, table, types, drafted, read_norms, norms
        self.record = PairNet(
            table.data_ptr(), get_pointer(types), fc.packed.data_ptr(), get_pointer(fc.bias),
            read_norms.ctypes.data, get_pointer(embedding_norm), get_pointer(feature_norm),
            ctypes.addressof(layers.records), layers.final, head.packed.data_ptr(),
            get_pointer(drafted), kind, self.vocab_size,
            table.stride(0) if kind == BLOCK_ROWS else 0, self.state_size, num_read,
            self.num_outputs,
            int(eagle3 is not None and eagle3.norm_before_residual), int(net.is_output_normed),
            int(fc.packed.dtype is torch.uint8), int(head.packed.dtype is torch.uint8),
            float(net.head_scale), net.final_norm.epsilon,
        )  # fmt: skip

    def _name_outputs(self, offsets: Tensor | None) -> Tensor | None:
        """Return the token of each of the head's outputs; None where these are all tokens."""
        if offsets is None:
            if self.num_outputs > self.vocab_size:
                raise ValueError(f"{self.num_outputs} drafted tokens of {self.vocab_size}")
            return None
        drafted = offsets + torch.arange(len(offsets))
        check("drafted tokens", drafted, torch.int64, self.num_outputs)
        if not 0 <= int(drafted.min()) <= int(drafted.max()) < self.vocab_size:
            raise ValueError(f"drafted tokens beyond {self.vocab_size}")
        return drafted

    def _check_matrices(self, fc: Linear, head: Linear, *, is_third: bool) -> int:
        """Check what stands before and after the layers; return the width of a state."""
        size, layers, dtype = self.hidden_size, self.layers, self.dtype
        assert fc.packed is not None
        assert head.packed is not None
        if layers.dtype is not dtype or layers.sizes[0] != size:
            raise ValueError(f"layers of {layers.dtype} and {layers.sizes} for {dtype}, {size}")
        num_inputs = _find_depth(fc.packed)
        if not is_third and num_inputs != 2 * size:
            raise ValueError(f"fc reads {num_inputs} numbers, not {2 * size}")
        check_packed("fc", fc.packed, dtype, size, num_inputs)
        check("the bias of fc", fc.bias, dtype, size)
        check_packed("the head", head.packed, dtype, self.num_outputs, size)
        first_depth = 2 * size if is_third else size
        check_packed(
            "the first matrix", layers.first_matrix, dtype, layers.num_first_outputs, first_depth
        )
        return num_inputs if is_third else size

    def _find_embedding(self, embedding: Any) -> tuple[int, Tensor, Tensor | None]:
        """Return the kind of an embedding, its numbers, and the types of its rows."""
        shape = self.vocab_size, self.hidden_size
        if tuple(embedding.shape) != shape:
            raise ValueError(f"the embedding is {embedding.shape}, not {shape}")
        if isinstance(embedding, KernelMatrix):
            numbers = embedding.numbers
            check_packed("the embedding", numbers, self.dtype, *shape)
            if numbers.dtype is not torch.uint8:
                return PACKED_ROWS, numbers, None
            if numbers[16:24].any():
                raise ValueError("an embedding of integers")
            return PACKED_BLOCKS, numbers, None
        if isinstance(embedding, BlockMatrix):
            check("rows of blocks", embedding.rows, torch.uint8, *embedding.rows.shape)
            check("types of rows", embedding.types, torch.uint8, self.vocab_size)
            return BLOCK_ROWS, embedding.rows, embedding.types
        check("the embedding", embedding, self.dtype, *shape)
        return PLAIN_ROWS, embedding, None

    def draft(
        self, cache: KVCache, features: Tensor, new_states: NewStates | None, pairs: NewPairs,
        tree: TreeLayout, min_gain: float,
    ) -> PairDrafts:  # fmt: skip
        """Make features of new states, run new pairs, and draft a tree after each row's last one.

        features: [R, positions, D]. The new pairs are committed to the cache, the tree is not.
        """
        batch, counts = len(pairs.rows), [len(tokens) for tokens in pairs.tokens]
        num_pairs, past = max(counts), cache.past_lens[pairs.rows].tolist()
        states = new_states or NewStates(features, (), (), ())
        num_states = len(states.lines)
        tokens = [t for row in pairs.tokens for t in (*row, *(num_pairs - len(row)) * (0,))]
        numbers = [*states.lines, *states.rows, *states.positions, *pairs.rows, *past, *counts]
        ends = [start + count for start, count in zip(past, counts, strict=True)]
        self._check_call(cache, features, states, pairs, tree)
        self._check_numbers(cache, features, states, pairs, [*numbers, *tokens])
        most_positions = max(*(n + num_pairs for n in past), max(ends) + tree.num_run)
        num_lines = max(ends) + tree.depth - 1
        if most_positions > cache.num_positions or num_lines > self.layers.num_lines:
            raise ValueError(f"drafts up to {most_positions}, of {cache.num_positions} positions")
        indices = np.array([*numbers, *tokens], np.int64)
        start, size = get_address(indices), 8 * num_states
        rows_start = start + 3 * size
        temperatures = np.ascontiguousarray(pairs.temperatures, np.float64)
        nodes = np.empty((3, batch, tree.num_tokens + 1), np.int64)
        log_chances = np.empty((batch, tree.num_tokens + 1))
        step = PairStep(
            states.states.data_ptr(), start, start + size, start + 2 * size, features.data_ptr(),
            rows_start, rows_start + 8 * batch, rows_start + 16 * batch, rows_start + 24 * batch,
            get_address(temperatures), num_states, features.shape[1], batch, num_pairs,
        )  # fmt: skip
        levels = None if tree.levels is None else get_address(tree.levels)
        shape = self._make_shape(cache)
        num_levels = self.kernels.draft_pairs(
            ctypes.byref(self.record), ctypes.byref(step),
            ctypes.byref(PairTree(levels, tree.depth, tree.width, tree.num_tokens, min_gain)),
            ctypes.byref(shape), ctypes.byref(self.layers.scalars), cache.blocks.data_ptr(),
            get_address(nodes), get_address(log_chances),
        )  # fmt: skip
        cache.past_lens[pairs.rows] = ends
        if tree.levels is None:
            num_drafted = tree.width + (num_levels - 1) * tree.width**2
            num_nodes = 1 + min(tree.num_tokens, num_drafted)
            nodes, log_chances = nodes[..., :num_nodes], log_chances[:, :num_nodes]
        return PairDrafts(nodes, log_chances, num_levels)

    def _make_shape(self, cache: KVCache) -> Shape:
        layers, blocks = self.layers, cache.blocks
        return Shape(
            0, 0, 0, 0, *layers.sizes, blocks.shape[2], blocks.shape[4], layers.rotated,
            layers.num_layers, layers.activation, layers.is_gated, 0, layers.is_integer,
            *layers.widths,
        )  # fmt: skip

    def _check_call(
        self, cache: KVCache, features: Tensor, new_states: NewStates, pairs: NewPairs,
        tree: TreeLayout,
    ) -> None:  # fmt: skip
        """Raise ValueError where tensors are not as the kernels take them."""
        _, _, num_kv_heads, head_size, _ = self.layers.sizes
        num_rows = cache.blocks.shape[2]
        cache_shape = (self.layers.num_layers, 2, num_rows, num_kv_heads, cache.num_positions)
        check_all(
            self.dtype,
            ("the cache", cache.blocks, (*cache_shape, head_size)),
            ("features", features, (num_rows, features.shape[1], self.hidden_size)),
        )
        if new_states.lines:
            states = new_states.states
            check("states", states, self.dtype, *states.shape[:-1], self.state_size)
        if tree.max_ranked > self.num_outputs or not min(tree.width, tree.num_tokens) > 0:
            raise ValueError(f"a tree {tree} of {self.num_outputs} drafted tokens")
        if len(pairs.temperatures) != len(pairs.rows) or not min(pairs.temperatures) > 0:
            raise ValueError(f"temperatures {pairs.temperatures} of {len(pairs.rows)} rows")

    def _check_numbers(
        self, cache: KVCache, features: Tensor, new_states: NewStates, pairs: NewPairs,
        numbers: Sequence[int],
    ) -> None:  # fmt: skip
        """Raise ValueError where a row, a position, a line or a token is not there."""
        num_lines = new_states.states.numel() // new_states.states.shape[-1]
        limits = (
            ((*new_states.rows, *pairs.rows), len(cache.past_lens)),
            (new_states.positions, features.shape[1]),
            (new_states.lines, num_lines),
            ([token for row in pairs.tokens for token in row], self.vocab_size),
        )
        if min(numbers) < 0 or any(max(some, default=0) >= limit for some, limit in limits):
            raise ValueError(f"rows, positions, states or tokens {limits}")
        if not all(pairs.tokens) or features.shape[1] < cache.num_positions:
            raise ValueError(f"pairs {pairs.tokens}, features of {features.shape[1]} positions")


def _find_depth(packed: Tensor) -> int:
    """Return the inputs of a packed matrix."""
    if packed.dtype is torch.uint8:
        return int((ctypes.c_int64 * 2).from_address(packed.data_ptr())[1])
    return packed.shape[1] * packed.shape[3]
