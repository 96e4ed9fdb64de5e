"""Greedy decoding of one token a step on a device, ahead of the host.

The next step of a request needs its newest token, which is on the device already, and its position,
which the host knows. So it is begun before the token has come to the host, and the device never
waits for what the host does between steps. A request that turns out to have ended has one step too
many in flight; its result is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specdec.decode.drafters.base import list_rows
from specdec.decode.requests import ActiveRequest
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Step
from specdec.engine.transfers import Arrival, to_device
from specdec.engine.tree import IntArray


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A step that was begun; best: [B], the token that each request goes on with."""

    requests: list[ActiveRequest]
    best: Tensor
    arrival: Arrival


Emitted = tuple[ActiveRequest, int]  # a request and its next token


class PlainAhead:
    """Begins steps, and hands over the tokens of the one begun first."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._flight: _Flight | None = None

    @property
    def is_flying(self) -> bool:
        """Whether a step was begun that a request still waits for."""
        flight = self._flight
        return flight is not None and any(r.finish_reason is None for r in flight.requests)

    def step(self, active: Sequence[ActiveRequest]) -> list[Emitted]:
        """Return the next token of each request that has one; `active` are those that go on."""
        if not self.is_flying:
            newest = [request.output_ids[-1] for request in active]
            self._flight = self._begin(list(active), to_device(newest, self._decoder.device))
        flight, self._flight = self._flight, None
        assert flight is not None
        # Requests that came or went: those in flight land first.
        is_same = len(active) == len(flight.requests) and all(
            ours is theirs for ours, theirs in zip(active, flight.requests, strict=True)
        )
        if is_same and any(request.remaining > 1 for request in active):
            self._flight = self._begin(flight.requests, flight.best)
        return _take(flight)

    def land(self, active: Sequence[ActiveRequest]) -> list[Emitted]:
        """Return the tokens of the step that was begun, and begin no other."""
        flight, self._flight = self._flight, None
        assert flight is not None
        return _take(flight)

    def _begin(self, requests: list[ActiveRequest], tokens: Tensor) -> _Flight:
        logits = run_tokens(self._decoder, self._cache, list_rows(requests), tokens)
        best = logits.argmax(-1)
        return _Flight(requests, best, Arrival(best))


def _take(flight: _Flight) -> list[Emitted]:
    (tokens,) = flight.arrival.wait()
    return [
        (request, token)
        for request, token in zip(flight.requests, tokens.tolist(), strict=True)
        if request.finish_reason is None
    ]


def run_tokens(decoder: Decoder, cache: KVCache, rows: IntArray, tokens: Tensor) -> Tensor:
    """Run and commit one token a row, `tokens` [B] on the device; return logits [B, V]."""
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
