"""Account of the time that drafts win and lose beside plain decoding."""

from __future__ import annotations

import dataclasses

LOSS_SHARE = 0.02  # of the time of plain decoding, what drafts may lose
TRIAL_SHARE = 0.009  # of the same, what trials may lose of drafts that are believed not to pay


@dataclasses.dataclass
class Account:
    """Seconds of drafted steps compared with those of plain ones for as many tokens.

    spent: of all steps. lost: by drafts, less than nothing where they won. read: by drafters, for
    prompts. for_trials: what trials of drafts that are believed not to pay may lose yet, what the
    drafter reads for them included; it grows only while that is so, so that what few requests
    won does not pay for slow steps of many.
    """

    spent: float = 0.0
    lost: float = 0.0
    read: float = 0.0
    for_trials: float = 0.0

    def find_limit(self, ahead: float) -> float:
        """Return the seconds that may be lost. ahead: seconds of plain decoding to come."""
        return LOSS_SHARE * (self.spent + ahead) - self.lost

    def add(self, seconds: float, lost: float, *, is_trial: bool) -> None:
        """Take a step's seconds, and what its drafts lost."""
        self.spent += seconds
        self.lost += lost
        if is_trial:
            self.for_trials += TRIAL_SHARE * seconds - lost
