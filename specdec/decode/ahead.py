"""Plain steps and drafts that a device begins before the host has the step before them.

The next plain step of a request needs its newest token, which is on the device already, and its
position, which the host knows. So it is begun before the token has come to the host, and the device
never waits for the host's work between steps. Steps are plain where nothing drafts, and where the
drafter rests for a while. A request that turns out to have ended has one step too many in flight;
the result of that step is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.decode.accept import accept_on_device
from specdec.decode.device_tokens import run_tokens
from specdec.decode.drafters.base import Drafter, list_rows
from specdec.decode.requests import ActiveRequest
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.ranking import find_best
from specdec.engine.step import States
from specdec.engine.transfers import Array, Arrival, to_device, to_host
from specdec.engine.tree import BoolArray, Tree


@dataclasses.dataclass(frozen=True)
class _Flight:
    """One plain step that the device computes, or has computed.

    requests: the B requests of the step. states: the step's states, [B, 1, D].
    next_tokens: [B], the token that each request goes on with. arrival: next_tokens on their way
    to the host.
    """

    requests: list[ActiveRequest]
    states: States
    next_tokens: Tensor
    arrival: Arrival


class PlainAhead:
    """Queue of at most two plain steps: the host takes the first while the device runs the second.

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
        """Return whether a step was begun that a request still waits for."""
        flight = self._flight
        return flight is not None and any(r.finish_reason is None for r in flight.requests)

    def serves(self, active: Sequence[ActiveRequest]) -> bool:
        """Return whether the next step of these requests comes from here."""
        return bool(active) and (self.is_flying or self._may_begin(active))

    def step(self, active: Sequence[ActiveRequest]) -> tuple[list[ActiveRequest], Array, States]:
        """Return the requests that have a next token, those tokens [B, 1], and the step's states.

        active: the requests that go on.
        """
        if not self.is_flying:
            newest_tokens = [request.output_ids[-1] for request in active]
            self._flight = self._begin(list(active), to_device(newest_tokens, self._decoder.device))
        flight, self._flight = self._flight, None
        assert flight is not None
        self._drafter.skip(len(flight.requests))
        # Where requests came or went, those in flight land first.
        is_same = [*map(id, active)] == [*map(id, flight.requests)]
        may_begin = self._may_begin(active)
        if may_begin and is_same and any(request.remaining > 1 for request in active):
            self._flight = self._begin(flight.requests, flight.next_tokens)
        (tokens,) = flight.arrival.wait()
        rows = [row for row, r in enumerate(flight.requests) if r.finish_reason is None]
        states = flight.states.take(rows)
        return [flight.requests[row] for row in rows], tokens[rows, None], states

    def _may_begin(self, active: Sequence[ActiveRequest]) -> bool:
        return (
            self._is_allowed
            and self._decoder.graphs is not None
            and self._drafter.rests(len(active))
            and all(request.needs_only_best for request in active)
        )

    def _begin(self, requests: list[ActiveRequest], tokens: Tensor) -> _Flight:
        states = run_tokens(self._decoder, self._cache, list_rows(requests), tokens)
        next_tokens = find_best(self._decoder.compute_logits(states.hidden)[:, 0])
        return _Flight(requests, states, next_tokens, Arrival(next_tokens))


def draft_ahead(
    drafter: Drafter,
    requests: Sequence[ActiveRequest],
    trees: Sequence[Tree],
    tree_mask: BoolArray,
    states: Tensor,
    logits: Tensor,
) -> Array | None:
    """Let the next draft begin before the host knows which tokens were accepted, where it can.

    Returns the greedy choices [B, T], which came to the host with the draft.
    """
    if not all(r.needs_only_best and r.request.allows_drafts for r in requests):
        return None
    best_tokens = find_best(logits)
    last_nodes, roots = accept_on_device(trees, tree_mask, best_tokens)
    newest_states = states[torch.arange(len(trees), device=states.device), last_nodes]
    drafts_on_device = drafter.compute_drafts(newest_states, roots)
    choices, path_ends, drafts = to_host(best_tokens, last_nodes, drafts_on_device)
    drafter.take_drafts(requests, choices[np.arange(len(trees)), path_ends].tolist(), drafts)
    return choices
