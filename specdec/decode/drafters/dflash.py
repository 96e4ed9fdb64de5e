"""DFlash: one pass drafts a block; its likeliest tokens of every place become a tree.

The tokens of a block are drafted each by itself, so any token of a place may follow any of the
place before, and a path is as probable as its tokens' probabilities multiplied. A step's tree is
made of the most probable paths; with one token a place it is a chain. DSpark's Markov head makes
the tokens of a place depend on the one before it: its trees grow level by level, as EAGLE-2's do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import (
    ALL_LEVELS,
    DraftContext,
    FeatureDrafter,
    list_rows,
    make_net,
)
from specdec.decode.drafters.levels import DynamicTree, Level
from specdec.decode.drafters.trees import (
    check_num_tokens,
    count_paths,
    get_cpu_tokens,
    grow_tree,
)
from specdec.decode.requests import ActiveRequest
from specdec.engine.decoder import Decoder
from specdec.engine.dflash import DFlashNet
from specdec.engine.kv_cache import CachedTensor
from specdec.engine.transfers import to_device, to_host
from specdec.engine.tree import IntArray
from specdec.errors import SpecDecError
from specdec.methods.dflash import DFlashDraft, DFlashParams

DEFAULT_TOP_K = 4


class BlockDraft:
    """A draft of blocks whose places know the token before them."""

    min_gain = ALL_LEVELS  # one costs next to nothing

    def __init__(self, net: DFlashNet, hidden: Tensor, roots: IntArray) -> None:
        """hidden: [B, P, D], the states of the places; roots: [B]."""
        self.roots = roots
        self._net, self._depth = net, 0
        self._logits = net.compute_logits(hidden)

    def rank(self, level: Level) -> tuple[IntArray, np.ndarray]:
        logits = self._logits[:, self._depth]
        self._depth += 1
        tokens, scores = to_host(*self._net.rank_after(logits, level.tokens, level.width))
        return tokens, scores


def make_drafter(context: DraftContext) -> DFlashDrafter:
    """Lay out the drafter, with the trees that are asked for, or others that are small on a CPU."""
    params, decoder = context.params, context.decoder
    assert isinstance(params, DFlashParams)
    head = decoder.lm_head if decoder.group is None else None
    net = make_net(DFlashNet, context, params, params.block_size, head)
    return DFlashDrafter(net, decoder, context.options, has_budget=context.has_budget)


class DFlashDrafter(FeatureDrafter):
    """Proposes the likeliest paths of a block; its cache holds the context of committed tokens."""

    net: DFlashNet

    def __init__(
        self, net: DFlashNet, decoder: Decoder, options: DFlashDraft | None = None, *,
        has_budget: bool = False,
    ) -> None:  # fmt: skip
        """has_budget: only the part worth its time is verified: a larger tree on a CPU."""
        super().__init__(net, decoder, net.params.aux_layers, "DFlash")
        self.params, self._num_run = net.params, net.params.block_size
        self._most_tokens = get_cpu_tokens(has_budget=has_budget)
        options = options or DFlashDraft()
        self.use_tree(options.dflash_tokens, options.dflash_top_k)

    def use_tree(self, num_tokens: int | None = None, top_k: int | None = None) -> None:
        """Propose so many tokens from now on, of `top_k` a place; raise SpecDecError beyond limits.

        None: as many as pay on the device.
        """
        params = self.params
        if top_k is None:
            top_k = min(DEFAULT_TOP_K, params.draft_vocab_size)
        depth = params.max_draft_depth
        if num_tokens is None:
            num_tokens = params.max_draft_len
            if top_k == 1 or self._decoder.device.type == "cpu":
                num_tokens = min(num_tokens, max(self._most_tokens, depth))
        check_num_tokens(
            "--dflash-tokens", num_tokens, params.max_draft_len, "--dflash-max-draft-len"
        )
        if top_k > params.draft_vocab_size:
            raise SpecDecError(
                f"--dflash-top-k is {top_k}, the drafter has {params.draft_vocab_size} tokens",
                f"give at most {params.draft_vocab_size}",
            )
        self.top_k = top_k
        self.max_draft_tokens = min(num_tokens, count_paths(depth, top_k))
        self.max_draft_depth = depth = min(depth, self.max_draft_tokens)
        self._tree: DynamicTree | None = None
        if params.markov_rank:
            self._tree = DynamicTree(top_k=top_k, depth=depth, num_tokens=num_tokens)
            self.max_draft_tokens = self._tree.num_tokens

    def allocate(self, num_rows: int, num_positions: int) -> None:
        super().allocate(num_rows, num_positions)
        self._num_read = self._cache.past_lens  # what is read of a row is what its cache holds

    def list_cached_tensors(self) -> list[CachedTensor]:
        """List the keys and values of the context."""
        return [self._cache.get_cached_tensor("context")]

    def _keep(self, rows: IntArray, positions: IntArray, states: Tensor) -> None:
        """Write the keys and values that the context has in every layer."""
        device = self._decoder.device
        self.net.write_context(
            self._cache, to_device(rows, device), to_device(positions, device), states
        )

    def _draft(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Fill a block for every request, and make a tree of each."""
        rows = list_rows(requests)
        roots = np.array([request.output_ids[-1] for request in requests], np.int64)
        hidden = self.net.run_blocks(self._cache, rows, roots)[:, : self.max_draft_depth]
        if self._tree is not None:
            return self._tree.grow(BlockDraft(self.net, hidden, roots))
        tokens, scores = to_host(*self.net.rank_tokens(hidden, self.top_k))  # [B, P, K]
        return [
            grow_tree(int(root), row_tokens, probabilities, self.max_draft_tokens)
            for root, row_tokens, probabilities in zip(roots, tokens, np.exp(scores), strict=True)
        ]
