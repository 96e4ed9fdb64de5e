"""Whether speculation works: what is drafted, accepted, and whether that lasts."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from .answers import Counts, read_text, read_tokens
from .checks import FAILED, OK, SKIPPED, SUSPECT, Audit, Check, Round

ENOUGH = 20  # drafts, or drafted tokens, from which on nothing accepted is no accident
LEAST_PER_DRAFT = 0.1  # accepted tokens; below, a verify step costs more than it brings
LEAST_RATE = 0.03  # the same of drafted tokens, where drafts are not counted
ENOUGH_BEFORE = 50  # tokens accepted at a position, from which on none at the next is odd
COLLAPSE = 0.5  # of the first round's acceptance
SOURCES = {
    "metrics": "the server's metrics, before and after",
    "answers": "what each answer tells of itself",
    "events": "the sizes of a stream's chunks, which is weaker evidence",
}


def check_acceptance(audit: Audit) -> Check:
    """Judge the counts of the rounds, by the best source there is."""
    first, last = audit.rounds[0], audit.rounds[-1]
    for source, before, after in (
        ("metrics", first.counted, last.counted), ("answers", first.told, last.told),
    ):  # fmt: skip
        if before is not None and after is not None:
            least = audit.settings.min_acceptance_length
            return _judge(source, before, after, first, last, least)
    return _judge_events(audit)


def _judge(
    source: str, before: Counts, after: Counts, first: Round, last: Round, least: float | None
) -> Check:
    total = before + after
    grave, faults = find_inconsistencies(total), list[str]()
    told = first.told, last.told
    if source == "metrics" and told[0] is not None and told[1] is not None:
        own = told[0] + told[1]
        if own.drafted > total.drafted or own.accepted > total.accepted:
            grave.append(
                f"the metrics count {total.accepted} of {total.drafted} accepted, the answers tell"
                f" of {own.accepted} of {own.drafted}"
            )
        if total.per_position is not None and own.per_position is not None:
            # The answers know of positions that have accepted nothing so far.
            pairs = itertools.zip_longest(total.per_position, own.per_position, fillvalue=0)
            total = dataclasses.replace(total, per_position=tuple(count for count, _ in pairs))
    num_tokens = first.num_tokens + last.num_tokens
    size = total.drafts if total.drafts is not None else total.drafted
    per_draft = total.accepted / total.drafts if total.drafts else None
    if total.drafted == 0:
        grave.append(f"nothing was drafted in {num_tokens} tokens: the server does not speculate")
    elif total.accepted == 0:
        fact = f"none of {total.drafted} drafted tokens was accepted"
        (grave if size >= ENOUGH else faults).append(fact)
    elif (per_draft is not None and per_draft < LEAST_PER_DRAFT) or (
        per_draft is None and total.accepted / total.drafted < LEAST_RATE
    ):
        faults.append(
            f"{total.accepted} of {total.drafted} drafted tokens were accepted, which is hardly any"
        )
    else:
        faults += _find_dead_positions(total)
        rates = [_find_rate(counts) for counts in (before, after)]
        sizes = [c.drafts if c.drafts is not None else c.drafted for c in (before, after)]
        if min(sizes) >= ENOUGH and rates[1] < COLLAPSE * rates[0]:
            faults.append(
                f"acceptance collapses: {rates[0]:.3g} at first, {rates[1]:.3g} for the same"
                " prompts at the end"
            )
    length = find_length(total, num_tokens)
    if least is not None and not grave and (length is None or length < least):
        shown = "not known" if length is None else f"{length:.2f}"
        grave.append(f"the acceptance length is {shown}, less than {least:g}")
    verdict = FAILED if grave else SUSPECT if faults else OK
    evidence: dict[str, Any] = {
        "source": source, **dataclasses.asdict(total), "acceptance_length": length,
        "rounds": [*map(dataclasses.asdict, (before, after))], "output_tokens": num_tokens,
    }  # fmt: skip
    summary = f"{total.accepted} of {total.drafted} drafted tokens accepted"
    summary += "" if length is None else f", {length:.2f} tokens per draft"
    return Check(
        "acceptance", verdict, f"{summary}, by {SOURCES[source]}", grave + faults, evidence
    )


def _find_rate(counts: Counts) -> float:
    """Accepted tokens per draft, or per drafted token."""
    return counts.accepted / max(1, counts.drafts if counts.drafts is not None else counts.drafted)


def find_length(counts: Counts, num_tokens: int) -> float | None:
    """Tokens that a draft and its verify step bring, the target's own included."""
    if counts.drafts:
        return 1 + counts.accepted / counts.drafts
    if counts.drafts is None and num_tokens > counts.accepted and counts.drafted:
        return num_tokens / (num_tokens - counts.accepted)
    return None


def find_inconsistencies(counts: Counts) -> list[str]:
    """Counters that contradict one another."""
    faults = []
    if counts.accepted > counts.drafted:
        faults.append(f"{counts.accepted} tokens accepted of {counts.drafted} drafted")
    if counts.drafts is not None and counts.drafts > counts.drafted:
        faults.append(f"{counts.drafts} drafts hold {counts.drafted} tokens")
    positions = counts.per_position
    if positions is None:
        return faults
    if sum(positions) != counts.accepted:
        faults.append(
            f"the positions' counts {list(positions)} add up to {sum(positions)}, not to the"
            f" {counts.accepted} accepted"
        )
    if any(later > earlier for earlier, later in itertools.pairwise(positions)):
        faults.append(f"a later position accepts more than the one before: {list(positions)}")
    if counts.drafts is not None and positions and positions[0] > counts.drafts:
        faults.append(f"position 0 accepts {positions[0]} times in {counts.drafts} drafts")
    return faults


def _find_dead_positions(counts: Counts) -> list[str]:
    positions = counts.per_position or ()
    for place, (before, here) in enumerate(itertools.pairwise(positions), 1):
        if here == 0 and before >= ENOUGH_BEFORE:
            return [f"position {place} accepts nothing, position {place - 1} {before} times"]
    return []


def _judge_events(audit: Audit) -> Check:
    """How many tokens came at once, where nothing is counted."""
    longest = audit.list_longest(1)
    if not longest:
        return Check("acceptance", SKIPPED, "the greedy texts are empty")
    server = audit.server
    answer, chunks, _ = server.stream(
        audit.told[longest[0]].prompt, max_tokens=audit.settings.max_tokens, has_usage=True,
        **server.offer.told,
    )  # fmt: skip
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or []]
    lists = (c.get("token_ids") or read_tokens(c.get("logprobs")) or () for c in choices)
    sizes = [len(tokens) for tokens in lists if tokens]
    pieces = sum(bool(read_text(choice)) for choice in choices)
    count = sum(sizes) or answer.completion_tokens or 0
    num_events = len(sizes) or pieces
    mean = count / num_events if num_events else 0.0
    evidence = {"source": "events", "events": num_events, "tokens": count, "sizes": sizes}
    summary = f"{count} tokens came in {num_events} events, by {SOURCES['events']}"
    if mean > 1 + LEAST_PER_DRAFT:
        return Check("acceptance", OK, summary, [], evidence)
    fault = "nothing is counted, and tokens come one by one: no sign of speculation"
    return Check("acceptance", SUSPECT, summary, [fault], evidence)
