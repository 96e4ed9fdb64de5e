"""Loop with external drafts for a TensorRT-LLM engine, whose runtime accepts them.

An engine with external drafts ends every request after one step, so each step is a call that is
given the whole text, whose keys and values the runtime takes from its cache by block reuse. Such a
call ends after the drafted tokens that the target agrees with and one token of its own.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.decode.accept import Candidates
from specdec.decode.cost_table import CostTable, Curve, Grid, smooth
from specdec.decode.drafters.base import Drafter, list_roots
from specdec.decode.drafters.pace import Pace
from specdec.decode.loop import Interrupted, Options
from specdec.decode.requests import BONUS, PLAIN, ActiveRequest, Request
from specdec.decode.requests import DRAFT as DRAFTED
from specdec.decode.sampling import SamplingParams
from specdec.decode.timing import Timing
from specdec.engine.tree import pack_beams
from specdec.errors import SpecDecError
from specdec.trtllm.runner import RowOutput, TensorRTRunner

from .tensorrt_call import fill_results

TARGET, DRAFT = range(2)  # whose random numbers
TURNS = 3  # in which calls are timed, of which the fastest counts
TEXT_TOKENS = 8  # of the texts that are timed


class EngineDrafter(Drafter):
    """Drafter by a second engine, up to the token before each request's limit.

    pace: the policy that chooses the length; None drafts `max_draft_tokens` always. The
    `draft_probs` of a proposal are logits, of which the runtime makes probabilities itself.
    """

    def __init__(
        self,
        runner: TensorRTRunner,
        max_draft_tokens: int,
        pace: Pace | None,
        *,
        use_logits: bool,
        target_vocab_size: int,
    ) -> None:
        self._runner, self.pace = runner, pace
        self.max_draft_tokens = max_draft_tokens
        self._use_logits = use_logits
        self._vocab_size = min(target_vocab_size, runner.folder.vocab_size)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Run the draft model for all requests at once that have room for a draft."""
        texts = [get_text(request) for request in requests]
        counts = self._plan_counts(requests, texts)
        drafts = list_roots(requests)
        rows = [row for row, count in enumerate(counts) if count > 0]
        if not rows:
            return drafts
        outputs = self._runner.generate(
            [texts[row] for row in rows],
            max_new_tokens=max(counts),
            sampling=requests[0].request.sampling,
            seed=self.seed,
            keep_logits=self._use_logits,
        )
        for row, output in zip(rows, outputs, strict=True):
            if tokens := self._cut_tokens(output.tokens[: counts[row]]):
                tree = pack_beams(requests[row].output_ids[-1], np.array([tokens]))
                logits = None if output.logits is None else [*output.logits[: len(tokens)]]
                drafts[row] = Candidates(tree, logits)
        return drafts

    def _plan_counts(
        self, requests: Sequence[ActiveRequest], texts: Sequence[Sequence[int]]
    ) -> list[int]:
        """Return how many tokens to draft for each request: 0 where it has no room or cannot."""
        remaining = [request.remaining for request in requests]
        num_planned = self.max_draft_tokens
        if self.pace is not None:
            num_planned = self.pace.max_levels if self.pace.plan(remaining) else 0
        # A token beyond the draft model's vocabulary can only be padding, which it cannot follow.
        return [
            min(num_planned, room - 1) if max(text) < self._runner.folder.vocab_size else 0
            for room, text in zip(remaining, texts, strict=True)
        ]

    def _cut_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens before the first that the target's vocabulary does not have."""
        return [*itertools.takewhile(lambda token: token < self._vocab_size, tokens)]


def measure_costs(
    target: TensorRTRunner, draft: TensorRTRunner, max_draft_len: int, num_rows: int
) -> CostTable:
    """Time calls of both engines, for one text and for as many as they take at once."""
    sizes = sorted({*(2**n for n in range(max_draft_len.bit_length())), max_draft_len})
    steps, drafts = [], []
    for rows in dict.fromkeys((1, num_rows)):
        call: dict[str, Any] = {"sampling": SamplingParams(), "seed": 0, "keep_logits": False}
        texts = [[1] * TEXT_TOKENS for _ in range(rows)]

        def verify(size: int, texts: Any = texts, call: Any = call) -> None:
            chains = [[1] * (size - 1) for _ in texts] if size > 1 else None
            target.generate(texts, drafts=chains, max_new_tokens=size, **call)

        def propose(size: int, texts: Any = texts, call: Any = call) -> None:
            draft.generate(texts, max_new_tokens=size, **call)

        steps.append((rows, _time_calls(verify, [1, *(size + 1 for size in sizes)])))
        drafts.append((rows, _time_calls(propose, sizes)))
    return CostTable(steps=Grid((*steps,)), drafts=(Grid((*drafts,)),))


def _time_calls(call: Callable[[int], None], sizes: Sequence[int]) -> Curve:
    fastest = dict.fromkeys(sizes, math.inf)
    for _ in range(TURNS):
        for size in sizes:
            start = time.perf_counter()
            call(size)
            fastest[size] = min(fastest[size], time.perf_counter() - start)
    return smooth(fastest)


def get_text(request: ActiveRequest) -> list[int]:
    """Return a request's prompt and its emitted tokens."""
    return [*request.request.input_ids, *request.output_ids]


def derive_seed(seed: int, call: int, stream: int) -> int:
    """Return the seed of one call: equal seeds would draw equal numbers step after step."""
    return int(np.random.SeedSequence([seed, call, stream]).generate_state(1, np.uint64)[0])


class ExternalLoop:
    """Loop over requests of one sampling setting; a finished one's row is filled again."""

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
        self._waiting_requests = deque(enumerate(requests))
        self._active: dict[int, ActiveRequest] = {}  # by index in `requests`
        self._started_requests: dict[
            int, ActiveRequest
        ] = {}  # by index, those that are over included
        self._num_calls = 0

    def run(self) -> list[ActiveRequest]:
        """Return the results in the order of the requests; Interrupted on Ctrl-C."""
        try:
            while self._waiting_requests or self._active:
                self._admit()
                self._step()
        except KeyboardInterrupt as error:
            raise Interrupted(fill_results(self._requests, self._started_requests)) from error
        return fill_results(self._requests, self._started_requests)

    def _admit(self) -> None:
        """Give free rows to waiting requests and run their prompts, which yield a token each."""
        num_free_rows = (self._options.max_batch_size or len(self._requests)) - len(self._active)
        count = min(num_free_rows, len(self._waiting_requests))
        if count < 1:
            return
        start = time.perf_counter()
        admitted = {}
        used_rows = {active.row for active in self._active.values()}
        rows = (row for row in range(len(self._requests)) if row not in used_rows)
        for _ in range(count):
            index, request = self._waiting_requests.popleft()
            options = self._options
            text = request.make_text(options.tokenizer, is_followed=options.follow_text)
            admitted[index] = ActiveRequest(
                request, next(rows), max_depth=self._drafter.max_draft_tokens, text_stream=text
            )
        started = list(admitted.values())
        self._active |= admitted
        self._started_requests |= admitted
        self._drafter.start(started)
        for active, output in zip(started, self._verify(started, None), strict=True):
            self._emit(active, output, [])
        self._finish(started)
        self._timing.prefill += time.perf_counter() - start

    def _step(self) -> None:
        """Draft for every active request, let the target verify, emit."""
        requests = list(self._active.values())
        if not requests:
            return
        clock = time.perf_counter
        start = clock()
        self._drafter.seed = self._next_seed(DRAFT)
        candidates = self._drafter.propose(requests) or list_roots(requests)
        drafts = [proposal.tree.tokens[1:].tolist() for proposal in candidates]
        drafted = clock()
        outputs = self._verify_drafts(requests, candidates, drafts)
        verified = clock()
        num_accepted = []
        for row, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            output = outputs[row]
            num_accepted.append(len(output.tokens) - 1)
            num_emitted = self._emit(request, output, draft)
            request.stats.count_step(
                num_draft_tokens=len(draft),
                depth=len(draft),
                num_accepted=min(num_emitted, num_accepted[-1]),
            )
        length = max(map(len, drafts))
        if (pace := self._drafter.pace) is not None and length:
            pace.record(length + 1, [n + 1 for n in num_accepted], [(0, len(drafts), length)])
        self._finish(requests)
        self._timing.draft += drafted - start
        self._timing.verify += verified - drafted
        self._timing.other += clock() - verified

    def _verify_drafts(
        self, requests: Sequence[ActiveRequest], candidates: Sequence[Candidates],
        drafts: Sequence[list[int]],
    ) -> dict[int, RowOutput]:  # fmt: skip
        """Verify drafts, by row, in a call for the rows with one and a call for those without.

        The runtime refuses empty drafts, and a call has drafts for all of its rows or for none.
        """
        outputs: dict[int, RowOutput] = {}
        for has_draft in (True, False):
            rows = [row for row, draft in enumerate(drafts) if bool(draft) == has_draft]
            if rows:
                row_drafts = [drafts[row] for row in rows] if has_draft else None
                draft_probs = [candidates[row].draft_probs for row in rows]
                logits = [torch.stack([*probs]) for probs in draft_probs if probs is not None]
                emitted = self._verify([requests[row] for row in rows], row_drafts, logits)
                outputs |= zip(rows, emitted, strict=True)
        return outputs

    def _verify(
        self, requests: Sequence[ActiveRequest], drafts: Sequence[list[int]] | None,
        logits: Sequence[Tensor] = (),
    ) -> list[RowOutput]:  # fmt: skip
        """Return the tokens that the target emits for each request, accepted drafts first.

        logits: [tokens, V], that each draft was drawn from, where it was.
        """
        longest_draft = max(map(len, drafts), default=0) if drafts else 0
        outputs = self._target.generate(
            [get_text(request) for request in requests],
            drafts=drafts,
            draft_logits=logits or None,
            keep_logits=self._options.keep_logits,
            max_new_tokens=longest_draft + 1,
            sampling=self._sampling,
            seed=self._next_seed(TARGET),
            # Without an end id the runtime counts every token; where a text ends is decided here.
        )
        for row, (request, output) in enumerate(zip(requests, outputs, strict=True)):
            check_step(request.request.index, drafts[row] if drafts else [], output.tokens)
        return outputs

    def _emit(self, request: ActiveRequest, output: RowOutput, draft: Sequence[int]) -> int:
        num_accepted = len(output.tokens) - 1
        origins = [*[DRAFTED] * num_accepted, BONUS if draft else PLAIN]
        num_emitted = request.emit(output.tokens, origins)
        if self._options.keep_rejected and num_emitted > num_accepted:
            request.note_rejected(list(draft[num_accepted:]))
        if output.logits is not None:
            request.kept_logits.append(self._target.widen(output.logits[:num_emitted]))
        return num_emitted

    def _finish(self, moved: Sequence[ActiveRequest]) -> None:
        """Report progress, and let finished requests leave."""
        if self._options.on_progress is not None:
            self._options.on_progress(moved)
        running = self._active.items()
        self._active = {
            index: request for index, request in running if request.finish_reason is None
        }

    def _next_seed(self, stream: int) -> int:
        self._num_calls += 1
        return derive_seed(self._sampling.seed, self._num_calls, stream)


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
