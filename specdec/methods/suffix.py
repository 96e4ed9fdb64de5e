"""Suffix decoding: what followed the end of the text wherever it stood before is drafted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from specdec.errors import UsageError
from specdec.options import (
    as_options,
    get_flags,
    list_given,
    name_flag,
    no_speculation,
    refuse_contradictions,
    setting,
)

from .base import Method, number

# With its root as many nodes as the kernels verify in one go. The pace takes of a draft what pays.
DEFAULT_TOKENS = 15
DEFAULT_DEPTH = 16
DEFAULT_FACTOR = 4.0
DEFAULT_PROBABILITY = 0.1
DEFAULT_CACHED_TOKENS = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuffixDraft:
    """Options of every command that decodes."""

    suffix_max_tokens: int | None = number(
        help="Draft what followed the end of the text where it occurred before, as a tree of up to"
        " N tokens in a step, and by no other method. Where no option says who drafts, this drafts"
        f" too: up to {DEFAULT_TOKENS} tokens, while that is faster."
    )
    suffix_max_depth: int | None = setting(
        minimum=1, metavar="D",
        help=f"Tokens at the end of the text to look for, at most.  [default: {DEFAULT_DEPTH}]",
    )  # fmt: skip
    suffix_max_factor: float | None = setting(
        metavar="F",
        help="Draft at most F tokens for each token that was found.  [default:"
        f" {DEFAULT_FACTOR:g}]",
    )  # fmt: skip
    suffix_min_probability: float | None = setting(
        metavar="P",
        help="Draft no token that followed in less than this share of the cases, its whole branch"
        f" counted.  [default: {DEFAULT_PROBABILITY:g}]",
    )  # fmt: skip
    suffix_share_requests: bool = setting(
        False,
        help="Look also in the prompts and outputs of requests of the same run that are finished.",
    )  # fmt: skip
    suffix_max_cached_tokens: int | None = setting(
        minimum=2, metavar="N",
        help="With --suffix-share-requests or --suffix-cache: keep at most N tokens of finished"
        f" requests; the oldest are dropped.  [default: {DEFAULT_CACHED_TOKENS}]",
    )  # fmt: skip
    suffix_cache: Path | None = setting(
        metavar="FILE",
        help="Keep the texts of finished requests in FILE, for later runs and other processes; it"
        " is made if there is none.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuffixOptions:
    """How drafts are taken from the text.

    max_tokens: of a step's tree. max_depth: longest end of the text that is looked for. max_factor:
    tokens drafted for each that was found. min_probability: of a drafted token's whole branch.
    max_cached_tokens: of finished requests, 0 to forget them. cache: the file that keeps them.
    """

    max_tokens: int
    max_depth: int = DEFAULT_DEPTH
    max_factor: float = DEFAULT_FACTOR
    min_probability: float = DEFAULT_PROBABILITY
    max_cached_tokens: int = 0
    cache: Path | None = None

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens drafted a step, which an engine is built for."""
        return self.max_tokens


def read_options(settings: Any) -> SuffixOptions | None:
    """Return the options of a suffix run, None of any other; raise UsageError."""
    options = as_options(settings, SuffixDraft)
    given_flags = [name_flag(name) for name in list_given(settings, SuffixDraft)]
    if not given_flags:
        return None
    refuse_contradictions(settings, [no_speculation(*get_flags(SuffixDraft))])
    if options.suffix_max_tokens is None:
        raise UsageError(
            f"{given_flags[0]} without --suffix-max-tokens", "say how many tokens to draft a step"
        )
    shares = options.suffix_share_requests or options.suffix_cache is not None
    if options.suffix_max_cached_tokens is not None and not shares:
        raise UsageError(
            "--suffix-max-cached-tokens without --suffix-share-requests or --suffix-cache",
            "without them nothing of a finished request is kept; leave one out or give both",
        )
    _check_ranges(options)
    factor, probability = options.suffix_max_factor, options.suffix_min_probability
    cached = options.suffix_max_cached_tokens or DEFAULT_CACHED_TOKENS
    return SuffixOptions(
        max_tokens=options.suffix_max_tokens,
        max_depth=options.suffix_max_depth or DEFAULT_DEPTH,
        max_factor=DEFAULT_FACTOR if factor is None else factor,
        min_probability=DEFAULT_PROBABILITY if probability is None else probability,
        max_cached_tokens=cached if shares else 0,
        cache=options.suffix_cache,
    )


def _check_ranges(options: SuffixDraft) -> None:
    """Raise UsageError for a factor or a probability that is none."""
    factor, probability = options.suffix_max_factor, options.suffix_min_probability
    if factor is not None and not 0 < factor < float("inf"):
        raise UsageError(f"--suffix-max-factor is {factor:g}", "give a number above 0, such as 4")
    if probability is not None and not 0 <= probability <= 1:
        raise UsageError(
            f"--suffix-min-probability is {probability:g}", "give a number from 0 to 1"
        )


METHOD = Method(
    name="suffix",
    title="Suffix decoding",
    paper="https://arxiv.org/abs/2411.04975",
    mode="draft_tokens_external",
    source="target",
    read=read_options,
    options={"draft": SuffixDraft},
)
