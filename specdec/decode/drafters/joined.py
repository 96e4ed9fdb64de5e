"""Drafters that work as one: each sees every step, whichever of them drafts."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.decode.drafters.base import Drafter
from specdec.decode.requests import ActiveRequest
from specdec.engine.kv_cache import CachedTensor, KVCache
from specdec.engine.step import States


class JoinedDrafter(Drafter):
    """Tells its members of every prompt and step; a subclass says which of them draft."""

    def __init__(self, groups: Sequence[Sequence[Drafter]]) -> None:
        """Join drafters. groups: they draft by turns; the members of one share a tree."""
        self.members = members = [drafter for group in groups for drafter in group]
        self.groups = groups
        self.max_draft_depth = max(member.max_draft_depth for member in members)
        self.max_draft_tokens = max(sum(d.max_draft_tokens for d in group) for group in groups)
        self.follows_prompts = any(member.follows_prompts for member in members)
        self.reads_hidden = any(member.reads_hidden for member in members)

    def take_cache(self, cache: KVCache) -> None:
        for member in self.members:
            member.take_cache(cache)

    def allocate(self, num_rows: int, num_positions: int) -> None:
        for member in self.members:
            member.allocate(num_rows, num_positions)

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        for member in self.members:
            member.start(requests)

    def count_unread(self, requests: Sequence[ActiveRequest]) -> int:
        return sum(member.count_unread(requests) for member in self.members)

    def follow(
        self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], states: States
    ) -> None:
        for member in self.members:
            member.follow(rows, starts, counts, states)

    def observe(
        self, requests: Sequence[ActiveRequest], states: States, paths: Sequence[Sequence[int]]
    ) -> None:
        for member in self.members:
            member.observe(requests, states, paths)

    def copy_prefix(self, source: int, row: int, length: int) -> None:
        for member in self.members:
            member.copy_prefix(source, row, length)

    def list_cached_tensors(self) -> list[CachedTensor]:
        """List those of all members."""
        return [numbers for member in self.members for numbers in member.list_cached_tensors()]

    def settle(self, row: int) -> None:
        for member in self.members:
            member.settle(row)

    def resume(self, row: int, length: int) -> None:
        for member in self.members:
            member.resume(row, length)

    def keep(self) -> None:
        for member in self.members:
            member.keep()
