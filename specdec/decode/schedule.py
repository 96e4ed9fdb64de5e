"""Scheduler: gives rows of the cache to requests, and plans each forward pass."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

from specdec.decode.accept import Accepted
from specdec.decode.cost_table import CostTable
from specdec.decode.drafters.base import Drafter
from specdec.decode.prefill import PrefillChunk, PromptReader, count_shared
from specdec.decode.prompt_chunks import choose_chunk
from specdec.decode.requests import ActiveRequest
from specdec.decode.sessions import Sessions
from specdec.decode.timing import Timing
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache

# Tokens of a beginning that two prompts share, from which on the second request waits until the
# first one has read them; where prompts are read whole, it waits for a single token.
WORTH_WAITING = 16
# Prompt tokens that a drafter may read in a step, as a multiple of the target's: it reads every
# prompt that the target reads, and the output since then, before it can draft.
DRAFTER_SHARE = 4


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Plan of one forward pass of the target, made before drafts are proposed for it.

    verifies: whether running requests are in the pass. allows_drafts: whether anything may be
    drafted for them. reads_prompts: whether a prefill chunk is in the pass. max_tokens: most prompt
    tokens of that chunk; None is as many as a pass should have. counts_verified: whether the tokens
    that running requests verify count among `max_tokens`, too. num_prompt_tokens: prompt tokens
    that the pass reads beside running requests, if no draft takes their place.
    """

    verifies: bool = False
    allows_drafts: bool = True
    reads_prompts: bool = False
    max_tokens: int | None = None
    counts_verified: bool = False
    num_prompt_tokens: int = 0


class Scheduler:
    """Owner of the cache's rows: of requests that wait, those in prefill, and those that run.

    queue: requests that wait for a row. prefilling: requests whose prompts are being read.
    active: requests that run, ordered by row.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        drafter: Drafter,
        timing: Timing,
        *,
        max_num_tokens: int,
        prompt_chunk: int | Literal["auto"] | None,
        reuses_prefixes: bool,
        costs: CostTable | None = None,
    ) -> None:
        """Start with free rows; `Options` of the loop describes the settings."""
        self.queue: deque[ActiveRequest] = deque()
        self.prefilling: list[ActiveRequest] = []
        self.active: list[ActiveRequest] = []
        self.reader = PromptReader(decoder, cache, max_num_tokens)
        self.max_prefill: int | None = None  # prompt tokens that drafters may read in a step
        self._cache, self._drafter, self._timing = cache, drafter, timing
        self._prompt_chunk, self._reuses_prefixes = prompt_chunk, reuses_prefixes
        # By row, the prompt and the output that are in its cache; no output of a request without
        # drafts, since a drafter that follows prompts has not seen it.
        self._row_texts: list[tuple[list[int], list[int]]] = [([], []) for _ in cache.past_lens]
        self._costs = costs
        self.sessions: Sessions | None = None  # where texts are kept on disk
        self._drafted_size = 1  # nodes of a row in the newest step that might be drafted for

    @property
    def is_busy(self) -> bool:
        """Return whether a step has anything to do."""
        requests = (*self.active, *self.prefilling, *self.queue)
        return not all(r.is_over for r in requests)

    def plan(self) -> Iterator[ForwardPlan]:
        """Free the rows of requests that have ended, fill them, and plan the step's passes.

        A step has one pass, or two where the prompts' tokens cannot share the pass of the running
        requests. A pass reads prompts in one of three ways: as many tokens as it should have, where
        no request runs or those that run may wait; a chunk, in a pass before that of the running
        requests; a chunk beside the running requests.

        Cancellations take effect here alone: a request that is cancelled later stays in this step
        to its end.
        """
        for request in (*self.active, *self.prefilling, *self.queue):
            request.take_cancellation()
        self.retire()
        self._admit()
        chunk = self._choose_chunk()
        if not self.prefilling:
            if self.active:
                yield ForwardPlan(verifies=True)
        elif chunk is None or not self.active:
            yield ForwardPlan(reads_prompts=True)
        elif not self.reader.joins:
            yield ForwardPlan(reads_prompts=True, max_tokens=chunk)
            if self.active:
                yield ForwardPlan(verifies=True)
        else:
            yield self._plan_joined_pass(chunk)

    def _plan_joined_pass(self, chunk: int) -> ForwardPlan:
        """Plan a pass of the running requests and of a chunk of at most so many prompt tokens."""
        num_unread, counts_verified = self.reader.num_unread, self._prompt_chunk == "auto"
        # A token of a prompt and one of a draft cost the same, and requests that wait for their
        # first token have none yet: prompts go before drafts.
        fits = num_unread + len(self.active) * self._drafted_size <= chunk
        return ForwardPlan(
            verifies=True,
            allows_drafts=fits or not counts_verified or self._drafter.is_indivisible,
            reads_prompts=True,
            max_tokens=chunk,
            counts_verified=counts_verified,
            num_prompt_tokens=min(chunk, num_unread),
        )

    def plan_chunk(self, plan: ForwardPlan, num_rows: int, num_nodes: int) -> PrefillChunk | None:
        """Choose the prompt tokens of a pass that verifies num_nodes nodes in num_rows rows.

        Returns None where the plan reads no prompts.
        """
        if not plan.reads_prompts:
            return None
        max_tokens, drafter = plan.max_tokens, self._drafter
        if plan.counts_verified and max_tokens is not None:
            max_tokens = max(1, max_tokens - num_rows * num_nodes)
        reads_all = drafter.follows_prompts and drafter.reads_hidden
        reads_all |= any(r.request.wants_prompt_logprobs for r in self.prefilling)
        max_past = max((int(self._cache.past_lens[r.row]) for r in self.active), default=0)
        return self.reader.plan(
            max_tokens, num_others=num_rows, max_past=max_past, min_size=max(1, num_nodes),
            reads_all=reads_all,
        )  # fmt: skip

    def record(self, plan: ForwardPlan, num_rows: int, num_nodes: int) -> None:
        """Remember the number of nodes that a pass has verified in each of num_rows rows."""
        if num_rows and plan.allows_drafts:
            self._drafted_size = num_nodes

    def retire(self) -> None:
        """Give back the rows of requests that have ended."""
        requests = (*self.active, *self.prefilling)
        ended_requests = [r for r in requests if r.finish_reason is not None]
        if not ended_requests:
            return
        for request in ended_requests:
            if self.sessions is not None:
                self.sessions.finish(request)
            request.release()
            if request in self.prefilling:
                self.reader.drop(request.row)
        self.active = [r for r in self.active if r not in ended_requests]
        self.prefilling = [r for r in self.prefilling if r not in ended_requests]

    def commit(
        self,
        requests: Sequence[ActiveRequest],
        accepted: Sequence[Accepted],
    ) -> None:
        """Keep the accepted paths of trees in the requests' rows."""
        for request, (path, _) in zip(requests, accepted, strict=True):
            self._cache.commit(request.row, path)

    def finish_chunk(self, chunk: PrefillChunk) -> list[ActiveRequest]:
        """Commit a prefill chunk; let the requests whose prompts end there run, and return them."""
        self.reader.commit(chunk)
        by_row = {request.row: request for request in self.prefilling}
        new_requests = [by_row[row] for row in chunk.ended_rows]
        self.prefilling = [r for r in self.prefilling if r not in new_requests]
        self.active = sorted([*self.active, *new_requests], key=lambda r: r.row)
        return new_requests

    def keep(self) -> None:
        """Let the sessions, if any, have what a step has brought."""
        if self.sessions is not None:
            self.sessions.note((*self.active, *self.prefilling))

    def _choose_chunk(self) -> int | None:
        """Choose how many prompt tokens a step may read where requests run; None is all.

        With "auto" the tokens that running requests verify count, too, where they share a pass.
        """
        chunk = self._prompt_chunk
        if chunk == "auto":
            num_requests = len(self.active) + len(self.prefilling) + len(self.queue)
            chunk = choose_chunk(self._costs, len(self.active), num_requests)
        self.max_prefill = None if chunk is None else DRAFTER_SHARE * chunk
        return chunk

    def _admit(self) -> None:
        """Give free rows to waiting requests, with the cached beginnings of their prompts."""
        if not self.queue:
            return
        taken_rows = {request.row for request in (*self.active, *self.prefilling)}
        free_rows = [row for row in range(len(self._row_texts)) if row not in taken_rows]
        while free_rows and self.queue:
            request = self.queue[0]
            # One that was cancelled before its turn only leaves the queue.
            if request.finish_reason is None and not self._give_row(request, free_rows):
                return
            self.queue.popleft()

    def _give_row(self, request: ActiveRequest, free_rows: list[int]) -> bool:
        """Give a request one of the free rows; return False where it waits for another's prompt."""
        prompt = request.request.input_ids
        source, num_shared, fork_lengths = free_rows[0], 0, list[int]()
        if self._reuses_prefixes and not request.request.wants_prompt_logprobs:
            source, num_shared, fork_lengths = self._find_prefix(free_rows, prompt)
            num_kept = self.sessions.count_kept(prompt) if self.sessions is not None else 0
            if self._is_being_read(prompt, max(num_shared, num_kept)):
                return False
            self._timing.num_sought_tokens += len(prompt)
        request.row = source if source in free_rows else free_rows[0]
        free_rows.remove(request.row)
        self._cache.copy_prefix(source, request.row, num_shared)
        self._cache.request_prefixes(request.row, fork_lengths)
        self._drafter.copy_prefix(source, request.row, num_shared)
        if self.sessions is not None:
            num_shared = self.sessions.begin(request, num_shared)
        self._timing.num_reused_tokens += num_shared
        request.stats.num_cached_tokens = num_shared
        self.reader.add(request.row, prompt)
        output = request.output_ids if request.request.allows_drafts else []
        self._row_texts[request.row] = prompt, output
        self.prefilling.append(request)
        return True

    def _find_prefix(
        self, free_rows: Sequence[int], prompt: Sequence[int]
    ) -> tuple[int, int, list[int]]:
        """Find the row that holds most of a prompt's beginning; return it and that many tokens.

        Returned third: the lengths at which later prompts may part from this one, namely where
        this one parts from a cached text, if that is much further than the cache can be taken
        over, and where it ends.
        """
        cached_lengths = [self._count_cached(row, prompt) for row in range(len(self._row_texts))]
        usable_lengths = [
            self._cache.find_prefix(row, length) for row, length in enumerate(cached_lengths)
        ]
        source = max(
            range(len(usable_lengths)), key=lambda row: (usable_lengths[row], row in free_rows)
        )
        num_shared, fork = usable_lengths[source], max(cached_lengths)
        fork_lengths = [fork] if fork >= num_shared + WORTH_WAITING else []
        return source, num_shared, [*fork_lengths, len(prompt) - 1]

    def _count_cached(self, row: int, prompt: Sequence[int]) -> int:
        """Count a prompt's first tokens that are in a row's cache, without the prompt's last."""
        row_prompt, row_output = self._row_texts[row]
        num_shared = count_shared(row_prompt, prompt)
        if num_shared == len(row_prompt):
            num_shared += count_shared(row_output, prompt[num_shared:])
        # The last token is always run: its hidden state is needed.
        return min(num_shared, int(self._cache.past_lens[row]), len(prompt) - 1)

    def _is_being_read(self, prompt: Sequence[int], num_cached: int) -> bool:
        """Return whether a prompt in prefill shares much more of this prompt than is cached."""
        min_tokens = 1 if self._prompt_chunk is None else WORTH_WAITING
        for request in self.prefilling:
            num_shared = min(count_shared(request.request.input_ids, prompt), len(prompt) - 1)
            if num_shared >= num_cached + min_tokens and self._cache.request_prefixes(
                request.row, (num_shared,)
            ):
                return True
        return False
