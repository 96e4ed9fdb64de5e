"""The one table of when suffixes and n-grams draft without a flag: before a drafter, or alone.

Their drafts are verified only while that is faster, as `Pace` decides for each step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import specdec
from specdec.engine.layout import EngineConfig
from specdec.files.ngrams import hash_tokens, read_vocabulary
from specdec.methods import ngram
from specdec.methods.chain import Chain
from specdec.methods.suffix import DEFAULT_TOKENS, METHOD, SuffixOptions

if TYPE_CHECKING:
    from specdec.decode.drafters import Drafting

TABLES = Path(specdec.__file__).parent / "tables"  # of n-grams, one for each vocabulary


@dataclasses.dataclass(frozen=True)
class Situation:
    """An engine, what options ask of its drafts, and the type of its device."""

    config: EngineConfig
    drafting: Drafting
    device: str


# Why suffixes do not draft by themselves, by a test of the situation. Not here, since they draft:
# ranks (drafts are made on rank 0, which leads the others), hybrids (one path of a tree is
# verified), mixtures, sampled requests (each token is the target's own choice), requests with a
# grammar, and those that keep trees or logits. Who compares with plain decoding on purpose (bench,
# diagnose, verify, audit, a request with "speculation": false) runs that beside or instead.
EXCLUSIONS: tuple[tuple[str, Callable[[Situation], bool]], ...] = (
    # A flag of a method, --use-logits among them, means that method, and a chain its members.
    ("options say who drafts", lambda s: bool(s.drafting.options or s.drafting.chain)),
    # Verified whole in every step, suffixes lose wherever a text does not repeat itself.
    ("drafts are as long as the options say", lambda s: s.drafting.budget.mode == "fixed"),
    ("the engine's own drafter is measured", lambda s: s.drafting.counts_own),
    ("the build fixed what is verified", lambda s: s.config.has_fixed_drafts),
    ("the engine's method drafts alone", lambda s: not _joins_chains(s.config)),
    ("a step has no room for drafts", lambda s: s.config.draft_room < 1),
    # There plain steps are recorded, and begun ahead of the host: no gain was measured yet.
    ("the device is a GPU", lambda s: s.device != "cpu"),
)


def _joins_chains(config: EngineConfig) -> bool:
    return config.default_method is None or config.default_method.joins_chains


def add_suffixes(config: EngineConfig, drafting: Drafting, device: str) -> Drafting:
    """Return options by which suffixes draft too, where nothing in the table speaks against it.

    N-grams draft into their tree, where specdec has a table of the tokenizer. device: its type.
    """
    situation = Situation(config, drafting, device)
    if any(excludes(situation) for _, excludes in EXCLUSIONS):
        return drafting
    room, method = config.draft_room, config.default_method
    options: dict[str, Any] = {METHOD.name: SuffixOptions(max_tokens=min(DEFAULT_TOKENS, room))}
    if (table := find_table(drafting.tokenizer)) is not None and room > DEFAULT_TOKENS:
        options[ngram.METHOD.name] = ngram.NgramOptions(
            path=table, max_tokens=min(ngram.DEFAULT_TOKENS, room - DEFAULT_TOKENS)
        )
    chain: Chain = (tuple(options),) if method is None else (tuple(options), (method.name,))
    is_alone = len(options) == 1 and method is None
    return dataclasses.replace(
        drafting, options=options, is_default=True, chain=None if is_alone else chain
    )


def find_table(tokenizer: Any) -> Path | None:
    """Return the file of the table that specdec has for a tokenizer of transformers, if any."""
    if tokenizer is None:
        return None
    for path in sorted(TABLES.glob("*.safetensors")):
        num_tokens, sha256 = read_vocabulary(path)
        if num_tokens <= len(tokenizer) and hash_tokens(tokenizer, num_tokens) == sha256:
            return path
    return None
