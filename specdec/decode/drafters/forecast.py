"""Forecasts of steps: the tokens per second that drafts promise, by what they and steps cost.

Legend: sizes are numbers of drafted nodes that a step verifies of each row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specdec.decode.drafters.promise import Promise

KNOWN_DRAFTS = 8  # drafts of some drafters of a chain, before these may go on alone
FIRST_TOKENS = 20.0  # promised tokens of which as many are believed to have been accepted at first
KEPT_TOKENS = 0.99  # weight of the tokens before the newest step's


@dataclasses.dataclass
class Credit:
    """How much of what drafts promise comes.

    Drafters, and their nodes, are chosen where they promise the most, and so where chance makes
    them promise too much. promised_tokens, accepted_tokens: of what was verified, newer steps
    counting more.
    """

    promised_tokens: float = FIRST_TOKENS
    accepted_tokens: float = FIRST_TOKENS

    @property
    def share(self) -> float:
        """Return the tokens that were accepted over those that were promised."""
        return self.accepted_tokens / self.promised_tokens

    def judge(self, promised_tokens: float, accepted_tokens: float) -> None:
        """Take what the drafts of a step had promised of what was verified, and what came of it."""
        self.promised_tokens = KEPT_TOKENS * self.promised_tokens + promised_tokens
        self.accepted_tokens = KEPT_TOKENS * self.accepted_tokens + accepted_tokens


@dataclasses.dataclass
class DrafterSet:
    """Drafters of a chain that may draft for a step, and what their drafts promise.

    left_out: the other drafters. num_drafts: that the promise was learned from.
    """

    promise: Promise
    left_out: frozenset[int] = frozenset()
    num_drafts: int = 0

    @property
    def is_known(self) -> bool:
        """Return whether enough is known to let these drafters draft without the others."""
        return self.num_drafts >= KNOWN_DRAFTS


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Steps for which some drafters of a chain draft.

    gains: tokens that drafts bring, by size. expected_seconds: of a step that may verify each size,
    if drafts are as usual. draft_seconds: of its draft. best_size: of the most tokens per second.
    rate: these, or those of plain steps where they are more. gain: the best size's tokens per
    second by those of plain steps. sure_gain: tokens that drafts of the best size bring as far as
    is known.
    """

    drafter_set: DrafterSet
    gains: Sequence[float] = ()
    expected_seconds: Sequence[float] = ()
    draft_seconds: Sequence[float] = ()
    best_size: int = 0
    rate: float = 0.0
    gain: float = 1.0
    sure_gain: float = 0.0

    @property
    def left_out(self) -> frozenset[int]:
        """Return the drafters of the chain that do not draft."""
        return self.drafter_set.left_out


def forecast_steps(
    drafter_set: DrafterSet, credit: Credit, num_rows: int, plain_seconds: float,
    expected_seconds: Sequence[float], draft_seconds: Sequence[float],
) -> Forecast:  # fmt: skip
    """Return the forecast of steps of so many rows.

    credit: how much of such promises has come. plain_seconds: of a step without drafts.
    expected_seconds, draft_seconds: by size, from one on, or of the largest size alone where drafts
    are verified whole.
    """
    gains = (drafter_set.promise.gains * credit.share).tolist()
    num_smaller = len(gains) - len(expected_seconds)
    gains = gains[num_smaller:]
    rates = [
        num_rows * (1 + gain) / (draft + step)
        for gain, draft, step in zip(gains, draft_seconds, expected_seconds, strict=True)
    ]
    best_rate, plain_rate = max(rates), num_rows / plain_seconds
    best = rates.index(best_rate)
    return Forecast(
        drafter_set, gains, expected_seconds, draft_seconds, num_smaller + 1 + best,
        rate=max(best_rate, plain_rate), gain=best_rate / plain_rate,
        sure_gain=drafter_set.promise.trust * gains[best],
    )  # fmt: skip
