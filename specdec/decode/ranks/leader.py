"""Rank 0's decoder, which sends each call to the other ranks, so that all compute it together.

Loop, sampler and drafters run only on rank 0 and call this decoder as they call any other, so the
ranks can never come to different decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.decode.ranks.processes import Ranks
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Step
from specdec.engine.tree import IntArray
from specdec.files.reading import Array


class LeadingCache(KVCache):
    """Rank 0's part of a cache; remembers what was moved, so that the others can do the same.

    moves: source row, row, start and number of positions, then these, of each move.
    """

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.handle = -1
        self.moves: list[int] = []

    def move(self, source: int, row: int, positions: IntArray, start: int) -> None:
        super().move(source, row, positions, start)
        self.moves += [source, row, start, len(positions), *positions.tolist()]


class LeadingDecoder(Decoder):
    """Rank 0's part of a decoder, in the hands of code that knows of no ranks."""

    cache_class = LeadingCache

    def __init__(self, *arguments: Any, ranks: Ranks, handle: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ranks = ranks
        self._handle = handle
        ranks.drop_with_owner(self, handle)

    def make_cache(self, num_rows: int, num_positions: int) -> KVCache:
        """Allocate a cache of `num_positions` a row on every rank."""
        handle = self._ranks.make_handle()
        with self._ranks.together():
            self._tell("make_cache", cache=handle, num_rows=num_rows, num_positions=num_positions)
            cache = super().make_cache(num_rows, num_positions)
        assert isinstance(cache, LeadingCache)
        cache.handle = handle
        self._ranks.drop_with_owner(cache, handle)
        return cache

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the input embeddings, [..., D]."""
        with self._ranks.together():
            arrays = {"tokens": tokens.cpu().numpy(), "positions": positions.cpu().numpy()}
            self._tell("embed", arrays)
            return super().embed(tokens, positions)

    def forward(self, step: Step, cache: KVCache, tokens: Tensor | None = None) -> Tensor:
        """Run a step on every rank; return the normed last hidden state [B, T, D]."""
        assert isinstance(cache, LeadingCache)
        assert tokens is None
        self._check_lengths(step, cache)  # what is refused is not begun
        with self._ranks.together():
            self._tell("forward", pack_forward(step, cache), cache=cache.handle)
            cache.moves.clear()
            return super().forward(step, cache)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] of hidden states [..., D], of which rank 0's count."""
        hidden = hidden.contiguous()
        with self._ranks.together():
            self._tell("compute_logits", shape=list(hidden.shape))
            assert self.group is not None
            self.group.broadcast(hidden)
            return super().compute_logits(hidden)

    def _tell(self, call: str, arrays: dict[str, Array] | None = None, **values: Any) -> None:
        self._ranks.tell(call, arrays or {}, decoder=self._handle, **values)


def pack_forward(step: Step, cache: LeadingCache) -> dict[str, Array]:
    """Return a step, and the cache's changes since the last one, as a message's arrays."""
    empty = np.zeros(0, np.int64)
    return {
        "rows": step.rows,
        "tokens": step.tokens,
        "positions": step.positions,
        "tree_mask": np.packbits(step.tree_mask),
        "mask_shape": np.array(step.tree_mask.shape),
        "past": empty if step.past is None else step.past,
        "past_lens": cache.past_lens,
        "rotary_starts": cache.rotary_starts,
        "moves": np.array(cache.moves, np.int64),
        "state_moves": np.array([] if cache.states is None else cache.states.moves, np.int64),
        "counts": empty if step.counts is None else step.counts,
        "certain_counts": empty if step.certain_counts is None else step.certain_counts,
        "mask_positions": step.mask_positions,
    }


def unpack_forward(arrays: dict[str, Array], cache: KVCache) -> Step:
    """Bring a cache up to date and return the step."""
    moves, offset = arrays["moves"].tolist(), 0
    while offset < len(moves):
        source, row, start, count = moves[offset : offset + 4]
        offset += 4 + count
        cache.move(source, row, np.array(moves[offset - count : offset], np.int64), start)
    if cache.states is not None:
        cache.states.repeat(arrays["state_moves"].tolist())
    cache.past_lens[:] = arrays["past_lens"]
    cache.rotary_starts[:] = arrays["rotary_starts"]
    shape = tuple(arrays["mask_shape"].tolist())
    mask = np.unpackbits(arrays["tree_mask"], count=math.prod(shape))
    num_earlier = shape[2] - shape[1]
    return Step(
        rows=arrays["rows"],
        tokens=arrays["tokens"],
        positions=arrays["positions"],
        tree_mask=mask.reshape(shape).astype(np.bool_),
        past=arrays["past"] if len(arrays["past"]) else None,
        counts=arrays["counts"] if len(arrays["counts"]) else None,
        certain_counts=arrays["certain_counts"] if len(arrays["certain_counts"]) else None,
        earlier_positions=arrays["mask_positions"][:, :num_earlier] if num_earlier else None,
    )


def open_decoder(
    ranks: Ranks | None, folder: Path, device: torch.device,
    decoder_classes: tuple[type[Decoder], type[LeadingDecoder]], make: Callable[..., Any],
) -> Any:  # fmt: skip
    """Load rank 0's part of an engine folder, by `make` of a class and of options for it.

    decoder_classes: the class where there are no other ranks, and where there are. These
    load their parts.
    """
    if ranks is None:
        return make(decoder_classes[0])
    ranks.meet()
    handle = ranks.make_handle()
    with ranks.together():
        ranks.tell("load", {}, decoder=handle, folder=str(folder.resolve()), device=device.type)
        decoder = make(decoder_classes[1], group=ranks.group, ranks=ranks, handle=handle)
        ranks.check_loaded()
    return decoder
