"""Which request has which row of the cache, and what each pass of the target is about."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

from specdec.decode.accept import Accepted
from specdec.decode.cost_table import CostTable
from specdec.decode.drafters.base import Drafter
from specdec.decode.prefill import PromptReader, Reading, count_shared
from specdec.decode.prompt_chunks import choose_chunk
from specdec.decode.requests import ActiveRequest
from specdec.decode.timing import Timing
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache

# Where prompts are read in chunks, a request waits for another that is reading the same beginning
# if that brings so many tokens more.
WORTH_WAITING = 16
# How many times as many tokens as the target a drafter may read of prompts in a step. It has every
# prompt to read that the target has, and what was emitted meanwhile, or it would never draft.
DRAFTER_SHARE = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of the target.

    verifies: whether running requests are in it. drafts: whether anything may be drafted for them.
    reads: whether prompts are in it. max_tokens: prompt tokens at most, None as many as a pass
    should have. is_shared: what the requests verify counts among `max_tokens`. num_prompt_tokens:
    that the pass reads, if no draft takes their place.
    """

    verifies: bool = False
    drafts: bool = True
    reads: bool = False
    max_tokens: int | None = None
    is_shared: bool = False
    num_prompt_tokens: int = 0


class Scheduler:
    """The requests that wait, those whose prompts are being read, and those that run."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        proposer: Drafter,
        timing: Timing,
        *,
        max_num_tokens: int,
        prompt_chunk: int | Literal["auto"] | None,
        reuses_prefixes: bool,
        costs: CostTable | None = None,
    ) -> None:
        """See `Options` of the loop."""
        self.waiting: deque[ActiveRequest] = deque()
        self.reading: list[ActiveRequest] = []
        self.active: list[ActiveRequest] = []  # by row
        self.reader = PromptReader(decoder, cache, max_num_tokens)
        self.max_prefill: int | None = None  # prompt tokens that drafters may read in a step
        self._cache, self._proposer, self._timing = cache, proposer, timing
        self._prompt_chunk, self._reuses_prefixes = prompt_chunk, reuses_prefixes
        # By row, the prompt and the output that are in its cache; no output that no drafter has
        # seen, if it follows prompts.
        self._texts: list[tuple[list[int], list[int]]] = [([], []) for _ in cache.past_lens]
        self._costs = costs
        self._drafted_size = 1  # nodes of a row in the newest step that might be drafted for

    @property
    def is_busy(self) -> bool:
        """Whether a step has anything to do."""
        requests = (*self.active, *self.reading, *self.waiting)
        return not all(r.is_over for r in requests)

    def plan(self) -> Iterator[Pass]:
        """Free the rows of requests that have ended, fill them, and tell the step's passes.

        That is one, or two where the prompts' tokens cannot share the others' pass. Here alone
        cancellations are taken: who leaves later is in this step to its end.
        """
        for request in (*self.active, *self.reading, *self.waiting):
            request.take_cancellation()
        self.retire()
        self._admit()
        chunk = self._choose_chunk()
        if not self.reading:
            if self.active:
                yield Pass(verifies=True)
        elif chunk is None or not self.active:  # whole prompts first, or no request waits for it
            yield Pass(reads=True)
        elif not self.reader.joins:
            yield Pass(reads=True, max_tokens=chunk)
            if self.active:
                yield Pass(verifies=True)
        else:
            left, is_shared = self.reader.num_left, self._prompt_chunk == "auto"
            # A token of a prompt and one of a draft cost the same, and requests that wait for
            # their first token have none yet: prompts go before drafts.
            fits = left + len(self.active) * self._drafted_size <= chunk
            drafts = fits or not is_shared or self._proposer.is_indivisible
            yield Pass(True, drafts, True, chunk, is_shared, min(chunk, left))

    def plan_reading(self, task: Pass, num_rows: int, num_nodes: int) -> Reading:
        """The prompts' tokens of a pass that verifies so many nodes of so many rows."""
        max_tokens, proposer = task.max_tokens, self._proposer
        if task.is_shared and max_tokens is not None:
            max_tokens = max(1, max_tokens - num_rows * num_nodes)
        reads_all = proposer.follows_prompts and proposer.follows_last
        reads_all |= any(r.request.wants_prompt_logprobs for r in self.reading)
        longest = max((int(self._cache.past_lens[r.row]) for r in self.active), default=0)
        return self.reader.plan(
            max_tokens, num_others=num_rows, longest=longest, min_size=max(1, num_nodes),
            reads_all=reads_all,
        )  # fmt: skip

    def record(self, task: Pass, num_rows: int, num_nodes: int) -> None:
        """Take what a pass was that verified so many nodes of so many rows."""
        if num_rows and task.drafts:
            self._drafted_size = num_nodes

    def retire(self) -> None:
        """Give back the rows of requests that have ended."""
        ended = [r for r in (*self.active, *self.reading) if r.finish_reason is not None]
        if not ended:
            return
        for request in ended:
            request.release()
            if request in self.reading:
                self.reader.drop(request.row)
        self.active = [r for r in self.active if r not in ended]
        self.reading = [r for r in self.reading if r not in ended]

    def commit(
        self,
        requests: Sequence[ActiveRequest],
        accepted: Sequence[Accepted],
    ) -> None:
        """Keep the accepted paths of trees in the requests' rows."""
        for request, (path, _) in zip(requests, accepted, strict=True):
            self._cache.commit(request.row, path)

    def finish_reading(self, reading: Reading) -> list[ActiveRequest]:
        """Keep what a pass has read of prompts; return the requests whose prompts have ended."""
        self.reader.commit(reading)
        by_row = {request.row: request for request in self.reading}
        begun = [by_row[row] for row in reading.ended]
        self.reading = [r for r in self.reading if r not in begun]
        self.active = sorted([*self.active, *begun], key=lambda r: r.row)
        return begun

    def _choose_chunk(self) -> int | None:
        """Tokens of prompts that a step may read where requests run; None is all.

        With "auto" those that the others verify count, too, where they share a pass.
        """
        chunk = self._prompt_chunk
        if chunk == "auto":
            num_requests = len(self.active) + len(self.reading) + len(self.waiting)
            chunk = choose_chunk(self._costs, len(self.active), num_requests)
        self.max_prefill = None if chunk is None else DRAFTER_SHARE * chunk
        return chunk

    def _admit(self) -> None:
        """Give free rows to waiting requests, with what other rows hold of their prompts."""
        if not self.waiting:
            return
        taken = {request.row for request in (*self.active, *self.reading)}
        free = [row for row in range(len(self._texts)) if row not in taken]
        while free and self.waiting:
            request = self.waiting[0]
            if request.finish_reason is None:  # not cancelled before its turn
                prompt = request.request.input_ids
                source, shared, places = free[0], 0, list[int]()
                if self._reuses_prefixes and not request.request.wants_prompt_logprobs:
                    source, shared, places = self._find_prefix(free, prompt)
                    if self._is_being_read(prompt, shared):
                        return
                    self._timing.num_sought_tokens += len(prompt)
                request.row = source if source in free else free[0]
                free.remove(request.row)
                self._cache.copy_prefix(source, request.row, shared)
                self._cache.want_places(request.row, places)
                self._proposer.copy_prefix(source, request.row, shared)
                self._timing.num_reused_tokens += shared
                self.reader.add(request.row, prompt)
                output = request.output_ids if request.request.drafts else []
                self._texts[request.row] = prompt, output
                self.reading.append(request)
            self.waiting.popleft()

    def _find_prefix(
        self, free: Sequence[int], prompt: Sequence[int]
    ) -> tuple[int, int, list[int]]:
        """The row that holds most of a prompt's beginning, and how many tokens that is.

        And behind which tokens later prompts may part from this one: where it parts from what is
        held, if that is much further than it can be taken over, and where it ends.
        """
        held = [self._count_held(row, prompt) for row in range(len(self._texts))]
        known = [self._cache.find_prefix(row, length) for row, length in enumerate(held)]
        source = max(range(len(known)), key=lambda row: (known[row], row in free))
        fork = max(held)
        places = [fork] if fork >= known[source] + WORTH_WAITING else []
        return source, known[source], [*places, len(prompt) - 1]

    def _count_held(self, row: int, prompt: Sequence[int]) -> int:
        """How many of a prompt's first tokens are in a row's cache, without the prompt's last."""
        read, output = self._texts[row]
        shared = count_shared(read, prompt)
        if shared == len(read):
            shared += count_shared(output, prompt[shared:])
        # The last token is always run: its hidden state is needed.
        return min(shared, int(self._cache.past_lens[row]), len(prompt) - 1)

    def _is_being_read(self, prompt: Sequence[int], known: int) -> bool:
        """Whether much more of a prompt than is known will be, from one that is being read."""
        worth = 1 if self._prompt_chunk is None else WORTH_WAITING
        for other in self.reading:
            shared = min(count_shared(other.request.input_ids, prompt), len(prompt) - 1)
            if shared >= known + worth and self._cache.want_places(other.row, (shared,)):
                return True
        return False
