"""The checks of what a server writes. Each returns its verdict and what it rests on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from specdec.errors import shorten
from specdec.text.comparison import DIFFERS, NEAR_TIE, UNKNOWN, find_verdict

from .answers import INCOMPLETE, Answer, AnyPrompt, Counts, add_counts
from .events import Fault, find_broken_characters
from .reference import Reference
from .server import Counters, Refused, Server
from .settings import AuditSettings
from .texts import Difference, compare

OK, SUSPECT, FAILED, SKIPPED = "ok", "suspect", "failed", "skipped"
MAX_TIES = 16  # near-ties of a prompt behind which it is compared further
NUM_STOPS, NUM_STOP_PROMPTS = 8, 2  # stop words of a prompt, and prompts
LIMITS = (1, 2, 3, 4, 5, 6, 7, 8)
NARROW = 1e-4  # a top_p that leaves the likeliest token alone
SAMPLED = 24  # tokens of a sampled text
SEEDS = (1, 2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Check:
    """What one check found. faults: what is wrong, the gravest first."""

    name: str
    verdict: str
    summary: str
    faults: list[str] = dataclasses.field(default_factory=list)
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Round:
    """The same greedy prompts, once. counted: by the metrics page over that time."""

    answers: list[Answer]
    counted: Counts | None

    @property
    def told(self) -> Counts | None:
        """The sum of what the answers tell; None where one does not."""
        told = [answer.counts for answer in self.answers if answer.counts is not None]
        return add_counts(told) if len(told) == len(self.answers) else None

    @property
    def num_tokens(self) -> int:
        return sum(a.completion_tokens or a.num_tokens or 0 for a in self.answers)


@dataclasses.dataclass
class Audit:
    """What is known so far. rounds: at the beginning and at the end; told: the greedy answers with
    all that the server tells of the tokens."""

    settings: AuditSettings
    server: Server
    counters: Counters
    prompts: Sequence[AnyPrompt]
    reference: Reference | None
    rounds: list[Round] = dataclasses.field(default_factory=list)
    told: list[Answer] = dataclasses.field(default_factory=list)

    def ask_all(self) -> None:
        """Ask for the greedy texts once more."""
        before, offer = self.counters.read(), self.server.offer
        answers = [
            self.server.complete(prompt, max_tokens=self.settings.max_tokens, **offer.ids)
            for prompt in self.prompts
        ]
        after = self.counters.read()
        counted = None if before is None or after is None else after - before
        self.rounds.append(Round(answers, counted))

    def compare(self, answer: Answer, known: Answer, at: int) -> list[Difference]:
        """The first difference of an answer to prompt `at` from what is known, if there is one."""
        found = compare(answer, known, prompt=at, bound=self.settings.near_tie)
        return [] if found is None else [found]

    def list_longest(self, count: int) -> list[int]:
        """The prompts with the longest greedy answers."""
        order = sorted(range(len(self.told)), key=lambda at: -len(self.told[at].text))
        return [at for at in order[:count] if self.told[at].text]


def make_check(
    name: str, summary: str, differences: Sequence[Difference], faults: Sequence[str] = (),
    **evidence: Any,
) -> Check:  # fmt: skip
    """A check of texts: what differs beyond a near-tie is wrong, without a margin suspect."""
    found = find_verdict(d.cause for d in differences)
    verdict = FAILED if faults or found == DIFFERS else SUSPECT if found == UNKNOWN else OK
    margins = [abs(d.margin or 0.0) for d in differences if d.cause == NEAR_TIE]
    ties = f", {len(margins)} near-ties, margins up to {max(margins):.2g}" if margins else ""
    gravest = sorted(differences, key=lambda d: d.cause == UNKNOWN)
    wrong = [*faults, *(str(d) for d in gravest if d.cause != NEAR_TIE)]
    evidence |= {"differences": [dataclasses.asdict(d) for d in differences]}
    return Check(name, verdict, summary + ties, wrong, evidence)


def check_greedy(audit: Audit) -> Check:
    """The server's greedy text against the reference, token by token."""
    reference = audit.reference
    if reference is None:
        return Check("greedy", SKIPPED, "no --reference-engine or --reference-url was given")
    plain = [_with_tokens(*pair) for pair in zip(audit.rounds[0].answers, audit.told, strict=True)]
    prompts = [answer.prompt_ids or answer.prompt for answer in plain]
    expected = reference.continue_all(prompts, audit.settings.max_tokens)
    differences: list[Difference] = []
    num_compared = num_equal = 0
    for at, (answer, known) in enumerate(zip(plain, expected, strict=True)):
        found = list(_follow(answer, known, at, reference, audit))
        differences += found
        is_whole = not found or found[-1].cause == NEAR_TIE
        num_compared += (known.num_tokens or 0) if is_whole else found[-1].position
        num_equal += not found
    unit = "characters" if None in (plain[0].ids, expected[0].ids) else "token ids"
    return make_check(
        "greedy", f"{num_equal} of {len(plain)} texts equal, by {unit}", differences,
        verdict=find_verdict(d.cause for d in differences), reference=reference.name,
        near_tie=audit.settings.near_tie, compared_by=unit, tokens=num_compared, prompts=len(plain),
        equal=num_equal,
    )  # fmt: skip


def _with_tokens(answer: Answer, told: Answer) -> Answer:
    """An answer with what another with the same text tells of its tokens."""
    if answer.text != told.text or (answer.ids is not None and answer.ids != told.ids):
        return answer
    return dataclasses.replace(answer, ids=told.ids, tokens=told.tokens)


def _follow(
    answer: Answer, known: Answer, prompt: int, reference: Reference, audit: Audit
) -> Iterator[Difference]:
    """The differences of one answer: behind a near-tie the reference goes on from the server's."""
    start = 0
    for _ in range(MAX_TIES):
        found = compare(answer, known, prompt=prompt, bound=audit.settings.near_tie)
        if found is None:
            return
        yield dataclasses.replace(found, position=start + found.position)
        ids, read = answer.ids, known.prompt_ids
        if found.cause != NEAR_TIE or found.unit != "token" or ids is None or read is None:
            return
        done = found.position + 1
        if not (left := ids[done:]):
            return
        start += done
        (known,) = reference.continue_all([[*read, *ids[:done]]], len(left))
        tokens = answer.tokens[done:] if answer.tokens is not None else None
        # The ids alone decide.
        answer = dataclasses.replace(answer, ids=left, tokens=tokens, text=known.text)


def check_repeat(audit: Audit) -> Check:
    """The same greedy request again, with log-probabilities and without."""
    pairs = [(answer, at) for done in audit.rounds for at, answer in enumerate(done.answers)]
    found = [one for answer, at in pairs for one in audit.compare(answer, audit.told[at], at)]
    return make_check("repeat", f"{len(pairs)} answers, each asked for before or after", found)


def check_own_choice(audit: Audit) -> Check:
    """Each greedy token is the likeliest by the server's own log-probabilities."""
    logprobs, faults = [], []
    for at, answer in enumerate(audit.told):
        for place, token in enumerate(answer.tokens or []):
            told = [one.logprob for one in token.top if one.logprob is not None]
            if token.logprob is None or not told:
                continue
            logprobs.append(token.logprob)
            if max(told) - token.logprob > audit.settings.near_tie:
                faults.append(
                    f"prompt {at}, token {place}: {shorten(token.text)} is written, another token"
                    f" is {max(told) - token.logprob:.3g} higher by the server's own logits"
                )
    if not logprobs:
        return Check("own_choice", SKIPPED, "the server tells no log-probabilities")
    verdict = FAILED if faults else OK
    if not faults and len(logprobs) > 20 and len(set(logprobs)) == 1:
        verdict, faults = SUSPECT, ["every token has the same log-probability"]
    evidence = {"tokens": len(logprobs)}
    return Check("own_choice", verdict, f"{len(logprobs)} tokens", faults, evidence)


def check_narrow_sampling(audit: Audit) -> Check:
    """Sampling from the likeliest token only gives the greedy text, by the rule of sampling."""
    longest = audit.list_longest(4)
    differences = []
    for at in longest:
        base = _cut(audit.told[at], SAMPLED)
        answer = audit.server.complete(
            base.prompt, max_tokens=SAMPLED, temperature=1.0, top_p=NARROW, seed=SEEDS[0],
            **audit.server.offer.ids,
        )  # fmt: skip
        differences += audit.compare(answer, base, at)
    return make_check("narrow_sampling", f"{len(longest)} texts at top_p {NARROW}", differences)


def _cut(answer: Answer, count: int) -> Answer:
    """The first tokens of an answer, as far as they are known."""
    if answer.num_tokens is None or answer.num_tokens <= count or answer.ends is None:
        return answer
    cut: dict[str, Any] = {"text": answer.text[: answer.ends[count - 1]], "finish_reason": "length"}
    for name in ("ids", "tokens", "ends"):
        known = getattr(answer, name)
        cut[name] = None if known is None else known[:count]
    return dataclasses.replace(answer, **cut)


def check_seeds(audit: Audit) -> Check:
    """Equal seeds give equal sampled texts."""
    pairs = []
    prompts = [audit.prompts[n % len(audit.prompts)] for n in range(len(SEEDS))]
    for prompt, seed in zip(prompts, SEEDS, strict=True):
        texts = [
            audit.server.complete(prompt, max_tokens=SAMPLED, temperature=1.0, seed=seed).text
            for _ in range(2)
        ]
        pairs.append({"seed": seed, "equal": texts[0] == texts[1], "texts": texts})
    num_different = sum(not pair["equal"] for pair in pairs)
    # Rounding may now and then tip a draw; seeds without effect change nearly every text.
    verdict = OK if not num_different else FAILED if num_different > len(pairs) / 2 else SUSPECT
    fault = f"{num_different} of {len(pairs)} texts differ when asked for again with the same seed"
    summary = f"{len(pairs)} seeds, each asked for twice"
    return Check("seeds", verdict, summary, [fault] if num_different else [], {"pairs": pairs})


def check_stops(audit: Audit) -> Check:
    """Stop words at every offset: nothing behind them in text, ids, log-probabilities, usage."""
    faults: list[str] = []
    differences: list[Difference] = []
    tried = []
    for at in audit.list_longest(NUM_STOP_PROMPTS):
        base = audit.told[at]
        for number, stop in enumerate(choose_stops(base)):
            body = {
                "max_tokens": audit.settings.max_tokens,
                "stop": [stop],
                **audit.server.offer.told,
            }
            if number % 2:
                answer, _, found = audit.server.stream(base.prompt, has_usage=True, **body)
                faults += [f"stream with stop {stop!r}: {fault}" for fault in _list_grave(found)]
            else:
                answer = audit.server.complete(base.prompt, **body)
            tried.append({"prompt": at, "stop": stop, "expected": base.text.find(stop)})
            expected = base.text[: base.text.find(stop)]
            if answer.text.startswith(expected):
                faults += _find_stop_faults(answer, base, stop, f"prompt {at}, stop {stop!r}")
            else:  # another text, or it ends too early
                known = dataclasses.replace(base, text=expected, ids=None)
                differences += audit.compare(answer, known, at)
    if not tried:
        return Check("stops", SKIPPED, "the greedy texts are too short")
    return make_check("stops", f"{len(tried)} stop words", differences, faults, stops=tried)


def choose_stops(base: Answer) -> list[str]:
    """Pieces from the middle of a text, one for each of some tokens in succession.

    Each begins in the middle of its token, where that has several characters, and goes into the
    next one.
    """
    text = base.text
    ends = base.ends or list(range(3, len(text) + 1, 3))
    chosen: list[str] = []
    places: set[int] = set()
    for at in range(max(1, len(ends) // 4), len(ends) - 1):
        start, end = ends[at - 1], ends[at]
        begin = start + (end - start) // 2
        stop = text[begin : max(end + 1, begin + 2)]
        place = text.find(stop)
        if len(stop) < 2 or not stop.strip() or INCOMPLETE in stop or place in places or not place:
            continue
        places.add(place)
        chosen.append(stop)
        if len(chosen) == NUM_STOPS:
            break
    return chosen


def _find_stop_faults(answer: Answer, base: Answer, stop: str, where: str) -> list[str]:
    """What is wrong with an answer whose text begins as it should."""
    place = base.text.find(stop)
    if len(answer.text) > place:
        return [f"{where}: {answer.text[place : place + 40]!r} is written behind the text"]
    faults = []
    if answer.finish_reason != "stop":
        faults.append(f"{where}: finish_reason is {answer.finish_reason!r}")
    if base.ends is None:
        return faults
    # The token that completes the stop word is the last that may be told of.
    most = next(i for i, end in enumerate(base.ends, 1) if end >= place + len(stop))
    least = sum(end <= place for end in base.ends)
    counts = {
        "token ids": None if answer.ids is None else len(answer.ids),
        "log-probabilities": None if answer.tokens is None else len(answer.tokens),
        "usage.completion_tokens": answer.completion_tokens,
    }
    faults += [
        f"{where}: {count} {name}, where the stop word is complete after {most} tokens"
        for name, count in counts.items()
        if count is not None and count > most
    ]
    if (count := answer.completion_tokens) is not None and count < least:
        faults.append(f"{where}: usage.completion_tokens is {count}, the text has {least} tokens")
    return faults


def _list_grave(faults: Sequence[Fault]) -> list[str]:
    return [fault.text for fault in faults if not fault.is_mild]


def check_limits(audit: Audit) -> Check:
    """max_tokens is met to the token, and the text is the beginning of the longer one."""
    longest = audit.list_longest(1)
    if not longest:
        return Check("limits", SKIPPED, "the greedy texts are empty")
    at = longest[0]
    base = audit.told[at]
    length = base.num_tokens or base.completion_tokens or 0
    limits = [n for n in (*LIMITS, length // 2, length - 1) if 0 < n < length]
    faults: list[str] = []
    differences: list[Difference] = []
    for limit in sorted(set(limits)):
        answer = audit.server.complete(base.prompt, max_tokens=limit, **audit.server.offer.ids)
        counts = {"token ids": answer.num_tokens, "usage": answer.completion_tokens}
        faults += [
            f"max_tokens {limit}: {count} by {name}"
            for name, count in counts.items()
            if count is not None and count != limit
        ]
        if answer.finish_reason != "length":
            faults.append(f"max_tokens {limit}: finish_reason is {answer.finish_reason!r}")
        text = answer.text.rstrip(INCOMPLETE)
        least = 0 if base.ends is None else base.ends[limit - 1]
        if not base.text.startswith(text):
            differences += audit.compare(answer, dataclasses.replace(base, ids=None), at)
        elif len(text) < len(base.text[:least].rstrip(INCOMPLETE)):
            faults.append(
                f"max_tokens {limit}: the text ends at {len(text)} characters, {limit} tokens have"
                f" {least}"
            )
    return make_check("limits", f"max_tokens {limits} of prompt {at}", differences, faults)


def check_stream(audit: Audit) -> Check:
    """Server-sent events, one by one, and the text that they add up to."""
    faults: list[Fault] = []
    differences: list[Difference] = []
    skipped = []
    longest = audit.list_longest(1)
    if not longest:
        return Check("stream", SKIPPED, "the greedy texts are empty")
    at = longest[0]
    base, server = audit.told[at], audit.server

    def try_stream(what: str, prompt: AnyPrompt, known: Answer, body: dict[str, Any]) -> None:
        answer, chunks, found = server.stream(prompt, max_tokens=known.max_tokens, **body)
        found += find_broken_characters(chunks, known.text)
        faults.extend(Fault(f"{what}: {fault.text}", fault.is_mild) for fault in found)
        differences.extend(differing := audit.compare(answer, known, at))
        told, whole = answer.completion_tokens, known.completion_tokens
        if None not in (told, whole) and told != whole and not differing:
            faults.append(Fault(f"{what}: usage has {told} tokens, of the whole answer {whole}"))

    try_stream("greedy", base.prompt, base, {**server.offer.ids})
    try_stream("with usage", base.prompt, base, {"has_usage": True})
    # Hot sampling writes bytes that are halves of characters, where a tokenizer has such tokens.
    hot: dict[str, Any] = {"temperature": 1.5, "seed": SEEDS[0]}
    whole = server.complete(base.prompt, max_tokens=SAMPLED, **hot)
    if server.complete(base.prompt, max_tokens=SAMPLED, **hot).text == whole.text:
        try_stream("sampled", base.prompt, whole, hot)
    else:
        skipped.append("a sampled stream: equal seeds give different texts")
    if isinstance(base.prompt, str) and not server.offer.is_chat:
        chat = [{"role": "user", "content": base.prompt}]
        try:
            whole = server.complete(chat, max_tokens=SAMPLED)
        except Refused as refusal:
            skipped.append(f"chat/completions: {refusal}")
        else:
            try_stream("chat", chat, whole, {})
            try_stream("chat with usage", chat, whole, {"has_usage": True})
    check = make_check(
        "stream", "greedy, sampled and chat", differences, _list_grave(faults), skipped=skipped
    )
    mild = [fault.text for fault in faults if fault.is_mild]
    verdict = SUSPECT if mild and check.verdict == OK else check.verdict
    return dataclasses.replace(check, verdict=verdict, faults=[*check.faults, *mild])


def check_usage(audit: Audit) -> Check:
    """The counts of all answers so far, against their tokens."""
    server, faults = audit.server, []
    counted = [answer for answer in server.answers if answer.usage is not None]
    if not counted:
        return Check("usage", SKIPPED, "no answer has a usage")
    by_prompt: dict[str, set[int]] = {}
    for answer in counted:
        usage = answer.usage or {}
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        where = f"prompt {shorten(answer.prompt, 40)}, max_tokens {answer.max_tokens}"
        if not isinstance(prompt, int) or not isinstance(output, int):
            faults.append(f"{where}: usage is {shorten(dict(usage))}")
            continue
        by_prompt.setdefault(repr(answer.prompt), set()).add(prompt)
        if usage.get("total_tokens") != prompt + output:
            faults.append(f"{where}: {prompt} + {output} tokens are {usage.get('total_tokens')}")
        told = answer.num_tokens
        # An end token or a stop word is counted, and need not be told of.
        is_wrong = output < (told or 0) or (answer.finish_reason == "length" and output != told)
        if told is not None and is_wrong:
            faults.append(f"{where}: completion_tokens {output}, and there are {told} tokens")
        if answer.finish_reason == "length" and output != answer.max_tokens and told is None:
            faults.append(f"{where}: completion_tokens {output} at the length's end")
        if answer.prompt_ids is not None and len(answer.prompt_ids) != prompt:
            faults.append(
                f"{where}: prompt_tokens {prompt}, and there are {len(answer.prompt_ids)} of them"
            )
        accepted = (usage.get("completion_tokens_details") or {}).get("accepted_prediction_tokens")
        if isinstance(accepted, int) and accepted > output:
            faults.append(f"{where}: {accepted} accepted tokens of {output}")
    faults += [
        f"prompt {shorten(prompt, 40)}: prompt_tokens is {sorted(counts)} by turns"
        for prompt, counts in by_prompt.items()
        if len(counts) > 1
    ]
    for prompt in audit.prompts[:2]:
        counts = by_prompt.get(repr(prompt))
        known = server.count_prompt_tokens(prompt)
        if counts and known is not None and counts != {known}:
            told = min(counts)
            faults.append(
                f"prompt {shorten(prompt, 40)}: prompt_tokens {told}, /tokenize says {known}"
            )
    faults = list(dict.fromkeys(faults))
    verdict = FAILED if faults else OK
    return Check("usage", verdict, f"{len(counted)} answers", faults, {"answers": len(counted)})
