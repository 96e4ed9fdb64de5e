"""Account of the time that drafts win and lose beside plain decoding."""

from __future__ import annotations

import dataclasses

LOSS_SHARE = 0.02  # of the time of plain decoding, what drafts may lose
READ_SHARE = 0.04  # of the time of all steps, what drafters may take to read prompts
TRIAL_SHARE = 0.009  # of that time, what trials of drafts may lose that are believed not to pay


@dataclasses.dataclass
class Account:
    """Seconds of drafted steps compared with those of plain ones for as many tokens.

    spent_seconds: of all steps. lost_seconds: by drafts, less than nothing where they won.
    reading_seconds: of drafters that read prompts. trial_allowance: seconds that trials of drafts
    that are believed not to pay may lose yet, reading for them included; it grows only while that
    is so, so that what few requests won does not pay for slow steps of many.
    """

    spent_seconds: float = 0.0
    lost_seconds: float = 0.0
    reading_seconds: float = 0.0
    trial_allowance: float = 0.0

    def find_limit(self, seconds_ahead: float) -> float:
        """Return the seconds that may be lost. seconds_ahead: seconds of plain decoding to come."""
        return LOSS_SHARE * (self.spent_seconds + seconds_ahead) - self.lost_seconds

    def find_reading_limit(self, seconds_ahead: float) -> float:
        """Return the seconds for which drafters may read prompts.

        That is a share of all the time, and what drafts have won.
        """
        limit = READ_SHARE * (self.spent_seconds + seconds_ahead) - self.reading_seconds
        return max(0.0, limit + max(0.0, -self.lost_seconds))

    def read(self, seconds: float, *, is_trial: bool) -> None:
        """Take the seconds for which drafters have read prompts."""
        self.spent_seconds += seconds
        self.reading_seconds += seconds
        if is_trial:
            self.trial_allowance -= seconds

    def add(self, seconds: float, lost_seconds: float, *, is_trial: bool) -> None:
        """Take a step's seconds, and what its drafts lost."""
        self.spent_seconds += seconds
        self.lost_seconds += lost_seconds
        if is_trial:
            self.trial_allowance += TRIAL_SHARE * seconds - lost_seconds
