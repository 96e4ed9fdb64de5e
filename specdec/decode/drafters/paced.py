"""Drafters whose work is paced: who drafts for which request, and how much of it is verified.

Lookups cost next to nothing and are right for long where a text repeats something; a trained
drafter is right for a little while anywhere. Oliaro et al., https://arxiv.org/abs/2411.04975,
section 4, choose between the two by a threshold; here what each promises for its time decides.
Whoever drafts, the target's own choices are emitted: docs/exactness.md, theorem 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from specdec.decode.accept import Candidates, map_children
from specdec.decode.cost_table import CostTable
from specdec.decode.drafters.base import ALL_LEVELS, Drafter, list_roots
from specdec.decode.drafters.calibration import follow_text
from specdec.decode.drafters.joined import JoinedDrafter
from specdec.decode.drafters.merging import join_candidates
from specdec.decode.drafters.pace import FEW_UNREAD_TOKENS, Pace
from specdec.decode.drafters.prices import DraftCall
from specdec.decode.requests import ActiveRequest
from specdec.engine.step import States
from specdec.files.acceptance import Acceptance


class PacedDrafter(JoinedDrafter):
    """Lets drafters draft as `Pace` says, by turns or in one tree. Each sees every step.

    Drafts that were drawn from what the accept rule is told are left as they are: to keep or to
    leave a token for its own sake would change the distribution.
    """

    pace: Pace

    def __init__(
        self, groups: Sequence[Sequence[Drafter]], costs: CostTable, *, is_fixed: bool = False,
        record: Acceptance | None = None, recorded_drafter: int = 0, names: Sequence[str] = (),
        clock: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        """Join drafters under one pace.

        groups: they draft by turns, the cheapest first; the members of one share a tree. names: of
        the groups, by which requests choose one; none where no request chooses or limits.
        costs: of the target's steps, and of each group's drafts. is_fixed: something is drafted in
        every step, and all of it is verified. record, recorded_drafter: as in `Pace`. clock: in
        seconds, by which steps are held against the table; none where they are not.
        """
        super().__init__(groups)
        self.is_fixed, self.names = is_fixed, names
        is_alone, first_member = len(self.members) == 1, self.members[0]
        self.is_indivisible = is_alone and first_member.is_indivisible
        self.pace = Pace(
            self.max_draft_tokens, costs, is_whole=self.is_indivisible,
            is_planned=is_alone and first_member.is_planned,
            max_depths=[max(d.max_draft_depth for d in group) for group in groups],
            record=record, recorded_drafter=recorded_drafter,
        )  # fmt: skip
        self._clock, self._start_time = clock, 0.0  # when the newest step's drafts were made
        self._draft_calls: list[DraftCall] = []  # of a step, by group
        self._drafts: list[Candidates] = []
        self._verified: list[Candidates] = []  # of these, as grammars have left them
        # By row, the chances of a draft's nodes, best first, and the nodes; and the draft's value.
        self._ranks: dict[int, tuple[list[float], list[int]]] = {}
        self._values: dict[int, float] = {}
        # Drafts that another drafter's excelled, with the length of the text before.
        self._displaced: list[tuple[ActiveRequest, int, Candidates]] = []

    def fit_budget(self) -> PacedDrafter:
        """Return the members as they draft where only what is worth its time is verified."""
        groups = [[member.fit_budget() for member in group] for group in self.groups]
        return PacedDrafter(groups, self.pace.costs, names=self.names, clock=self._clock)

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Forget all requests; what was learned of acceptance, and the account, go on."""
        self._drafts, self._start_time = [], 0.0  # a step that failed has no end
        super().allocate(num_rows, num_positions)

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        self.pace.start(len(requests))
        super().start(requests)

    def rests(self, num_requests: int) -> bool:
        return not self.is_fixed and self.pace.is_resting(num_requests)

    def skip(self, num_requests: int) -> None:
        self._drafts = []
        self.pace.begin_step(num_requests)
        self._begin_step()

    @property
    def _step_clock(self) -> Callable[[], float] | None:
        """Return the clock by which the step is timed, if it is: one that reads prompts is not."""
        return None if self.num_prompt_tokens else self._clock

    def _begin_step(self) -> None:
        """Note when a step begins that is timed, once its drafts are made."""
        clock = self._step_clock
        self._start_time = clock() if clock is not None else 0.0

    def _end_step(self) -> None:
        """Take the seconds of a step that is timed."""
        start_time, self._start_time = self._start_time, 0.0
        if self._clock is not None:
            size = _count_nodes(self._verified)
            draft_calls = self._draft_calls if self._drafts else ()
            self.pace.prices.take_step(size, self._clock() - start_time, draft_calls)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Draft for the requests that it is worth the time for; nothing but roots for the others.

        The groups are asked in order, each for the requests that those before it did not suit.
        """
        clock = self._step_clock
        start_time = clock() if clock is not None else 0.0
        drafts = self._propose(requests)
        if any(candidates.draft_probs is not None for candidates in drafts):
            self._clock = None  # a seed decides what is drawn, and nothing else
        elif drafts and clock is not None and not self.num_prefilled:
            self.pace.prices.take_drafts(clock() - start_time, self._draft_calls)
        self._begin_step()
        return drafts

    def _propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        self._drafts, self._verified, self._ranks, self._values = [], [], {}, {}
        self._displaced, self.num_prefilled = [], 0
        if not (self._plan(requests) or self.is_fixed):
            return []
        self._drafts, self._draft_calls = list_roots(requests), []
        self._instruct()
        self._draft_by_turns(requests)
        if not (self.is_fixed or self.pace.is_whole or self.pace.is_planned):
            self._cut_drafts()
        self._verified = self._drafts
        return self._drafts

    def _draft_by_turns(self, requests: Sequence[ActiveRequest]) -> None:
        """Ask the groups in order, each for requests that let it draft, and limit the drafts."""
        rows = list(range(len(requests)))
        for group in range(len(self.groups)):
            names = (None, self.names[group]) if self.names else ()
            asked_rows = [r for r in rows if not names or requests[r].request.draft_method in names]
            if asked_rows and self._is_worth(group, asked_rows):
                left_rows = self._draft(group, requests, asked_rows)
                rows = sorted({*rows} - {*asked_rows} | {*left_rows})
        if self.names:
            self._drafts = [
                candidates.limit(request.request.max_draft_tokens)
                for candidates, request in zip(self._drafts, requests, strict=True)
            ]

    def _plan(self, requests: Sequence[ActiveRequest]) -> bool:
        """Return whether the pace lets the step draft."""
        if not self.is_fixed and self.pace.rest_step(len(requests)):
            return False
        remaining = [request.remaining for request in requests]
        num_positions = sum(len(r.request.input_ids) + len(r.output_ids) for r in requests)
        unread_counts: list[int] = []  # with none, what is unread ends no draft
        if not self.is_fixed:
            unread_counts = [sum(m.count_unread(requests) for m in g) for g in self.groups]
        is_worth = self.pace.plan(remaining, self.num_prompt_tokens, unread_counts, num_positions)
        is_timed = self._step_clock is not None
        return is_worth and not (is_timed and self.pace.prices.drift.needs_plain)

    def _instruct(self) -> None:
        """Tell the drafters how much they may read and draft in the step."""
        pace = self.pace
        limits = [self.max_prefill, None if self.is_fixed else pace.max_read]
        max_prefill = min([n for n in limits if n is not None], default=None)
        min_gain = pace.price_level() if self.max_draft_depth > 1 else ALL_LEVELS
        for member in self.members:
            member.max_prefill = max_prefill
            if not self.is_fixed:
                member.min_gain = min_gain
                member.max_levels = pace.max_levels if pace.is_planned else None

    def _is_worth(self, group: int, rows: Sequence[int]) -> bool:
        """Return whether to ask a group for some rows at all."""
        if self.is_fixed or len(self.groups) == 1:
            return True
        return self.pace.is_worth_asking(group, [self._values.get(row, 0.0) for row in rows])

    def _draft(
        self, group: int, requests: Sequence[ActiveRequest], rows: Sequence[int]
    ) -> list[int]:
        """Draft for the requests of some rows; return those that later groups may suit better."""
        drafts = self._ask(group, [requests[row] for row in rows])
        if len(self.groups) == 1:
            for row, candidates in zip(rows, drafts, strict=True):
                self._drafts[row] = candidates
            return []
        pace, num_rows = self.pace, len(rows)
        ranks = pace.calibration.rank(drafts)
        chances = [row_chances for row_chances, _ in ranks]
        if group == 0:
            pace.note_first(chances)
        values = pace.value(chances)
        pace.drafters[group].record(values)
        for row, candidates, rank, value in zip(rows, drafts, ranks, values, strict=True):
            if self._is_better(row, candidates, value):
                self._displace(requests[row], self._drafts[row])
                self._drafts[row], self._ranks[row], self._values[row] = candidates, rank, value
            else:
                self._displace(requests[row], candidates)
        if group == len(self.groups) - 1:
            return []
        valued_rows = zip(rows, values, strict=True)
        return [row for row, value in valued_rows if not pace.is_best(group, value, num_rows)]

    def _is_better(self, row: int, candidates: Candidates, value: float) -> bool:
        """Return whether a draft takes the place of the one before, as one that was drawn must."""
        return candidates.draft_probs is not None or value >= self._values.get(row, 0.0)

    def _displace(self, request: ActiveRequest, candidates: Candidates) -> None:
        """Let the text judge a draft that is not verified."""
        if candidates.tree.num_draft_tokens and candidates.draft_probs is None:
            self._displaced.append((request, len(request.output_ids), candidates))

    def _ask(self, group: int, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Return the drafts of a group, whose members share a tree."""
        members = self.groups[group]
        member_drafts = [member.propose(requests) or list_roots(requests) for member in members]
        self.num_prefilled += sum(member.num_prefilled for member in members)
        self.num_levels = max(member.num_levels for member in members)
        self._draft_calls.append((group, len(requests), self.num_levels))
        drafts = [join_candidates(row_drafts) for row_drafts in zip(*member_drafts, strict=True)]
        if self.chains_only:
            drafts = [candidates.make_chain() for candidates in drafts]
        if group:
            drafts = [dataclasses.replace(candidates, source=group) for candidates in drafts]
        return drafts

    def note_verified(self, drafts: Sequence[Candidates]) -> None:
        """Take what is verified; a draft that was drawn counts whole.

        How much a grammar leaves of it depends on what was drawn, on which no later draft may.
        """
        self._verified = [
            verified if draft.draft_probs is None else draft
            for draft, verified in zip(self._drafts, drafts, strict=True)
        ]

    def observe(
        self, requests: Sequence[ActiveRequest], states: States, paths: Sequence[Sequence[int]]
    ) -> None:
        """Let all see the step; note what it brought, unless it was one over prompts only."""
        if self._start_time:
            self._end_step()
        super().observe(requests, states, paths)
        if not self._drafts:
            return
        drafts, self._drafts = self._drafts, []
        size = _count_nodes(drafts)
        self.pace.record(
            size, [len(path) for path in paths], self._draft_calls, self.num_prefilled,
            verified_size=_count_nodes(self._verified),
        )  # fmt: skip
        calibration = self.pace.calibration
        if size > 1:
            calibration.record(drafts, [*map(_find_path, drafts, self._verified, paths)])
        for request, start, candidates in self._displaced:
            judged, path = follow_text(candidates, request.output_ids[start:])
            calibration.record([judged], [path])

    def _rank_drafts(self) -> list[tuple[list[float], list[int]]]:
        """Rank each draft's nodes, unless that was done when it was made, and all are kept."""
        ranks = [self._ranks.get(row, ([], [])) for row in range(len(self._drafts))]
        is_ranked = [
            candidates.tree.num_draft_tokens == len(order)
            for candidates, (_, order) in zip(self._drafts, ranks, strict=True)
        ]
        return ranks if all(is_ranked) else self.pace.calibration.rank(self._drafts)

    def _cut_drafts(self) -> None:
        """Keep the likeliest nodes of each tree, as many as are worth their time."""
        ranks = self._rank_drafts()
        chances = [row_chances for row_chances, _ in ranks]
        # A prompt that is not read yet may promise something still.
        if self.num_prefilled > FEW_UNREAD_TOKENS:
            chances = [row for row in chances if any(row)]
        max_nodes = self.pace.choose(chances) if chances else 0
        self._drafts = [
            candidates
            if candidates.draft_probs is not None or candidates.tree.num_draft_tokens <= max_nodes
            else candidates.keep([0, *sorted(order[:max_nodes])])
            for candidates, (_, order) in zip(self._drafts, ranks, strict=True)
        ]


def _count_nodes(drafts: Sequence[Candidates]) -> int:
    """Return the nodes of the largest draft, or of a root alone."""
    return max((candidates.tree.num_nodes for candidates in drafts), default=1)


def _find_path(draft: Candidates, verified: Candidates, path: Sequence[int]) -> Sequence[int]:
    """Return the nodes of a draft that are a path of what was verified of it.

    A token that a grammar forbids was refused, as one that the target did not choose.
    """
    if verified.tree is draft.tree:
        return path
    children, draft_path = map_children(draft.tree), [0]
    for token in verified.tree.tokens[path[1:]].tolist():
        draft_path.append(children[draft_path[-1], token])
    return draft_path
