"""The loop of speculative decoding: schedule, propose, one target forward, accept, commit.

Methods only propose; what is emitted is decided only by `accept.accept_batch`.
Legend: B rows that are verified, E prompts that end, T tree nodes, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from specdec.decode.accept import Accepted, Candidates, accept_batch
from specdec.decode.ahead import PlainAhead, draft_ahead
from specdec.decode.cost_table import CostTable
from specdec.decode.drafters.base import Drafter, list_roots
from specdec.decode.drafters.calibration import AcceptanceCounts
from specdec.decode.prefill import Reading
from specdec.decode.requests import NO_ROW, ActiveRequest, Request
from specdec.decode.schedule import Pass, Scheduler
from specdec.decode.timing import Stopwatch, Timing
from specdec.engine.decoder import Decoder
from specdec.engine.step import States, pack_segments, place_tree
from specdec.engine.transfers import Array
from specdec.engine.tree import make_root


class Interrupted(KeyboardInterrupt):
    """Raised by `generate` on Ctrl-C; `results` hold what there is."""

    def __init__(self, results: list[ActiveRequest]) -> None:
        super().__init__()
        self.results = results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How requests are run.

    max_batch_size: requests decoded at once; None is all. max_num_tokens: bound of one prompt pass.
    prompt_chunk: prompt tokens that a step of other requests reads at most, and a drafter four
    times as many; None reads whole prompts first. "auto" is what `choose_chunk` chooses for the
    whole step by costs: prompts go before drafts, which are made if all unread tokens fit in as
    well. costs: what steps cost, None where that is not known.
    tokenizer: needed for stop words and to follow the text. reuse_blocks: take shared prefixes of
    prompts from the cache. keep_logits: return the logits that tokens were chosen by.
    keep_rejected: return what was drafted and not accepted. counts: count what is accepted.
    on_progress: called after every step with the requests that it moved on.
    """

    max_num_tokens: int = 8192
    prompt_chunk: int | Literal["auto"] | None = None
    costs: CostTable | None = None
    max_batch_size: int | None = None
    tokenizer: Any = None
    follow_text: bool = False
    reuse_blocks: bool = False
    keep_logits: bool = False
    keep_rejected: bool = False
    counts: AcceptanceCounts | None = None
    on_progress: Callable[[Sequence[ActiveRequest]], None] | None = None


def generate(
    decoder: Decoder, proposer: Drafter, requests: Sequence[Request], options: Options,
    timing: Timing | None = None,
) -> list[ActiveRequest]:  # fmt: skip
    """Decode requests, a finished one's row going to the next; results are in their order.

    Raises Interrupted on Ctrl-C.
    """
    num_rows = min(options.max_batch_size or len(requests), len(requests))
    max_seq_len = max(len(r.input_ids) + r.max_output_len for r in requests)
    batch = Batch(
        decoder, proposer, options, timing or Timing(), num_rows=num_rows, max_seq_len=max_seq_len
    )
    active = [batch.submit(request) for request in requests]
    try:
        while batch.is_busy:
            batch.step()
    except KeyboardInterrupt as error:
        raise Interrupted(active) from error
    return active


class Batch:
    """Cache rows, the requests that occupy them, and those that wait.

    Requests join with `submit`, between steps, and leave when they end or with `cancel`. One thread
    at a time may call it; `cancel` may be called by any thread, in the middle of a step, too. The
    proposer is the batch's own while it is used: another batch of the same proposer makes it forget
    this one's requests.
    """

    @torch.inference_mode()
    def __init__(
        self, decoder: Decoder, proposer: Drafter, options: Options, timing: Timing, *,
        num_rows: int, max_seq_len: int,
    ) -> None:  # fmt: skip
        """num_rows: requests decoded at once. max_seq_len: tokens of a prompt and its output."""
        self.decoder, self.proposer, self.options = decoder, proposer, options
        self.timing, self.max_seq_len = timing, max_seq_len
        num_positions = max_seq_len + proposer.max_draft_tokens + 1
        self.cache = decoder.make_cache(num_rows, num_positions)
        proposer.chains_only = self.cache.states is not None
        proposer.allocate(num_rows, num_positions)
        self.scheduler = Scheduler(
            decoder, self.cache, proposer, timing, max_num_tokens=options.max_num_tokens,
            prompt_chunk=options.prompt_chunk, reuses_prefixes=options.reuse_blocks,
            costs=options.costs,
        )  # fmt: skip
        may_go_ahead = not (options.keep_logits or timing.is_exact)
        self._ahead = PlainAhead(decoder, self.cache, proposer, is_allowed=may_go_ahead)
        self._clocks = {p: Stopwatch(timing, p, decoder.device) for p in timing.list_seconds()}

    @property
    def is_busy(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.is_busy

    def submit(self, request: Request) -> ActiveRequest:
        """Let a request wait for a row; what it becomes can be read from what is returned."""
        assert len(request.input_ids) + request.max_output_len <= self.max_seq_len
        text = request.make_text(self.options.tokenizer, is_followed=self.options.follow_text)
        depth = self.proposer.max_draft_depth
        active = ActiveRequest(request, NO_ROW, max_depth=depth, text_stream=text)
        self.scheduler.waiting.append(active)
        return active

    def cancel(self, request: ActiveRequest) -> None:
        """Note that a request is to end, which it does when the next step begins.

        What a step works with must not change while it does, so this is a note and nothing else.
        """
        request.is_cancelled = True

    @torch.inference_mode()
    def step(self) -> None:
        """Read prompts, and move each running request on by a token or more.

        A request whose prompt has ended has its first token.
        """
        for task in self.scheduler.plan():
            num_rows, num_nodes = self._run(task)
            self.scheduler.retire()
            self.scheduler.record(task, num_rows, num_nodes)

    def _run(self, task: Pass) -> tuple[int, int]:
        """Propose, forward, accept, commit; return the rows that were verified, and their size."""
        requests, cache = self.scheduler.active if task.verifies else [], self.cache
        if not task.reads and self._ahead.serves(requests):
            return self._run_ahead(requests)
        with self._clocks["draft"]:
            candidates = self._propose(requests, task) if requests else []
        trees = [c.tree for c in candidates]
        num_rows, num_nodes = len(trees), max((tree.num_nodes for tree in trees), default=0)
        with self._clocks["verify" if requests else "prefill"]:
            segments = [place_tree(t, r.row, cache) for t, r in zip(trees, requests, strict=True)]
            reading = self.scheduler.plan_reading(task, num_rows, num_nodes) if task.reads else None
            if reading is not None:
                segments += reading.segments
            step = pack_segments(segments, cache, num_nodes if reading is None else reading.size)
            own = States(self.decoder.forward(step, cache), self.decoder.observed)
            if reading is None:
                own_logits = self.decoder.compute_logits(own.last)  # [B, T, V]
            else:
                own, read = own.split(num_rows)
                nodes = own.last[:, :num_nodes].flatten(0, 1)  # [B * T, D]
                ends = reading.pick_last(read.last)  # [E, D]
                needed = torch.cat((nodes, ends))
                logits = self.decoder.compute_logits(needed) if len(needed) else needed
                own_logits = logits[: len(nodes)].view(num_rows, num_nodes, logits.shape[-1])
        if requests:
            choices = None
            if self.proposer.drafts_ahead:
                with self._clocks["draft"]:
                    sees = step.tree_mask[:num_rows, :num_nodes, :num_nodes]
                    choices = draft_ahead(
                        self.proposer, requests, trees, sees, own.last, own_logits
                    )
            with self._clocks["accept"]:
                accepted = self._accept(requests, candidates, own_logits, choices)
            with self._clocks["other"]:
                self.scheduler.commit(requests, accepted)
                self._observe(requests, own, accepted)
            self.timing.num_steps += 1
        if reading is not None:
            with self._clocks["other" if requests else "prefill"]:
                self._begin(reading, read, ends, logits[len(nodes) :])
        return num_rows, num_nodes

    def _propose(self, requests: Sequence[ActiveRequest], task: Pass) -> list[Candidates]:
        """What is drafted for each request; the proposer never hears of those without drafts."""
        proposer = self.proposer
        proposer.plan_step(task.num_prompt_tokens, self.scheduler.max_prefill)
        drafting = [r for r in requests if task.drafts and r.request.drafts]
        found = proposer.propose(drafting) if drafting else []
        if not found:
            return list_roots(requests)
        drafted = dict(zip(drafting, found, strict=True))
        candidates = []
        for request in requests:
            own = drafted.get(request) or Candidates(make_root(request.output_ids[-1]))
            if proposer.chains_only:
                own = own.make_chain()
            if own.tree.num_draft_tokens and request.grammar and not proposer.is_indivisible:
                own = own.prune(request.grammar)
            candidates.append(own)
        return candidates

    def _accept(
        self, requests: Sequence[ActiveRequest], candidates: Sequence[Candidates],
        logits: Tensor | None, choices: Array | None = None,
    ) -> list[Accepted]:  # fmt: skip
        """Choose tokens by the logits after each node, or take choices, and emit them."""
        samplers, positions = [r.sampler for r in requests], [len(r.output_ids) for r in requests]
        accepted = accept_batch(candidates, logits, samplers, positions, choices)
        keeps = self.options.keep_logits, self.options.keep_rejected
        for at, (request, found) in enumerate(zip(requests, accepted, strict=True)):
            own = None if logits is None else logits[at]
            request.take(candidates[at].tree, *found, own, *keeps)
        if self.options.counts is not None:
            self.options.counts.record(candidates, [path for path, _ in accepted])
        if self.options.on_progress is not None:
            self.options.on_progress(requests)
        return accepted

    def _observe(
        self, requests: Sequence[ActiveRequest], states: States, accepted: Sequence[Accepted]
    ) -> None:
        """Let the drafter see the states of the requests that it drafts for."""
        places = [at for at, r in enumerate(requests) if r.request.drafts]
        if places:
            paths = [accepted[at][0] for at in places]
            self.proposer.observe([requests[at] for at in places], states.take(places), paths)

    def _begin(self, reading: Reading, states: States, ends: Tensor, logits: Tensor) -> None:
        """Keep what was read of prompts; requests whose prompts have ended get their first tokens.

        states: of the prompts' rows. ends, logits: [E, D] and [E, V], of the prompts' last tokens.
        """
        proposer = self.proposer
        told = {r.row: r for r in self.scheduler.reading if r.request.wants_prompt_logprobs}
        begun = self.scheduler.finish_reading(reading)
        if told or proposer.follows_prompts:
            states = reading.gather(states)
            proposer.follow(reading.rows, reading.starts, reading.counts, states)
        for at, row in enumerate(reading.rows):
            if row in told:
                own = states.last[at, : reading.counts[at]]
                told[row].note_prompt(own, self.decoder.compute_logits)
        if begun:
            proposer.start([r for r in begun if r.request.drafts])
            roots = [Candidates(make_root(r.request.input_ids[-1])) for r in begun]
            accepted = self._accept(begun, roots, logits[:, None])
            self._observe(begun, States(ends[:, None]), accepted)

    def _run_ahead(self, active: Sequence[ActiveRequest]) -> tuple[int, int]:
        """What `_run` does where nothing is drafted, the device a step ahead of the host."""
        with self._clocks["verify"]:
            requests, choices, states = self._ahead.step(active)
        with self._clocks["accept"]:
            accepted = self._accept(requests, list_roots(requests), None, choices)
        with self._clocks["other"]:
            self._observe(requests, states, accepted)
        self.timing.num_steps += 1
        return len(requests), 1
