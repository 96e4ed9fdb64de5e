"""The loop of speculative decoding: propose, one target forward over a tree, accept, commit.

Methods only propose; what is emitted is decided by `accept.accept_batch` alone.
Legend: B active rows, T tree nodes, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from specdec.decode.accept import Candidates, accept_batch, accept_on_device
from specdec.decode.chunk_size import ChunkSize
from specdec.decode.drafters.base import Drafter, list_rows
from specdec.decode.plain_ahead import Emitted, PlainAhead
from specdec.decode.prefill import PromptReader, count_shared
from specdec.decode.requests import (
    BONUS,
    DRAFT,
    NO_ROW,
    PLAIN,
    ActiveRequest,
    DraftTree,
    Request,
    Result,
)
from specdec.decode.sampling import take_rows
from specdec.decode.text import TextStream
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Step
from specdec.engine.torch_layers import find_past
from specdec.engine.transfers import Array, to_device, to_host
from specdec.engine.tree import Tree, build_tree_mask, make_root

# Tokens of a prefix that another request is about to bring into the cache, for which one waits
# where prompts are read in chunks.
WORTH_WAITING = 16
# How many times as many tokens as the target a drafter may read of prompts in a step. It has every
# prompt to read that the target has, and what was emitted meanwhile, or it would never draft.
DRAFTER_SHARE = 4
LOGPROB_TOKENS = 64  # of a prompt, whose logits are in memory at once


@dataclasses.dataclass
class Timing:
    """Seconds spent, by part, verify steps, and prompt tokens that were taken from the cache.

    is_exact: wait for the device at the end of each part, so that none pays for what came before.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    other: float = 0.0
    num_steps: int = 0
    num_reused_tokens: int = 0
    is_exact: bool = False

    @property
    def target_seconds(self) -> float:
        """What steps took without drafters."""
        return self.prefill + self.verify + self.accept

    def add(self, part: str, seconds: float) -> None:
        """Count seconds as a part's."""
        setattr(self, part, getattr(self, part) + seconds)

    def list_seconds(self) -> dict[str, float]:
        """The seconds of each part, by its name."""
        fields = dataclasses.fields(self)
        return {field.name: getattr(self, field.name) for field in fields if field.type == "float"}


class _Stopwatch:
    """Counts the seconds between its beginning and its end as a part's; none if it is left early.

    device: a CUDA device that is waited for at the end where the timing is exact, or None.
    """

    def __init__(self, timing: Timing, part: str, device: torch.device | None) -> None:
        self._timing, self._part, self._device = timing, part, device
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            if self._device is not None and self._timing.is_exact:
                torch.cuda.synchronize(self._device)
            self._timing.add(self._part, time.perf_counter() - self._began)


class Interrupted(KeyboardInterrupt):
    """Raised by `generate` on Ctrl-C; `results` hold what there is."""

    def __init__(self, results: list[Result]) -> None:
        super().__init__()
        self.results = results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How requests are run.

    max_batch_size: requests decoded at once; None is all. max_num_tokens: bound of one prompt pass.
    prompt_chunk: prompt tokens that a step of other requests reads at most, and a drafter four
    times as many; None reads whole prompts first. "auto" is what `ChunkSize` chooses, of which what
    the requests verify is taken: prompts go before drafts, which are made in such a step if all
    that waits fits in beside them.
    tokenizer: needed for stop words and to follow the text. reuse_blocks: take shared prefixes of
    prompts from the cache. keep_logits: return the logits that tokens were chosen by.
    keep_rejected: return what was drafted and not accepted.
    on_progress: called after every step with the requests that it moved on.
    """

    max_num_tokens: int = 8192
    prompt_chunk: int | Literal["auto"] | None = None
    max_batch_size: int | None = None
    tokenizer: Any = None
    follow_text: bool = False
    reuse_blocks: bool = False
    keep_logits: bool = False
    keep_rejected: bool = False
    on_progress: Callable[[Sequence[ActiveRequest]], None] | None = None


def generate(
    decoder: Decoder,
    proposer: Drafter,
    requests: Sequence[Request],
    options: Options,
    timing: Timing | None = None,
) -> list[Result]:
    """Decode requests, a finished one's row going to the next; results are in their order.

    Raises Interrupted on Ctrl-C.
    """
    batch = fit_batch(decoder, proposer, requests, options, timing or Timing())
    active = [batch.submit(request) for request in requests]
    try:
        while batch.is_busy:
            batch.step()
    except KeyboardInterrupt as error:
        raise Interrupted([request.make_result() for request in active]) from error
    return [request.make_result() for request in active]


def fit_batch(
    decoder: Decoder,
    proposer: Drafter,
    requests: Sequence[Request],
    options: Options,
    timing: Timing,
) -> Batch:
    """Return a batch with room for these requests, and no more."""
    num_rows = min(options.max_batch_size or len(requests), len(requests))
    longest = max(len(r.input_ids) + r.max_output_len for r in requests)
    return Batch(decoder, proposer, options, timing, num_rows=num_rows, max_seq_len=longest)


class Batch:
    """Cache rows, the requests that occupy them, and those that wait.

    Requests join with `submit` and leave when they end or with `cancel`, at any time between steps.
    One thread at a time may call it, `cancel` excepted. The proposer is the batch's own while it
    is used: another batch of the same proposer makes it forget this one's requests.
    """

    @torch.inference_mode()
    def __init__(
        self,
        decoder: Decoder,
        proposer: Drafter,
        options: Options,
        timing: Timing,
        *,
        num_rows: int,
        max_seq_len: int,
    ) -> None:
        """num_rows: requests decoded at once. max_seq_len: tokens of a prompt and its output."""
        self.decoder, self.proposer, self.options = decoder, proposer, options
        self.timing = timing
        self.max_seq_len = max_seq_len
        self.waiting: deque[ActiveRequest] = deque()
        self.active: list[ActiveRequest] = []  # by row
        num_positions = max_seq_len + proposer.max_draft_tokens + 1
        self.cache: KVCache = decoder.make_cache(num_rows, num_positions)
        device = decoder.device if decoder.device.type == "cuda" else None
        self._clocks = {part: _Stopwatch(timing, part, device) for part in timing.list_seconds()}
        proposer.allocate(num_rows, num_positions)
        self._ahead = PlainAhead(decoder, self.cache)
        self._reading: list[ActiveRequest] = []  # whose prompts are on their way into their rows
        self._reader = PromptReader(decoder, self.cache, options.max_num_tokens)
        self._follow_prompts()
        self._held: list[list[int]] = [[] for _ in range(num_rows)]  # tokens in a row's cache
        self._chunk_size = ChunkSize()
        self._max_prefill: int | None = None  # prompt tokens that drafters may read in a step
        self._drafted_size = 1  # tokens of each row in the newest step that might be drafted for

    @property
    def is_busy(self) -> bool:
        """Whether a step has anything to do."""
        requests = (*self.active, *self._reading, *self.waiting)
        return any(r.finish_reason is None for r in requests)

    def submit(self, request: Request) -> ActiveRequest:
        """Let a request wait for a row; what it becomes can be read from what is returned."""
        assert len(request.input_ids) + request.max_output_len <= self.max_seq_len
        follows_text = bool(request.stop) or self.options.follow_text
        text = TextStream(self.options.tokenizer, request.stop) if follows_text else None
        active = ActiveRequest(request, NO_ROW, max_depth=self.proposer.max_draft_depth, text=text)
        self.waiting.append(active)
        return active

    def cancel(self, request: ActiveRequest) -> None:
        """End a request, which gives its row back when the next step begins."""
        if request.finish_reason is None:
            request.finish_reason = "cancelled"

    @torch.inference_mode()
    def step(self) -> None:
        """Give free rows to waiting requests, read prompts, and verify a step of those that go on.

        With `prompt_chunk` a step reads a part of the prompts, in the same pass where the decoder
        allows it; and requests that have just begun go on in the next, so that their first tokens
        can be had.
        """
        spent, num_read = self.timing.target_seconds, self._reader.num_read
        self._retire()
        self._admit()
        num_active, num_verified = self._run()
        if num_active:  # else a GPU may still be at it
            num_tokens = num_verified + self._reader.num_read - num_read
            self._chunk_size.record(num_active, num_tokens, self.timing.target_seconds - spent)

    def _run(self) -> tuple[int, int]:
        """Requests of which tokens were verified, and how many were."""
        chunk = self._choose_chunk()
        if not self._reading:
            pass
        elif chunk is None:
            self._read_prompts()
        elif not self.active:  # nobody waits for it
            self._read_chunk(None)
            return 0, 0
        elif self._reader.joins:
            return self._verify(chunk)
        else:
            self._read_chunk(chunk)
        if not self.active:
            return 0, 0
        if self._runs_ahead():
            return self._emit_ahead(self._ahead.step)
        if self._ahead.is_flying:  # a request joined that cannot be run ahead
            return self._emit_ahead(self._ahead.land)
        return self._verify()

    def _choose_chunk(self) -> int | None:
        """Tokens of prompts that a step may read beside others; None is all.

        With "auto" those that the others verify count, too, where they share a pass.
        """
        chunk = self.options.prompt_chunk
        if chunk == "auto":
            num_requests = len(self.active) + len(self._reading) + len(self.waiting)
            chunk = self._chunk_size.choose(
                len(self.active), num_requests, is_reading=bool(self._reading)
            )
        self._max_prefill = None if chunk is None else DRAFTER_SHARE * chunk
        return chunk

    def _admit(self) -> None:
        taken = {request.row for request in (*self.active, *self._reading)}
        free = [row for row in range(len(self._held)) if row not in taken]
        while free and self.waiting:
            request = self.waiting[0]
            if request.finish_reason is None:  # not cancelled before its turn
                prompt = request.request.input_ids
                source, shared = free[0], 0
                if not request.request.wants_prompt_logprobs:
                    source, shared = self._find_prefix(free, prompt)
                    if self._is_being_read(prompt, shared):
                        return
                request.row = source if source in free else free[0]
                free.remove(request.row)
                self._copy_prefix(source, request.row, shared)
                self._reader.add(request.row, prompt)
                self._note_read(request)
                self._reading.append(request)
            self.waiting.popleft()
        self._follow_prompts()

    def _read_prompts(self) -> None:
        """Read all prompts to their ends."""
        while self._reading:
            ended: dict[int, Tensor] = {}
            with self._clocks["prefill"]:
                while self._reader.is_busy:
                    ended |= self._reader.run_pass()
                self._end_reading(ended)
            self._admit()  # those that waited for another's prefix

    def _read_chunk(self, chunk: int | None) -> None:
        """Read some tokens of prompts, or as many as a pass should have."""
        with self._clocks["prefill"]:
            self._end_reading(self._reader.run_pass(chunk))

    def _end_reading(self, ended: Mapping[int, Tensor]) -> None:
        """Note what was read; requests whose prompts have ended get their first token."""
        for request in self._reading:
            self._note_read(request)
        if ended:
            hidden = torch.stack([*ended.values()])[:, None]
            self._start([*ended], hidden, self.decoder.compute_logits(hidden))

    def _follow_prompts(self) -> None:
        """Let those have the states of prompts that want them."""
        proposer = self.proposer
        reader = self._reader
        reader.follow = proposer.follow if proposer.follows_prompts else None
        reader.reads_all = proposer.follows_prompts and proposer.follows_last
        if any(request.request.wants_prompt_logprobs for request in self._reading):
            reader.follow, reader.reads_all = self._tell_prompts, True

    def _tell_prompts(
        self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], states: Tensor
    ) -> None:
        """Note the log-probabilities of prompts where they are asked for; see `Drafter.follow`."""
        self.proposer.follow(rows, starts, counts, states)
        by_row = {request.row: request for request in self._reading}
        for row, start, count, own in zip(rows, starts, counts, states, strict=True):
            request = by_row[row]
            if not request.request.wants_prompt_logprobs:
                continue
            # What follows the last token is no more of the prompt.
            count = min(count, len(request.request.input_ids) - start - 1)
            for at in range(0, count, LOGPROB_TOKENS):
                part = own[at : min(at + LOGPROB_TOKENS, count)]
                request.note_prompt(self.decoder.compute_logits(part))

    def _note_read(self, request: ActiveRequest) -> None:
        """Remember what a row holds of its prompt."""
        length = int(self.cache.past_lens[request.row])
        self._held[request.row] = request.request.input_ids[:length]

    def _start(self, rows: Sequence[int], states: Tensor, logits: Tensor) -> None:
        """Emit the first tokens of rows whose prompts are read.

        states, logits: [B, 1, D] and [B, 1, V] of the prompts' last tokens.
        """
        reading = {request.row: request for request in self._reading}
        requests = [reading[row] for row in rows]
        self.proposer.start([r for r in requests if r.request.drafts])
        roots = [Candidates(make_root(r.request.input_ids[-1])) for r in requests]
        paths = self._emit(requests, roots, logits)
        self._observe(requests, states, paths)
        self.active = sorted([*self.active, *requests], key=lambda r: r.row)
        self._reading = [r for r in self._reading if r.row not in rows]
        self._follow_prompts()
        self._retire()

    def _verify(self, chunk: int | None = None) -> tuple[int, int]:
        """One verify step of every active request: propose, forward, accept, commit; as `_run`.

        chunk: prompt tokens to read in the same pass, as of `_choose_chunk`; None reads nothing.
        """
        active = self.active
        left = 0 if chunk is None else self._reader.num_left
        is_shared = chunk is not None and self.options.prompt_chunk == "auto"
        self.proposer.plan_step(min(chunk or 0, left), self._max_prefill)
        # A token of a prompt and one of a draft cost the same, and those who wait for their first
        # token have none yet.
        drafts = (
            not is_shared or self.proposer.is_indivisible
            or left + len(active) * self._drafted_size <= (chunk or 0)
        )  # fmt: skip
        with self._clocks["draft"]:
            candidates = self._propose(active, drafts=drafts)
        trees = [c.tree for c in candidates]
        size = num_nodes = max(tree.num_nodes for tree in trees)
        verified = len(active), len(active) * size
        if drafts:
            self._drafted_size = size
        with self._clocks["verify"]:
            reading = None
            if chunk is not None:
                room = max(1, chunk - len(active) * size) if is_shared else chunk
                reading = self._reader.plan(room, beside=len(active), least=size)
                size = reading.size
            step = pack_step(trees, list_rows(active), self.cache, size)
            if reading is not None:
                step = join_steps(step, reading.step, self.cache)
            all_states = self.decoder.forward(step, self.cache)
            states, read = all_states[: len(active)], all_states[len(active) :]  # [B, T, D]
            ended = all_states[:0, 0] if reading is None else reading.pick_last(read)
            own = states[:, :num_nodes].flatten(0, 1)
            logits = self.decoder.compute_logits(torch.cat((own, ended)) if len(ended) else own)
            first_logits = logits[len(active) * num_nodes :, None]  # [E, 1, V]
            logits = logits[: len(active) * num_nodes].view(len(active), num_nodes, -1)
        with self._clocks["draft"]:
            best = self._draft_ahead(step, trees, states, logits)
        lengths = [len(r.output_ids) for r in active]
        with self._clocks["accept"]:
            paths = self._emit(active, candidates, logits, best)
        with self._clocks["other"]:
            for request, tree, path, before in zip(active, trees, paths, lengths, strict=True):
                self._commit(request, tree, path, len(request.output_ids) - before)
            observed = self.decoder.observed
            if reading is not None and observed is not None:
                self.decoder.observed = observed[: len(active)]
            self._observe(active, states, paths)
            if reading is not None:
                if observed is not None:
                    self.decoder.observed = observed[len(active) :]
                self._reader.finish(reading, read)
                for request in self._reading:
                    self._note_read(request)
                if len(ended):
                    self._start([reading.rows[at] for at in reading.ended], ended[:, None],
                                first_logits)  # fmt: skip
            self._retire()  # not before: whose prompt was read may have been cancelled meanwhile
        self.timing.num_steps += 1
        return verified

    def _propose(self, active: Sequence[ActiveRequest], *, drafts: bool) -> list[Candidates]:
        """What is drafted for each request; the proposer never hears of those without drafts.

        drafts: False is nothing for anybody.
        """
        drafting = [r for r in active if drafts and r.request.drafts]
        drafted = iter(self.proposer.propose(drafting) if drafting else ())
        candidates = []
        for request in active:
            if not (drafts and request.request.drafts):
                candidates.append(Candidates(make_root(request.output_ids[-1])))
                continue
            own = next(drafted)
            if request.grammar is not None and not self.proposer.is_indivisible:
                own = own.prune(request.grammar)
            candidates.append(own)
        return candidates

    def _observe(
        self, requests: Sequence[ActiveRequest], states: Tensor, paths: Sequence[list[int]]
    ) -> None:
        places = [at for at, r in enumerate(requests) if r.request.drafts]
        if places:
            self.proposer.observe(
                [requests[at] for at in places], take_rows(states, places),
                [paths[at] for at in places],
            )  # fmt: skip

    def _commit(self, request: ActiveRequest, tree: Tree, path: list[int], taken: int) -> None:
        """Keep an accepted path, of which the request took so many tokens."""
        request.stats.count_step(
            num_draft_tokens=tree.num_draft_tokens,
            depth=tree.depth,
            num_accepted=min(taken, len(path) - 1),
        )
        if request.request.drafts:  # what a drafter has seen, too, if it follows prompts
            self._held[request.row] += tree.tokens[path].tolist()
        self.cache.commit(request.row, path)

    def _runs_ahead(self) -> bool:
        """Whether steps are begun before the host has the tokens of the step before."""
        return (
            self.decoder.graphs is not None
            and not self.proposer.max_draft_tokens
            and not self.options.keep_logits
            and not self.timing.is_exact
            and all(r.needs_only_best for r in self.active)
        )

    def _emit_ahead(self, run: Callable[[list[ActiveRequest]], list[Emitted]]) -> tuple[int, int]:
        """What `_verify` does where nothing is drafted, the device a step ahead."""
        with self._clocks["verify"]:
            emitted = run(self.active)
        with self._clocks["accept"]:
            for request, token in emitted:
                self._held[request.row].append(request.output_ids[-1])
                request.emit([token], [PLAIN])
                request.stats.count_step(num_draft_tokens=0, depth=0, num_accepted=0)
            if self.options.on_progress is not None:
                self.options.on_progress([request for request, _ in emitted])
            self._retire()
        self.timing.num_steps += 1
        return len(emitted), len(emitted)

    def _draft_ahead(
        self, step: Step, trees: Sequence[Tree], states: Tensor, logits: Tensor
    ) -> Array | None:
        """Let the next draft begin before the host knows what was accepted, where it can.

        Returns the greedy choices [B, T], which came to the host with the draft.
        """
        active, proposer = self.active, self.proposer
        if not (
            proposer.drafts_ahead and all(r.needs_only_best and r.request.drafts for r in active)
        ):
            return None
        best = logits.argmax(-1)
        last, roots = accept_on_device(trees, step.tree_mask, best)
        newest = states[torch.arange(len(active), device=states.device), last]
        choices, ends, drafts = to_host(best, last, proposer.compute_drafts(newest, roots))
        proposer.take_drafts(active, choices[np.arange(len(active)), ends].tolist(), drafts)
        return choices

    def _emit(
        self,
        requests: Sequence[ActiveRequest],
        candidates: Sequence[Candidates],
        logits: Tensor,
        choices: Array | None = None,
    ) -> list[list[int]]:
        """Choose and emit tokens by the logits of a forward; return each row's accepted nodes."""
        accepted = accept_batch(
            candidates,
            logits,
            [r.sampler for r in requests],
            [len(r.output_ids) for r in requests],
            choices,
        )
        paths = []
        for at, (request, (path, bonus)) in enumerate(zip(requests, accepted, strict=True)):
            tree = candidates[at].tree
            drafted = tree.tokens[path[1:]].tolist()
            last = BONUS if tree.num_draft_tokens else PLAIN
            taken = request.emit([*drafted, bonus], [*[DRAFT] * len(drafted), last])
            if request.request.keep_trees:
                request.trees.append(DraftTree(tree.tokens.tolist(), tree.parents.tolist(), path))
            if self.options.keep_rejected and taken > len(drafted):
                request.note_rejected(follow_branch(tree, path[-1]))
            if request.request.num_logprobs is not None:
                request.note_logprobs(logits[at, to_device(path[:taken], logits.device)])
            if self.options.keep_logits:
                chosen = logits[at, to_device(path[:taken], logits.device)]
                request.logits.append(torch.from_numpy(to_host(chosen.float())[0]))
            paths.append(path)
        if self.options.on_progress is not None:
            self.options.on_progress(requests)
        return paths

    def _find_prefix(self, free: Sequence[int], prompt: Sequence[int]) -> tuple[int, int]:
        """The row that holds most of a prompt's beginning, and how many tokens that is."""
        if not self.options.reuse_blocks:
            return free[0], 0
        # The last token is always run: its hidden state is needed.
        known = [min(count_shared(held, prompt), len(prompt) - 1) for held in self._held]
        source = max(range(len(known)), key=lambda row: (known[row], row in free))
        return source, known[source]

    def _is_being_read(self, prompt: Sequence[int], known: int) -> bool:
        """Whether much more of a prompt than is known will be, from one that is being read."""
        if not self.options.reuse_blocks:
            return False
        worth = 1 if self.options.prompt_chunk is None else WORTH_WAITING
        others = (request.request.input_ids for request in self._reading)
        return any(count_shared(other, prompt) >= known + worth for other in others)

    def _copy_prefix(self, source: int, row: int, length: int) -> None:
        """Put the prefix that another row or the row itself holds into it."""
        self.cache.copy_prefix(source, row, length)
        self.proposer.copy_prefix(source, row, length)
        self.timing.num_reused_tokens += length

    def _retire(self) -> None:
        for request in (*self.active, *self._reading):
            if request.finish_reason is not None:
                request.release()
        self.active = [r for r in self.active if r.finish_reason is None]
        for request in self._reading:
            if request.finish_reason is not None:
                self._reader.drop(request.row)
        self._reading = [r for r in self._reading if r.finish_reason is None]


def follow_branch(tree: Tree, node: int) -> list[int]:
    """The tokens below a node, the first child's at every fork: what was drafted and not taken."""
    tokens = []
    for child in range(node + 1, tree.num_nodes):
        if tree.parents[child] == node:
            tokens.append(int(tree.tokens[child]))
            node = child
    return tokens


def pack_step(trees: Sequence[Tree], rows: np.ndarray, cache: KVCache, size: int = 0) -> Step:
    """Pad trees to one size, `size` or the largest's: tokens, positions [B, T], mask [B, T, T]."""
    size = max(size, *(tree.num_nodes for tree in trees))
    tokens = np.zeros((len(trees), size), np.int64)
    positions = np.zeros((len(trees), size), np.int64)
    wanted = np.zeros((len(trees), size), np.bool_)
    mask = np.zeros((len(trees), size, size), np.bool_)
    mask[:, np.arange(size), np.arange(size)] = True
    for at, (tree, row) in enumerate(zip(trees, rows, strict=True)):
        num_nodes = tree.num_nodes
        tokens[at, :num_nodes], wanted[at, :num_nodes] = tree.tokens, True
        positions[at, :num_nodes] = cache.past_lens[row] + tree.depths
        mask[at, :num_nodes, :num_nodes] = build_tree_mask(tree)
    return Step(rows=rows, tokens=tokens, positions=positions, tree_mask=mask, wanted=wanted)


def join_steps(first: Step, second: Step, cache: KVCache) -> Step:
    """One step of the rows of two, which are of the same size."""
    pasts = [find_past(step, cache) for step in (first, second)]
    wanted = [
        np.ones(step.tokens.shape, np.bool_) if step.wanted is None else step.wanted
        for step in (first, second)
    ]
    return Step(
        rows=np.concatenate((first.rows, second.rows)),
        tokens=np.concatenate((first.tokens, second.tokens)),
        positions=np.concatenate((first.positions, second.positions)),
        tree_mask=np.concatenate((first.tree_mask, second.tree_mask)),
        past=np.concatenate(pasts),
        wanted=np.concatenate(wanted),
    )
