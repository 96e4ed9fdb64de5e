"""MTP assistant: chains or trees that are drafted from the target's own keys and values.

A node of a draft reads its token's embedding and what its parent's pass yielded. Nodes have no keys
of their own, so those of a depth cost one pass together, whatever tree they stand in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import DraftContext, list_rows
from specdec.decode.drafters.hidden_state import HiddenStateDrafter
from specdec.decode.drafters.levels import DynamicTree, TreeDraft, read_temperatures
from specdec.decode.drafters.trees import check_num_tokens
from specdec.decode.requests import ActiveRequest
from specdec.engine.kv_cache import KVCache
from specdec.engine.mtp_assistant import MtpAssistantNet
from specdec.errors import SpecDecError
from specdec.methods.mtp_assistant import MtpAssistantDraft, MtpAssistantParams


def make_drafter(context: DraftContext) -> MtpAssistantDrafter:
    """Lay out the assistant, for the trees that are asked for, or chains."""
    assert isinstance(context.params, MtpAssistantParams)
    net = MtpAssistantNet(context.params, context.weights, context.decoder)
    return MtpAssistantDrafter(net, context.options)


class MtpAssistantDrafter(HiddenStateDrafter):
    """Proposes a dynamic tree, by default a chain."""

    _cache: KVCache

    def __init__(self, net: MtpAssistantNet, options: MtpAssistantDraft | None = None) -> None:
        super().__init__(None)
        self.net = net
        options = options or MtpAssistantDraft()
        self.use_tree(options.mtp_assistant_tokens, options.mtp_assistant_top_k or 1)

    def use_tree(self, num_tokens: int | None = None, top_k: int = 1) -> None:
        """Propose so many tokens from now on; raise SpecDecError beyond the engine's limits.

        num_tokens: None for all that the engine has room for. top_k: nodes of a depth that the
        draft goes on from.
        """
        room, num_scored = self.net.params.max_draft_len, self.net.num_scored_tokens
        num_tokens = room if num_tokens is None else num_tokens
        check_num_tokens(
            "--mtp-assistant-tokens", num_tokens, room, "--mtp-assistant-max-draft-len"
        )
        if top_k > num_scored:
            raise SpecDecError(
                f"--mtp-assistant-top-k is {top_k}, and the assistant scores {num_scored} tokens",
                f"give at most {num_scored}",
            )
        self._tree = DynamicTree(top_k=top_k, depth=num_tokens, num_tokens=num_tokens)
        self.max_draft_tokens, self.max_draft_depth = self._tree.num_tokens, self._tree.depth

    def take_cache(self, cache: KVCache) -> None:
        self._cache = cache

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Draft for all rows at once, depth by depth."""
        rows, cache = list_rows(requests), self._cache
        roots = np.array([request.output_ids[-1] for request in requests], np.int64)
        hidden = self.net.begin(cache, rows, roots, self.get_hidden(requests))
        temperatures = read_temperatures(requests)
        draft = TreeDraft(self.net, cache, rows, roots, hidden, temperatures, self.min_gain)
        candidates = self._tree.grow(draft)
        self.num_levels = draft.num_levels
        return candidates
