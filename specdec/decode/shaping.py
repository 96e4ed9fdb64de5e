"""Logits that depend on what a request has written: penalties, bias, bans, at every node of a tree.

They change what the target's distribution is, before temperature and the rest; the accept rules
stay exact for it, since a node's logits are shaped by the very text that its path means.
Legend: T tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
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
        """Follow a request; output_ids: its own list, which grows."""
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
            written_tokens, counts = np.unique(text, return_counts=True)
            row = shaped[node]
            if params.repetition_penalty != 1:
                repeated_tokens = to_device(np.union1d(self._prompt, written_tokens), device)
                scores, penalty = row[repeated_tokens], params.repetition_penalty
                row[repeated_tokens] = torch.where(scores < 0, scores * penalty, scores / penalty)
            if params.frequency_penalty or params.presence_penalty:
                deductions = params.frequency_penalty * counts + params.presence_penalty
                row[to_device(written_tokens, device)] -= to_device(
                    deductions.astype(np.float32), device
                )
        return shaped


class Bans:
    """Bans of tokens, whose probability becomes 0; `SamplingParams` has their kinds."""

    def __init__(
        self, params: SamplingParams, end_ids: Collection[int], output_ids: Sequence[int]
    ) -> None:
        """Follow a request; output_ids: its own list, which grows."""
        self._params, self._output_ids = params, output_ids
        self._ends = np.array(sorted(end_ids), np.int64)
        self._allowed_tokens = np.array(sorted(params.allowed_ids or ()), np.int64)
        self._single_tokens = np.array(
            [word[0] for word in params.bad_words if len(word) == 1], np.int64
        )
        words = [word for word in params.bad_words if len(word) > 1]
        self._num_earlier = max(map(len, words), default=1) - 1
        self._words: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for word in words:
            self._words.setdefault(word[-2], []).append(word)

    def shape(self, tree: Tree, logits: Tensor) -> Tensor:
        shaped = logits[: tree.num_nodes].float().clone()
        if self._params.allowed_ids is not None:
            allowed_tokens = to_device(self._allowed_tokens, shaped.device)
            allowed_logits, shaped = shaped[:, allowed_tokens], torch.full_like(shaped, -torch.inf)
            shaped[:, allowed_tokens] = allowed_logits
        _ban(shaped, self._single_tokens)
        earlier_tokens = list(self._output_ids[-self._num_earlier :]) if self._words else []
        for node in range(tree.num_nodes):
            branch = list_branch(tree, node)
            text = (*earlier_tokens, *branch)
            words = self._words.get(text[-1], ()) if text else ()
            banned = [word[-1] for word in words if text[1 - len(word) :] == word[:-1]]
            _ban(shaped[node], np.array(banned, np.int64))
            if len(self._output_ids) + len(branch) < self._params.min_tokens:
                row = _ban(shaped[node].clone(), self._ends)
                if row.isfinite().any():  # else a grammar has come to its end
                    shaped[node] = row
        return shaped


def _ban(logits: Tensor, tokens: NDArray[np.int64]) -> Tensor:
    tokens = tokens[tokens < logits.shape[-1]]
    if len(tokens):
        logits[..., to_device(tokens, logits.device)] = -torch.inf
    return logits


def list_branch(tree: Tree, node: int) -> list[int]:
    """List the tokens of the path to a node, without the root's."""
    tokens: list[int] = []
    while node > 0:
        tokens.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tokens[::-1]


class ShaperChain:
    """Chain of shapers, of which each changes the logits of the one before."""

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
    end_ids: Collection[int] = (),
) -> Shaper | None:
    """Make the shaper of a request's logits, `mask` before bans; None where it needs none."""
    shapers: list[Shaper] = [] if mask is None else [mask]
    if params.is_penalized:
        shapers.insert(0, Penalties(params, prompt, output_ids))
    if params.is_restricted:
        shapers.append(Bans(params, end_ids, output_ids))
    return ShaperChain(shapers) if len(shapers) > 1 else shapers[0] if shapers else None
