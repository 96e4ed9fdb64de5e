"""Lookahead decoding: the target itself fills a pool of n-grams, from which it is drafted.

Fu et al., "Break the sequential dependency of LLM inference using lookahead decoding",
https://arxiv.org/abs/2402.02057. There are no weights.

The window holds N - 1 rows of W guessed tokens. The token in row r and column c is a guess for the
place r + c after the newest token, made from the one above it; row 0 is a text, whose token in
column 0 is the newest token itself. Toy example, W = 3, N = 4, newest token 7:

    row 0   7 a b       one tree   7 - a - b - e - h     (column 2: 7 a b, then e h below b)
    row 1   c d e                  |   +- d - g          (column 1)
    row 2   f g h                  +- c - f              (column 0)

So what a token of the window sees, the paper's figure 2, is the path to it, and one forward pass
over one tree evaluates the window with the n-grams that are to be verified. Equal paths are one
node, and a node of the window is accepted like any other if it holds the target's token.

The target's tokens after the last row, here f, g and h, become the new last row; each column is
then an n-gram for the pool; row 0 drops out. Legend: B rows, T nodes, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import DraftContext, Drafter
from specdec.decode.requests import ActiveRequest
from specdec.engine.ranking import find_best
from specdec.engine.step import States
from specdec.engine.transfers import to_device, to_host
from specdec.engine.tree import Tree, TreeBuilder
from specdec.errors import SpecDecError, UsageError
from specdec.methods.lookahead import METHOD, LookaheadConfig

if TYPE_CHECKING:
    from specdec.engine.decoder import Decoder


def make_drafter(context: DraftContext) -> LookaheadDrafter:
    """Open the window that is asked for, or the largest that the engine was built for."""
    assert context.engine is not None
    config = context.engine.config
    mode, draft_room = config.build.speculative_decoding_mode, config.build.max_draft_len
    window: LookaheadConfig | None = context.options
    if window is None or config.has_fixed_drafts:
        window = choose_lookahead(window, mode, draft_room)
    assert window is not None
    context.check_room(METHOD, window.max_draft_tokens)
    return LookaheadDrafter(window, context.engine.decoder)


def choose_lookahead(
    config: LookaheadConfig | None, mode: str | None, max_draft_len: int
) -> LookaheadConfig | None:
    """Return the window of a lookahead engine, None for an engine of another mode.

    What is not given is the largest [n,n,n] that the engine has room for. SpecDecError where it
    has no room, and UsageError for a window that an engine has no use for.
    """
    needed_mode = METHOD.mode
    if mode != needed_mode:
        if config is not None:
            raise UsageError(
                f"--lookahead-config has no effect with an engine that was built with"
                f" speculative_decoding_mode {mode}",
                f"build it from a plain checkpoint with --speculative-decoding-mode {needed_mode}"
                f" --max-draft-len {config.max_draft_tokens}",
            )
        return None
    config = config or _find_largest(max_draft_len)
    if config.max_draft_tokens > max_draft_len:
        raise SpecDecError(
            f"lookahead {config} drafts {config.max_draft_tokens} tokens a step, the engine was"
            f" built with max_draft_len {max_draft_len}",
            "give a smaller --lookahead-config, or build with --max-draft-len"
            f" {config.max_draft_tokens}",
        )
    return config


def _find_largest(max_draft_len: int) -> LookaheadConfig:
    size = 2
    while LookaheadConfig(size + 1, size + 1, size + 1).max_draft_tokens <= max_draft_len:
        size += 1
    return LookaheadConfig(size, size, size)


def fit_lookahead(max_draft_len: int) -> LookaheadConfig:
    """Return the window of exactly so many draft tokens whose three sizes are the most alike."""
    total = max_draft_len + 1  # (W + G) (N - 1)
    sizes = [n for n in range(2, total + 1) if total % (n - 1) == 0 and total // (n - 1) > 1]
    size = min(sizes, key=lambda n: abs(total // (n - 1) - 2 * n))
    columns = total // (size - 1)
    return LookaheadConfig(columns - columns // 2, size, columns // 2)


class NgramPool:
    """N-grams by their first token: the newest `max_per_token` continuations of each."""

    def __init__(self, max_per_token: int) -> None:
        self.max_per_token = max_per_token
        self._continuations: dict[int, dict[tuple[int, ...], None]] = {}  # oldest first

    def add(self, ngram: Sequence[int]) -> None:
        """Put an n-gram in, or make it the newest again."""
        first_token, *continuation = ngram
        continuations = self._continuations.setdefault(first_token, {})
        continuations.pop(tuple(continuation), None)
        continuations[tuple(continuation)] = None
        if len(continuations) > self.max_per_token:
            del continuations[next(iter(continuations))]

    def find(self, first_token: int) -> Iterable[tuple[int, ...]]:
        """Return the continuations of a token, newest first."""
        return reversed(self._continuations.get(first_token, {}))


class Lookahead:
    """One request's window and pool."""

    def __init__(self, config: LookaheadConfig, prompt: Sequence[int]) -> None:
        self.config = config
        self.pool = NgramPool(config.verification_set_size)
        # The first guesses are tokens of the prompt; the text does not depend on them.
        generator = np.random.Generator(np.random.Philox(key=0))
        shape = (config.ngram_size - 1, config.window_size)
        self.window: list[list[int]] = generator.choice(np.array(prompt), shape).tolist()
        self._num_steps = 0
        self._text: list[int] = []  # its last tokens, fewer than an n-gram
        self._num_tokens = 0  # of the output that are known
        self._read(prompt)
        self.ends: list[int] = []  # by column, the last row's node in the tree under way, if one is

    def grow(self, output: Sequence[int]) -> Tree:
        """Return the tree over the pool's n-grams and the window, for the text so far."""
        self._read(output[self._num_tokens :])
        self._num_tokens = len(output)
        root = output[-1]
        self.window[0][0] = root
        builder = TreeBuilder(root)
        for ngram in self.pool.find(root):
            node = 0
            for token in ngram:
                node = builder.add(node, token)
        self.ends = []
        start = 0
        for column in range(self.config.window_size):
            start = builder.add(start, self.window[0][column]) if column else 0
            node = start
            for row in self.window[1:]:
                node = builder.add(node, row[column])
            self.ends.append(node)
        return builder.build()

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the target's tokens after the last row, one a column."""
        size = self.config.ngram_size
        self._num_steps += 1
        if self._num_steps >= size - 1:  # before, guesses that follow nothing are among the rows
            for column in zip(*self.window, tokens, strict=True):
                self.pool.add(column)
        self.window = [*self.window[1:], list(tokens)]
        self.ends = []

    def _read(self, tokens: Iterable[int]) -> None:
        """Put the n-grams of the text itself into the pool."""
        for token in tokens:
            self._text.append(token)
            if len(self._text) == self.config.ngram_size:
                self.pool.add(self._text)
                del self._text[0]


class LookaheadDrafter(Drafter):
    """Proposes the tree of each request's n-grams and window, and moves the window on."""

    is_indivisible = True

    def __init__(self, config: LookaheadConfig, decoder: Decoder) -> None:
        self.config = config
        self.max_draft_tokens = config.max_draft_tokens
        self.max_draft_depth = config.max_draft_depth
        self._decoder = decoder
        self._states: dict[int, Lookahead] = {}  # by row

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Forget the windows."""
        self._states = {}

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        """Give each request a window of its own."""
        for request in requests:
            self._states[request.row] = Lookahead(self.config, request.request.input_ids)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Grow each request's tree."""
        return [
            Candidates(self._states[request.row].grow(request.output_ids)) for request in requests
        ]

    def observe(
        self, requests: Sequence[ActiveRequest], states: States, paths: Sequence[Sequence[int]]
    ) -> None:
        """Read the target's tokens after the last row of each window."""
        lookaheads = [self._states[request.row] for request in requests]
        if not lookaheads[0].ends:  # the prompts' own pass, or a step without drafts
            return
        ends = to_device(
            np.array([lookahead.ends for lookahead in lookaheads], np.int64), states.hidden.device
        )
        rows = torch.arange(len(ends), device=states.hidden.device)[:, None]
        best_tokens = find_best(self._decoder.compute_logits(states.hidden[rows, ends]))  # [B, W]
        (tokens,) = to_host(best_tokens)
        for lookahead, row in zip(lookaheads, tokens.tolist(), strict=True):
            lookahead.advance(row)
