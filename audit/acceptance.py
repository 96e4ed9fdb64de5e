"""Verdict on speculation: drafted and accepted tokens, and whether acceptance lasts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from .answers import Counts, add_counts, read_text, read_tokens
from .checks import FAILED, OK, SKIPPED, SUSPECT, Audit, Check

ENOUGH = 20  # drafts, or drafted tokens, from which zero acceptance is a fault
LEAST_PER_DRAFT = 0.1  # accepted tokens; below, a verify step costs more than it brings
LEAST_RATE = 0.03  # accepted tokens per drafted token; the bound where drafts are not counted
ENOUGH_BEFORE = 50  # tokens accepted at a position, from which zero at the next is suspect
COLLAPSE = 0.5  # share of the first round's acceptance, below which the last is suspect
SOURCES = {
    "metrics": "the server's metrics, before and after",
    "answers": "what each answer tells of itself",
    "events": "the sizes of a stream's chunks, which is weaker evidence",
}


def check_acceptance(audit: Audit) -> Check:
    """Judge the counts of the rounds, from the best available source."""
    rounds = audit.rounds[0], audit.rounds[-1]
    for source, counts in (
        ("metrics", [r.metric_counts for r in rounds]),
        ("answers", [r.answer_counts for r in rounds]),
    ):
        complete_counts = [count for count in counts if count is not None]
        if len(complete_counts) == len(rounds):
            return _judge_counts(audit, source, complete_counts)
    return _judge_events(audit)


def _judge_counts(audit: Audit, source: str, counts: Sequence[Counts]) -> Check:
    """Judge the counts of the first and of the last round, which come from one source."""
    rounds = audit.rounds[0], audit.rounds[-1]
    total = add_counts(counts)
    failures = find_inconsistencies(total)
    if source == "metrics":
        answer_total = _sum_counts([r.answer_counts for r in rounds])
        failures += _find_contradictions(total, answer_total)
        total = _extend_positions(total, answer_total)
    num_tokens = sum(r.num_tokens for r in rounds)
    new_failures, suspicions = _find_acceptance_faults(total, counts, num_tokens)
    failures += new_failures
    length = find_length(total, num_tokens)
    required_length = audit.settings.min_acceptance_length
    if required_length is not None and not failures and (length or 0.0) < required_length:
        length_text = "not known" if length is None else f"{length:.2f}"
        failures.append(f"the acceptance length is {length_text}, less than {required_length:g}")
    evidence: dict[str, Any] = {
        "source": source, **dataclasses.asdict(total), "acceptance_length": length,
        "rounds": [*map(dataclasses.asdict, counts)], "output_tokens": num_tokens,
    }  # fmt: skip
    summary = f"{total.accepted} of {total.drafted} drafted tokens accepted"
    summary += "" if length is None else f", {length:.2f} tokens per draft"
    return Check(
        "acceptance", FAILED if failures else SUSPECT if suspicions else OK,
        f"{summary}, by {SOURCES[source]}", failures + suspicions, evidence,
    )  # fmt: skip


def _sum_counts(counts: Sequence[Counts | None]) -> Counts | None:
    """Return the sum of counts; None where one of them is unknown."""
    terms = [term for term in counts if term is not None]
    return add_counts(terms) if len(terms) == len(counts) else None


def _find_contradictions(total: Counts, answer_total: Counts | None) -> list[str]:
    """Return a fault where the answers count more than the metrics do."""
    if answer_total is None:
        return []
    if answer_total.drafted <= total.drafted and answer_total.accepted <= total.accepted:
        return []
    return [
        f"the metrics count {total.accepted} of {total.drafted} accepted, the answers tell"
        f" of {answer_total.accepted} of {answer_total.drafted}"
    ]


def _extend_positions(total: Counts, answer_total: Counts | None) -> Counts:
    """Add positions without acceptance, which only the answers list."""
    if total.per_position is None or answer_total is None or answer_total.per_position is None:
        return total
    num_missing = len(answer_total.per_position) - len(total.per_position)
    return dataclasses.replace(total, per_position=total.per_position + (0,) * num_missing)


def _find_acceptance_faults(
    total: Counts, counts: Sequence[Counts], num_tokens: int
) -> tuple[list[str], list[str]]:
    """Return failures and suspicions about the numbers of drafted and accepted tokens."""
    if total.drafted == 0:
        fault = f"nothing was drafted in {num_tokens} tokens: the server does not speculate"
        return [fault], []
    if total.accepted == 0:
        fault = f"none of {total.drafted} drafted tokens was accepted"
        return ([fault], []) if _count_trials(total) >= ENOUGH else ([], [fault])
    if total.drafts:
        is_rare = total.accepted / total.drafts < LEAST_PER_DRAFT
    else:
        is_rare = total.accepted / total.drafted < LEAST_RATE
    if is_rare:
        return [], [
            f"{total.accepted} of {total.drafted} drafted tokens were accepted, which is hardly any"
        ]
    return [], _find_dead_positions(total) + _find_collapse(*counts)


def _find_collapse(first_counts: Counts, last_counts: Counts) -> list[str]:
    """Return a fault where acceptance falls from the first round to the last."""
    trials = [_count_trials(counts) for counts in (first_counts, last_counts)]
    rates = [
        counts.accepted / max(1, _count_trials(counts)) for counts in (first_counts, last_counts)
    ]
    if min(trials) < ENOUGH or rates[1] >= COLLAPSE * rates[0]:
        return []
    return [
        f"acceptance collapses: {rates[0]:.3g} at first, {rates[1]:.3g} for the same prompts at"
        " the end"
    ]


def _count_trials(counts: Counts) -> int:
    """Return the number of drafts, or of drafted tokens where drafts are not counted."""
    return counts.drafts if counts.drafts is not None else counts.drafted


def find_length(counts: Counts, num_tokens: int) -> float | None:
    """Return the tokens per draft and verify step, bonus token included."""
    if counts.drafts:
        return 1 + counts.accepted / counts.drafts
    if counts.drafts is None and num_tokens > counts.accepted and counts.drafted:
        return num_tokens / (num_tokens - counts.accepted)
    return None


def find_inconsistencies(counts: Counts) -> list[str]:
    """Return faults of counters that contradict one another."""
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
    if any(b > a for a, b in itertools.pairwise(positions)):
        faults.append(f"a later position accepts more than the one before: {list(positions)}")
    if counts.drafts is not None and positions and positions[0] > counts.drafts:
        faults.append(f"position 0 accepts {positions[0]} times in {counts.drafts} drafts")
    return faults


def _find_dead_positions(counts: Counts) -> list[str]:
    """Return a fault for the first position that accepts nothing after one that accepts much."""
    positions = counts.per_position or ()
    for index, (accepted, next_accepted) in enumerate(itertools.pairwise(positions), 1):
        if next_accepted == 0 and accepted >= ENOUGH_BEFORE:
            return [f"position {index} accepts nothing, position {index - 1} {accepted} times"]
    return []


def _judge_events(audit: Audit) -> Check:
    """Judge by the number of tokens in each chunk of a stream, for servers without counters."""
    prompt_indices = audit.list_longest(1)
    if not prompt_indices:
        return Check("acceptance", SKIPPED, "the greedy texts are empty")
    server = audit.server
    answer, chunks, _ = server.stream(
        audit.detailed_answers[prompt_indices[0]].prompt, max_tokens=audit.settings.max_tokens,
        has_usage=True, **server.offer.detail_fields,
    )  # fmt: skip
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or []]
    sizes = _list_chunk_sizes(choices)
    count = sum(sizes) or answer.completion_tokens or 0
    num_events = len(sizes) or sum(bool(read_text(choice)) for choice in choices)
    mean = count / num_events if num_events else 0.0
    evidence = {"source": "events", "events": num_events, "tokens": count, "sizes": sizes}
    summary = f"{count} tokens came in {num_events} events, by {SOURCES['events']}"
    if mean > 1 + LEAST_PER_DRAFT:
        return Check("acceptance", OK, summary, [], evidence)
    fault = "nothing is counted, and tokens come one by one: no sign of speculation"
    return Check("acceptance", SUSPECT, summary, [fault], evidence)


def _list_chunk_sizes(choices: Sequence[dict[str, Any]]) -> list[int]:
    """Return the number of tokens of each chunk that lists tokens."""
    lists = (c.get("token_ids") or read_tokens(c.get("logprobs")) or () for c in choices)
    return [len(tokens) for tokens in lists if tokens]
