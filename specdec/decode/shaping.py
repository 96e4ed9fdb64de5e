"""Logits that depend on what a request has written: penalties and a bias, at every node of a tree.

They change what the target's distribution is, before temperature and the rest; the accept rules
stay exact for it, since a node's logits are shaped by the very text that its path means.
Legend: T tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.decode.sampling import SamplingParams, Shaper
from specdec.engine.transfers import to_device
from specdec.engine.tree import Tree


class Penalties:
    """A bias, then the repetition, frequency and presence penalties.

    The repetition penalty (Keskar et al. 2019, https://arxiv.org/abs/1909.05858) counts tokens of
    the prompt and the output, as transformers does; the two others, OpenAI's, those of the output.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        """output_ids: the request's own list, which grows."""
        self._params = params
        self._prompt, self._output_ids = np.unique(np.array(prompt, np.int64)), output_ids
        self._biased = np.array([token for token, _ in params.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float32)

    def shape(self, tree: Tree, logits: Tensor) -> Tensor:
        shaped = logits[: tree.num_nodes].float().clone()
        device, params = shaped.device, self._params
        if len(self._biased):
            shaped[:, to_device(self._biased, device)] += to_device(self._biases, device)
        for node in range(tree.num_nodes):
            text = np.array([*self._output_ids, *list_branch(tree, node)], np.int64)
            written, counts = np.unique(text, return_counts=True)
            row = shaped[node]
            if params.repetition_penalty != 1:
                seen = to_device(np.union1d(self._prompt, written), device)
                scores, penalty = row[seen], params.repetition_penalty
                row[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
            if params.frequency_penalty or params.presence_penalty:
                taken = params.frequency_penalty * counts + params.presence_penalty
                row[to_device(written, device)] -= to_device(taken.astype(np.float32), device)
        return shaped


def list_branch(tree: Tree, node: int) -> list[int]:
    """The tokens of the path to a node, without the root's."""
    tokens: list[int] = []
    while node > 0:
        tokens.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tokens[::-1]


class ShaperChain:
    """One shaper after another."""

    def __init__(self, shapers: Sequence[Shaper]) -> None:
        self._shapers = shapers

    def shape(self, tree: Tree, logits: Tensor) -> Tensor:
        for shaper in self._shapers:
            logits = shaper.shape(tree, logits)
        return logits


def make_shaper(
    params: SamplingParams,
    prompt: Sequence[int],
    output_ids: Sequence[int],
    mask: Shaper | None = None,
) -> Shaper | None:
    """Return what shapes a request's logits, `mask` last; None where nothing does."""
    if not params.is_shaped:
        return mask
    penalties = Penalties(params, prompt, output_ids)
    return penalties if mask is None else ShaperChain([penalties, mask])
