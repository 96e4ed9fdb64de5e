"""Draft-target: a small model of the same vocabulary drafts a chain of tokens.

Leviathan et al., "Fast inference from transformers via speculative decoding", 2023; Chen et al.,
"Accelerating large language model decoding with speculative sampling", 2023.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec import logs
from specdec.decode.accept import Candidates
from specdec.decode.devices import check_devices
from specdec.decode.drafters.base import DraftContext, EngineHandle
from specdec.decode.drafters.budget import Calibration
from specdec.decode.drafters.pacing import DraftLength, bound_catch_up
from specdec.decode.engine import TorchEngine
from specdec.decode.plain_ahead import run_tokens
from specdec.decode.prefill import fill_cache
from specdec.decode.requests import ActiveRequest
from specdec.decode.sampling import CHOICE, DRAFT, draw, process_logits, take_rows
from specdec.decode.vocabulary import ModelTokens, check_vocabularies
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.transfers import to_host
from specdec.engine.tree import make_root, pack_beams
from specdec.errors import Problems, SpecDecError
from specdec.methods import list_starters
from specdec.methods.draft_target import METHOD, DraftOptions

logger = logs.get_logger(__name__)


def make_proposer(context: DraftContext) -> DraftTargetProposer:
    """Load the draft model's engine and compare its vocabulary with the target's."""
    target, options = context.engine, context.options
    assert target is not None
    if options is None:
        raise SpecDecError(
            f"{target.folder} was built for external drafts, and nothing drafts",
            f"give {', '.join(list_starters(METHOD.mode))}, or --no-speculation to decode without",
        )
    assert isinstance(options, DraftOptions)
    draft = TorchEngine(
        options.engine_dir, device=target.device.type, devices=options.draft_devices
    )
    try:
        check_devices("draft", options.draft_devices, draft)
        check_devices("target", options.target_devices, target)
        target_tokens, draft_tokens = (
            ModelTokens(engine.folder, engine.config.checkpoint.model.vocab_size,
                        engine.config.vocabulary)
            for engine in (target, draft)
        )  # fmt: skip
        check_vocabularies(target_tokens, draft_tokens, context.tokenizer, options.tokenizer_dir)
        return attach_draft(
            target, draft, draft_len=options.draft_len, use_logits=options.use_logits,
            adapts=context.has_budget and not context.is_in_chain,
        )  # fmt: skip
    except BaseException:
        draft.close()
        raise


def attach_draft(
    target: EngineHandle, draft: EngineHandle, *, draft_len: int | None, use_logits: bool,
    adapts: bool = False,
) -> DraftTargetProposer:  # fmt: skip
    """Let one engine draft for another; raise SpecDecError where they do not match.

    draft_len: tokens a step; None adapts it, up to what the engine was built for.
    """
    own, theirs = target.config, draft.config
    longest = own.build.max_draft_len
    problems = Problems()
    if own.build.speculative_decoding_mode != METHOD.mode:
        problems.add(
            f"the target's engine was built with speculative_decoding_mode"
            f" {own.build.speculative_decoding_mode}",
            "build it from a plain checkpoint with --speculative-decoding-mode"
            " draft_tokens_external --max-draft-len N",
        )
    elif draft_len is not None and draft_len > longest:
        problems.add(
            f"the draft length is {draft_len}, the target's engine was built with"
            f" max_draft_len {longest}",
            f"draft {longest} or fewer, or build with --max-draft-len {draft_len}",
        )
    if theirs.build.speculative_decoding_mode is not None:
        problems.add(
            f"the draft engine was built with speculative_decoding_mode"
            f" {theirs.build.speculative_decoding_mode}",
            "give a plain engine as --draft-engine-dir",
        )
    if theirs.build.max_seq_len < own.build.max_seq_len:
        logger.warning(
            "the draft engine's max_seq_len is %d, the target's %d: requests may use"
            " the smaller of the two",
            theirs.build.max_seq_len, own.build.max_seq_len,
        )  # fmt: skip
    problems.raise_all()
    proposer = DraftTargetProposer(
        draft.decoder,
        DraftLength(draft_len or longest, is_auto=adapts or draft_len is None),
        use_logits=use_logits,
        target_vocab_size=own.checkpoint.model.vocab_size,
        max_num_tokens=theirs.build.max_num_tokens,
    )
    target.use_method(METHOD.name, proposer, draft)
    return proposer


class DraftTargetProposer:
    """Decodes the draft model `draft_length` tokens ahead of each request.

    The draft model's cache is kept between steps and cut back to what was accepted; nothing is
    computed twice. With `use_logits`, sampled requests are accepted by the ratio of probabilities;
    without, their draft tokens are drawn with the random numbers that the target will use, and
    compared. Greedy requests are compared always.
    """

    def __init__(
        self,
        decoder: Decoder,
        draft_length: DraftLength,
        *,
        use_logits: bool,
        target_vocab_size: int,
        max_num_tokens: int,
    ) -> None:
        self.decoder = decoder
        self.draft_length = draft_length
        self.use_logits = use_logits
        self.max_draft_tokens = self.max_draft_depth = draft_length.maximum
        self._vocab_size = target_vocab_size
        self._max_num_tokens = max_num_tokens
        self._cache: KVCache | None = None
        # By row, of the last draft: tokens of the request when it began, and what was drafted.
        self._drafts: dict[int, tuple[int, Candidates]] = {}
        self._num_passes = 0  # in the last draft
        self._calibration = Calibration()
        self.max_catch_up: int | None = None
        self.is_shared = False  # see StepTimer
        self._num_caught_up = 0  # tokens, in the last draft
        self._draft_seconds = self._began_verify = 0.0

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Make a cache of the target's shape."""
        self._cache = None  # what it has is free for the next
        self._cache = self.decoder.make_cache(num_rows, num_positions)
        self._drafts = {}
        self.draft_length.reset()
        self._calibration.reset()

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        """Empty the rows; their prompts are run when the first draft is asked for."""
        assert self._cache is not None
        for request in requests:
            self._cache.copy_prefix(request.row, request.row, 0)
            self._drafts.pop(request.row, None)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Draft for all requests at once, each at most up to the token before its limit."""
        assert self._cache is not None
        began = time.perf_counter()
        texts = [[*r.request.input_ids, *r.output_ids] for r in requests]
        # Every draft runs the newest token, and the one before it where that was drafted itself.
        lags = [
            max(0, len(text) - int(self._cache.past_lens[r.row]) - 2)
            for r, text in zip(requests, texts, strict=True)
        ]
        plan = self.draft_length.plan(lags, [r.remaining for r in requests])
        if self.max_catch_up is not None and len(requests) > 1:
            plan = bound_catch_up(plan, lags, self.max_catch_up)
        # A token beyond the draft model's vocabulary can only be padding, which it cannot follow.
        vocab_size = self.decoder.model.vocab_size
        counts = [
            min(count, request.remaining - 1) if count and max(text) < vocab_size else 0
            for count, request, text in zip(plan.counts, requests, texts, strict=True)
        ]
        # Drafts may go on beyond what was planned, and end before, as the draft model is sure; not
        # where that would follow from what was drawn: docs/exactness.md.
        is_open = plan.most > 0 and not (
            self.use_logits and any(not r.sampler.params.is_greedy for r in requests)
        )
        if is_open:
            counts = [
                min(plan.most, r.remaining - 1) if n else 0
                for n, r in zip(counts, requests, strict=True)
            ]
        self._num_caught_up = sum(lag for lag, n in zip(lags, counts, strict=True) if n)
        for at, count in plan.catch_up.items():
            if max(texts[at]) < vocab_size:
                self._catch_up(requests[at].row, texts[at], count)
                self._num_caught_up += count
        known = [len(text) for text in texts]
        draft_probs: list[list[Tensor]] = [[] for _ in requests]
        confidence: list[list[float]] = [[1.0] for _ in requests]
        chances = np.ones(len(requests))  # that all of a request's draft is right
        is_greedy = all(request.sampler.params.is_greedy for request in requests)
        runs_ahead = is_greedy and self.decoder.graphs is not None
        if runs_ahead:
            self._draft_ahead(requests, texts, counts if not is_open else plan.counts)
        self._num_passes = 0
        for depth in range(0 if runs_ahead else max(counts)):
            active = [at for at, count in enumerate(counts) if count > depth]
            if is_open and depth and not self.draft_length.goes_on(depth, chances[active]):
                break
            hidden = fill_cache(
                self.decoder,
                self._cache,
                [requests[at].row for at in active],
                [texts[at] for at in active],
                self._max_num_tokens,
            )
            logits = self.decoder.compute_logits(hidden)[:, : self._vocab_size]
            self._num_passes += 1
            if self.draft_length.is_auto:
                (sure,) = to_host(logits.float().softmax(-1).amax(-1).double())
                chances[active] *= self._calibration.rate(np.full(len(active), depth + 1), sure)
                if is_open and depth and not self.draft_length.keeps(depth + 1, chances[active]):
                    break
                for at, value in zip(active, sure.tolist(), strict=True):
                    confidence[at].append(value)
            drafted = self._choose(logits, [requests[at] for at in active], depth)
            for at, (token, probs) in zip(active, drafted, strict=True):
                texts[at].append(token)
                if probs is not None:
                    draft_probs[at].append(probs)
        candidates = []
        for request, text, length, probs_list, sure_list in zip(
            requests, texts, known, draft_probs, confidence, strict=True
        ):
            root, drafted_ids = request.output_ids[-1], text[length:]
            tree = pack_beams(root, np.array([drafted_ids])) if drafted_ids else make_root(root)
            is_told = len(sure_list) == len(drafted_ids) + 1
            own = Candidates(tree, probs_list or None, np.array(sure_list) if is_told else None)
            self._drafts[request.row] = length, own
            candidates.append(own)
        if runs_ahead:
            self._num_passes = max(c.tree.num_draft_tokens for c in candidates)
        self._began_verify = time.perf_counter()
        self._draft_seconds = self._began_verify - began
        return candidates

    def _draft_ahead(
        self, requests: Sequence[ActiveRequest], texts: list[list[int]], counts: Sequence[int]
    ) -> None:
        """Append greedy drafts to the texts; they come to the host when all are made."""
        assert self._cache is not None
        drafted: list[tuple[list[int], Tensor]] = []
        for depth in range(max(counts)):
            active = [at for at, count in enumerate(counts) if count > depth]
            rows = [requests[at].row for at in active]
            if not drafted:
                hidden = fill_cache(
                    self.decoder, self._cache, rows, [texts[at] for at in active],
                    self._max_num_tokens,
                )  # fmt: skip
                logits = self.decoder.compute_logits(hidden)
            else:
                before, best = drafted[-1]
                newest = take_rows(best, [before.index(at) for at in active])
                logits = run_tokens(self.decoder, self._cache, np.array(rows), newest)
            drafted.append((active, logits[:, : self._vocab_size].argmax(-1)))
        if drafted:
            found = to_host(*(tokens for _, tokens in drafted))
            for (active, _), tokens in zip(drafted, found, strict=True):
                for at, token in zip(active, tokens.tolist(), strict=True):
                    texts[at].append(token)

    def observe(
        self, requests: Sequence[ActiveRequest], states: Tensor, paths: Sequence[Sequence[int]]
    ) -> None:
        """Cut the draft model's cache back to the accepted tokens."""
        assert self._cache is not None
        if not self._drafts:  # the prompts' own pass, or others have drafted
            return
        seconds = time.perf_counter() - self._began_verify
        drafts = []
        for request, path in zip(requests, paths, strict=True):
            if request.row not in self._drafts:
                continue
            num_known, drafted = self._drafts.pop(request.row)
            kept = num_known + len(path) - 1
            past = int(self._cache.past_lens[request.row])
            self._cache.copy_prefix(request.row, request.row, min(past, kept))
            drafts.append((drafted.tree.num_draft_tokens, len(path) - 1))
            if drafted.confidence is not None:
                emitted = request.output_ids[num_known - len(request.request.input_ids) :]
                self._calibration.record(drafted, emitted)
        self.draft_length.record_step(
            num_rows=len(requests),
            num_tokens=states.shape[1],
            num_passes=self._num_passes,
            num_caught_up=self._num_caught_up,
            draft_seconds=self._draft_seconds,
            verify_seconds=None if self.is_shared else seconds,
            drafts=drafts,
        )

    def _catch_up(self, row: int, text: Sequence[int], count: int) -> None:
        """Run the next tokens of a text that the cache does not hold, and wait for the end."""
        assert self._cache is not None
        end = int(self._cache.past_lens[row]) + count
        fill_cache(self.decoder, self._cache, [row], [text[:end]], self._max_num_tokens).cpu()

    def _choose(
        self, logits: Tensor, requests: Sequence[ActiveRequest], depth: int
    ) -> list[tuple[int, Tensor | None]]:
        """The draft model's token for each request, and what it was drawn from if that counts."""
        sampled = [at for at, r in enumerate(requests) if not r.sampler.params.is_greedy]
        chosen: list[tuple[int, Tensor | None]] = [(0, None)] * len(requests)
        if len(sampled) < len(requests):
            chosen = [(token, None) for token in to_host(logits.argmax(-1))[0].tolist()]
        if not sampled:
            return chosen
        samplers = [requests[at].sampler for at in sampled]
        probs = process_logits(take_rows(logits, sampled), [s.params for s in samplers])
        if probs.shape[1] < self._vocab_size:  # the target's vocabulary is padded further
            probs = torch.nn.functional.pad(probs, (0, self._vocab_size - probs.shape[1]))
        stream = DRAFT if self.use_logits else CHOICE
        uniforms = [
            sampler.get_uniform(stream, len(requests[at].output_ids) + depth)
            for at, sampler in zip(sampled, samplers, strict=True)
        ]
        for line, (at, token) in enumerate(zip(sampled, draw(probs, uniforms), strict=True)):
            chosen[at] = (token, probs[line] if self.use_logits else None)
        return chosen
