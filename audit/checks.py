"""Checks of a server's answers. Each returns its verdict and the evidence for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.errors import shorten
from specdec.text.comparison import DIFFERS, NEAR_TIE, UNKNOWN, find_verdict

from .answers import INCOMPLETE, AnyPrompt, Completion, Counts, Token, add_counts
from .events import StreamFault, find_broken_characters
from .reference import Reference
from .server import Counters, Refused, ServerClient
from .settings import AuditSettings
from .texts import Difference, compare

OK, SUSPECT, FAILED, SKIPPED = "ok", "suspect", "failed", "skipped"
MAX_TIES = 16  # near-ties of a prompt, after each of which the comparison continues
NUM_STOPS = 8  # stop words of a prompt
NUM_STOP_PROMPTS = 2  # prompts with stop words
LIMITS = (1, 2, 3, 4, 5, 6, 7, 8)
NARROW = 1e-4  # a top_p that leaves the likeliest token alone
SAMPLED = 24  # tokens of a sampled text
SEEDS = (1, 2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Check:
    """Result of one check. faults: sentences, the gravest first."""

    name: str
    verdict: str
    summary: str
    faults: list[str] = dataclasses.field(default_factory=list)
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Round:
    """Answers to the greedy prompts, one each. metric_counts: counts of the metrics page."""

    answers: list[Completion]
    metric_counts: Counts | None

    @property
    def answer_counts(self) -> Counts | None:
        """Sum of the answers' counts; None where an answer has none."""
        counts = [answer.counts for answer in self.answers if answer.counts is not None]
        return add_counts(counts) if len(counts) == len(self.answers) else None

    @property
    def num_tokens(self) -> int:
        return sum(a.completion_tokens or a.num_tokens or 0 for a in self.answers)


@dataclasses.dataclass
class Audit:
    """State of an audit, which its checks share.

    rounds: greedy answers at the beginning and at the end. detailed_answers: the greedy answers
    with the token ids and log-probabilities that the server offers.
    """

    settings: AuditSettings
    server: ServerClient
    counters: Counters
    prompts: Sequence[AnyPrompt]
    reference: Reference | None
    rounds: list[Round] = dataclasses.field(default_factory=list)
    detailed_answers: list[Completion] = dataclasses.field(default_factory=list)

    def ask_all(self) -> None:
        """Ask for the greedy texts once more."""
        start_counts, offer = self.counters.read(), self.server.offer
        answers = [
            self.server.complete(prompt, max_tokens=self.settings.max_tokens, **offer.id_fields)
            for prompt in self.prompts
        ]
        end_counts = self.counters.read()
        counts = None
        if start_counts is not None and end_counts is not None:
            counts = end_counts - start_counts
        self.rounds.append(Round(answers, counts))

    def compare(self, answer: Completion, expected: Completion, prompt: int) -> list[Difference]:
        """Return the first difference of an answer to a prompt from the expected one, if any."""
        difference = compare(answer, expected, prompt=prompt, bound=self.settings.near_tie)
        return [] if difference is None else [difference]

    def list_longest(self, count: int) -> list[int]:
        """Return the indices of the prompts with the longest greedy answers."""
        lengths = [len(answer.text) for answer in self.detailed_answers]
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        return [index for index in order[:count] if lengths[index]]


def make_check(
    name: str, summary: str, differences: Sequence[Difference], faults: Sequence[str] = (),
    **evidence: Any,
) -> Check:  # fmt: skip
    """Make a check of texts: a difference beyond a near-tie fails, one without a margin is suspect.

    The faults fail, too.
    """
    cause = find_verdict(d.cause for d in differences)
    verdict = FAILED if faults or cause == DIFFERS else SUSPECT if cause == UNKNOWN else OK
    margins = [abs(d.margin or 0.0) for d in differences if d.cause == NEAR_TIE]
    ties = f", {len(margins)} near-ties, margins up to {max(margins):.2g}" if margins else ""
    gravest = sorted(differences, key=lambda d: d.cause == UNKNOWN)
    all_faults = [*faults, *(str(d) for d in gravest if d.cause != NEAR_TIE)]
    evidence |= {"differences": [dataclasses.asdict(d) for d in differences]}
    return Check(name, verdict, summary + ties, all_faults, evidence)


def check_greedy(audit: Audit) -> Check:
    """Compare the server's greedy text with the reference's, token by token."""
    reference = audit.reference
    if reference is None:
        return Check("greedy", SKIPPED, "no --reference-engine or --reference-url was given")
    pairs = zip(audit.rounds[0].answers, audit.detailed_answers, strict=True)
    answers = [_add_tokens(*pair) for pair in pairs]
    prompts = [answer.prompt_ids or answer.prompt for answer in answers]
    references = reference.continue_all(prompts, audit.settings.max_tokens)
    differences: list[Difference] = []
    num_compared = num_equal = 0
    for index, (answer, expected) in enumerate(zip(answers, references, strict=True)):
        answer_differences = list(_iterate_differences(answer, expected, index, reference, audit))
        differences += answer_differences
        if not answer_differences or answer_differences[-1].cause == NEAR_TIE:
            num_compared += expected.num_tokens or 0
        else:
            num_compared += answer_differences[-1].position
        num_equal += not answer_differences
    unit = "characters" if None in (answers[0].ids, references[0].ids) else "token ids"
    return make_check(
        "greedy", f"{num_equal} of {len(answers)} texts equal, by {unit}", differences,
        verdict=find_verdict(d.cause for d in differences), reference=reference.name,
        near_tie=audit.settings.near_tie, compared_by=unit, tokens=num_compared,
        prompts=len(answers), equal=num_equal,
    )  # fmt: skip


def _add_tokens(answer: Completion, detailed_answer: Completion) -> Completion:
    """Add the tokens of a detailed answer to an answer with the same text."""
    if answer.text != detailed_answer.text:
        return answer
    if answer.ids is not None and answer.ids != detailed_answer.ids:
        return answer
    return dataclasses.replace(answer, ids=detailed_answer.ids, tokens=detailed_answer.tokens)


def _iterate_differences(
    answer: Completion, expected: Completion, prompt: int, reference: Reference, audit: Audit
) -> Iterator[Difference]:
    """Yield the differences of an answer from the expected one.

    After a near-tie the reference continues the server's text, and the comparison goes on.
    """
    start = 0
    for _ in range(MAX_TIES):
        difference = compare(answer, expected, prompt=prompt, bound=audit.settings.near_tie)
        if difference is None:
            return
        yield dataclasses.replace(difference, position=start + difference.position)
        if difference.cause != NEAR_TIE or difference.unit != "token":
            return
        ids, prompt_ids = answer.ids, expected.prompt_ids
        if ids is None or prompt_ids is None:
            return
        num_compared = difference.position + 1
        if not (next_ids := ids[num_compared:]):
            return
        start += num_compared
        next_prompt = [*prompt_ids, *ids[:num_compared]]
        (expected,) = reference.continue_all([next_prompt], len(next_ids))
        tokens = answer.tokens[num_compared:] if answer.tokens is not None else None
        # The ids decide, not the texts.
        answer = dataclasses.replace(answer, ids=next_ids, tokens=tokens, text=expected.text)


def check_repeat(audit: Audit) -> Check:
    """Compare repeated greedy answers, with log-probabilities and without."""
    differences: list[Difference] = []
    num_answers = 0
    for greedy_round in audit.rounds:
        for index, answer in enumerate(greedy_round.answers):
            differences += audit.compare(answer, audit.detailed_answers[index], index)
            num_answers += 1
    summary = f"{num_answers} answers, each asked for before or after"
    return make_check("repeat", summary, differences)


def check_own_choice(audit: Audit) -> Check:
    """Check that each greedy token is the likeliest by the server's own log-probabilities."""
    logprobs: list[float] = []
    faults = []
    for prompt, answer in enumerate(audit.detailed_answers):
        for index, token in enumerate(answer.tokens or []):
            if (margin := _find_margin(token)) is None or token.logprob is None:
                continue
            logprobs.append(token.logprob)
            if margin > audit.settings.near_tie:
                faults.append(
                    f"prompt {prompt}, token {index}: {shorten(token.text)} is written, another"
                    f" token is {margin:.3g} higher by the server's own logits"
                )
    if not logprobs:
        return Check("own_choice", SKIPPED, "the server tells no log-probabilities")
    verdict = FAILED if faults else OK
    if not faults and len(logprobs) > 20 and len(set(logprobs)) == 1:
        verdict, faults = SUSPECT, ["every token has the same log-probability"]
    evidence = {"tokens": len(logprobs)}
    return Check("own_choice", verdict, f"{len(logprobs)} tokens", faults, evidence)


def _find_margin(token: Token) -> float | None:
    """Return the logit of the likeliest token at a position, less that of the chosen token."""
    logprobs = [candidate.logprob for candidate in token.top if candidate.logprob is not None]
    return max(logprobs) - token.logprob if logprobs and token.logprob is not None else None


def check_narrow_sampling(audit: Audit) -> Check:
    """Check that sampling from the likeliest token alone gives the greedy text."""
    prompt_indices = audit.list_longest(4)
    differences = []
    for index in prompt_indices:
        expected = _truncate(audit.detailed_answers[index], SAMPLED)
        num_tokens = min(SAMPLED, audit.detailed_answers[index].max_tokens)
        answer = audit.server.complete(
            expected.prompt, max_tokens=num_tokens, temperature=1.0, top_p=NARROW, seed=SEEDS[0],
            **audit.server.offer.id_fields,
        )  # fmt: skip
        differences += audit.compare(answer, expected, index)
    summary = f"{len(prompt_indices)} texts at top_p {NARROW}"
    return make_check("narrow_sampling", summary, differences)


def _truncate(answer: Completion, count: int) -> Completion:
    """Return an answer's first tokens; the answer itself where its tokens are unknown."""
    if answer.num_tokens is None or answer.num_tokens <= count or answer.ends is None:
        return answer
    text = answer.text[: answer.ends[count - 1]]
    fields: dict[str, Any] = {"text": text, "finish_reason": "length"}
    for name in ("ids", "tokens", "ends"):
        items = getattr(answer, name)
        fields[name] = None if items is None else items[:count]
    return dataclasses.replace(answer, **fields)


def check_seeds(audit: Audit) -> Check:
    """Check that equal seeds give equal sampled texts."""
    pairs = []
    prompts = [audit.prompts[n % len(audit.prompts)] for n in range(len(SEEDS))]
    for prompt, seed in zip(prompts, SEEDS, strict=True):
        texts = [
            audit.server.complete(prompt, max_tokens=SAMPLED, temperature=1.0, seed=seed).text
            for _ in range(2)
        ]
        pairs.append({"seed": seed, "equal": texts[0] == texts[1], "texts": texts})
    num_different = sum(not pair["equal"] for pair in pairs)
    # Rounding may change a draw now and then; seeds without effect change nearly every text.
    verdict = OK if not num_different else FAILED if num_different > len(pairs) / 2 else SUSPECT
    fault = f"{num_different} of {len(pairs)} texts differ when asked for again with the same seed"
    summary = f"{len(pairs)} seeds, each asked for twice"
    return Check("seeds", verdict, summary, [fault] if num_different else [], {"pairs": pairs})


def check_stops(audit: Audit) -> Check:
    """Try stop words at every offset of a token.

    Text, ids, log-probabilities and usage must all end before the stop word.
    """
    faults: list[str] = []
    differences: list[Difference] = []
    trials = []
    for index in audit.list_longest(NUM_STOP_PROMPTS):
        greedy = audit.detailed_answers[index]
        for number, stop in enumerate(choose_stops(greedy)):
            body = {
                "max_tokens": audit.settings.max_tokens,
                "stop": [stop],
                **audit.server.offer.detail_fields,
            }
            if number % 2:
                answer, _, stream_faults = audit.server.stream(
                    greedy.prompt, has_usage=True, **body
                )
                texts = _list_grave(stream_faults)
                faults += [f"stream with stop {stop!r}: {text}" for text in texts]
            else:
                answer = audit.server.complete(greedy.prompt, **body)
            trials.append({"prompt": index, "stop": stop, "expected": greedy.text.find(stop)})
            text = greedy.text[: greedy.text.find(stop)]
            if answer.text.startswith(text):
                label = f"prompt {index}, stop {stop!r}"
                faults += _find_stop_faults(answer, greedy, stop, label)
            else:  # a different text, or an early end
                expected = dataclasses.replace(greedy, text=text, ids=None)
                differences += audit.compare(answer, expected, index)
    if not trials:
        return Check("stops", SKIPPED, "the greedy texts are too short")
    return make_check("stops", f"{len(trials)} stop words", differences, faults, stops=trials)


def choose_stops(greedy: Completion) -> list[str]:
    """Return pieces from the middle of a text, one for each of some tokens in succession.

    A piece begins in the middle of its token, if that has several characters, and ends in the next
    token.
    """
    text = greedy.text
    ends = greedy.ends or list(range(3, len(text) + 1, 3))
    stops: dict[int, str] = {}  # by the first position of each in the text
    for index in range(max(1, len(ends) // 4), len(ends) - 1):
        start, end = ends[index - 1], ends[index]
        middle = start + (end - start) // 2
        stop = text[middle : max(end + 1, middle + 2)]
        position = text.find(stop)
        if len(stop) < 2 or not stop.strip() or INCOMPLETE in stop or not position:
            continue
        stops.setdefault(position, stop)
        if len(stops) == NUM_STOPS:
            break
    return list(stops.values())


def _find_stop_faults(answer: Completion, greedy: Completion, stop: str, label: str) -> list[str]:
    """Return the faults of an answer whose text begins with the greedy text up to the stop word."""
    position = greedy.text.find(stop)
    if len(answer.text) > position:
        text = answer.text[position : position + 40]
        return [f"{label}: {text!r} is written after the text"]
    faults = []
    if answer.finish_reason != "stop":
        faults.append(f"{label}: finish_reason is {answer.finish_reason!r}")
    if greedy.ends is not None:
        # The token that completes the stop word is the last that the answer may list.
        end = position + len(stop)
        max_tokens = next(i for i, token_end in enumerate(greedy.ends, 1) if token_end >= end)
        min_tokens = sum(token_end <= position for token_end in greedy.ends)
        faults += _find_stop_count_faults(answer, min_tokens, max_tokens, label)
    return faults


def _find_stop_count_faults(
    answer: Completion, min_tokens: int, max_tokens: int, label: str
) -> list[str]:
    """Return the faults of an answer's counts of tokens before its stop word."""
    counts = {
        "token ids": None if answer.ids is None else len(answer.ids),
        "log-probabilities": None if answer.tokens is None else len(answer.tokens),
        "usage.completion_tokens": answer.completion_tokens,
    }
    faults = [
        f"{label}: {count} {name}, where the stop word is complete after {max_tokens} tokens"
        for name, count in counts.items()
        if count is not None and count > max_tokens
    ]
    if (count := answer.completion_tokens) is not None and count < min_tokens:
        faults.append(
            f"{label}: usage.completion_tokens is {count}, the text has {min_tokens} tokens"
        )
    return faults


def _list_grave(faults: Sequence[StreamFault]) -> list[str]:
    return [fault.text for fault in faults if not fault.is_mild]


def check_limits(audit: Audit) -> Check:
    """Check that max_tokens is met to the token, with the beginning of the longer text."""
    prompt_indices = audit.list_longest(1)
    if not prompt_indices:
        return Check("limits", SKIPPED, "the greedy texts are empty")
    index = prompt_indices[0]
    greedy = audit.detailed_answers[index]
    length = greedy.num_tokens or greedy.completion_tokens or 0
    limits = [n for n in (*LIMITS, length // 2, length - 1) if 0 < n < length]
    faults: list[str] = []
    differences: list[Difference] = []
    for limit in sorted(set(limits)):
        answer = audit.server.complete(
            greedy.prompt, max_tokens=limit, **audit.server.offer.id_fields
        )
        faults += _find_limit_faults(answer, limit)
        text = answer.text.rstrip(INCOMPLETE)
        end = 0 if greedy.ends is None else greedy.ends[limit - 1]
        if not greedy.text.startswith(text):
            expected = dataclasses.replace(greedy, ids=None)
            differences += audit.compare(answer, expected, index)
        elif len(text) < len(greedy.text[:end].rstrip(INCOMPLETE)):
            faults.append(
                f"max_tokens {limit}: the text ends at {len(text)} characters, {limit} tokens have"
                f" {end}"
            )
    return make_check("limits", f"max_tokens {limits} of prompt {index}", differences, faults)


def _find_limit_faults(answer: Completion, limit: int) -> list[str]:
    """Return the faults in the counts of tokens and the finish_reason at a limit."""
    counts = {"token ids": answer.num_tokens, "usage": answer.completion_tokens}
    faults = [
        f"max_tokens {limit}: {count} by {name}"
        for name, count in counts.items()
        if count is not None and count != limit
    ]
    if answer.finish_reason != "length":
        faults.append(f"max_tokens {limit}: finish_reason is {answer.finish_reason!r}")
    return faults


def check_stream(audit: Audit) -> Check:
    """Check server-sent events, one by one, and the text that they make up."""
    faults: list[StreamFault] = []
    differences: list[Difference] = []
    skip_reasons = []
    prompt_indices = audit.list_longest(1)
    if not prompt_indices:
        return Check("stream", SKIPPED, "the greedy texts are empty")
    index = prompt_indices[0]
    greedy, server = audit.detailed_answers[index], audit.server

    def try_stream(
        label: str, prompt: AnyPrompt, expected: Completion, body: dict[str, Any]
    ) -> None:
        answer, chunks, stream_faults = server.stream(
            prompt, max_tokens=expected.max_tokens, **body
        )
        stream_faults += find_broken_characters(chunks, expected.text)
        faults.extend(
            StreamFault(f"{label}: {fault.text}", fault.is_mild) for fault in stream_faults
        )
        text_differences = audit.compare(answer, expected, index)
        differences.extend(text_differences)
        count, expected_count = answer.completion_tokens, expected.completion_tokens
        if None in (count, expected_count) or text_differences:
            return
        if count != expected_count:
            text = f"{label}: usage has {count} tokens, of the whole answer {expected_count}"
            faults.append(StreamFault(text))

    try_stream("greedy", greedy.prompt, greedy, {**server.offer.id_fields})
    try_stream("with usage", greedy.prompt, greedy, {"has_usage": True})
    # A high temperature samples tokens that are halves of characters, if the tokenizer has any.
    hot: dict[str, Any] = {"temperature": 1.5, "seed": SEEDS[0]}
    answer = server.complete(greedy.prompt, max_tokens=SAMPLED, **hot)
    if server.complete(greedy.prompt, max_tokens=SAMPLED, **hot).text == answer.text:
        try_stream("sampled", greedy.prompt, answer, hot)
    else:
        skip_reasons.append("a sampled stream: equal seeds give different texts")
    if isinstance(greedy.prompt, str) and not server.offer.is_chat:
        chat = [{"role": "user", "content": greedy.prompt}]
        try:
            answer = server.complete(chat, max_tokens=SAMPLED)
        except Refused as refusal:
            skip_reasons.append(f"chat/completions: {refusal}")
        else:
            try_stream("chat", chat, answer, {})
            try_stream("chat with usage", chat, answer, {"has_usage": True})
    check = make_check(
        "stream", "greedy, sampled and chat", differences, _list_grave(faults), skipped=skip_reasons
    )
    mild = [fault.text for fault in faults if fault.is_mild]
    verdict = SUSPECT if mild and check.verdict == OK else check.verdict
    return dataclasses.replace(check, verdict=verdict, faults=[*check.faults, *mild])


def check_usage(audit: Audit) -> Check:
    """Compare the usage of all answers so far with their tokens."""
    answers = [answer for answer in audit.server.answers if answer.usage is not None]
    if not answers:
        return Check("usage", SKIPPED, "no answer has a usage")
    faults: list[str] = []
    prompt_counts: dict[str, set[int]] = {}
    for answer in answers:
        faults += _find_usage_faults(answer)
        prompt_count, output_count = _read_usage(answer)
        if prompt_count is not None and output_count is not None:
            prompt_counts.setdefault(repr(answer.prompt), set()).add(prompt_count)
    faults += _find_prompt_faults(audit, prompt_counts)
    faults = list(dict.fromkeys(faults))
    verdict = FAILED if faults else OK
    return Check("usage", verdict, f"{len(answers)} answers", faults, {"answers": len(answers)})


def _find_prompt_faults(audit: Audit, prompt_counts: Mapping[str, set[int]]) -> list[str]:
    """Return the faults in the numbers of prompt tokens, which are keyed by the prompt's repr."""
    faults = [
        f"prompt {shorten(prompt, 40)}: prompt_tokens is {sorted(counts)} by turns"
        for prompt, counts in prompt_counts.items()
        if len(counts) > 1
    ]
    for prompt in audit.prompts[:2]:
        counts = prompt_counts.get(repr(prompt))
        count = audit.server.count_prompt_tokens(prompt)
        if counts and count is not None and counts != {count}:
            faults.append(
                f"prompt {shorten(prompt, 40)}: prompt_tokens {min(counts)}, /tokenize says {count}"
            )
    return faults


def _read_usage(answer: Completion) -> tuple[int | None, int | None]:
    """Return the numbers of prompt and of output tokens; None for a value that is no number."""
    usage = answer.usage or {}
    prompt_count, output_count = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return (
        prompt_count if isinstance(prompt_count, int) else None,
        output_count if isinstance(output_count, int) else None,
    )


def _find_usage_faults(answer: Completion) -> list[str]:
    """Return the faults in the usage of one answer."""
    usage, faults = answer.usage or {}, []
    prompt_count, output_count = _read_usage(answer)
    label = f"prompt {shorten(answer.prompt, 40)}, max_tokens {answer.max_tokens}"
    if prompt_count is None or output_count is None:
        return [f"{label}: usage is {shorten(dict(usage))}"]
    total = usage.get("total_tokens")
    if total != prompt_count + output_count:
        faults.append(f"{label}: {prompt_count} + {output_count} tokens are {total}")
    if fault := _find_output_fault(answer, output_count):
        faults.append(f"{label}: completion_tokens {output_count}{fault}")
    if answer.prompt_ids is not None and len(answer.prompt_ids) != prompt_count:
        faults.append(
            f"{label}: prompt_tokens {prompt_count}, and there are {len(answer.prompt_ids)} of them"
        )
    accepted = (usage.get("completion_tokens_details") or {}).get("accepted_prediction_tokens")
    if isinstance(accepted, int) and accepted > output_count:
        faults.append(f"{label}: {accepted} accepted tokens of {output_count}")
    return faults


def _find_output_fault(answer: Completion, output_count: int) -> str | None:
    """Return the fact that contradicts an answer's number of output tokens.

    The count includes an end token or a stop word, which the answer's tokens may lack.
    """
    num_tokens, is_full = answer.num_tokens, answer.finish_reason == "length"
    if num_tokens is None:
        return " at the length's end" if is_full and output_count != answer.max_tokens else None
    if output_count < num_tokens or (is_full and output_count != num_tokens):
        return f", and there are {num_tokens} tokens"
    return None
