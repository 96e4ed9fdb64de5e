"""Drafts only while that pays: for methods that draft for all requests of a step, or for none.

Where many requests share a step, verification costs arithmetic rather than memory, and the drafts
of a method that is twice as fast alone can slow a batch down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import PlainProposer, PromptFollower, Proposer
from specdec.decode.drafters.pacing import (
    HORIZON,
    KEEP,
    LOSS_SHARE,
    PROBE_SHARE,
    Costs,
    is_plain_due,
)
from specdec.decode.requests import ActiveRequest

# A belief that a few drafted steps outweigh: so many tokens a request and step.
FIRST_EMITTED, FIRST_STEPS = 2.0, 3.0


class Switch:
    """Decides, step by step, whether to draft.

    A drafted step pays if it emits more tokens a request than it takes times as long as a plain
    one. Both are measured as the run goes on, by the number of requests. An account is kept of what
    drafted steps lost against plain ones for as many tokens; nothing is drafted that could lose
    more than `LOSS_SHARE` of plain decoding's time in all, and where drafts are known not to pay,
    they are tried again for `PROBE_SHARE` of it. The first drafted step is not foreseen.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was measured: another run begins."""
        self._plain, self._drafted = Costs(), Costs()  # by requests
        self._known: set[int] = set()  # numbers of requests that plain steps had
        self._num_plain = self._since_plain = 0
        self._spent = self._lost = 0.0
        self._emitted, self._num_steps = FIRST_EMITTED * FIRST_STEPS, FIRST_STEPS

    def choose(self, remaining: Sequence[int]) -> bool:
        """Whether to draft; remaining: tokens that each request of the step may still emit."""
        num_rows = len(remaining)
        if is_plain_due(self._num_plain, self._since_plain):
            return False
        # With fewer requests a plain step costs no more; much less, perhaps.
        is_known = any(num_rows <= known < 2 * num_rows for known in self._known)
        if not is_known or max(remaining) <= 1:
            return False
        plain, drafted = self._plain.estimate(num_rows), self._drafted.estimate(num_rows)
        assert plain is not None
        if drafted is None:
            return True
        risk = drafted - plain
        if self._emitted / self._num_steps * plain > drafted:
            ahead = min(max(remaining), HORIZON) * plain
            return self._lost + risk <= LOSS_SHARE * (self._spent + ahead)
        return self._lost + risk <= PROBE_SHARE * self._spent

    def record(self, seconds: float, emitted: Sequence[int], *, is_drafted: bool) -> None:
        """Take what a step cost, and how many tokens it emitted for each request."""
        num_rows = len(emitted)
        self._spent += seconds
        if not is_drafted:
            self._plain.record(num_rows, seconds)
            self._known.add(num_rows)
            self._num_plain += 1
            self._since_plain = 0
            return
        self._drafted.record(num_rows, seconds)
        self._since_plain += 1
        for count in emitted:
            self._emitted = KEEP * self._emitted + count
            self._num_steps = KEEP * self._num_steps + 1
        plain = self._plain.estimate(num_rows) or 0.0
        self._lost += seconds - sum(emitted) / num_rows * plain


class AdaptiveProposer:
    """Lets another proposer draft while that pays; what it watches, it watches at every step."""

    def __init__(self, proposer: Proposer, clock: Callable[[], float] = time.perf_counter) -> None:
        self.proposer = proposer
        self.max_draft_tokens = proposer.max_draft_tokens
        self.max_draft_depth = proposer.max_draft_depth
        self.switch = Switch()
        self._plain = PlainProposer()
        self._clock = clock
        self._began: float | None = None  # of the step that is under way
        self._is_drafted = False

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Forget everything, costs too."""
        self.switch.reset()
        self._began = None
        self.proposer.allocate(num_rows, num_positions)

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        """Begin requests."""
        self.proposer.start(requests)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Return what the other drafts, or nothing but roots."""
        self._began = self._clock()
        self._is_drafted = self.switch.choose([request.remaining for request in requests])
        proposer = self.proposer if self._is_drafted else self._plain
        return proposer.propose(requests)

    def observe(
        self, requests: Sequence[ActiveRequest], states: Tensor, paths: Sequence[Sequence[int]]
    ) -> None:
        """Let the other see the step; note its cost, unless it was one over prompts."""
        self.proposer.observe(requests, states, paths)
        if self._began is not None:
            seconds, self._began = self._clock() - self._began, None
            self.switch.record(seconds, [len(p) for p in paths], is_drafted=self._is_drafted)


class _Follower(Proposer, PromptFollower, Protocol):
    """Both at once."""


class AdaptiveFollower(AdaptiveProposer):
    """The same for one that wants the states of the prompts, too."""

    proposer: _Follower

    def follow(
        self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], states: Tensor
    ) -> None:
        """Hand on the states of a pass over prompts."""
        self.proposer.follow(rows, starts, counts, states)

    def copy_prefix(self, source: int, row: int, length: int) -> None:
        """Let a row start over."""
        self.proposer.copy_prefix(source, row, length)


def adapt(proposer: Proposer) -> AdaptiveProposer:
    """Let a proposer draft only while that pays."""
    kind = AdaptiveFollower if isinstance(proposer, PromptFollower) else AdaptiveProposer
    return kind(proposer)
