"""How many tokens to draft: a fixed number, or what measured acceptance and costs make best."""

from __future__ import annotations

KEEP = 0.9  # weight of what was known before the newest measurement
PROBE_EVERY = 32  # steps without a draft before one is tried again


class DraftLength:
    """Chooses the length of drafts, at most `maximum`; fixed unless `is_auto`.

    With a of the drafted tokens accepted where they are reached, a step of n draft tokens emits
    (1 - a^(n+1)) / (1 - a) tokens (Leviathan et al. 2023, equation 1) and costs n draft steps and
    one verify step of n + 1 tokens; the best n has the most tokens per second. All three are
    measured as the run goes on, and recent steps count most.
    """

    def __init__(self, maximum: int, *, is_auto: bool = False) -> None:
        self.maximum = maximum
        self.is_auto = is_auto
        self._accepted, self._reached = 7.0, 10.0  # a belief that a few steps outweigh
        self._draft_seconds: float | None = None
        self._verify_seconds: dict[int, float] = {}  # by tokens in the step
        self._idle_steps = 0

    def choose(self) -> int:
        """Return the length of the next draft."""
        if not self.is_auto or self._draft_seconds is None or not self._verify_seconds:
            return self.maximum if not self.is_auto else min(4, self.maximum)
        rate = min(self._accepted / self._reached, 0.999)
        best = max(range(self.maximum + 1), key=lambda n: self._get_speed(n, rate))
        if best:
            self._idle_steps = 0
            return best
        self._idle_steps += 1
        return 1 if self._idle_steps % PROBE_EVERY == 0 else 0

    def record_draft(self, num_tokens: int, seconds: float) -> None:
        """Take the time of a draft of `num_tokens`."""
        if num_tokens:
            self._draft_seconds = _blend(self._draft_seconds, seconds / num_tokens)

    def record_verify(self, num_tokens: int, seconds: float) -> None:
        """Take the time of a verify step over `num_tokens` a request."""
        before = self._verify_seconds.get(num_tokens)
        self._verify_seconds[num_tokens] = _blend(before, seconds)

    def record_accepted(self, num_accepted: int, num_drafted: int) -> None:
        """Take how many of a request's drafted tokens were accepted."""
        num_reached = min(num_accepted + 1, num_drafted)  # what follows a rejection tells nothing
        self._accepted = KEEP * self._accepted + (1 - KEEP) * 10 * num_accepted
        self._reached = KEEP * self._reached + (1 - KEEP) * 10 * num_reached

    def _get_speed(self, num_tokens: int, rate: float) -> float:
        assert self._draft_seconds is not None
        emitted = (1 - rate ** (num_tokens + 1)) / (1 - rate)
        cost = num_tokens * self._draft_seconds + self._estimate_verify(num_tokens + 1)
        return emitted / cost

    def _estimate_verify(self, num_tokens: int) -> float:
        """Seconds of a verify step: as measured, or on the line through the nearest two sizes."""
        known = sorted(self._verify_seconds, key=lambda n: abs(n - num_tokens))
        nearest = known[0]
        seconds = self._verify_seconds[nearest]
        if nearest == num_tokens or len(known) == 1:
            return seconds
        slope = (self._verify_seconds[known[1]] - seconds) / (known[1] - nearest)
        return seconds + max(0.0, slope) * (num_tokens - nearest)


def _blend(before: float | None, new: float) -> float:
    return new if before is None else KEEP * before + (1 - KEEP) * new
