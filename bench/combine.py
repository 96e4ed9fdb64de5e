"""Settings made of others, which choose by measured times, so that only decoding tells of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.paced import PacedDrafter, bind
from specdec.decode.drafters.suffix import SuffixProposer
from specdec.methods import Method
from specdec.methods.suffix import METHOD as SUFFIX
from specdec.methods.suffix import SuffixOptions

from .methods.base import Candidate

NUM_SUFFIX_TOKENS = 15  # that suffix decoding drafts in a chain


def list_combined(fixed: Sequence[Candidate], methods: Sequence[Method]) -> list[Candidate]:
    """A budget for the best setting and for the longest drafts, and the best one in a chain.

    fixed: the settings, best first.
    """
    best, longest = fixed[0], max(fixed, key=lambda c: c.proposer.max_draft_tokens)
    chosen = [best] if longest is best else [best, longest]
    found = [add_budget(c) for c in chosen]
    (method, *others) = methods
    if not others and method.source != "target":
        found.append(add_suffix(best, method))
    return found


def add_budget(candidate: Candidate) -> Candidate:
    """The same with `--draft-budget auto`."""
    return dataclasses.replace(
        candidate,
        name=f"{candidate.name}, budget auto",
        proposer=pace(candidate.proposer),
        run=candidate.run | {"draft_budget": "auto"},
    )


def pace(drafter: Drafter) -> Drafter:
    """What drafts as a drafter does, as far as that pays."""
    return bind(copy.copy(drafter.fit_budget()))  # what a run changes is made again for each


def put_suffix_before(drafter: Drafter, num_tokens: int = NUM_SUFFIX_TOKENS) -> Drafter:
    """Suffix decoding where that promises more, else what was given."""
    suffix = SuffixProposer(SuffixOptions(max_tokens=num_tokens))
    return PacedDrafter([[suffix], [drafter]], is_fixed=True)


def add_suffix(candidate: Candidate, method: Method) -> Candidate:
    """The same behind suffix decoding, with `--draft-chain`."""
    build = dict(candidate.build)
    if "max_draft_len" in build:
        build["max_draft_len"] = max(build["max_draft_len"], NUM_SUFFIX_TOKENS)
    return dataclasses.replace(
        candidate,
        name=f"suffix of {NUM_SUFFIX_TOKENS}, else {candidate.name}",
        proposer=put_suffix_before(candidate.proposer),
        build=build,
        run=candidate.run
        | {"suffix_max_tokens": NUM_SUFFIX_TOKENS, "draft_chain": f"{SUFFIX.name},{method.name}"},
    )
