"""Draft-target: a small model drafts a chain of tokens, of the same vocabulary or of shared ones.

Leviathan et al., "Fast inference from transformers via speculative decoding", 2023; Chen et al.,
"Accelerating large language model decoding with speculative sampling", 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specdec.decode.accept import Candidates
from specdec.decode.device_tokens import run_tokens
from specdec.decode.drafters.base import DraftContext, EngineHandle, find_room_problems
from specdec.decode.drafters.devices import check_devices
from specdec.decode.drafters.draft_model import LoadedModel, ModelDrafter
from specdec.decode.drafters.draft_tree import ModelTreeDrafter
from specdec.decode.prefill import count_shared
from specdec.decode.requests import ActiveRequest
from specdec.decode.sampling import CHOICE, DRAFT, draw, process_logits, take_rows
from specdec.engine.layout import BuildConfig, EngineConfig
from specdec.engine.ranking import find_best
from specdec.engine.step import States
from specdec.engine.transfers import to_host
from specdec.engine.tree import make_root, pack_beams
from specdec.errors import Problems, SpecDecError
from specdec.methods import list_starters
from specdec.methods.draft_target import METHOD, DraftOptions
from specdec.system import logs
from specdec.text.token_map import SameTokens, SharedTokens, TokenMap
from specdec.text.vocabulary_check import ModelTokens, check_vocabularies, load_pair

logger = logs.get_logger(__name__)
# Of a chain or a tree where neither the run nor the build says a length.
USUAL_LENGTH = 8
# Of the tree that a CPU drafts where nothing is said; a part is verified. A verify step
# of twice as many tokens pays on none that was measured.
MOST_TREE_TOKENS = 31


def make_drafter(context: DraftContext) -> ModelChainDrafter | ModelTreeDrafter:
    """Load the draft model's engine and compare its vocabulary with the target's."""
    target, options = context.engine, context.options
    assert target is not None
    if options is None:
        raise SpecDecError(
            f"{target.folder} was built for external drafts, and nothing drafts",
            f"give {', '.join(list_starters(METHOD.mode))}, or --no-speculation to decode without",
        )
    assert isinstance(options, DraftOptions)
    draft = target.open_draft_engine(options.engine_dir, options.draft_devices)
    try:
        draft.check_whole()
        check_devices("draft", options.draft_devices, draft)
        check_devices("target", options.target_devices, target)
        target_tokens, draft_tokens = (
            ModelTokens(engine.folder, engine.config.checkpoint.model.vocab_size,
                        engine.config.vocabulary)
            for engine in (target, draft)
        )  # fmt: skip
        tokens: TokenMap | None = None
        if not options.has_own_tokens:
            check_vocabularies(
                target_tokens, draft_tokens, context.tokenizer, options.tokenizer_dir
            )
        else:
            pair = load_pair(target_tokens, draft_tokens, context.tokenizer, options.tokenizer_dir)
            sizes = target_tokens.vocab_size, draft_tokens.vocab_size
            tokens = SharedTokens(*pair, *sizes, draft.device)
        return attach_draft(
            target, draft, draft_len=options.draft_len, use_logits=options.use_logits,
            tree_tokens=options.tree_tokens,
            fits_budget=context.has_budget or options.leaves_length, tokens=tokens,
        )  # fmt: skip
    except BaseException:
        draft.close()
        raise


def attach_draft(
    target: EngineHandle, draft: EngineHandle, *, draft_len: int | None, use_logits: bool,
    tree_tokens: int | None = None, fits_budget: bool = False,
    tokens: TokenMap | None = None,
) -> ModelChainDrafter | ModelTreeDrafter:  # fmt: skip
    """Let one engine draft for another; raise SpecDecError where they do not match.

    draft_len: tokens a step; None adapts it, up to the length that the engine was built with.
    tree_tokens: of a tree that is drafted instead of a chain, whose depth draft_len then is at
    most; None for a chain. fits_budget: whether only the part worth its time is verified. tokens:
    which of the models' tokens are the same; None is all of them.
    """
    draft_build = draft.config.build
    models = target.config.checkpoint.model, draft.config.checkpoint.model
    hybrids = [model.architecture for model in models if model.recurrence is not None]
    problems = find_length_problems(target.config, draft_len, tree_tokens)
    if tree_tokens is not None and hybrids:
        problems.add(
            f"--draft-tree-tokens is given, and {hybrids[0]} is a hybrid whose states follow one"
            " text",
            "leave it out: a chain is drafted",
        )
    problems += _find_mode_problems(draft.config)
    _warn_of_length(target.config.build, draft_build)
    problems.raise_all()
    tokens = tokens or SameTokens(models[0].vocab_size, draft.decoder.model.vocab_size)
    limits = draft_build.max_num_tokens, draft_build.max_seq_len
    model = LoadedModel(draft.decoder, tokens, *limits)
    drafter: ModelChainDrafter | ModelTreeDrafter
    if tree_tokens is not None:
        drafter = ModelTreeDrafter(model, tree_tokens, draft_len)
    else:
        length = draft_len or choose_length(target.config)
        chain = ModelChainDrafter(model, length, use_logits=use_logits)
        drafter = chain.fit_budget() if fits_budget and not hybrids else chain
    target.use_method(METHOD.name, drafter, draft)
    return drafter


def choose_length(config: EngineConfig) -> int:
    """Return the tokens of a draft whose length no option says."""
    return config.build.max_draft_len or min(USUAL_LENGTH, config.draft_room)


def _find_mode_problems(config: EngineConfig) -> Problems:
    """List why a draft model's engine is none that only decodes."""
    mode = config.build.speculative_decoding_mode
    is_fixed = config.checkpoint.method is not None or config.has_fixed_drafts
    return Problems.from_table(
        (is_fixed and mode is not None,
         f"the draft engine was built with speculative_decoding_mode {mode}",
         "give a plain engine as --draft-engine-dir"),
    )  # fmt: skip


def _warn_of_length(target_build: BuildConfig, draft_build: BuildConfig) -> None:
    """Log where a draft engine has room for shorter texts than the target's engine."""
    if draft_build.max_seq_len < target_build.max_seq_len:
        logger.warning(
            "the draft engine's max_seq_len is %d, the target's %d: requests with"
            " drafts may use the smaller of the two",
            draft_build.max_seq_len, target_build.max_seq_len,
        )  # fmt: skip


def find_length_problems(
    config: EngineConfig, draft_len: int | None, tree_tokens: int | None
) -> Problems:
    """List why a target's engine does not take the drafts that are asked for.

    draft_len, tree_tokens: tokens of a chain and of a tree, None where no option says them.
    """
    mode, max_draft_len = config.build.speculative_decoding_mode, config.build.max_draft_len
    if not config.has_fixed_drafts:
        return find_room_problems(config, METHOD, max(draft_len or 0, tree_tokens or 0))
    return Problems.from_table(
        (mode != METHOD.mode,
         f"the target's engine was built with speculative_decoding_mode {mode}",
         "build it from a plain checkpoint with --speculative-decoding-mode draft_tokens_external"
         " --max-draft-len N"),
        (mode == METHOD.mode and (draft_len or 0) > max_draft_len,
         f"the draft length is {draft_len}, the target's engine was built with max_draft_len"
         f" {max_draft_len}",
         f"draft {max_draft_len} or fewer, or build with --max-draft-len {draft_len}"),
        (mode == METHOD.mode and (tree_tokens or 0) > max_draft_len,
         f"--draft-tree-tokens is {tree_tokens}, the target's engine was built with max_draft_len"
         f" {max_draft_len}",
         f"give at most {max_draft_len}, or build with --max-draft-len {tree_tokens}"),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Draft:
    """Draft of a request, with the numbers of text ids and output tokens before it."""

    num_ids: int
    num_output: int
    candidates: Candidates


@dataclasses.dataclass(eq=False)
class _Chain:
    """A draft under way.

    ids: the text in the draft model's tokens, num_ids of them and then what is drafted.
    num_planned: tokens to draft. probs: what tokens were drawn from.
    """

    request: ActiveRequest
    ids: list[int]
    num_ids: int
    num_planned: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    probs: list[Tensor] = dataclasses.field(default_factory=list)


class ModelChainDrafter(ModelDrafter):
    """Decodes the draft model `max_draft_tokens` tokens ahead of each request, or `max_levels`.

    The draft model's cache is kept between steps and cut back to what was accepted; nothing is
    computed twice but the last draft token, where that was accepted. With `use_logits`, sampled
    requests are accepted by the ratio of probabilities; without, their draft tokens are drawn with
    the random numbers that the target will use, and compared. Greedy requests are compared always.
    """

    is_planned = True

    def __init__(self, model: LoadedModel, draft_len: int, *, use_logits: bool) -> None:
        super().__init__(model, draft_len)
        self.use_logits = use_logits
        self.max_draft_depth = draft_len
        self._drafts: dict[int, _Draft] = {}  # by row, of the last draft

    def fit_budget(self) -> ModelChainDrafter | ModelTreeDrafter:
        """Return, on a CPU, one that drafts a tree of as many tokens."""
        if self.use_logits or self.decoder.device.type != "cpu":
            return self
        num_tokens = min(self.max_draft_tokens, MOST_TREE_TOKENS)
        return ModelTreeDrafter(self.model, num_tokens, num_tokens)

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Make a cache of the target's shape, or a longer one where tokens are not the same."""
        super().allocate(num_rows, num_positions)
        self._drafts = {}

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        """Empty the rows; their prompts are run when the first draft is asked for."""
        super().start(requests)
        for request in requests:
            self._drafts.pop(request.row, None)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Draft for all requests at once, each at most up to the token before its limit."""
        read = [self._read(request) for request in requests]
        ready = self._catch_up(requests, read)
        num_planned = self.max_draft_tokens if self.max_levels is None else self.max_levels
        for request, text in zip(requests, read, strict=True):
            self._cache.request_prefixes(request.row, (len(text.ids),))
        chains = [
            _Chain(
                request, text.ids, len(text.ids),
                min(num_planned, request.remaining - 1) if index in ready else 0,
            )
            for index, (request, text) in enumerate(zip(requests, read, strict=True))
        ]  # fmt: skip
        self.num_levels = max(chain.num_planned for chain in chains)
        is_greedy = all(request.sampler.params.is_greedy for request in requests)
        if is_greedy and self.decoder.graphs is not None:
            self._draft_ahead(chains)
        else:
            self._draft(chains)
        return [self._finish(chain) for chain in chains]

    def _draft(self, chains: Sequence[_Chain]) -> None:
        """Draft a token of each chain at a time."""
        for depth in range(self.num_levels):
            active = [chain for chain in chains if chain.num_planned > depth]
            logits = self._run(active)
            choices = self._choose(logits, [chain.request for chain in active], depth)
            chosen_ids = np.array([choice for choice, _ in choices], np.int64)
            tokens, draft_tokens = self.tokens.name(chosen_ids)
            for chain, token, twin, (_, probs) in zip(
                active, tokens.tolist(), draft_tokens.tolist(), choices, strict=True
            ):
                chain.tokens.append(token)
                chain.ids.append(twin)
                chain.probs += () if probs is None else (probs,)

    def _run(self, chains: Sequence[_Chain]) -> Tensor:
        """Run what the draft model lacks of texts and drafts; return the next tokens' logits."""
        rows, texts = [chain.request.row for chain in chains], [chain.ids for chain in chains]
        hidden = self._fill(rows, texts)
        return self.tokens.restrict(self.decoder.compute_logits(hidden))

    def _draft_ahead(self, chains: Sequence[_Chain]) -> None:
        """Draft greedily as planned; tokens come to the host when all are made."""
        passes: list[tuple[list[_Chain], Tensor]] = []
        for depth in range(self.num_levels):
            active = [chain for chain in chains if chain.num_planned > depth]
            if not passes:
                logits = self._run(active)
            else:
                earlier_chains, best_choices = passes[-1]
                indices = [earlier_chains.index(chain) for chain in active]
                newest = self.tokens.to_draft(take_rows(best_choices, indices))
                rows = np.array([chain.request.row for chain in active])
                states = run_tokens(self.decoder, self._cache, rows, newest)
                logits = self.tokens.restrict(self.decoder.compute_logits(states.hidden)[:, 0])
            passes.append((active, find_best(logits)))
        choices_by_depth = to_host(*(choices for _, choices in passes)) if passes else ()
        for (active, _), choices in zip(passes, choices_by_depth, strict=True):
            tokens, _ = self.tokens.name(choices)
            for chain, token in zip(active, tokens.tolist(), strict=True):
                chain.tokens.append(token)

    def _finish(self, chain: _Chain) -> Candidates:
        """Return a chain as candidates, and take its tokens out of the text again."""
        del chain.ids[chain.num_ids :]
        root = chain.request.output_ids[-1]
        tree = pack_beams(root, np.array([chain.tokens])) if chain.tokens else make_root(root)
        candidates = Candidates(tree, chain.probs or None)
        self._drafts[chain.request.row] = _Draft(
            chain.num_ids, len(chain.request.output_ids), candidates
        )
        return candidates

    def observe(
        self, requests: Sequence[ActiveRequest], states: States, paths: Sequence[Sequence[int]]
    ) -> None:
        """Cut the draft model's cache back to the accepted tokens."""
        if not self._drafts:  # the prompts' own pass, or others have drafted
            return
        for request in requests:
            if request.row not in self._drafts:
                continue
            draft = self._drafts.pop(request.row)
            # In one tree with others' drafts, the path may be theirs.
            emitted = request.output_ids[draft.num_output :]
            num_kept = count_shared(draft.candidates.tree.tokens[1:].tolist(), emitted)
            past = int(self._cache.past_lens[request.row])
            num_cached = min(past, draft.num_ids + num_kept)
            self._cache.copy_prefix(request.row, request.row, num_cached)

    def _choose(
        self, logits: Tensor, requests: Sequence[ActiveRequest], depth: int
    ) -> list[tuple[int, Tensor | None]]:
        """Choose each request's drafted token, by row, with its distribution where it is drawn.

        logits: of the tokens that may be drafted, [B, N].
        """
        sampled_rows = [
            row for row, request in enumerate(requests) if not request.sampler.params.is_greedy
        ]
        choices: list[tuple[int, Tensor | None]] = [(0, None)] * len(requests)
        if len(sampled_rows) < len(requests):
            choices = [(choice, None) for choice in to_host(find_best(logits))[0].tolist()]
        if sampled_rows:
            sampled_requests = [requests[row] for row in sampled_rows]
            draws = self._draw(take_rows(logits, sampled_rows), sampled_requests, depth)
            for row, choice in zip(sampled_rows, draws, strict=True):
                choices[row] = choice
        return choices

    def _draw(
        self, logits: Tensor, requests: Sequence[ActiveRequest], depth: int
    ) -> list[tuple[int, Tensor | None]]:
        """Draw the tokens of sampled requests, as `_choose` returns them."""
        samplers = [request.sampler for request in requests]
        probs = process_logits(logits, [sampler.params for sampler in samplers])
        stream = DRAFT if self.use_logits else CHOICE
        uniforms = [
            request.sampler.get_uniform(stream, len(request.output_ids) + depth)
            for request in requests
        ]
        distributions = self.tokens.spread(probs) if self.use_logits else [None] * len(requests)
        return list(zip(draw(probs, uniforms), distributions, strict=True))
