"""The one table of when suffixes draft without a flag: before an engine's drafter, or alone.

Their drafts are verified only while that is faster, as `Pace` decides for each step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from specdec.engine.layout import EngineConfig
from specdec.methods.suffix import DEFAULT_TOKENS, METHOD, SuffixOptions

if TYPE_CHECKING:
    from specdec.decode.drafters import Drafting


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

    device: its type.
    """
    situation = Situation(config, drafting, device)
    if any(excludes(situation) for _, excludes in EXCLUSIONS):
        return drafting
    method = config.default_method
    options = SuffixOptions(max_tokens=min(DEFAULT_TOKENS, config.draft_room))
    return dataclasses.replace(
        drafting, options={METHOD.name: options}, is_default=True,
        chain=((METHOD.name,), (method.name,)) if method is not None else None,
    )  # fmt: skip
