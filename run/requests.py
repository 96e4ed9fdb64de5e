"""A request and its result, the same for every backend."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

FinishReason = Literal["length", "eos", "stop"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, tokenized, with its own limit. Generation ends at any of `end_ids`."""

    index: int
    input_ids: list[int]
    max_output_len: int
    end_ids: frozenset[int]
    input_text: str = ""


@dataclasses.dataclass
class RequestStats:
    """Counts of one request's verify steps; always kept.

    The prompt's own forward pass yields the first token outside of any verify step.
    accepted_histogram[n]: verify steps in which n draft tokens were accepted.
    """

    accepted_histogram: list[int]
    num_output_tokens: int = 0
    num_verify_steps: int = 0
    num_draft_tokens: int = 0
    num_draft_depth: int = 0
    num_accepted: int = 0

    def count_step(self, *, num_draft_tokens: int, depth: int, num_accepted: int) -> None:
        """Record a verify step; `depth` is the longest path proposed."""
        self.num_verify_steps += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_draft_depth += depth
        self.num_accepted += num_accepted
        self.accepted_histogram[num_accepted] += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verify step, bonus token included; 0 without a verify step."""
        return (
            (self.num_output_tokens - 1) / self.num_verify_steps if self.num_verify_steps else 0.0
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed along the accepted path's depth."""
        return self.num_accepted / self.num_draft_depth if self.num_draft_depth else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "num_output_tokens": self.num_output_tokens,
            "num_verify_steps": self.num_verify_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted": self.num_accepted,
            "acceptance_length": round(self.acceptance_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "accepted_histogram": self.accepted_histogram,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a request produced. output_ids: new tokens only, the ending token included."""

    request: Request
    output_ids: list[int]
    finish_reason: FinishReason
    stats: RequestStats


def sum_stats(results: list[Result]) -> dict[str, float]:
    """Acceptance over all requests' verify steps, and the number of tokens."""
    tokens = sum(r.stats.num_output_tokens for r in results)
    steps = sum(r.stats.num_verify_steps for r in results)
    depth = sum(r.stats.num_draft_depth for r in results)
    emitted = sum(r.stats.num_output_tokens - 1 for r in results)
    accepted = sum(r.stats.num_accepted for r in results)
    return {
        "num_output_tokens": tokens,
        "num_verify_steps": steps,
        "acceptance_length": round(emitted / steps, 4) if steps else 0.0,
        "acceptance_rate": round(accepted / depth, 4) if depth else 0.0,
    }
