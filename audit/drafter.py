"""Comparison of the server's drafting with the same drafter's in an engine of ours.

Greedy text is the same on both sides, and so are, rounding apart, the drafts: then both need the
same number of verify steps for it. Rounding helps one side as often as the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .answers import INCOMPLETE, AnyPrompt, Completion, Counts, add_counts, count_drafts
from .checks import FAILED, OK, SKIPPED, Audit, Check
from .reference import EngineReference
from .server import Refused

if TYPE_CHECKING:
    from specdec import Output

NUM_PIECES = 36  # greedy texts that are compared
LEAST_PIECES = 12  # fewest texts for a verdict
PIECE = 32  # tokens of a text
FALSE_ALARMS = 1e-3  # share of audits that fail although only rounding differs
TOLERANCE = 0.03  # share of further verify steps that coarser number formats may cost
FLOAT32_NEAR_TIE = 0.01  # --near-tie below which both sides compute in float32
MAX_OTHERS = 2  # texts with another number of steps that float32 allows
# Share of the reference's drafted tokens per step, for trees; below it, the server drafts less.
MIN_SERVER_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class Pair:
    """Counts of both sides for a text that both wrote, `num_tokens` long."""

    num_tokens: int
    server: Counts
    reference: Counts

    @property
    def num_steps(self) -> int:
        """Number of the server's verify steps: the prompt's own pass gives the first token.

        Runtimes differ in what they count at a request's end: llama-server drafts no more than may
        still be written, vLLM counts drafts that are then cut off. Neither is less than this.
        """
        return max(self.server.drafts or 0, self.num_tokens - 1 - self.server.accepted)


def check_drafter(audit: Audit) -> Check:
    """Let both sides write the same texts, and compare their verify steps."""
    reference = audit.reference
    if not audit.settings.same_drafter or not isinstance(reference, EngineReference):
        return Check("drafter", SKIPPED, "no --reference-engine was given with --same-drafter")
    counts = _ask_with_counts(audit, audit.prompts[0], audit.settings.max_tokens)[1]
    if counts is None or not counts.drafted:
        return Check("drafter", SKIPPED, "the server counts no drafts")
    length = find_length(counts, audit.settings.max_tokens)
    reference.start_drafting(length)
    pairs: list[Pair] = []
    num_texts = 0
    for output in _write_pieces(audit, reference):
        num_texts += 1
        try:
            answer, counts = _ask_with_counts(audit, output.prompt_ids, PIECE)
        except Refused as refusal:
            if refusal.is_fault:
                raise
            continue  # longer than the server's limit
        is_cut = output.finish_reason == "length"
        if counts is not None and is_cut and _is_same(answer, output):
            pairs.append(Pair(len(output.token_ids), counts, count_drafts(output.stats)))
    if len(pairs) < LEAST_PIECES:
        return Check(
            "drafter",
            SKIPPED,
            f"{len(pairs)} texts of {num_texts} are the reference's and counted, too few:"
            f" {LEAST_PIECES} are needed",
        )
    return judge(pairs, length, num_texts, is_exact=audit.settings.near_tie < FLOAT32_NEAR_TIE)


def _ask_with_counts(
    audit: Audit, prompt: AnyPrompt, max_tokens: int
) -> tuple[Completion, Counts | None]:  # fmt: skip
    """Return an answer and its counts; the server's counters give them where answers do not."""
    server = audit.server
    start_counts = None if server.facts["answers_count"] else audit.counters.read()
    answer = server.complete(prompt, max_tokens=max_tokens, **server.offer.id_fields)
    if answer.counts is not None or start_counts is None:
        return answer, answer.counts
    end_counts = audit.counters.read()
    return answer, None if end_counts is None else end_counts - start_counts


def find_length(counts: Counts, num_tokens: int) -> int | None:
    """Return the length of the chain that each step drafts; None for a tree.

    A tree has more tokens than its depth.
    """
    steps = max(counts.drafts or 0, num_tokens - 1 - counts.accepted, 1)
    length = max(1, math.ceil(counts.drafted / max(1, counts.drafts or steps)))
    depth = len(counts.per_position or ())
    return None if depth and length > depth else length


def _write_pieces(audit: Audit, reference: EngineReference) -> Iterator[Output]:
    """Yield the reference's texts in pieces; each piece continues the one before."""
    prompts: Sequence[AnyPrompt] = audit.prompts[:NUM_PIECES]
    num_left = NUM_PIECES
    while prompts and num_left > 0:
        outputs = reference.draft(prompts[:num_left], PIECE)
        yield from outputs
        num_left -= len(outputs)
        unfinished = [output for output in outputs if output.finish_reason == "length"]
        texts = [[*output.prompt_ids, *output.token_ids] for output in unfinished]
        prompts = [ids for ids in texts if reference.can_continue(ids, PIECE)]


def _is_same(answer: Completion, output: Output) -> bool:
    if answer.ids is not None:
        return answer.ids == output.token_ids
    return answer.text.rstrip(INCOMPLETE) == output.text.rstrip(INCOMPLETE)


def find_margin(differences: Sequence[int]) -> int:
    """Return the least sum that at most FALSE_ALARMS of all draws of the signs reach."""
    chances = {0: 1.0}  # probability of each sum
    for size in map(abs, differences):
        new_chances: dict[int, float] = {}
        for total, chance in chances.items():
            for new_total in (total - size, total + size):
                new_chances[new_total] = new_chances.get(new_total, 0.0) + chance / 2
        chances = new_chances
    margin, tail = max(chances) + 1, 0.0
    for total in sorted(chances, reverse=True):
        tail += chances[total]
        if tail > FALSE_ALARMS:
            break
        margin = total
    return margin


def judge(
    pairs: Sequence[Pair], length: int | None, num_texts: int, *, is_exact: bool = False
) -> Check:
    """Compare the server's verify steps with the reference's.

    is_exact: whether both compute in float32, in which equal drafters draft equal tokens.
    """
    num_steps = sum(pair.num_steps for pair in pairs)
    differences = [pair.num_steps - (pair.reference.drafts or 0) for pair in pairs]
    reference_steps = num_steps - sum(differences)
    max_steps = reference_steps + max(
        find_margin(differences) - 1, math.floor(TOLERANCE * reference_steps)
    )
    num_tokens = sum(pair.num_tokens - 1 for pair in pairs)
    server = add_counts([pair.server for pair in pairs])
    reference = add_counts([pair.reference for pair in pairs])
    num_others = sum(difference != 0 for difference in differences)
    evidence: dict[str, Any] = {
        "texts": num_texts, "compared": len(pairs), "others": num_others, "tokens": num_tokens,
        "chain": length, "steps": num_steps, "reference_steps": reference_steps,
        "most_steps": max_steps, "tokens_per_step": num_tokens / num_steps,
        "reference_tokens_per_step": num_tokens / reference_steps,
        "least_tokens_per_step": num_tokens / max_steps, "false_alarms": FALSE_ALARMS,
        "server": dataclasses.asdict(server), "reference": dataclasses.asdict(reference),
    }  # fmt: skip
    drafted_per_step = server.drafted / num_steps
    reference_drafted_per_step = reference.drafted / reference_steps
    if _drafts_less(server, num_steps, length, len(pairs), reference_drafted_per_step):
        return Check(
            "drafter", SKIPPED,
            f"the server drafts {drafted_per_step:.2f} tokens a step, the reference"
            f" {reference_drafted_per_step:.2f}: let both draft alike", [], evidence,
        )  # fmt: skip
    summary = (
        f"{num_tokens / num_steps:.2f} tokens a step in {len(pairs)} texts, the reference"
        f" {num_tokens / reference_steps:.2f}, at least {num_tokens / max_steps:.2f} expected;"
        f" {num_others} texts in another number of steps"
    )
    faults = _list_faults(evidence, is_exact=is_exact)
    return Check("drafter", FAILED if faults else OK, summary, faults, evidence)


def _list_faults(evidence: Mapping[str, Any], *, is_exact: bool) -> list[str]:
    """Return the facts by which the server's drafter is not the reference's."""
    faults = []
    if evidence["steps"] > evidence["most_steps"]:
        faults.append(
            f"{evidence['steps']} verify steps for texts that the same drafter writes in"
            f" {evidence['reference_steps']} in the reference; up to {evidence['most_steps']} would"
            f" be chance, with {FALSE_ALARMS:g} false alarms an audit"
        )
    if is_exact and evidence["others"] > MAX_OTHERS:
        faults.append(
            f"{evidence['others']} of {evidence['compared']} texts take another number of verify"
            " steps than in the reference; in float32 the same drafter drafts the same, so that"
            f" {MAX_OTHERS} are many"
        )
    return faults


def _drafts_less(
    server: Counts, num_steps: int, length: int | None, num_texts: int,
    reference_drafted_per_step: float,
) -> bool:  # fmt: skip
    """Return whether the server drafts less than the reference, not counting ends of requests."""
    if length is None:
        return server.drafted < MIN_SERVER_SHARE * reference_drafted_per_step * num_steps
    return length * num_steps - server.drafted > num_texts * length * (length + 1) // 2
