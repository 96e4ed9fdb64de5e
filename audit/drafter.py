"""Whether the server drafts as well as the same drafter does in an engine of ours.

Greedy text is the same on both sides, and so are, rounding apart, the drafts: then both need the
same number of verify steps for it. Rounding helps one side as often as the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .answers import INCOMPLETE, Answer, AnyPrompt, Counts, add_counts, count_drafts
from .checks import FAILED, OK, SKIPPED, Audit, Check
from .reference import EngineReference
from .server import Refused

if TYPE_CHECKING:
    from specdec import Output

NUM_PIECES = 36  # greedy texts that are compared, and the fewest of them
LEAST_PIECES = 12
PIECE = 32  # tokens of each
FALSE_ALARMS = 1e-3  # of audits of servers that differ from the reference by rounding alone
TOLERANCE = 0.03  # more verify steps than the reference: what coarser number formats may cost
EXACT = 0.01  # --near-tie below which both sides are taken to compute in float32
MAX_OTHERS = 2  # texts that may then take another number of steps
FULL = 0.8  # of the reference's drafted tokens per step, in trees; below, the server drafts less


@dataclasses.dataclass(frozen=True)
class Pair:
    """A text that both sides wrote, `num_tokens` long."""

    num_tokens: int
    server: Counts
    reference: Counts

    @property
    def num_steps(self) -> int:
        """The server's verify steps: the prompt's own pass gives the first token.

        Runtimes differ in what they count at a request's end: llama-server drafts no more than may
        still be written, vLLM counts drafts that are then cut off. Neither is less than this.
        """
        return max(self.server.drafts or 0, self.num_tokens - 1 - self.server.accepted)


def check_drafter(audit: Audit) -> Check:
    """Let both sides write the same texts, and compare their verify steps."""
    reference = audit.reference
    if not audit.settings.same_drafter or not isinstance(reference, EngineReference):
        return Check("drafter", SKIPPED, "no --reference-engine was given with --same-drafter")
    seen = _count_one(audit, audit.prompts[0], audit.settings.max_tokens)[1]
    if seen is None or not seen.drafted:
        return Check("drafter", SKIPPED, "the server counts no drafts")
    length = find_length(seen, audit.settings.max_tokens)
    reference.start_drafting(length)
    pairs: list[Pair] = []
    num_asked = 0
    for known in _write(audit, reference):
        num_asked += 1
        try:
            answer, counts = _count_one(audit, known.prompt_ids, PIECE)
        except Refused as refusal:
            if refusal.is_fault:
                raise
            continue  # longer than the server takes
        is_cut = known.finish_reason == "length"
        if counts is not None and is_cut and _is_same(answer, known):
            pairs.append(Pair(len(known.token_ids), counts, count_drafts(known.stats)))
    if len(pairs) < LEAST_PIECES:
        return Check(
            "drafter",
            SKIPPED,
            f"{len(pairs)} texts of {num_asked} are the reference's and counted, too few:"
            f" {LEAST_PIECES} are needed",
        )
    return judge(pairs, length, num_asked, is_exact=audit.settings.near_tie < EXACT)


def _count_one(
    audit: Audit, prompt: AnyPrompt, max_tokens: int
) -> tuple[Answer, Counts | None]:  # fmt: skip
    """An answer and what was drafted for it; by the counters where answers do not tell."""
    server = audit.server
    before = None if server.facts["answers_count"] else audit.counters.read()
    answer = server.complete(prompt, max_tokens=max_tokens, **server.offer.ids)
    if answer.counts is not None or before is None:
        return answer, answer.counts
    after = audit.counters.read()
    return answer, None if after is None else after - before


def find_length(counts: Counts, num_tokens: int) -> int | None:
    """Tokens of a chain that is drafted at each step; None for trees, of more tokens than depth."""
    steps = max(counts.drafts or 0, num_tokens - 1 - counts.accepted, 1)
    length = max(1, math.ceil(counts.drafted / max(1, counts.drafts or steps)))
    depth = len(counts.per_position or ())
    return None if depth and length > depth else length


def _write(audit: Audit, reference: EngineReference) -> Iterator[Output]:
    """The reference's texts in pieces: each goes on where the one before has ended."""
    prompts: Sequence[AnyPrompt] = audit.prompts[:NUM_PIECES]
    left = NUM_PIECES
    while prompts and left > 0:
        written = reference.draft(prompts[:left], PIECE)
        yield from written
        left -= len(written)
        cut = [piece for piece in written if piece.finish_reason == "length"]
        longer = [[*piece.prompt_ids, *piece.token_ids] for piece in cut]
        prompts = [ids for ids in longer if reference.can_continue(ids, PIECE)]


def _is_same(answer: Answer, known: Output) -> bool:
    if answer.ids is not None:
        return answer.ids == known.token_ids
    return answer.text.rstrip(INCOMPLETE) == known.text.rstrip(INCOMPLETE)


def find_margin(differences: Sequence[int]) -> int:
    """The least sum that is no chance: reached in FALSE_ALARMS of all draws of the signs."""
    sums = {0: 1.0}
    for size in map(abs, differences):
        drawn: dict[int, float] = {}
        for total, chance in sums.items():
            for one in (total - size, total + size):
                drawn[one] = drawn.get(one, 0.0) + chance / 2
        sums = drawn
    least, tail = max(sums) + 1, 0.0
    for total in sorted(sums, reverse=True):
        tail += sums[total]
        if tail > FALSE_ALARMS:
            break
        least = total
    return least


def judge(
    pairs: Sequence[Pair], length: int | None, num_asked: int, *, is_exact: bool = False
) -> Check:
    """Hold the server's verify steps against the reference's.

    is_exact: both compute in float32, in which the same drafter drafts the same tokens.
    """
    own, known = sum(pair.num_steps for pair in pairs), [p.reference.drafts or 0 for p in pairs]
    expected = sum(known)
    num_tokens = sum(pair.num_tokens - 1 for pair in pairs)
    differences = [pair.num_steps - steps for pair, steps in zip(pairs, known, strict=True)]
    margin = find_margin(differences)
    most = expected + max(margin - 1, math.floor(TOLERANCE * expected))
    server = add_counts([pair.server for pair in pairs])
    reference = add_counts([pair.reference for pair in pairs])
    num_others = sum(difference != 0 for difference in differences)
    evidence: dict[str, Any] = {
        "texts": num_asked, "compared": len(pairs), "others": num_others, "tokens": num_tokens,
        "chain": length, "steps": own, "reference_steps": expected, "most_steps": most,
        "tokens_per_step": num_tokens / own, "reference_tokens_per_step": num_tokens / expected,
        "least_tokens_per_step": num_tokens / most, "false_alarms": FALSE_ALARMS,
        "server": dataclasses.asdict(server), "reference": dataclasses.asdict(reference),
    }  # fmt: skip
    rate, wanted = server.drafted / own, reference.drafted / expected
    if _drafts_less(server, own, length, len(pairs), wanted):
        return Check(
            "drafter", SKIPPED,
            f"the server drafts {rate:.2f} tokens a step, the reference {wanted:.2f}: let both"
            " draft alike", [], evidence,
        )  # fmt: skip
    summary = (
        f"{num_tokens / own:.2f} tokens a step in {len(pairs)} texts, the reference"
        f" {num_tokens / expected:.2f}, at least {num_tokens / most:.2f} expected;"
        f" {num_others} texts in another number of steps"
    )
    faults = []
    if own > most:
        faults.append(
            f"{own} verify steps for texts that the same drafter writes in {expected} in the"
            f" reference; up to {most} would be chance, with {FALSE_ALARMS:g} false alarms an audit"
        )
    if is_exact and num_others > MAX_OTHERS:
        faults.append(
            f"{num_others} of {len(pairs)} texts take another number of verify steps than in the"
            f" reference; in float32 the same drafter drafts the same, so that {MAX_OTHERS} are"
            " many"
        )
    return Check("drafter", FAILED if faults else OK, summary, faults, evidence)


def _drafts_less(
    server: Counts, num_steps: int, length: int | None, num_texts: int, known: float
) -> bool:
    """Whether the server drafts less than the reference, but for the ends of requests."""
    if length is None:
        return server.drafted < FULL * known * num_steps
    return length * num_steps - server.drafted > num_texts * length * (length + 1) // 2
