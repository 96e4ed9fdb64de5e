"""Lookahead: the target fills a window of guesses itself, and verifies the n-grams they form."""

from __future__ import annotations

import dataclasses

from specdec.settings import setting

from .base import Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookaheadDraft:
    """Options of every command that decodes."""

    lookahead_config: str | None = setting(
        metavar="[W,N,G]",
        help="Lookahead: columns of the window, tokens of an n-gram, n-grams verified a step; the"
        " largest [n,n,n] that the engine has room for if not given.",
    )


METHOD = Method(
    name="lookahead",
    title="Lookahead",
    paper="https://arxiv.org/abs/2402.02057",
    mode="lookahead_decoding",
    source="target",
    options={"draft": LookaheadDraft},
)


def count_lookahead_tokens(window_size: int, ngram_size: int, verification_set_size: int) -> int:
    """Draft tokens that lookahead's [W,N,G] makes a step."""
    return (window_size + verification_set_size) * (ngram_size - 1) - 1
