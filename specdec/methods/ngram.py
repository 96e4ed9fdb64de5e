"""N-gram table: the tokens that follow the last few in a corpus are drafted, as a tree."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from specdec.errors import UsageError
from specdec.options import as_options, no_speculation, refuse_contradictions, setting

from .base import Method, number

# Most of what a table's guesses bring; each more of them takes the time of a look-up.
DEFAULT_TOKENS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramDraft:
    """Options of every command that decodes."""

    ngram_table: Path | None = setting(
        metavar="FILE",
        help="Draft what followed the last few tokens in the texts that `specdec-train ngrams` has"
        " counted. Where no option says who drafts and specdec has a table for the model's"
        " tokenizer, that one drafts beside suffixes, while it is faster.",
    )  # fmt: skip
    ngram_max_tokens: int | None = number(
        help=f"With --ngram-table: tokens of a step's tree, at most.  [default: {DEFAULT_TOKENS}]",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramOptions:
    """How drafts are taken from a table. path: its file. max_tokens: of a step's tree."""

    path: Path
    max_tokens: int = DEFAULT_TOKENS

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens drafted a step, which an engine has to have room for."""
        return self.max_tokens


def read_options(settings: Any) -> NgramOptions | None:
    """Return the options of a run with a table, None of any other; raise UsageError."""
    options = as_options(settings, NgramDraft)
    if options.ngram_table is None:
        if options.ngram_max_tokens is not None:
            raise UsageError(
                "--ngram-max-tokens without --ngram-table",
                "say which table drafts, or leave it out",
            )
        return None
    refuse_contradictions(settings, [no_speculation("ngram_table")])
    return NgramOptions(
        path=options.ngram_table, max_tokens=options.ngram_max_tokens or DEFAULT_TOKENS
    )


METHOD = Method(
    name="ngram",
    title="N-gram table",
    paper="https://arxiv.org/abs/2311.08252",
    mode="draft_tokens_external",
    source="target",
    read=read_options,
    options={"draft": NgramDraft},
)
