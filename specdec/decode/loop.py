"""The loop of speculative decoding: schedule, propose, one target forward, accept, commit.

Drafters only propose; `accept.accept_batch` alone decides which tokens are emitted.
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
from specdec.decode.prefill import PrefillChunk
from specdec.decode.requests import NO_ROW, ActiveRequest, Request
from specdec.decode.schedule import ForwardPlan, Scheduler
from specdec.decode.sessions import Sessions
from specdec.decode.timing import Stopwatch, Timing
from specdec.engine.decoder import Decoder
from specdec.engine.step import States, Step, pack_segments, place_tree
from specdec.engine.transfers import Array
from specdec.engine.tree import BoolArray, Tree, make_root


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `generate`, with the results so far of all requests."""

    def __init__(self, results: list[ActiveRequest]) -> None:
        super().__init__()
        self.results = results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a run that hold for all its requests.

    max_batch_size: requests decoded at once; None is all. max_num_tokens: most tokens of a pass
    that reads prompts.
    prompt_chunk: most prompt tokens that a step of running requests reads, and a drafter four times
    as many; None reads whole prompts first. "auto" lets `choose_chunk` choose the tokens of the
    whole step by the cost table: prompts go before drafts, which are made if all unread tokens fit
    in as well. costs: the cost table; None where nothing was measured.
    tokenizer: needed for stop words and to follow the text. follow_text: whether requests keep
    their texts up to date. reuse_blocks: take shared prefixes of prompts from the cache.
    sessions: where texts' keys and values are kept on disk, None where they are not.
    keep_logits: return the logits that tokens were chosen by. keep_rejected: return drafted tokens
    that were not accepted. counts: counter of accepted drafts, None for none. on_progress: called
    after every step with the requests that it moved on.
    """

    max_num_tokens: int = 8192
    prompt_chunk: int | Literal["auto"] | None = None
    costs: CostTable | None = None
    max_batch_size: int | None = None
    tokenizer: Any = None
    follow_text: bool = False
    reuse_blocks: bool = False
    sessions: Sessions | None = None
    keep_logits: bool = False
    keep_rejected: bool = False
    counts: AcceptanceCounts | None = None
    on_progress: Callable[[Sequence[ActiveRequest]], None] | None = None


def generate(
    decoder: Decoder, drafter: Drafter, requests: Sequence[Request], options: Options,
    timing: Timing | None = None,
) -> list[ActiveRequest]:  # fmt: skip
    """Decode requests and return their results in order; a row that gets free goes to the next.

    Raises Interrupted on Ctrl-C.
    """
    num_rows = min(options.max_batch_size or len(requests), len(requests))
    max_seq_len = max(len(r.input_ids) + r.max_output_len for r in requests)
    batch = Batch(
        decoder, drafter, options, timing or Timing(), num_rows=num_rows, max_seq_len=max_seq_len
    )
    active = [batch.submit(request) for request in requests]
    try:
        while batch.is_busy:
            batch.step()
    except KeyboardInterrupt as error:
        raise Interrupted(active) from error
    return active


@dataclasses.dataclass(frozen=True)
class ForwardOutput:
    """States [B, T, D] and logits [B, T, V] of the trees that a forward pass has verified.

    prefill: output of the pass's prefill chunk; None where it has none.
    """

    states: States
    logits: Tensor
    prefill: PrefillOutput | None = None


@dataclasses.dataclass(frozen=True)
class PrefillOutput:
    """States of a prefill chunk's segments, and of the last tokens of prompts that end there.

    end_hidden, end_logits: [E, D] and [E, V].
    """

    chunk: PrefillChunk
    states: States
    end_hidden: Tensor
    end_logits: Tensor


class Batch:
    """Cache rows, the requests that occupy them, and those that wait.

    Requests join with `submit`, between steps, and leave when they end or with `cancel`. One thread
    at a time may call it; `cancel` may be called by any thread, in the middle of a step, too. A
    drafter serves one batch at a time: another batch of the same drafter makes it forget this
    one's requests.
    """

    @torch.inference_mode()
    def __init__(
        self, decoder: Decoder, drafter: Drafter, options: Options, timing: Timing, *,
        num_rows: int, max_seq_len: int,
    ) -> None:  # fmt: skip
        """Allocate the caches of the target and the drafter.

        num_rows: requests decoded at once. max_seq_len: tokens of a prompt and its output.
        """
        self.decoder, self.drafter, self.options = decoder, drafter, options
        self.timing, self.max_seq_len = timing, max_seq_len
        num_positions = max_seq_len + drafter.max_draft_tokens + 1
        self.cache = decoder.make_cache(num_rows, num_positions)
        drafter.chains_only = self.cache.states is not None
        drafter.take_cache(self.cache)
        drafter.allocate(num_rows, num_positions)
        self.scheduler = Scheduler(
            decoder, self.cache, drafter, timing, max_num_tokens=options.max_num_tokens,
            prompt_chunk=options.prompt_chunk, reuses_prefixes=options.reuse_blocks,
            costs=options.costs,
        )  # fmt: skip
        if options.sessions is not None:
            options.sessions.attach(decoder, self.cache, drafter)
            self.scheduler.sessions = options.sessions
        may_go_ahead = not (options.keep_logits or timing.is_exact)
        self._ahead = PlainAhead(decoder, self.cache, drafter, is_allowed=may_go_ahead)
        self._clocks = {p: Stopwatch(timing, p, decoder.device) for p in timing.list_seconds()}

    @property
    def is_busy(self) -> bool:
        """Return whether a step has anything to do."""
        return self.scheduler.is_busy

    def submit(self, request: Request) -> ActiveRequest:
        """Queue a request for a cache row; return the object that will hold its output."""
        assert len(request.input_ids) + request.max_output_len <= self.max_seq_len
        text = request.make_text(self.options.tokenizer, is_followed=self.options.follow_text)
        depth = self.drafter.max_draft_depth
        active = ActiveRequest(request, NO_ROW, max_depth=depth, text_stream=text)
        self.scheduler.queue.append(active)
        return active

    def cancel(self, request: ActiveRequest) -> None:
        """Note that a request is to end, which it does when the next step begins.

        A step's requests must not change while it runs, so this is a note and nothing else.
        """
        request.is_cancelled = True

    @torch.inference_mode()
    def step(self) -> None:
        """Read prompts, and move each running request on by a token or more.

        A request whose prompt has ended has its first token.
        """
        for plan in self.scheduler.plan():
            num_rows, num_nodes = self._run(plan)
            self.scheduler.retire()
            self.scheduler.record(plan, num_rows, num_nodes)
        self.scheduler.keep()

    def _run(self, plan: ForwardPlan) -> tuple[int, int]:
        """Propose, forward, accept, commit; return the number of verified rows, and their nodes."""
        requests = self.scheduler.active if plan.verifies else []
        if not plan.reads_prompts and self._ahead.serves(requests):
            return self._run_ahead(requests)
        with self._clocks["draft"]:
            candidates = self._propose(requests, plan) if requests else []
        trees = [c.tree for c in candidates]
        num_rows, num_nodes = len(trees), max((tree.num_nodes for tree in trees), default=0)
        with self._clocks["verify" if requests else "prefill"]:
            chunk = self.scheduler.plan_chunk(plan, num_rows, num_nodes)
            step = self._pack(requests, trees, chunk)
            output = self._forward(step, chunk, num_rows, num_nodes)
        if requests:
            tree_mask = step.tree_mask[:num_rows, :num_nodes, :num_nodes]
            self._verify(requests, candidates, tree_mask, output)
        if output.prefill is not None:
            with self._clocks["other" if requests else "prefill"]:
                self._finish_prefill(output.prefill)
        return num_rows, num_nodes

    def _pack(
        self, requests: Sequence[ActiveRequest], trees: Sequence[Tree], chunk: PrefillChunk | None
    ) -> Step:
        """Pack the requests' draft trees, then the prefill chunk, into one step."""
        pairs = zip(requests, trees, strict=True)
        segments = [place_tree(tree, request.row, self.cache) for request, tree in pairs]
        if chunk is None:
            size = max(tree.num_nodes for tree in trees)
        else:
            size = chunk.size
            segments += chunk.segments
        return pack_segments(segments, self.cache, size)

    def _propose(self, requests: Sequence[ActiveRequest], plan: ForwardPlan) -> list[Candidates]:
        """Return each request's draft; the drafter never sees requests without drafts."""
        drafter = self.drafter
        drafter.plan_step(plan.num_prompt_tokens, self.scheduler.max_prefill)
        drafting = [r for r in requests if plan.allows_drafts and r.request.allows_drafts]
        drafts = drafter.propose(drafting) if drafting else []
        if not drafts:
            return list_roots(requests)
        by_request = dict(zip(drafting, drafts, strict=True))
        candidates = [self._trim(request, by_request.get(request)) for request in requests]
        pairs = zip(requests, candidates, strict=True)
        drafter.note_verified([draft for request, draft in pairs if request in by_request])
        return candidates

    def _trim(self, request: ActiveRequest, draft: Candidates | None) -> Candidates:
        """Return what of a request's draft may be verified, or a root alone where it has none."""
        drafter, draft = self.drafter, draft or Candidates(make_root(request.output_ids[-1]))
        if drafter.chains_only:
            draft = draft.make_chain()
        draft = draft.limit(request.request.max_draft_tokens)
        if draft.tree.num_draft_tokens and request.grammar and not drafter.is_indivisible:
            draft = draft.prune(request.grammar)
        return draft

    def _forward(
        self, step: Step, chunk: PrefillChunk | None, num_rows: int, num_nodes: int
    ) -> ForwardOutput:
        """Run the target, and compute the logits that this pass needs."""
        states = States(self.decoder.forward(step, self.cache), self.decoder.observed_outputs)
        if chunk is None:
            return ForwardOutput(states, self.decoder.compute_logits(states.hidden))
        tree_states, prompt_states = states.split(num_rows)
        node_hidden = tree_states.hidden[:, :num_nodes].flatten(0, 1)  # [B * T, D]
        end_hidden = chunk.pick_last(prompt_states.hidden)
        hidden = torch.cat((node_hidden, end_hidden))
        logits = self.decoder.compute_logits(hidden) if len(hidden) else hidden
        tree_logits = logits[: len(node_hidden)].view(num_rows, num_nodes, logits.shape[-1])
        end_logits = logits[len(node_hidden) :]
        prefill = PrefillOutput(chunk, prompt_states, end_hidden, end_logits)
        return ForwardOutput(tree_states, tree_logits, prefill)

    def _verify(
        self, requests: Sequence[ActiveRequest], candidates: Sequence[Candidates],
        tree_mask: BoolArray, output: ForwardOutput,
    ) -> None:  # fmt: skip
        """Accept drafts by the target's logits, commit them, and let the drafter see their states.

        tree_mask: [B, T, T], of the trees' nodes alone.
        """
        choices, states, logits = None, output.states, output.logits
        if self.drafter.drafts_ahead:
            with self._clocks["draft"]:
                trees = [c.tree for c in candidates]
                choices = draft_ahead(
                    self.drafter, requests, trees, tree_mask, states.hidden, logits
                )
        with self._clocks["accept"]:
            accepted = self._accept(requests, candidates, logits, choices)
        with self._clocks["other"]:
            self.scheduler.commit(requests, accepted)
            self._observe(requests, states, accepted)
        self.timing.num_steps += 1

    def _accept(
        self, requests: Sequence[ActiveRequest], candidates: Sequence[Candidates],
        logits: Tensor | None, choices: Array | None = None,
    ) -> list[Accepted]:  # fmt: skip
        """Choose tokens by the logits after each node, or take choices, and emit them."""
        samplers, positions = [r.sampler for r in requests], [len(r.output_ids) for r in requests]
        if choices is None and logits is not None and all(r.needs_only_best for r in requests):
            choices = self.decoder.find_best(logits)
        accepted = accept_batch(candidates, logits, samplers, positions, choices)
        keeps = self.options.keep_logits, self.options.keep_rejected
        for row, (request, (path, bonus)) in enumerate(zip(requests, accepted, strict=True)):
            row_logits = None if logits is None else logits[row]
            request.take(candidates[row].tree, path, bonus, row_logits, *keeps)
        if self.options.counts is not None:
            self.options.counts.record(candidates, [path for path, _ in accepted])
        if self.options.on_progress is not None:
            self.options.on_progress(requests)
        return accepted

    def _observe(
        self, requests: Sequence[ActiveRequest], states: States, accepted: Sequence[Accepted]
    ) -> None:
        """Let the drafter see the states of the requests that it drafts for."""
        rows = [row for row, r in enumerate(requests) if r.request.allows_drafts]
        if rows:
            paths = [accepted[row][0] for row in rows]
            self.drafter.observe([requests[row] for row in rows], states.take(rows), paths)

    def _finish_prefill(self, output: PrefillOutput) -> None:
        """Commit a prefill chunk; emit the first tokens of requests whose prompts end in it."""
        drafter, chunk, states = self.drafter, output.chunk, output.states
        prefilling = self.scheduler.prefilling
        scored_requests = {r.row: r for r in prefilling if r.request.wants_prompt_logprobs}
        new_requests = self.scheduler.finish_chunk(chunk)
        if scored_requests or drafter.follows_prompts:
            states = chunk.gather(states)
            drafter.follow(chunk.rows, chunk.starts, chunk.counts, states)
        for index, row in enumerate(chunk.rows):
            if row in scored_requests:
                row_hidden = states.hidden[index, : chunk.counts[index]]
                scored_requests[row].note_prompt(row_hidden, self.decoder.compute_logits)
        if new_requests:
            drafter.start([r for r in new_requests if r.request.allows_drafts])
            roots = [Candidates(make_root(r.request.input_ids[-1])) for r in new_requests]
            accepted = self._accept(new_requests, roots, output.end_logits[:, None])
            self._observe(new_requests, States(output.end_hidden[:, None]), accepted)

    def _run_ahead(self, active: Sequence[ActiveRequest]) -> tuple[int, int]:
        """Run a step without drafts, the device a step ahead of the host; return as `_run` does."""
        with self._clocks["verify"]:
            requests, choices, states = self._ahead.step(active)
        with self._clocks["accept"]:
            accepted = self._accept(requests, list_roots(requests), None, choices)
        with self._clocks["other"]:
            self._observe(requests, states, accepted)
        self.timing.num_steps += 1
        return len(requests), 1
