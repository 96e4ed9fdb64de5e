"""A request and its result, in the form that all backends share."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from specdec.decode.sampling import GREEDY, Sampler, SamplingParams
from specdec.decode.shaping import make_shaper
from specdec.engine.ranking import find_top
from specdec.engine.transfers import to_device, to_host
from specdec.errors import ExcessLength, FieldProblem, Problems
from specdec.model.bounds import MAX_SIZE
from specdec.text.prompts import name_prompt
from specdec.text.text_stream import PLAIN_FORM, TextForm, TextStream

if TYPE_CHECKING:
    from specdec.engine.tree import Tree
    from specdec.text.grammar import Grammar, GrammarState

FinishReason = Literal["length", "eos", "stop", "cancelled"]
Origin = Literal["draft", "bonus", "plain"]
# How a token came: as an accepted draft, as the target's own after a draft, or with none drafted.
DRAFT: Origin = "draft"
BONUS: Origin = "bonus"
PLAIN: Origin = "plain"
NO_ROW = -1  # of a request that waits for one
END_FLAG, NO_END = "--end-id", -1  # the flag of an end token, and its value for none
LOGPROB_TOKENS = 64  # of a prompt, whose logits are in memory at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, tokenized, with its own settings.

    Generation ends at any token of `end_ids`, and where the text comes to hold any of `stop`.
    continued_text: the text of an assistant's message at the prompt's end that the output goes on
    with.
    chosen_end_ids: those of the end tokens that a user chose, by the name of the option.
    form: rules by which the tokens become text.
    num_logprobs: number of likeliest tokens whose log-probabilities are returned at every position;
    None returns none. wants_prompt_logprobs: whether to return those of the prompt's positions,
    too; it is then read whole, not taken from the cache. allows_drafts: False decodes one token per
    step. draft_method: the one of the engine's methods that drafts, None for all. max_draft_tokens:
    tokens of a step's draft that are verified at most, None for the engine's. keep_trees: return
    the tree of every step. grammar: what the output keeps to. vocabulary: of the engine that
    has prepared it, None where it is unknown.
    """

    index: int
    input_ids: list[int]
    max_output_len: int
    end_ids: frozenset[int]
    chosen_end_ids: tuple[tuple[str, frozenset[int]], ...] = ()
    input_text: str = ""
    continued_text: str = ""
    sampling: SamplingParams = GREEDY
    stop: tuple[str, ...] = ()
    form: TextForm = PLAIN_FORM
    num_logprobs: int | None = None
    wants_prompt_logprobs: bool = False
    allows_drafts: bool = True
    draft_method: str | None = None
    max_draft_tokens: int | None = None
    keep_trees: bool = False
    grammar: Grammar | None = None
    vocabulary: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """Name of the request in messages."""
        return name_prompt(self.index)

    def make_text(self, tokenizer: Any, *, is_followed: bool) -> TextStream | None:
        """Make the stream of the request's text, where the text ends it or is to be followed."""
        needs_text = is_followed or self.stop or self.form != PLAIN_FORM
        if not needs_text or tokenizer is None:
            return None
        return TextStream(tokenizer, self.stop, self.form)


@dataclasses.dataclass(frozen=True)
class DraftTree:
    """Draft tree of one verify step: each node's token and parent (-1 of the root).

    accepted: the accepted nodes, the root first.
    """

    tokens: list[int]
    parents: list[int]
    accepted: list[int]


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token, and the likeliest tokens there with theirs.

    By the target's own distribution, before temperature, penalties and the rest.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclasses.dataclass
class RequestStats:
    """Counts of one request's verify steps; always kept.

    The prompt's own forward pass yields the first token outside of any verify step.
    accepted_histogram[n]: verify steps in which n draft tokens were accepted. num_drafted_steps:
    those in which anything was drafted. num_cached_tokens: tokens of the prompt that were taken
    from the cache.
    unknown_keys: keys of the JSON form that the backend does not count; they are null there.
    """

    accepted_histogram: list[int]
    num_output_tokens: int = 0
    num_verify_steps: int = 0
    num_drafted_steps: int = 0
    num_draft_tokens: int = 0
    num_draft_depth: int = 0
    num_accepted: int = 0
    unknown_keys: frozenset[str] = frozenset()
    num_cached_tokens: int = dataclasses.field(default=0, compare=False)

    def count_step(self, *, num_draft_tokens: int, depth: int, num_accepted: int) -> None:
        """Record a verify step; `depth` is the longest path proposed."""
        self.num_verify_steps += 1
        self.num_drafted_steps += num_draft_tokens > 0
        self.num_draft_tokens += num_draft_tokens
        self.num_draft_depth += depth
        self.num_accepted += num_accepted
        self.accepted_histogram[num_accepted] += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verify step, bonus token included; 0 without a verify step."""
        return (
            (self.num_output_tokens - 1) / self.num_verify_steps if self.num_verify_steps else 0.0
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed along the accepted path's depth."""
        return self.num_accepted / self.num_draft_depth if self.num_draft_depth else 0.0

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "num_output_tokens": self.num_output_tokens,
            "num_verify_steps": self.num_verify_steps,
            "num_drafted_steps": self.num_drafted_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted": self.num_accepted,
            "acceptance_length": round(self.acceptance_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "accepted_histogram": self.accepted_histogram,
        }
        return {key: None if key in self.unknown_keys else value for key, value in values.items()}


class ActiveRequest:
    """A request that waits for a cache row, occupies one, or is over; and what it has produced.

    output_ids: new tokens only; the last is the one that ended it. finish_reason: None where it
    goes on, or was interrupted; only the thread that decodes sets it. is_cancelled: a note, which
    any thread may set at any time, and which the next step takes at its beginning. logprobs: one a
    token, if asked for. prompt_logprobs: one a token of the prompt, None for its first. origins:
    one a token of the output; fewer where the backend does not tell.
    rejected: by the place of the token that the target emitted instead, the drafted tokens that
    were not accepted there (of a tree, its first branch), if asked for.
    """

    def __init__(
        self, request: Request, row: int, *, max_depth: int, text_stream: TextStream | None
    ) -> None:
        self.request = request
        self.row = row
        self.stats = RequestStats(accepted_histogram=[0] * (max_depth + 1))
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.is_cancelled = False
        self.text_stream = text_stream
        self.kept_logits: list[Tensor] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None] * request.wants_prompt_logprobs
        self.trees: list[DraftTree] = []
        self.origins: list[Origin] = []
        self.rejected: dict[int, list[int]] = {}
        self._max_depth = max_depth

    @functools.cached_property
    def sampler(self) -> Sampler:
        """Random numbers of the request, drawn when the first is needed."""
        # One more than the limit: the token after a full block is chosen, then cut.
        request = self.request
        return Sampler(
            request.sampling,
            request.max_output_len + self._max_depth + 1,
            make_shaper(
                request.sampling, request.input_ids, self.output_ids, self.grammar, request.end_ids
            ),
        )

    @functools.cached_property
    def grammar(self) -> GrammarState | None:
        """State of the request's grammar after its output so far."""
        grammar = self.request.grammar
        return None if grammar is None else grammar.follow(self.output_ids)

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, or ends when the next step begins."""
        return self.finish_reason is not None or self.is_cancelled

    def take_cancellation(self) -> None:
        """End the request where it is noted that it is cancelled; only between two steps."""
        if self.is_cancelled and self.finish_reason is None:
            self.finish_reason = "cancelled"

    @property
    def text(self) -> str | None:
        """Text of all tokens so far, without the stop word, where it was followed."""
        return self.text_stream.full_text if self.text_stream is not None else None

    @property
    def logits(self) -> Tensor | None:
        """Logits [output tokens, V] in float32 that each token was chosen by, if they are kept."""
        return torch.cat(self.kept_logits) if self.kept_logits else None

    @property
    def needs_only_best(self) -> bool:
        """Return whether only the target's likeliest tokens decide, as its logits are."""
        params = self.request.sampling
        is_shaped = params.is_shaped or self.request.grammar is not None
        return params.is_greedy and not is_shaped and self.request.num_logprobs is None

    def note_prompt(self, states: Tensor, compute_logits: Callable[[Tensor], Tensor]) -> None:
        """Keep the log-probabilities of the prompt's next tokens, which follow states [n, D]."""
        tokens = self.request.input_ids[len(self.prompt_logprobs) :][: len(states)]
        for start in range(0, len(tokens), LOGPROB_TOKENS):
            block_tokens = tokens[start : start + LOGPROB_TOKENS]
            logits = compute_logits(states[start : start + len(block_tokens)])
            self.prompt_logprobs += self._describe(logits, block_tokens)

    def _describe(self, logits: Tensor, tokens: Sequence[int]) -> list[TokenLogprob]:
        num_top = self.request.num_logprobs
        assert num_top is not None
        logits = logits.float()
        logprobs = logits.log_softmax(-1)
        token_logprobs = logprobs.gather(1, to_device(list(tokens), logits.device)[:, None])
        _, top_tokens = find_top(logits, min(num_top, logprobs.shape[-1]))
        arrays = to_host(token_logprobs, logprobs.gather(1, top_tokens), top_tokens)
        return [
            TokenLogprob(value, list(zip(ids, values, strict=True)))
            for (value,), values, ids in zip(*(a.tolist() for a in arrays), strict=True)
        ]

    def release(self) -> None:
        """Free the sampler and the grammar, which only further tokens would need."""
        self.__dict__.pop("sampler", None)
        self.__dict__.pop("grammar", None)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_output_len - len(self.output_ids)

    def emit(self, tokens: Iterable[int], origins: Sequence[Origin] = ()) -> int:
        """Append tokens up to the first that ends the request; return how many were taken.

        origins: how each of the tokens came, where that is known.
        """
        num_emitted = 0
        for token in tokens:
            self.output_ids.append(token)
            num_emitted += 1
            is_stopped = self.text_stream is not None and self.text_stream.add(token)
            if token in self.request.end_ids:
                is_cut = self.grammar is not None and self.grammar.is_cut
                self.finish_reason = "length" if is_cut else "eos"
            elif is_stopped:
                self.finish_reason = "stop"
            elif len(self.output_ids) == self.request.max_output_len:
                self.finish_reason = "length"
            else:
                continue
            break
        self.stats.num_output_tokens = len(self.output_ids)
        self.origins += origins[:num_emitted]
        return num_emitted

    def take(
        self,
        tree: Tree,
        path: list[int],
        bonus: int,
        logits: Tensor | None,
        keep_logits: bool,
        keep_rejected: bool,
    ) -> None:
        """Emit the accepted nodes of a tree, the root first in `path`, and the bonus token.

        logits: [T, V], those after each node. keep_logits, keep_rejected: see the loop's options.
        """
        is_step, num_draft_tokens = bool(self.output_ids), tree.num_draft_tokens
        drafted = tree.tokens[path[1:]].tolist() if len(path) > 1 else []
        bonus_origin = BONUS if num_draft_tokens else PLAIN
        num_emitted = self.emit([*drafted, bonus], [*[DRAFT] * len(drafted), bonus_origin])
        if self.request.keep_trees:
            self.trees.append(DraftTree(tree.tokens.tolist(), tree.parents.tolist(), path))
        if keep_rejected and num_emitted > len(drafted):
            self.note_rejected(tree.list_below(path[-1]))
        if self.request.num_logprobs is not None or keep_logits:
            assert logits is not None
            path_logits = logits[to_device(path[:num_emitted], logits.device)]
            if self.request.num_logprobs is not None:
                self.logprobs += self._describe(path_logits, self.output_ids[-num_emitted:])
            if keep_logits:
                self.kept_logits.append(torch.from_numpy(to_host(path_logits.float())[0]))
        if is_step:  # the first token comes by the prompt's own pass
            self.stats.count_step(
                num_draft_tokens=num_draft_tokens,
                depth=tree.depth,
                num_accepted=min(num_emitted, len(drafted)),
            )

    def note_rejected(self, tokens: list[int]) -> None:
        """Keep the drafted tokens in whose place the newest token was emitted."""
        if tokens:
            self.rejected[len(self.output_ids) - 1] = tokens


def choose_best(results: Sequence[ActiveRequest]) -> list[ActiveRequest]:
    """Choose each prompt's result of the highest sum of log-probabilities, ended ones first."""

    def rate(result: ActiveRequest) -> tuple[bool, float]:
        return result.finish_reason is not None, sum(token.logprob for token in result.logprobs)

    by_prompt = itertools.groupby(results, lambda result: result.request.index)
    return [max(prompt_results, key=rate) for _, prompt_results in by_prompt]


def find_problems(
    request: Request, *, max_input_len: int, max_seq_len: int, vocab_size: int,
    max_positions: int = MAX_SIZE, is_built: bool = True,
) -> Problems:  # fmt: skip
    """List where a request is beyond an engine's limits, each with a remedy.

    max_positions: tokens of a prompt and its output that any engine of the model can take.
    is_built: whether `specdec-build` made the engine; else `specdec generate` is to make it.
    """
    problems = Problems()
    if not request.input_ids:
        problems.add(f"{request.name} is empty", "give at least one token", "text")
    _add_length_problem(
        problems, request, max_input_len, max_seq_len, max_positions, is_built=is_built
    )
    if request.form.min_tokens > request.max_output_len:
        problems.add(
            f"{request.name} has min_tokens {request.form.min_tokens}, and at most"
            f" {request.max_output_len} tokens are asked for",
            "lower min_tokens, or raise the limit",
            "min_tokens",
        )
    foreign_tokens = [t for t in request.input_ids if not 0 <= t < vocab_size]
    if foreign_tokens:
        problems.add(
            f"{request.name} holds token {foreign_tokens[0]}, the model's vocabulary has"
            f" {vocab_size}",
            "use the tokenizer that belongs to the model",
            "text",
        )
    problems += _find_bans(request, vocab_size)
    biased_tokens = [t for t, _ in request.sampling.logit_bias if t >= vocab_size]
    if biased_tokens:
        problems.add(
            f"{request.name} has a logit_bias for token {biased_tokens[0]}, the model's vocabulary"
            f" has {vocab_size}",
            "leave it out",
            "logit_bias",
        )
    for name, ids in request.chosen_end_ids:
        if max(ids) < vocab_size:
            continue
        fault = f"{max(ids)}, the model's vocabulary has {vocab_size}"
        if name == END_FLAG:
            problems.add(f"{name} is {fault}", f"give {NO_END} for no end token, or leave it out")
        else:
            problems.add(f"{request.name} has {name} {fault}", "leave it out", name)
    return problems


def _add_length_problem(
    problems: Problems, request: Request, max_input_len: int, max_seq_len: int,
    max_positions: int, *, is_built: bool,
) -> None:  # fmt: skip
    """Note where a prompt, or a prompt with its output, is longer than the engine allows."""
    length = len(request.input_ids)
    total = length + request.max_output_len
    build_flags = [f"--max-seq-len {total}"] if total > max_seq_len else []
    if is_built and length > max_input_len:
        build_flags.append(f"--max-input-len {length}")
    remedy = f", or {'build with' if is_built else 'give'} {' and '.join(build_flags)} or more"
    if total > max_positions:
        remedy = f": the model takes {max_positions} tokens at most, prompt and output together"
    excess = ExcessLength(
        length, request.max_output_len, min(max_input_len, max_seq_len - 1), max_seq_len
    )
    if length > max_input_len:
        fault = FieldProblem(
            f"{request.name} has {length} tokens, the engine's max_input_len is {max_input_len}",
            f"shorten it{remedy}",
            "text", excess=excess,
        )  # fmt: skip
        problems.append(fault)
    elif total > max_seq_len:
        fault = FieldProblem(
            f"{request.name} has {length} tokens and asks for {request.max_output_len} more, the"
            f" engine's max_seq_len is {max_seq_len}",
            f"lower --max-output-len to {max_seq_len - length}{remedy}",
            "max_output_len", excess=excess,
        )  # fmt: skip
        problems.append(fault)


def _find_bans(request: Request, vocab_size: int) -> Problems:
    """List faults of the tokens that a request leaves out: one must be left at every position."""
    problems, params = Problems(), request.sampling
    allowed_ids = params.allowed_ids
    if not params.is_restricted:
        return problems
    if allowed_ids is not None and max(allowed_ids) >= vocab_size:
        problems.add(
            f"{request.name} allows token {max(allowed_ids)}, the model's vocabulary has"
            f" {vocab_size}",
            "leave it out", "allowed_token_ids",
        )  # fmt: skip
    banned_ids = {word[-1] for word in params.bad_words}
    banned_ids |= request.end_ids if params.min_tokens else set()
    candidate_ids = frozenset(range(vocab_size)) if allowed_ids is None else allowed_ids
    if candidate_ids <= banned_ids:
        problems.add(
            f"{request.name} allows tokens that bad_words and min_tokens rule out: none may be"
            " left",
            "allow more tokens", "bad_words" if allowed_ids is None else "allowed_token_ids",
        )  # fmt: skip
    return problems


class HasStats(Protocol):
    """Result of a run, or an output of the API: an object with counts of verify steps."""

    @property
    def stats(self) -> RequestStats: ...


def sum_stats(results: Sequence[HasStats]) -> dict[str, float | None]:
    """Sum up the acceptance over all requests' verify steps, and the number of tokens."""
    tokens = sum(r.stats.num_output_tokens for r in results)
    steps = sum(r.stats.num_verify_steps for r in results)
    depth = sum(r.stats.num_draft_depth for r in results)
    # The prompt's pass gives the first; one that was interrupted before it has none.
    emitted = sum(max(0, r.stats.num_output_tokens - 1) for r in results)
    accepted = sum(r.stats.num_accepted for r in results)
    values = {
        "num_output_tokens": tokens,
        "num_verify_steps": steps,
        "num_drafted_steps": sum(r.stats.num_drafted_steps for r in results),
        "acceptance_length": round(emitted / steps, 4) if steps else 0.0,
        "acceptance_rate": round(accepted / depth, 4) if depth else 0.0,
    }
    unknown_keys = frozenset[str]().union(*(r.stats.unknown_keys for r in results))
    return {key: None if key in unknown_keys else value for key, value in values.items()}
