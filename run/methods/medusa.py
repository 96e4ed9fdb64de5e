"""Medusa: a fixed tree over the most probable tokens of heads on the target's last hidden state.

A tree is given by choices, TensorRT-LLM's and Medusa's own form: the path [0, 2] is the third most
probable token of head 1 below the most probable one of head 0.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.engine.decoder import Decoder
from specdec.engine.medusa import MedusaHeads
from specdec.engine.tree import IntArray, Tree
from specdec.errors import UsageError, raise_problems
from specdec.methods import MedusaParams

from ..requests import ActiveRequest
from ..verify import Candidates
from .base import keep_newest, list_rows

Choices = tuple[tuple[int, ...], ...]

# Draft tokens of a tree that nobody chose, on a CPU: there a verify step over 8 tokens costs half
# as much again as over one, over 32 three times as much (benchmarks/RESULTS.md).
DEFAULT_CPU_TOKENS = 7
# The prior by which that tree grows: head i's best token is the target's with probability
# 0.6 * 0.8 ** i, and its token of rank r (from 0) is so 1 / (r + 1) ** 2 times as often.
FIRST_ACCURACY = 0.6
ACCURACY_DECAY = 0.8


def parse_choices(text: str) -> Choices:
    """Read `--medusa-choices`, a JSON list of paths; raise UsageError for anything else."""
    hint = "give a JSON list of paths of ranks, such as '[[0], [0, 0], [1]]'"
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--medusa-choices is no JSON: {error}", hint) from None
    if not isinstance(listed, list) or not listed:
        raise UsageError(f"--medusa-choices is {text[:80]}, not a list of paths", hint)
    for path in listed:
        is_path = isinstance(path, list) and bool(path)
        if not is_path or not all(type(rank) is int and rank >= 0 for rank in path):
            raise UsageError(f"--medusa-choices: {json.dumps(path)[:80]} is no path", hint)
    return tuple(tuple(path) for path in listed)


def check_choices(choices: Choices, params: MedusaParams, vocab_size: int) -> None:
    """Raise SpecDecError that lists what is wrong with a tree, for these heads."""
    problems = []
    known = set(choices)
    if len(known) < len(choices):
        twice = next(path for path in choices if choices.count(path) > 1)
        problems.append((f"--medusa-choices has {list(twice)} twice", "give every path once"))
    orphans = [path for path in choices if len(path) > 1 and path[:-1] not in known]
    if orphans:
        path = list(orphans[0])
        problems.append(
            (f"--medusa-choices has {path} but not {path[:-1]}", "give every path's beginning too")
        )
    depth = max(len(path) for path in choices)
    if depth > params.num_heads:
        problems.append(
            (
                f"--medusa-choices is {depth} deep, the engine has {params.num_heads} Medusa heads",
                f"give paths of at most {params.num_heads} ranks",
            )
        )
    if len(choices) > params.max_draft_len:
        problems.append(
            (
                f"--medusa-choices has {len(choices)} paths, the engine's max_draft_len is"
                f" {params.max_draft_len}",
                "give fewer, or convert with a larger --max-medusa-token-len",
            )
        )
    highest = max(rank for path in choices for rank in path)
    if highest >= vocab_size:
        problems.append(
            (
                f"--medusa-choices has rank {highest}, the vocabulary {vocab_size} tokens",
                "give ranks below that",
            )
        )
    raise_problems(problems)


def grow_choices(num_heads: int, num_tokens: int, vocab_size: int) -> Choices:
    """The `num_tokens` paths that are most probable by the prior above, or all there are."""

    def rate(path: tuple[int, ...]) -> float:
        rating = 1.0
        for head, rank in enumerate(path):
            rating *= FIRST_ACCURACY * ACCURACY_DECAY**head / (rank + 1) ** 2
        return rating

    # A path's beginning and its better sibling rate no lower, so the best of what they lead to
    # is the best of all that are left.
    waiting: list[tuple[float, tuple[int, ...]]] = [(-rate((0,)), (0,))]
    chosen: list[tuple[int, ...]] = []
    while waiting and len(chosen) < num_tokens:
        _, path = heapq.heappop(waiting)
        chosen.append(path)
        following: list[tuple[int, ...]] = []
        if path[-1] + 1 < vocab_size:
            following.append((*path[:-1], path[-1] + 1))
        if len(path) < num_heads:
            following.append((*path, 0))
        for other in following:
            heapq.heappush(waiting, (-rate(other), other))
    return tuple(chosen)


class ChoiceTree:
    """The nodes of a tree, root first, each by its head and rank.

    widths[i]: tokens needed of head i. columns: [T - 1], where a node's token stands in the heads'
    ranked tokens laid side by side.
    """

    def __init__(self, choices: Choices) -> None:
        paths = sorted(choices, key=lambda path: (len(path), path))
        nodes: dict[tuple[int, ...], int] = {
            (): 0,
            **{path: node for node, path in enumerate(paths, 1)},
        }
        self.widths = [
            1 + max(path[head] for path in paths if len(path) > head)
            for head in range(len(paths[-1]))
        ]
        starts = np.cumsum([0, *self.widths])
        self.columns: IntArray = np.array([starts[len(p) - 1] + p[-1] for p in paths], np.int64)
        self.parents: IntArray = np.array([-1, *(nodes[p[:-1]] for p in paths)], np.int64)
        self.depths: IntArray = np.array([0, *map(len, paths)], np.int64)

    def fill(self, root: int, ranked: IntArray) -> Tree:
        """Put a row's tokens into the tree; siblings differ since a head ranks a token once."""
        return Tree(np.concatenate(([root], ranked[self.columns])), self.parents, self.depths)


def make_proposer(
    params: MedusaParams, weights: Mapping[str, Tensor], decoder: Decoder
) -> MedusaProposer:
    """Lay out the heads, with a tree that is small on a CPU and the largest allowed elsewhere."""
    heads = MedusaHeads(params, weights, prepack=decoder.is_prepacked)
    num_tokens = params.max_draft_len
    if decoder.device.type == "cpu":
        num_tokens = min(num_tokens, DEFAULT_CPU_TOKENS)
    return MedusaProposer(heads, grow_choices(params.num_heads, num_tokens, heads.vocab_size))


class MedusaProposer:
    """Proposes the same tree of ranks every step, filled with the heads' tokens."""

    def __init__(self, heads: MedusaHeads, choices: Choices) -> None:
        self.heads = heads
        self._hidden = torch.empty(0)
        self.use_choices(choices)

    def use_choices(self, choices: Choices) -> None:
        """Propose this tree from now on; raise SpecDecError if the heads have no such tree."""
        check_choices(choices, self.heads.params, self.heads.vocab_size)
        self.tree = ChoiceTree(choices)
        self.max_draft_tokens = len(choices)
        self.max_draft_depth = len(self.tree.widths)

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Make room for one hidden state a row."""
        self._hidden = torch.zeros(
            (num_rows, self.heads.hidden_size), dtype=self.heads.dtype, device=self.heads.device
        )

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        """Nothing: the state comes with `observe`."""

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Rank the heads' tokens for all rows at once and fill each row's tree."""
        rows = torch.from_numpy(list_rows(requests)).to(self._hidden.device)
        ranked = self.heads.rank_tokens(self._hidden[rows], self.tree.widths).cpu().numpy()
        return [
            Candidates(self.tree.fill(request.output_ids[-1], tokens))
            for request, tokens in zip(requests, ranked, strict=True)
        ]

    def observe(
        self, requests: Sequence[ActiveRequest], states: Tensor, paths: Sequence[Sequence[int]]
    ) -> None:
        """Keep the hidden state of each row's newest committed token: the heads read it next."""
        keep_newest(self._hidden, requests, states, paths)
