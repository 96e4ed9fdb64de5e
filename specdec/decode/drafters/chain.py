"""A chain of drafters: for each request and step, the one that promises most for its time.

Lookups cost next to nothing and are right for long where a text repeats something; a trained
drafter is right for a little while anywhere. Oliaro et al., https://arxiv.org/abs/2411.04975,
section 4, choose between the two by a threshold; here what each has brought so far decides.
Whoever drafts, the target's own choices are emitted: docs/exactness.md, theorem 1.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import Drafter, DrafterGroup
from specdec.decode.drafters.budget import read_confidence
from specdec.decode.drafters.pacing import FEW_UNREAD
from specdec.decode.requests import ActiveRequest
from specdec.engine.step import States
from specdec.engine.tree import TreeBuilder

KEEP = 0.99  # weight of what was known before the newest step
FIRST_STEPS = 1.5  # that a belief weighs as much as
FIRST_RATE = 0.7  # believed: of the drafted tokens that are reached, those that are accepted
MAX_DEPTH = 16  # deeper drafts are counted as these


def merge_candidates(found: Sequence[Candidates]) -> Candidates:
    """One tree of all paths of trees with the same root; equal beginnings are one.

    Who is surer of a token is believed.
    """
    builder, confidence = TreeBuilder(int(found[0].tree.tokens[0])), [1.0]
    for candidates in found:
        tree, nodes, own = candidates.tree, [0], read_confidence(candidates).tolist()
        for node in range(1, tree.num_nodes):
            merged = builder.add(nodes[int(tree.parents[node])], int(tree.tokens[node]))
            nodes.append(merged)
            if merged == len(confidence):
                confidence.append(0.0)
            confidence[merged] = max(confidence[merged], own[node])
    return Candidates(builder.build(), None, np.array(confidence))


def join_candidates(found: Sequence[Candidates]) -> Candidates:
    """What several methods propose for one request, as one.

    Draws from a distribution cannot share a tree: what they are drawn from is asked for.
    """
    drafted = [candidates for candidates in found if candidates.tree.num_draft_tokens]
    if len(drafted) < 2:
        return drafted[0] if drafted else found[0]
    assert all(candidates.draft_probs is None for candidates in drafted)
    return merge_candidates(drafted)


class Average:
    """A mean in which newer values weigh more, and a belief where there are none or only old."""

    def __init__(self, belief: float) -> None:
        self._belief = belief
        self._sum = self._weight = 0.0

    def fade(self) -> None:
        """Let a step pass."""
        self._sum *= KEEP
        self._weight *= KEEP

    def add(self, value: float) -> None:
        """Take a value of the newest step."""
        self._sum += value
        self._weight += 1.0

    @property
    def value(self) -> float:
        return (self._sum + FIRST_STEPS * self._belief) / (self._weight + FIRST_STEPS)


class TrackRecord:
    """What each group of a chain has brought, and at what cost.

    Tokens are counted by the depth of the draft too: a lookup that finds much drafts much. What was
    not tried for long is believed to be as at first, so that it is tried again.
    """

    def __init__(self, num_groups: int) -> None:
        self._emitted: dict[tuple[int, int | None], Average] = {}
        self._draft = [Average(0.0) for _ in range(num_groups)]  # seconds
        self._verify = Average(0.0)

    def record_draft(self, group: int, seconds: float) -> None:
        """Take the time of a draft."""
        self._draft[group].add(seconds)

    def record_step(
        self, seconds: float, drafts: Sequence[tuple[int, int]], emitted: Sequence[int]
    ) -> None:
        """Take the rest of a step's time, and for each request who drafted how deep for how much.

        drafts: (group, depth of the draft); emitted: tokens, the bonus token included.
        """
        for average in (*self._emitted.values(), *self._draft, self._verify):
            average.fade()
        self._verify.add(seconds)
        for (group, depth), count in zip(drafts, emitted, strict=True):
            for key in (min(depth, MAX_DEPTH), None):
                self._get(group, key, depth).add(count)

    def estimate(self, group: int, depth: int | None, belief_depth: int) -> float:
        """Tokens a second of steps in which a group drafts; depth: None is any."""
        seconds = self._draft[group].value + self._verify.value
        emitted = self._get(group, depth, belief_depth).value
        return emitted / seconds if seconds > 0 else emitted

    def _get(self, group: int, depth: int | None, belief_depth: int) -> Average:
        key = group, depth
        if key not in self._emitted:
            belief = (1 - FIRST_RATE ** (belief_depth + 1)) / (1 - FIRST_RATE)
            self._emitted[key] = Average(belief)
        return self._emitted[key]


class ChainProposer(DrafterGroup):
    """Lets several drafters draft, by turns or in one tree."""

    def __init__(
        self,
        groups: Sequence[Sequence[Drafter]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """groups: they draft by turns, the cheapest first; the members of one share a tree."""
        super().__init__([drafter for group in groups for drafter in group])
        self._groups = groups
        self.max_draft_tokens = max(sum(d.max_draft_tokens for d in group) for group in groups)
        self._record = TrackRecord(len(groups))
        self._clock = clock
        self._began: float | None = None  # of the step that is under way, after its drafts
        self._drafts: list[tuple[int, int]] = []

    def fit_budget(self) -> ChainProposer:
        """A chain of the members as they draft then."""
        return ChainProposer([[member.fit_budget() for member in g] for g in self._groups])

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Forget all requests; what each group has brought is known still."""
        self._began = None
        super().allocate(num_rows, num_positions)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Ask the groups in order, each for the requests that those before it did not suit."""
        found: dict[int, tuple[int, Candidates]] = {}
        self.num_prefilled = 0
        for group in range(len(self._groups)):
            left = [at for at in range(len(requests)) if at not in found]
            if not left:
                break
            drafts = self._draft(group, [requests[at] for at in left])
            for at, candidates in zip(left, drafts, strict=True):
                if group == len(self._groups) - 1 or self._is_best(group, candidates.tree.depth):
                    found[at] = group, candidates
        self._drafts = [(found[at][0], found[at][1].tree.depth) for at in range(len(requests))]
        self._began = self._clock()
        return [found[at][1] for at in range(len(requests))]

    def observe(
        self, requests: Sequence[ActiveRequest], states: States, paths: Sequence[Sequence[int]]
    ) -> None:
        """Let all see the step; note what it brought, unless it was one over prompts."""
        super().observe(requests, states, paths)
        if self._began is not None:
            seconds, self._began = self._clock() - self._began, None
            if self.num_prompt_tokens:
                return
            self._record.record_step(seconds, self._drafts, [len(path) for path in paths])

    def _draft(self, group: int, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        began = self._clock()
        members = self._groups[group]
        found = [proposer.propose(requests) for proposer in members]
        read = sum(member.num_prefilled for member in members)
        self.num_prefilled += read
        if read <= FEW_UNREAD:  # else most of the time was not the drafts'
            self._record.record_draft(group, self._clock() - began)
        joined = (join_candidates(each) for each in zip(*found, strict=True))
        return [dataclasses.replace(candidates, source=group) for candidates in joined]

    def _is_best(self, group: int, depth: int) -> bool:
        """Whether a draft promises more than those that come later in the chain would."""
        if depth == 0:
            return False
        later = (
            self._record.estimate(other, None, max(p.max_draft_depth for p in self._groups[other]))
            for other in range(group + 1, len(self._groups))
        )
        return self._record.estimate(group, min(depth, MAX_DEPTH), depth) >= max(later)
