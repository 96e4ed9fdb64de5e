"""Drafts from outside of a TensorRT-LLM engine: the loop is ours, accepting is the runtime's.

An engine with external drafts ends every request after one step, so each step is a call that is
given the whole text, whose keys and values the runtime takes from its cache by block reuse. Such a
call ends after the drafted tokens that the target agrees with and one token of its own.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specdec.decode.drafters.pace import Pace
from specdec.decode.drafters.prompt_lookup import PromptLookupProposer
from specdec.decode.loop import Interrupted, Options
from specdec.decode.requests import BONUS, PLAIN, ActiveRequest, Request, Result
from specdec.decode.requests import DRAFT as DRAFTED
from specdec.decode.sampling import SamplingParams
from specdec.decode.timing import Timing
from specdec.errors import SpecDecError
from specdec.trtllm.runner import RowOutput, TensorRTRunner

from .tensorrt_call import fill_results

TARGET, DRAFT = range(2)  # whose random numbers


@dataclasses.dataclass(frozen=True)
class DraftedTokens:
    """Tokens for one request, perhaps none, and the logits [tokens, V] they were drawn from."""

    tokens: list[int]
    logits: Tensor | None = None


class Drafter:
    """Where drafts come from; this one drafts nothing, so that every step emits one token."""

    max_draft_tokens = 0

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        """These requests' rows now belong to them."""

    def draft(self, requests: Sequence[ActiveRequest], seed: int) -> list[DraftedTokens]:
        """Return what is drafted for each request."""
        return [DraftedTokens([]) for _ in requests]

    def observe(
        self,
        drafts: Sequence[DraftedTokens],
        num_accepted: Sequence[int],
        seconds: tuple[float, float],
    ) -> None:
        """Take how much of each draft was accepted, and what drafting and verifying took."""


class LookupDrafter(Drafter):
    """Drafts of prompt lookup."""

    def __init__(self, proposer: PromptLookupProposer) -> None:
        self._proposer = proposer
        self.max_draft_tokens = proposer.max_draft_tokens

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        self._proposer.start(requests)

    def draft(self, requests: Sequence[ActiveRequest], seed: int) -> list[DraftedTokens]:
        found = self._proposer.propose(requests)
        return [DraftedTokens(candidates.tree.tokens[1:].tolist()) for candidates in found]


class EngineDrafter(Drafter):
    """A second engine drafts, at most up to the token before each request's limit."""

    def __init__(
        self,
        runner: TensorRTRunner,
        max_draft_tokens: int,
        pace: Pace | None,
        *,
        use_logits: bool,
        target_vocab_size: int,
    ) -> None:
        self._runner = runner
        self._pace = pace  # None drafts `max_draft_tokens` always
        self.max_draft_tokens = max_draft_tokens
        self._use_logits = use_logits
        self._vocab_size = min(target_vocab_size, runner.folder.vocab_size)

    def draft(self, requests: Sequence[ActiveRequest], seed: int) -> list[DraftedTokens]:
        """Run the draft model for all requests at once that have room for a draft."""
        texts = [get_text(request) for request in requests]
        remaining = [request.remaining for request in requests]
        # A token beyond the draft model's vocabulary can only be padding, which it cannot follow.
        planned = self.max_draft_tokens
        if self._pace is not None:
            planned = self._pace.max_levels if self._pace.plan(remaining) else 0
        counts = [
            min(planned, room - 1) if max(text) < self._runner.folder.vocab_size else 0
            for room, text in zip(remaining, texts, strict=True)
        ]
        drafts = [DraftedTokens([])] * len(requests)
        rows = [row for row, count in enumerate(counts) if count > 0]
        if not rows:
            return drafts
        outputs = self._runner.generate(
            [texts[row] for row in rows],
            max_new_tokens=max(counts),
            sampling=requests[0].request.sampling,
            seed=seed,
            keep_logits=self._use_logits,
        )
        for row, output in zip(rows, outputs, strict=True):
            drafts[row] = self._cut(output, counts[row])
        return drafts

    def observe(
        self,
        drafts: Sequence[DraftedTokens],
        num_accepted: Sequence[int],
        seconds: tuple[float, float],
    ) -> None:
        """Let the draft length follow what steps cost and bring."""
        if self._pace is None:
            return
        length, num_rows = max(len(draft.tokens) for draft in drafts), len(drafts)
        self._pace.record_drafts(
            seconds[0] if length else None, length + 1, [n + 1 for n in num_accepted], length
        )
        self._pace.record_step(num_rows, num_rows * (length + 1), 0, seconds[1])

    def _cut(self, output: RowOutput, count: int) -> DraftedTokens:
        """Take the first `count` tokens, and none that the target's vocabulary does not have."""
        tokens = output.tokens[:count]
        foreign = [at for at, token in enumerate(tokens) if token >= self._vocab_size]
        tokens = tokens[: foreign[0]] if foreign else tokens
        logits = None if output.logits is None else output.logits[: len(tokens)]
        return DraftedTokens(tokens, logits)


def get_text(request: ActiveRequest) -> list[int]:
    """A request's prompt and what was emitted."""
    return [*request.request.input_ids, *request.output_ids]


def derive_seed(seed: int, call: int, stream: int) -> int:
    """Return the seed of one call: equal seeds would draw equal numbers step after step."""
    return int(np.random.SeedSequence([seed, call, stream]).generate_state(1, np.uint64)[0])


class ExternalLoop:
    """Requests of one sampling setting, decoded step by step, a finished one's row refilled."""

    def __init__(
        self,
        target: TensorRTRunner,
        drafter: Drafter,
        requests: Sequence[Request],
        options: Options,
        timing: Timing,
    ) -> None:
        self._target, self._drafter, self._options = target, drafter, options
        self._timing = timing
        self._requests = requests
        self._sampling: SamplingParams = requests[0].sampling
        self._waiting = deque(enumerate(requests))
        self._active: dict[int, ActiveRequest] = {}  # by place in `requests`
        self._results: dict[int, Result] = {}  # by place in `requests`
        self._num_calls = 0

    def run(self) -> list[Result]:
        """Return the results in the order of the requests; Interrupted on Ctrl-C."""
        try:
            while self._waiting or self._active:
                self._admit()
                self._step()
        except KeyboardInterrupt as error:
            raise Interrupted(self._collect()) from error
        return self._collect()

    def _admit(self) -> None:
        """Give free rows to waiting requests and run their prompts, which yield a token each."""
        free = (self._options.max_batch_size or len(self._requests)) - len(self._active)
        count = min(free, len(self._waiting))
        if count < 1:
            return
        began = time.perf_counter()
        admitted = {}
        taken = {active.row for active in self._active.values()}
        rows = (row for row in range(len(self._requests)) if row not in taken)
        for _ in range(count):
            place, request = self._waiting.popleft()
            options = self._options
            text = request.make_text(options.tokenizer, is_followed=options.follow_text)
            admitted[place] = ActiveRequest(
                request, next(rows), max_depth=self._drafter.max_draft_tokens, text=text
            )
        started = list(admitted.values())
        self._active |= admitted
        self._drafter.start(started)
        for active, output in zip(started, self._verify(started, None), strict=True):
            self._emit(active, output, [])
        self._finish(started)
        self._timing.prefill += time.perf_counter() - began

    def _step(self) -> None:
        """Draft for every active request, let the target verify, emit."""
        requests = list(self._active.values())
        if not requests:
            return
        clock = time.perf_counter
        began = clock()
        drafts = self._drafter.draft(requests, self._next_seed(DRAFT))
        drafted = clock()
        outputs: dict[int, RowOutput] = {}
        # The runtime refuses empty drafts, and a call has drafts for all of its rows or for none.
        for has_draft in (True, False):
            rows = [at for at, draft in enumerate(drafts) if bool(draft.tokens) == has_draft]
            if rows:
                chosen = [drafts[at] for at in rows] if has_draft else None
                found = self._verify([requests[at] for at in rows], chosen)
                outputs |= zip(rows, found, strict=True)
        verified = clock()
        num_accepted = []
        for at, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            output = outputs[at]
            num_accepted.append(len(output.tokens) - 1)
            taken = self._emit(request, output, draft.tokens)
            request.stats.count_step(
                num_draft_tokens=len(draft.tokens),
                depth=len(draft.tokens),
                num_accepted=min(taken, num_accepted[-1]),
            )
        self._drafter.observe(drafts, num_accepted, (drafted - began, verified - drafted))
        self._finish(requests)
        self._timing.draft += drafted - began
        self._timing.verify += verified - drafted
        self._timing.other += clock() - verified

    def _verify(
        self, requests: Sequence[ActiveRequest], drafts: Sequence[DraftedTokens] | None
    ) -> list[RowOutput]:
        """Return what the target emits for each request; a draft's agreeing part comes first."""
        longest = max((len(draft.tokens) for draft in drafts), default=0) if drafts else 0
        logits = [draft.logits for draft in drafts if draft.logits is not None] if drafts else []
        outputs = self._target.generate(
            [get_text(request) for request in requests],
            drafts=[draft.tokens for draft in drafts] if drafts else None,
            draft_logits=logits or None,
            keep_logits=self._options.keep_logits,
            max_new_tokens=longest + 1,
            sampling=self._sampling,
            seed=self._next_seed(TARGET),
            # Without an end id the runtime counts every token; where a text ends is decided here.
        )
        for at, (request, output) in enumerate(zip(requests, outputs, strict=True)):
            draft = drafts[at].tokens if drafts else []
            check_step(request.request.index, draft, output.tokens)
        return outputs

    def _emit(self, request: ActiveRequest, output: RowOutput, draft: Sequence[int]) -> int:
        num_accepted = len(output.tokens) - 1
        origins = [*[DRAFTED] * num_accepted, BONUS if draft else PLAIN]
        taken = request.emit(output.tokens, origins)
        if self._options.keep_rejected and taken > num_accepted:
            request.note_rejected(list(draft[num_accepted:]))
        if output.logits is not None:
            request.logits.append(self._target.widen(output.logits[:taken]))
        return taken

    def _finish(self, moved: Sequence[ActiveRequest]) -> None:
        """Report progress, and let finished requests leave."""
        if self._options.on_progress is not None:
            self._options.on_progress(moved)
        for place, request in list(self._active.items()):
            if request.finish_reason is not None:
                self._results[place] = self._active.pop(place).make_result()

    def _next_seed(self, stream: int) -> int:
        self._num_calls += 1
        return derive_seed(self._sampling.seed, self._num_calls, stream)

    def _collect(self) -> list[Result]:
        """Results so far."""
        active = {place: one.make_result() for place, one in self._active.items()}
        return fill_results(self._requests, active | self._results)


def check_step(index: int, draft: Sequence[int], emitted: Sequence[int]) -> None:
    """Raise SpecDecError unless a step emitted the beginning of its draft and one token more."""
    if not 1 <= len(emitted) <= len(draft) + 1:
        raise SpecDecError(
            f"TensorRT-LLM returned {len(emitted)} tokens for prompt {index}, one to"
            f" {len(draft) + 1} were expected",
            "the target must be built with --speculative-decoding-mode draft_tokens_external",
        )
    if list(emitted[:-1]) != list(draft[: len(emitted) - 1]):
        raise SpecDecError(
            f"TensorRT-LLM returned {list(emitted)} for prompt {index}, which does not begin as"
            f" the draft {list(draft)}",
            "its answers cannot be told apart; run one prompt at a time and report it",
        )
