"""Lookahead: the target fills a window of guesses itself, and verifies the n-grams they form."""

from __future__ import annotations

import dataclasses
from typing import Any

from specdec.errors import UsageError
from specdec.options import as_options, no_speculation, refuse_contradictions, setting

from .base import Method, read_literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookaheadDraft:
    """Options of every command that decodes."""

    lookahead_config: str | None = setting(
        takes_list=True,
        metavar="[W,N,G]",
        help="Columns of the window, tokens in an n-gram, n-grams verified in a step. If not given,"
        " the largest [n,n,n] that an engine built for lookahead has room for.",
    )


LOOKAHEAD_FORM = "[7,7,7]: columns of the window, tokens of an n-gram (2 or more), n-grams verified"


def count_lookahead_tokens(window_size: int, ngram_size: int, verification_set_size: int) -> int:
    """Draft tokens that lookahead's [W,N,G] makes a step."""
    return (window_size + verification_set_size) * (ngram_size - 1) - 1


@dataclasses.dataclass(frozen=True)
class LookaheadConfig:
    """W, N and G: columns of the window, tokens of an n-gram, n-grams verified at once."""

    window_size: int
    ngram_size: int
    verification_set_size: int

    @property
    def max_draft_tokens(self) -> int:
        """Most nodes of the tree besides its root; TensorRT-LLM's max_draft_len for [W,N,G]."""
        return count_lookahead_tokens(*dataclasses.astuple(self))

    @property
    def max_draft_depth(self) -> int:
        """Most draft tokens that one verify step can accept."""
        return max(self.ngram_size - 1, self.window_size + self.ngram_size - 3)

    def __str__(self) -> str:
        return f"[{self.window_size},{self.ngram_size},{self.verification_set_size}]"


def read_options(settings: Any) -> LookaheadConfig | None:
    """Return what --lookahead-config says, None where it is absent; raise UsageError."""
    text = as_options(settings, LookaheadDraft).lookahead_config
    if text is None:
        return None
    refuse_contradictions(settings, [no_speculation("lookahead_config")])
    sizes = read_literal("--lookahead-config", text, LOOKAHEAD_FORM, length=3)
    if any(type(size) is not int or size < 1 for size in sizes) or sizes[1] < 2:
        raise UsageError(f"--lookahead-config is {text!r}", f"write it as {LOOKAHEAD_FORM}")
    return LookaheadConfig(*sizes)


METHOD = Method(
    name="lookahead",
    title="Lookahead",
    paper="https://arxiv.org/abs/2402.02057",
    mode="lookahead_decoding",
    source="target",
    read=read_options,
    joins_chains=False,  # it reads the states of nodes that it has placed itself
    options={"draft": LookaheadDraft},
)
