"""Causes why speculation is not faster, each with its evidence and the gain of its removal.

Everything here is arithmetic on measurements. With C the time of a speculative step, P the time of
a plain step and E the tokens that a speculative step emits, speculation is E P / C times as fast; E
must exceed C / P, the break-even. A cause's gain is the ratio without the cause over the ratio now.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

GOOD_RATE = 0.8  # good drafters' accepted share of the draft tokens that a step reaches
LEAST_GAIN = 1.05  # smallest gain that is reported
LEAST_STEPS = 30  # fewest steps for a verdict on a range of context lengths
FALL = 0.7  # share of the best acceptance so far, below which a range of contexts is suspect
SATURATED = 0.9  # share of the largest float16
MAX_FLOAT16 = 65504.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """Measurements of one batch size.

    speculation, plain: milliseconds of a step by phase, and `total`. step_ms: milliseconds of a
    verify step by tokens per request. tokens_per_step: tokens that a step verifies for a request.
    by_position: share of steps that accept at least 1, 2, ... draft tokens. contexts: (tokens
    before a step, draft tokens it accepted). ratio: speculation's tokens per second over plain
    decoding's, prompts included; step_ratio: without them. smallest_batch: size of the smallest
    batch that was measured, and its ratio. prefill_share: share of plain decoding that reads
    prompts. is_trained: whether the drafter has weights. in_use: names of remedies, as in `advise`,
    that the engine has already.
    """

    batch_size: int
    speculation: dict[str, float]
    plain: dict[str, float]
    step_ms: dict[int, float]
    tokens_per_step: float
    acceptance_length: float
    by_position: Sequence[float]
    contexts: Sequence[tuple[int, int]]
    ratio: float
    step_ratio: float
    smallest_batch: tuple[int, float]
    prefill_share: float
    is_trained: bool = True
    in_use: frozenset[str] = frozenset()

    @property
    def break_even(self) -> float:
        """Number of tokens that a step must emit to be as fast as plain decoding."""
        return self.speculation["total"] / self.plain["total"]


@dataclasses.dataclass(frozen=True)
class Cause:
    """Cause why speculation is not faster, and its remedy.

    gain: speed without the cause over the speed now; None where that cannot be computed.
    is_certain: whether the cause is a fault at any gain.
    """

    name: str
    evidence: str
    remedy: str
    gain: float | None = None
    is_certain: bool = False

    def to_json(self) -> dict[str, Any]:
        gain = None if self.gain is None else round(self.gain, 3)
        return dataclasses.asdict(self) | {"gain": gain}


def rank_causes(facts: BatchFacts, suspects: Sequence[Cause]) -> list[Cause]:
    """Return the certain causes, then those with a gain, by gain, then the suspected ones.

    suspects: causes without a gain, certain or not.
    """
    causes = [cause for find_cause in FINDERS if (cause := find_cause(facts)) is not None]
    costly = [c for c in causes if c.gain is not None and c.gain >= LEAST_GAIN]
    certain = [c for c in suspects if c.is_certain]
    uncertain = [c for c in suspects if not c.is_certain]
    return [*certain, *sorted(costly, key=lambda c: -(c.gain or 0.0)), *uncertain]


def advise(facts: BatchFacts, remedy: str, **remedies: str) -> str:
    """Return a remedy, followed by those of `remedies` that the engine lacks."""
    texts = [text for name, text in remedies.items() if name not in facts.in_use]
    return "; ".join([remedy, *texts])


def find_low_acceptance(facts: BatchFacts) -> Cause | None:
    """Find a drafter that is right less often than a good one would be."""
    if not facts.by_position:
        return None
    good_length = sum(GOOD_RATE**n for n in range(len(facts.by_position) + 1))
    shares = ", ".join(f"{share:.0%}" for share in facts.by_position)
    return Cause(
        "few drafted tokens are accepted",
        f"a step emits {facts.acceptance_length:.2f} tokens and breaks even at"
        f" {facts.break_even:.2f}; steps that accept at least 1, 2, ...: {shares}; a drafter that"
        f" is right {GOOD_RATE:.0%} of the time would emit {good_length:.2f}",
        "train the drafter longer, on the target's own answers to prompts such as these"
        if facts.is_trained
        else "n-grams draft what a text repeats: for others, take a drafter with weights",
        good_length / max(facts.acceptance_length, 1.0),
    )


def find_long_draft(facts: BatchFacts) -> Cause | None:
    """Find last positions whose acceptance is not worth their cost."""
    depth = len(facts.by_position)
    if depth < 2:
        return None
    plain_ms = facts.plain["total"]
    draft_ms = facts.speculation["total"] - plain_ms
    speeds = [
        (1 + sum(facts.by_position[:n])) / (plain_ms + draft_ms * n / depth)
        for n in range(depth + 1)
    ]
    best_depth = max(range(depth + 1), key=speeds.__getitem__)
    price = draft_ms / depth / plain_ms
    advice = f"draft {best_depth} tokens" if best_depth else "decode without speculation"
    return Cause(
        "the draft is too long",
        f"each of {depth} positions costs {price:.0%} of a plain step on average, and pays only"
        f" where at least as large a share of steps accepts it; the last is accepted in"
        f" {facts.by_position[-1]:.0%}",
        f"{advice}; specdec bench --sweep OPTION=A,B,C measures which",
        speeds[best_depth] / speeds[depth],
    )


def find_slow_drafter(facts: BatchFacts) -> Cause | None:
    """Find a drafter that takes much of a step."""
    total, draft = facts.speculation["total"], facts.speculation["draft"]
    return Cause(
        "the drafter takes long",
        f"drafting takes {draft:.3f} of {total:.3f} ms, {draft / total:.0%} of a step",
        advise(
            facts,
            "use a smaller drafter, fewer beams or a shorter draft",
            rounded_drafter="build with --drafter-weights int8",
        ),
        total / max(1e-9, total - draft),
    )


def find_costly_verification(facts: BatchFacts) -> Cause | None:
    """Find verify steps over a tree that cost far more than steps over one token."""
    total, verify = facts.speculation["total"], facts.speculation["verify"]
    tree_ms = verify - facts.plain["verify"]
    costs = ", ".join(f"{n}: {ms / facts.step_ms[1]:.2f}" for n, ms in facts.step_ms.items())
    return Cause(
        "verification is expensive on this machine",
        f"a step verifies {facts.tokens_per_step:.1f} tokens a request in {verify:.3f} ms, a plain"
        f" one takes {facts.plain['verify']:.3f} ms; times of one token, by tokens: {costs}",
        advise(
            facts,
            "verify a smaller tree",
            bfloat16="convert with --dtype bfloat16",
            kernels="build with --optimize native",
        ),
        total / max(1e-9, total - max(0.0, tree_ms)),
    )


def find_overhead(facts: BatchFacts) -> Cause | None:
    """Find acceptance and bookkeeping that take longer than in plain decoding."""
    total = facts.speculation["total"]
    overhead, plain = (
        times["accept"] + times["other"] for times in (facts.speculation, facts.plain)
    )
    return Cause(
        "acceptance and bookkeeping take long",
        f"they take {overhead:.3f} of {total:.3f} ms a step, {plain:.3f} ms in a plain one",
        "a larger target makes them small; for a small one, a smaller tree does",
        total / max(1e-9, total - max(0.0, overhead - plain)),
    )


def find_large_batch(facts: BatchFacts) -> Cause | None:
    """Find a batch in which speculation wins less than in a smaller one."""
    size, ratio = facts.smallest_batch
    if size == facts.batch_size:
        return None
    return Cause(
        "the batch is large",
        f"speculation is {facts.ratio:.2f} times as fast with {facts.batch_size} requests at once"
        f" and {ratio:.2f} times with {size}: a full batch uses the machine without it",
        advise(facts, "draft less in large batches", budget="--draft-budget auto does that"),
        ratio / max(1e-9, facts.ratio),
    )


def find_long_prompts(facts: BatchFacts) -> Cause | None:
    """Find prompts whose passes, which have no drafts, take much of the time."""
    return Cause(
        "the prompts take much of the time",
        f"{facts.prefill_share:.0%} of plain decoding is the prompts' own passes; without them"
        f" speculation is {facts.step_ratio:.2f} times as fast",
        "ask for longer outputs, or take shared prefixes with --kv-cache-enable-block-reuse",
        facts.step_ratio / max(1e-9, facts.ratio),
    )


def find_long_context(facts: BatchFacts) -> Cause | None:
    """Find a trained drafter whose acceptance falls where the text has grown long."""
    if not facts.is_trained:
        return None
    ranges: dict[int, list[int]] = {}
    for length, accepted in facts.contexts:
        ranges.setdefault(length.bit_length(), []).append(accepted)
    means = {
        bits: statistics.fmean(counts)
        for bits, counts in sorted(ranges.items())
        if len(counts) >= LEAST_STEPS
    }
    best_mean = 0.0
    for mean in means.values():
        if mean < FALL * best_mean:
            overall_mean = statistics.fmean(accepted for _, accepted in facts.contexts)
            range_texts = ", ".join(f"from {1 << (b - 1)}: {m:.2f}" for b, m in means.items())
            return Cause(
                "acceptance falls in long contexts",
                f"draft tokens accepted a step, by tokens before it: {range_texts}",
                "train the drafter on sequences as long as these (--model-max-length)",
                (1 + best_mean) / (1 + overall_mean),
            )
        best_mean = max(best_mean, mean)
    return None


FINDERS: tuple[Callable[[BatchFacts], Cause | None], ...] = (
    find_low_acceptance, find_long_draft, find_slow_drafter, find_costly_verification,
    find_overhead, find_large_batch, find_long_prompts, find_long_context,
)  # fmt: skip


def find_overflow(dtype: str, max_magnitude: float) -> Cause | None:
    """Find values of a float16 engine that overflow, or are about to.

    max_magnitude: largest magnitude of a hidden value or logit; it may be infinite.
    """
    if dtype != "float16" or max_magnitude <= SATURATED * MAX_FLOAT16:
        return None
    return Cause(
        "float16 overflows",
        f"the largest hidden value or logit is {max_magnitude:g}, float16 ends at {MAX_FLOAT16:g}",
        "convert with --dtype bfloat16",
        is_certain=True,
    )


def find_unused_template(has_template: bool, num_messages: int) -> Cause | None:
    """Find bare prompts for a chat model. num_messages: prompts that are conversations."""
    if not has_template or num_messages:
        return None
    return Cause(
        "the chat template is not used",
        "the tokenizer has one and no prompt goes through it: drafters of chat models are trained"
        " on conversations",
        'write prompts as {"messages": [...]} or {"turns": [...]}',
    )


def find_missing_kernels(device: str, has_kernels: bool) -> Cause | None:
    """Find an engine that runs on torch's own operators."""
    if device != "cpu" or has_kernels:
        return None
    return Cause(
        "the engine has no compiled kernels",
        "it runs on torch's own operators, in which a step of several tokens costs more",
        "build it again with --optimize native, where a C++ compiler is installed",
    )
