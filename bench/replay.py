"""What a drafter would have proposed for texts that are known: drafting without the target.

The target's output is the same under any drafter, so one plain run gives every text, and what the
target computed at each of its tokens. A drafter that reads nothing else proposes against them what
it would have in a run of its own (up to rounding), at the cost of drafting alone.

Legend: B rows, T tokens of a step, F width of what a drafter reads of the target: its last hidden
state, or the outputs of some of its layers (`Decoder.observed`).
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.decode.accept import map_children
from specdec.decode.drafters.base import PlainProposer, PromptFollower, Proposer
from specdec.decode.requests import ActiveRequest, Request
from specdec.engine.decoder import Decoder
from specdec.engine.tree import Tree


@dataclasses.dataclass(frozen=True)
class Recording:
    """A request, its text, and what the target computed where each token of it was chosen.

    prompt_states: the same at every token of the prompt, for drafters that follow prompts.
    """

    request: Request
    output_ids: list[int]
    states: Tensor  # [tokens, F]
    prompt_states: Tensor | None = None  # [prompt tokens, F]


@dataclasses.dataclass
class Replay:
    """Steps that a drafter would have caused.

    sizes: tokens of each step a request, its largest tree. draft_seconds: of each step.
    num_admitted: requests whose first draft each step has, prompts included.
    """

    sizes: list[float] = dataclasses.field(default_factory=list)
    draft_seconds: list[float] = dataclasses.field(default_factory=list)
    num_admitted: list[int] = dataclasses.field(default_factory=list)
    num_emitted: int = 0  # by verify steps
    num_row_steps: int = 0  # verify steps, counted for each request

    def __iadd__(self, other: Replay) -> Replay:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    @property
    def acceptance_length(self) -> float:
        return self.num_emitted / self.num_row_steps if self.num_row_steps else 0.0


class StateRecorder(PlainProposer):
    """Drafts nothing and keeps what the target computed at every token."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.states: dict[int, list[Tensor]] = {}  # by the request's index

    def observe(
        self, requests: Sequence[ActiveRequest], states: Tensor, paths: Sequence[Sequence[int]]
    ) -> None:
        for at, request in enumerate(requests):
            kept = self.states.setdefault(request.request.index, [])
            kept.append(self._choose(states)[at, 0].clone())

    def _choose(self, states: Tensor) -> Tensor:
        """What is read of the target after a pass that made `states`, [B, T, F]."""
        observed = self._decoder.observed
        return states if observed is None else observed

    def get_prompt(self, index: int) -> Tensor | None:
        """What was kept of a prompt."""
        return None


class PromptStateRecorder(StateRecorder):
    """Keeps the prompts' too."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._passes: dict[int, list[Tensor]] = {}  # by row
        self._prompts: dict[int, Tensor] = {}  # by the request's index

    @property
    def follows_last(self) -> bool:
        """See PromptFollower."""
        return not self._decoder.observed_layers

    def copy_prefix(self, source: int, row: int, length: int) -> None:
        """Start a row over; no prefix is shared."""
        assert length == 0
        self._passes[row] = []

    def follow(
        self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], states: Tensor
    ) -> None:
        """Keep a pass over prompts."""
        for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
            self._passes[row].append(self._choose(states)[at, :count].clone())

    def observe(
        self, requests: Sequence[ActiveRequest], states: Tensor, paths: Sequence[Sequence[int]]
    ) -> None:
        """Keep a step; of the prompts' own pass the prompts' last tokens are known by now."""
        fresh = [request for request in requests if request.row in self._passes]
        for request in fresh:
            index = request.request.index
            self._prompts[index] = torch.cat(self._passes.pop(request.row))
            self.states[index] = [self._prompts[index][-1]]
        if not fresh:
            super().observe(requests, states, paths)

    def get_prompt(self, index: int) -> Tensor | None:
        """What was kept of a prompt, [tokens, F]."""
        return self._prompts[index]


Active = dict[int, tuple[ActiveRequest, Recording]]  # by row


@torch.inference_mode()
def replay(
    proposer: Proposer,
    recordings: Sequence[Recording],
    batch_size: int,
    num_positions: int,
    decoder: Decoder,
    *,
    max_steps: int | None = None,
) -> Replay:
    """Let a drafter propose for recorded texts, `batch_size` at a time as in a run.

    decoder: the target's, on which a drafter looks up what some layers have put out. max_steps:
    stop after so many.
    """
    found = Replay()
    waiting = deque(recordings)
    active: Active = {}
    proposer.allocate(batch_size, num_positions)
    while (waiting or active) and len(found.sizes) != max_steps:
        before = set(active)
        for row in [row for row in range(batch_size) if row not in active]:
            if waiting:
                _admit(proposer, row, waiting.popleft(), active, decoder)
        active = _drop_finished(active)
        if active:
            found.num_admitted.append(len(set(active) - before))
            _step(proposer, [active[row] for row in sorted(active)], found, decoder)
            active = _drop_finished(active)
    return found


def count_positions(recordings: Sequence[Recording], max_draft_tokens: int) -> int:
    """Cache positions a row that the longest text needs, with a draft behind it."""
    return (
        max_draft_tokens
        + 1
        + max(len(r.request.input_ids) + int(r.request.max_output_len) for r in recordings)
    )


def _drop_finished(active: Active) -> Active:
    return {row: pair for row, pair in active.items() if pair[0].finish_reason is None}


def _admit(
    proposer: Proposer, row: int, recording: Recording, active: Active, decoder: Decoder
) -> None:
    request = ActiveRequest(recording.request, row, max_depth=proposer.max_draft_depth, text=None)
    prompt = recording.prompt_states
    if prompt is not None and isinstance(proposer, PromptFollower):
        proposer.copy_prefix(row, row, 0)
        proposer.follow([row], [0], [len(prompt)], _show(prompt[None], decoder))
    proposer.start([request])
    request.emit(recording.output_ids[:1])
    proposer.observe([request], recording.states[None, :1], [[0]])
    active[row] = (request, recording)


def _show(states: Tensor, decoder: Decoder) -> Tensor:
    """Let a pass of the target have made these [B, T, F], where a drafter looks for them."""
    if decoder.observed_layers:
        decoder.observed = states
    return states


def _step(
    proposer: Proposer,
    active: Sequence[tuple[ActiveRequest, Recording]],
    found: Replay,
    decoder: Decoder,
) -> None:
    requests = [request for request, _ in active]
    began = time.perf_counter()
    candidates = proposer.propose(requests)
    drafted = time.perf_counter()
    size = max(candidate.tree.num_nodes for candidate in candidates)
    states = active[0][1].states.new_zeros((len(active), size, active[0][1].states.shape[1]))
    paths = []
    for row, ((request, recording), candidate) in enumerate(zip(active, candidates, strict=True)):
        at = len(request.output_ids)
        path = follow_text(candidate.tree, recording.output_ids[at:])
        known = recording.states[at : at + len(path)]
        states[row, path[: len(known)]] = known
        paths.append(path)
        found.num_emitted += request.emit(recording.output_ids[at : at + len(path)])
        found.num_row_steps += 1
    settled = time.perf_counter()
    proposer.observe(requests, _show(states, decoder), paths)
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
