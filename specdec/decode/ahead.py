"""What is begun on a device before the host knows the step before: plain steps, and drafts.

The next plain step of a request needs its newest token, which is on the device already, and its
position, which the host knows. So it is begun before the token has come to the host, and the device
never waits for what the host does between steps. A request that turns out to have ended has one
step too many in flight; its result is dropped.
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
from specdec.decode.sampling import find_best
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Step
from specdec.engine.transfers import Array, Arrival, to_device, to_host
from specdec.engine.tree import BoolArray, IntArray, Tree


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A step that was begun; best: [B], the token that each request goes on with."""

    requests: list[ActiveRequest]
    best: Tensor
    arrival: Arrival


class PlainAhead:
    """Begins steps, and hands over the tokens of the one begun first.

    is_allowed: whether no more of a step than its tokens is asked for.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, *, is_allowed: bool) -> None:
        self._decoder, self._cache, self._is_allowed = decoder, cache, is_allowed
        self._flight: _Flight | None = None

    @property
    def is_flying(self) -> bool:
        """Whether a step was begun that a request still waits for."""
        flight = self._flight
        return flight is not None and any(r.finish_reason is None for r in flight.requests)

    def serves(self, active: Sequence[ActiveRequest]) -> bool:
        """Whether the next step of these requests comes from here."""
        return bool(active) and (self.is_flying or self._may_begin(active))

    def step(self, active: Sequence[ActiveRequest]) -> tuple[list[ActiveRequest], Array]:
        """Return the requests that have a next token, and these, [B, 1]; `active` go on."""
        may_begin = self._may_begin(active)
        if not self.is_flying:
            newest = [request.output_ids[-1] for request in active]
            self._flight = self._begin(list(active), to_device(newest, self._decoder.device))
        flight, self._flight = self._flight, None
        assert flight is not None
        # Where requests came or went, those in flight land first.
        is_same = len(active) == len(flight.requests) and all(
            ours is theirs for ours, theirs in zip(active, flight.requests, strict=True)
        )
        if may_begin and is_same and any(request.remaining > 1 for request in active):
            self._flight = self._begin(flight.requests, flight.best)
        (tokens,) = flight.arrival.wait()
        found = [at for at, r in enumerate(flight.requests) if r.finish_reason is None]
        return [flight.requests[at] for at in found], tokens[found, None]

    def _may_begin(self, active: Sequence[ActiveRequest]) -> bool:
        return (
            self._is_allowed
            and self._decoder.graphs is not None
            and all(request.needs_only_best for request in active)
        )

    def _begin(self, requests: list[ActiveRequest], tokens: Tensor) -> _Flight:
        logits = run_tokens(self._decoder, self._cache, list_rows(requests), tokens)
        best = find_best(logits)
        return _Flight(requests, best, Arrival(best))


def run_tokens(decoder: Decoder, cache: KVCache, rows: IntArray, tokens: Tensor) -> Tensor:
    """Run and commit one token per row, `tokens` [B] on the device; return logits [B, V]."""
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
    return decoder.compute_logits(states)[:, 0]


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
