"""What a drafter would have proposed for texts that are known: drafting without the target.

The target's output is the same under any drafter, so one plain run gives every text, and the hidden
state behind each of its tokens. A drafter that reads nothing else proposes against them what it
would have in a run of its own (up to rounding), at the cost of drafting alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.engine.tree import Tree
from specdec.run.methods.base import PlainProposer, Proposer
from specdec.run.requests import ActiveRequest, Request
from specdec.run.verify import map_children


@dataclasses.dataclass(frozen=True)
class Recording:
    """A request, its text, and the state [D] by which each token of it was chosen."""

    request: Request
    output_ids: list[int]
    states: Tensor  # [tokens, D]


@dataclasses.dataclass
class Replay:
    """Steps that a drafter would have caused.

    sizes: tokens of each step a request, its largest tree. draft_seconds: of each step.
    """

    sizes: list[int] = dataclasses.field(default_factory=list)
    draft_seconds: list[float] = dataclasses.field(default_factory=list)
    num_emitted: int = 0  # by verify steps
    num_row_steps: int = 0  # verify steps, counted for each request

    @property
    def acceptance_length(self) -> float:
        return self.num_emitted / self.num_row_steps if self.num_row_steps else 0.0


class Recorder(PlainProposer):  # type: ignore[misc]
    """Drafts nothing and keeps the state behind every token."""

    def __init__(self) -> None:
        self.states: dict[int, list[Tensor]] = {}  # by the request's index

    def observe(
        self, requests: Sequence[ActiveRequest], states: Tensor, paths: Sequence[Sequence[int]]
    ) -> None:
        for at, request in enumerate(requests):
            self.states.setdefault(request.request.index, []).append(states[at, 0].clone())


@torch.inference_mode()
def replay(
    proposer: Proposer, recordings: Sequence[Recording], batch_size: int, num_positions: int
) -> Replay:
    """Let a drafter propose for recorded texts, `batch_size` at a time as in a run."""
    found = Replay()
    waiting = deque(recordings)
    active: dict[int, tuple[ActiveRequest, Recording]] = {}  # by row
    proposer.allocate(batch_size, num_positions)
    while waiting or active:
        for row in [row for row in range(batch_size) if row not in active]:
            if waiting:
                _admit(proposer, row, waiting.popleft(), active)
        active = {row: pair for row, pair in active.items() if pair[0].finish_reason is None}
        if active:
            _step(proposer, [active[row] for row in sorted(active)], found)
            active = {row: pair for row, pair in active.items() if pair[0].finish_reason is None}
    return found


def _admit(
    proposer: Proposer,
    row: int,
    recording: Recording,
    active: dict[int, tuple[ActiveRequest, Recording]],
) -> None:
    request = ActiveRequest(recording.request, row, max_depth=proposer.max_draft_depth, text=None)
    proposer.start([request])
    request.emit(recording.output_ids[:1])
    proposer.observe([request], recording.states[None, :1], [[0]])
    active[row] = (request, recording)


def _step(
    proposer: Proposer, active: Sequence[tuple[ActiveRequest, Recording]], found: Replay
) -> None:
    requests = [request for request, _ in active]
    began = time.perf_counter()
    candidates = proposer.propose(requests)
    drafted = time.perf_counter()
    size = max(candidate.tree.num_nodes for candidate in candidates)
    states = active[0][1].states.new_zeros((len(active), size, active[0][1].states.shape[1]))
    paths = []
    for line, ((request, recording), candidate) in enumerate(zip(active, candidates, strict=True)):
        at = len(request.output_ids)
        path = follow_text(candidate.tree, recording.output_ids[at:])
        known = recording.states[at : at + len(path)]
        states[line, path[: len(known)]] = known
        paths.append(path)
        found.num_emitted += request.emit(recording.output_ids[at : at + len(path)])
        found.num_row_steps += 1
    settled = time.perf_counter()
    proposer.observe(requests, states, paths)
    found.sizes.append(size)
    found.draft_seconds.append(drafted - began + time.perf_counter() - settled)


def follow_text(tree: Tree, text: Sequence[int]) -> list[int]:
    """The nodes of a tree, root first, whose tokens are the beginning of a text."""
    children = map_children(tree)
    path = [0]
    for token in text:
        child = children.get((path[-1], token))
        if child is None:
            break
        path.append(child)
    return path
