"""What is begun on a device before the host knows the step before: plain steps, and drafts.

The next plain step of a request needs its newest token, which is on the device already, and its
position, which the host knows. So it is begun before the token has come to the host, and the device
never waits for what the host does between steps. Steps are plain where nothing drafts, and where
what drafts rests for a while. A request that turns out to have ended has one step too many in
flight; its result is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.decode.accept import accept_on_device
from specdec.decode.drafters.base import Drafter, list_rows
from specdec.decode.requests import ActiveRequest
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.ranking import find_best
from specdec.engine.step import States, Step
from specdec.engine.transfers import Array, Arrival, to_device, to_host
from specdec.engine.tree import BoolArray, IntArray, Tree


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A step that was begun; best: [B], the token that each request goes on with.

    states: of that step, [B, 1, D].
    """

    requests: list[ActiveRequest]
    states: States
    best: Tensor
    arrival: Arrival


class PlainAhead:
    """Begins steps, and hands over the tokens of the one begun first.

    is_allowed: whether no more of a step than its tokens is asked for.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, drafter: Drafter, *, is_allowed: bool
    ) -> None:
        self._decoder, self._cache, self._is_allowed = decoder, cache, is_allowed
        self._drafter = drafter
        self._flight: _Flight | None = None

    @property
    def is_flying(self) -> bool:
        """Whether a step was begun that a request still waits for."""
        flight = self._flight
        return flight is not None and any(r.finish_reason is None for r in flight.requests)

    def serves(self, active: Sequence[ActiveRequest]) -> bool:
        """Whether the next step of these requests comes from here."""
        return bool(active) and (self.is_flying or self._may_begin(active))

    def step(self, active: Sequence[ActiveRequest]) -> tuple[list[ActiveRequest], Array, States]:
        """Return the requests that have a next token, those tokens [B, 1], and the step's states.

        active: the requests that go on.
        """
        if not self.is_flying:
            newest = [request.output_ids[-1] for request in active]
            self._flight = self._begin(list(active), to_device(newest, self._decoder.device))
        flight, self._flight = self._flight, None
        assert flight is not None
        self._drafter.skip(len(flight.requests))
        may_begin = self._may_begin(active)
        # Where requests came or went, those in flight land first.
        is_same = len(active) == len(flight.requests) and all(
            ours is theirs for ours, theirs in zip(active, flight.requests, strict=True)
        )
        if may_begin and is_same and any(request.remaining > 1 for request in active):
            self._flight = self._begin(flight.requests, flight.best)
        (tokens,) = flight.arrival.wait()
        found = [at for at, r in enumerate(flight.requests) if r.finish_reason is None]
        states = flight.states.take(found)
        return [flight.requests[at] for at in found], tokens[found, None], states

    def _may_begin(self, active: Sequence[ActiveRequest]) -> bool:
        return (
            self._is_allowed
            and self._decoder.graphs is not None
            and self._drafter.rests(len(active))
            and all(request.needs_only_best for request in active)
        )

    def _begin(self, requests: list[ActiveRequest], tokens: Tensor) -> _Flight:
        states = run_tokens(self._decoder, self._cache, list_rows(requests), tokens)
        best = find_best(self._decoder.compute_logits(states.last)[:, 0])
        return _Flight(requests, states, best, Arrival(best))


def run_tokens(decoder: Decoder, cache: KVCache, rows: IntArray, tokens: Tensor) -> States:
    """Run and commit one token per row, `tokens` [B] on the device; return states [B, 1, D]."""
    positions = cache.past_lens[rows][:, None]
    step = Step(
        rows=rows,
        tokens=np.zeros_like(positions),  # the host does not know them
        positions=positions,
        tree_mask=np.ones((len(rows), 1, 1), np.bool_),
    )
    states = decoder.forward(step, cache, tokens[:, None])
    for row in rows.tolist():
        cache.commit(row, [0])
    return States(states, decoder.observed)


def draft_ahead(
    proposer: Drafter,
    requests: Sequence[ActiveRequest],
    trees: Sequence[Tree],
    tree_mask: BoolArray,
    states: Tensor,
    logits: Tensor,
) -> Array | None:
    """Let the next draft begin before the host knows what was accepted, where it can.

    Returns the greedy choices [B, T], which came to the host with the draft.
    """
    if not all(r.needs_only_best and r.request.drafts for r in requests):
        return None
    best = find_best(logits)
    last, roots = accept_on_device(trees, tree_mask, best)
    newest = states[torch.arange(len(trees), device=states.device), last]
    choices, ends, drafts = to_host(best, last, proposer.compute_drafts(newest, roots))
    proposer.take_drafts(requests, choices[np.arange(len(trees)), ends].tolist(), drafts)
    return choices
