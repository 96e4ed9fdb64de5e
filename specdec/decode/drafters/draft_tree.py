"""Trees that a draft model drafts: the likeliest of what it would say, a level at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import list_rows
from specdec.decode.drafters.draft_model import LoadedModel, ModelDrafter
from specdec.decode.drafters.levels import DynamicTree, TreeDraft, read_temperatures
from specdec.decode.requests import ActiveRequest
from specdec.engine.decoder import Decoder
from specdec.engine.draft_net import rank_logits, rank_packed
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Step
from specdec.engine.tree import Tree, make_root
from specdec.text.token_map import TokenMap

TOP_K = 4  # nodes of a level that are gone on from, and tokens drafted from each
# A draft model's second choices are right less often than it finds them likely, where the target
# is greedy: by this temperature the trees of pycode's draft model hold most.
DRAFT_MODEL_MIN_TEMPERATURE = 0.4


class ModelTreeDrafter(ModelDrafter):
    """Proposes the likeliest continuations by the draft model, as one tree (`DynamicTree`).

    A level is one pass of the draft model over `TOP_K` nodes, which costs what one token does while
    it is bound by reading weights; so a tree of as many tokens as a chain takes fewer passes, and
    holds second choices where the draft model is in doubt. Nothing is drawn: sampled requests are
    compared with what the target draws.

    What was run of a tree is not kept. The next draft runs what was accepted in its first pass.
    """

    def __init__(self, model: LoadedModel, num_tokens: int, depth: int | None) -> None:
        """num_tokens: of a tree. depth: levels at most; None for as many as may pay."""
        depth = min(depth or num_tokens, num_tokens)
        self.tree = DynamicTree(top_k=min(TOP_K, num_tokens), depth=depth, num_tokens=num_tokens)
        super().__init__(model, self.tree.num_tokens)
        self.max_draft_depth = self.num_again = depth
        self.num_run = self.tree.num_run
        self._net = DraftModelNet(self.decoder, self.tokens)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Draft for all requests at once of whose text nothing is left to be read later."""
        read = [self._read(request) for request in requests]
        ready = self._catch_up(requests, read)
        candidates = [Candidates(make_root(request.output_ids[-1])) for request in requests]
        if not ready:
            return candidates
        ready_requests = [requests[index] for index in ready]
        rows = list_rows(ready_requests)
        hidden = self._fill(rows.tolist(), [read[index].ids for index in ready])
        roots = np.array([request.output_ids[-1] for request in ready_requests], np.int64)
        draft = TreeDraft(
            self._net, self._cache, rows, roots, hidden,
            read_temperatures(ready_requests, DRAFT_MODEL_MIN_TEMPERATURE), self.min_gain,
            self.decoder.num_positions - 1,
        )  # fmt: skip
        for index, row_draft in zip(ready, self.tree.grow(draft), strict=True):
            candidates[index] = self._name(row_draft)
        self.num_levels = draft.num_levels
        return candidates

    def _name(self, candidates: Candidates) -> Candidates:
        """Return the candidates with the target's tokens in the place of the draft model's."""
        tree = candidates.tree
        drafted, _ = self.tokens.name(tree.tokens[1:])
        tokens = np.concatenate((tree.tokens[:1], drafted))
        return dataclasses.replace(candidates, tree=Tree(tokens, tree.parents, tree.depths))


class DraftModelNet:
    """A draft model as a `TreeNet`: of tokens by their places among those that may be drafted."""

    def __init__(self, decoder: Decoder, tokens: TokenMap) -> None:
        self._decoder, self._tokens = decoder, tokens
        model, head = decoder.model, decoder.lm_head
        # Where logits are products and no more, sharper states have sharper logits.
        self._is_packed = (
            tokens.drafts_all
            and head.kernels is not None
            and head.bias is None
            and decoder.group is None
            and model.final_logit_softcapping is None
        )

    def forward(self, step: Step, features: Tensor, cache: KVCache) -> Tensor:
        """Run nodes; the draft model reads no features."""
        _, draft_tokens = self._tokens.name(step.tokens)
        return self._decoder.forward(dataclasses.replace(step, tokens=draft_tokens), cache)

    def rank_tokens(
        self, hidden: Tensor, width: int, sharpness: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the places of the `width` most probable tokens, and their log-probabilities."""
        decoder = self._decoder
        if self._is_packed:
            scaled = hidden * decoder.model.output_multiplier_scale
            return rank_packed(decoder.lm_head, scaled, width, sharpness=sharpness)
        logits = self._tokens.restrict(decoder.compute_logits(hidden))
        return rank_logits(logits, width, sharpness=sharpness)
