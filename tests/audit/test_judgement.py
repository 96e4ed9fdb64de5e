"""How an audit judges counts and texts, alone: numbers and texts that a reader can compare."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.audit import acceptance, cli, reference, texts
from specdec.audit.answers import Completion, Counts, Token
from specdec.audit.checks import FAILED, OK, SKIPPED, SUSPECT, Audit, Round
from specdec.audit.reference import EngineReference, open_reference
from specdec.audit.settings import AuditSettings
from specdec.errors import SpecDecError

GOOD = Counts(100, 300, 150, (90, 50, 10))


def judge(
    first: Counts | None, last: Counts | None, *, answers: Counts | None = None,
    num_tokens: int = 250, **settings: Any,
) -> Any:  # fmt: skip
    """The verdict on two rounds of one answer each, by the server's metrics."""
    rounds = []
    for metric_counts in (first, last):
        completion = Completion(
            prompt="a", text="b", max_tokens=9, counts=answers,
            usage={"completion_tokens": num_tokens},
        )  # fmt: skip
        rounds.append(Round([completion], metric_counts))
    audit = Audit(
        settings=AuditSettings(**settings), server=None, counters=None, prompts=["a"],
        reference=None, rounds=rounds,
    )  # fmt: skip
    return acceptance.check_acceptance(audit)


# ---- Counts.


def test_counts_that_agree() -> None:
    """100 drafts of three tokens in each round, half of which are accepted: 2.5 a draft."""
    check = judge(GOOD, GOOD)
    assert (check.verdict, check.faults) == (OK, [])
    assert check.summary == (
        "300 of 600 drafted tokens accepted, 2.50 tokens per draft, by the server's metrics, before"
        " and after"
    )
    assert check.evidence["acceptance_length"] == 2.5
    assert check.evidence["per_position"] == (180, 100, 20)
    assert (check.evidence["source"], check.evidence["output_tokens"]) == ("metrics", 500)
    assert judge(None, None, answers=GOOD).evidence["source"] == "answers"
    assert judge(GOOD, None, answers=GOOD).evidence["source"] == "answers"


@pytest.mark.parametrize(
    ("counts", "last", "verdict", "fault"),
    [
        (Counts(0, 0, 0), None, FAILED, "nothing was drafted in 500 tokens"),
        (Counts(10, 30, 0), None, FAILED, "none of 60 drafted tokens was accepted"),
        (Counts(9, 27, 0), None, SUSPECT, "none of 54 drafted tokens was accepted"),
        (Counts(100, 300, 9), None, SUSPECT, "18 of 600 drafted tokens were accepted, which is"),
        (Counts(100, 300, 10), None, OK, None),
        (Counts(None, 300, 8), None, SUSPECT, "16 of 600 drafted tokens were accepted, which is"),
        (Counts(None, 300, 9), None, OK, None),
        (Counts(100, 300, 100), Counts(100, 300, 49), SUSPECT, "acceptance collapses: 1 at first,"),
        (Counts(100, 300, 100), Counts(100, 300, 50), OK, None),
        (Counts(100, 300, 100), Counts(19, 57, 1), OK, None),
        (Counts(50, 150, 25, (25, 0)), None, SUSPECT, "position 1 accepts nothing, position 0 50"),
        (Counts(50, 150, 24, (24, 0)), None, OK, None),
        (Counts(100, 300, 301), None, FAILED, "602 tokens accepted of 600 drafted"),
        (Counts(301, 300, 150), None, FAILED, "602 drafts hold 600 tokens"),
        (Counts(100, 300, 150, (90, 50)), None, FAILED, "add up to 280, not to the 300 accepted"),
        (Counts(100, 300, 150, (70, 80)), None, FAILED, "a later position accepts more than the"),
        (Counts(100, 300, 101, (101,)), None, FAILED, "position 0 accepts 202 times in 200 drafts"),
    ],
)  # fmt: skip
def test_counts_that_are_faults(
    counts: Counts, last: Counts | None, verdict: str, fault: str | None
) -> None:
    check = judge(counts, last or counts)
    assert check.verdict == verdict
    assert len(check.faults) == (fault is not None)
    assert fault is None or fault in check.faults[0]


def test_answers_that_contradict_the_metrics() -> None:
    more = dataclasses.replace(GOOD, accepted=151, per_position=(91, 50, 10))
    check = judge(GOOD, GOOD, answers=more)
    assert check.faults == ["the metrics count 300 of 600 accepted, the answers tell of 302 of 600"]
    assert judge(GOOD, GOOD, answers=dataclasses.replace(GOOD, accepted=149)).verdict == OK
    # A position where nothing is accepted is in the answers alone.
    short = Counts(100, 300, 100, (100,))
    listed = Counts(100, 300, 100, (100, 0))
    check = judge(short, short, answers=listed)
    assert check.faults == ["position 1 accepts nothing, position 0 200 times"]


def test_the_length_that_is_asked_for() -> None:
    assert judge(GOOD, GOOD, min_acceptance_length=2.5).verdict == OK
    check = judge(GOOD, GOOD, min_acceptance_length=2.6)
    assert (check.verdict, check.faults) == (
        FAILED, ["the acceptance length is 2.50, less than 2.6"],
    )  # fmt: skip
    # Without a count of drafts: 500 tokens in 500 - 300 steps.
    assert acceptance.find_length(Counts(None, 600, 300), 500) == 2.5
    assert acceptance.find_length(Counts(None, 600, 300), 300) is None
    assert acceptance.find_length(Counts(0, 0, 0), 300) is None


def test_chunks_of_a_stream_are_weaker_evidence() -> None:
    def judge_stream(chunks: list[Any], longest: list[int]) -> Any:
        answer = Completion(prompt="a", text="abc", max_tokens=9)
        server = SimpleNamespace(
            offer=SimpleNamespace(detail_fields={}),
            stream=lambda prompt, **options: (
                dataclasses.replace(answer, usage={"completion_tokens": 6}), chunks, None
            ),
        )  # fmt: skip
        return acceptance._judge_events(SimpleNamespace(
            list_longest=lambda number: longest, server=server, detailed_answers=[answer],
            settings=AuditSettings(),
        ))  # fmt: skip

    assert judge_stream([], []).verdict == SKIPPED
    pieces = [{"choices": [{"text": "ab", "token_ids": [1] * size}]} for size in (3, 1, 2)]
    check = judge_stream([*pieces, {"choices": []}], [0])
    assert (check.verdict, check.evidence["sizes"], check.evidence["tokens"]) == (OK, [3, 1, 2], 6)
    single = [{"choices": [{"text": "a", "token_ids": [1]}]}] * 6
    check = judge_stream(single, [0])
    assert check.verdict == SUSPECT
    assert "tokens come one by one" in check.faults[0]
    # Without tokens' ids: as many as the server counts, in as many events as have text.
    plain = [{"choices": [{"text": text}]} for text in ("ab", "", "c")]
    check = judge_stream(plain, [0])
    assert (check.verdict, check.evidence["events"], check.evidence["tokens"]) == (OK, 2, 6)


# ---- Texts.


def complete(text: str, ids: list[int] | None = None, **fields: Any) -> Completion:
    return Completion(prompt="a", text=text, max_tokens=9, ids=ids, **fields)


def make_reference() -> Completion:
    """Three tokens, "ab", "cd", "ef", the second 0.3 likelier than "cx" and 2 than "y"."""
    second = Token(6, "cd", -0.5, (
        Token(6, "cd", -0.5), Token(8, "c", -9.0), Token(7, "cx", -0.8), Token(9, "y", -2.5),
    ))  # fmt: skip
    tokens = [Token(5, "ab", -0.1, (Token(5, "ab", -0.1),)), second, Token(4, "ef", -0.2)]
    return complete("abcdef", [5, 6, 4], tokens=tokens, ends=[2, 4, 6], finish_reason="length")


def compare(answer: Completion, reference: Completion, bound: float = 0.5) -> Any:
    return texts.compare(answer, reference, prompt=3, bound=bound)


@pytest.mark.parametrize(
    ("token", "margin", "is_least", "cause"),
    [
        (7, 0.3, False, "near-tie"), (9, 2.0, False, "differs"),
        # Not among the likeliest: at least as unlikely as the least likely of these, -9.
        (99, 8.5, True, "differs"),
    ],
)  # fmt: skip
def test_a_token_for_another(token: int, margin: float, is_least: bool, cause: str) -> None:
    difference = compare(complete("abXef", [5, token, 4]), make_reference())
    assert (difference.prompt, difference.position, difference.unit) == (3, 1, "token")
    assert (difference.server_token, difference.reference_token) == (token, 6)
    assert difference.margin == pytest.approx(margin)
    assert (difference.is_least, difference.cause) == (is_least, cause)
    assert ("at least" in str(difference)) is is_least


def test_texts_without_ids_are_compared_by_characters() -> None:
    """The reference's token there, and the likeliest that the answer goes on with."""
    difference = compare(complete("abcxef"), make_reference())
    assert (difference.position, difference.unit) == (3, "character")
    assert (difference.server, difference.reference) == ("'xef'", "'def'")
    assert difference.margin == pytest.approx(0.3), "cx, not c"
    assert difference.cause == "near-tie"
    # After an end another token begins, which lists no others.
    later = compare(complete("abcdxf"), make_reference())
    assert (later.position, later.margin, later.cause) == (4, None, "unknown")
    unknown = compare(complete("abcxef"), complete("abcdef"))
    assert (unknown.margin, unknown.cause) == (None, "unknown")
    assert str(unknown).endswith("margin not known, bound 0.5: unknown")
    assert compare(complete("abcdef"), make_reference()) is None


def test_texts_of_different_lengths() -> None:
    reference = make_reference()
    assert compare(complete("abcdef", [5, 6, 4], finish_reason="length"), reference) is None
    short = compare(complete("abcd", [5, 6], finish_reason="length"), reference)
    assert (short.cause, short.position, short.server) == ("length", 2, "2 tokens (length)")
    # An end token, which one of the two lists; but no more than it.
    ended = complete("abcdef", [5, 6, 4, 2], finish_reason="stop")
    assert compare(ended, reference) is None
    assert compare(dataclasses.replace(ended, ids=[5, 6, 4, 2, 2]), reference).cause == "length"
    shorter = compare(complete("abc"), reference)
    assert (shorter.cause, shorter.position, shorter.server) == ("length", 3, "''")
    # Equal tokens and other texts: no near-tie explains that.
    same_ids = compare(complete("abcdeX", [5, 6, 4], finish_reason="length"), reference)
    assert (same_ids.cause, same_ids.unit, same_ids.position) == ("length", "character", 5)


def test_a_token_without_ids_is_found_by_its_text() -> None:
    reference = make_reference()
    assert reference.tokens is not None
    nameless = [
        dataclasses.replace(
            token, id=None, top=tuple(dataclasses.replace(t, id=None) for t in token.top)
        )
        for token in reference.tokens
    ]
    reference = dataclasses.replace(reference, tokens=nameless)
    listed = [Token(5, "ab", None), Token(9, "y", None), Token(4, "ef", None)]
    difference = compare(complete("abyef", [5, 9, 4], tokens=listed), reference)
    assert (difference.margin, difference.server) == (2.0, "9 'y'")
    difference = compare(complete("abyef", [5, 9, 4]), reference)
    assert difference.margin == 2.0, "by what follows in the text"


# ---- The reference.


class Engine:
    """Writes a token of two letters for each number, and keeps what it was asked."""

    max_input_len, max_seq_len = 6, 10

    def __init__(self, folder: Any, **options: Any) -> None:
        self.options, self.asked, self.is_closed = options, list[Any](), False
        names = {5: "ab", 6: "cd", 2: ""}
        self.tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(names[i] for i in ids))

    def generate(self, prompts: Any, max_output_len: int) -> list[Any]:
        self.asked += prompts
        top = [(5, -0.1), (6, -2.0)]
        logprobs = [SimpleNamespace(logprob=-0.1, top=top), SimpleNamespace(logprob=-0.2, top=[])]
        return [SimpleNamespace(
            token_ids=[5, 6], logprobs=logprobs, text="abc", finish_reason="stop", prompt_ids=[1],
        ) for _ in prompts]  # fmt: skip

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    import specdec

    made: list[Engine] = []

    def load(folder: Any, **options: Any) -> Engine:
        made.append(Engine(folder, **options))
        return made[-1]

    monkeypatch.setattr(specdec, "Engine", SimpleNamespace(load=load))
    return made


SETTINGS = AuditSettings(reference_engine=Path("e"), device="cpu")


def test_an_engine_as_the_reference(engines: list[Engine]) -> None:
    with open_reference(SETTINGS) as opened:
        assert isinstance(opened, EngineReference)
        (engine,) = engines
        assert engine.options["speculation"] is False
        prompts: list[Any] = ["a", [3, 4], [{"role": "user", "content": "b"}]]
        completions = opened.continue_all(prompts, 7)
        assert [(p.text, p.token_ids, p.temperature) for p in engine.asked[:2]] == [
            ("a", None, 0.0), (None, [3, 4], 0.0),
        ]  # fmt: skip
        assert engine.asked[2].messages == prompts[2]
        first = completions[0]
        assert (first.prompt, first.text, first.ids, first.ends) == ("a", "abc", [5, 6], [2, 3])
        assert (first.max_tokens, first.finish_reason, first.prompt_ids) == (7, "stop", [1])
        assert first.tokens == [
            Token(5, "ab", -0.1, (Token(5, "ab", -0.1), Token(6, "cd", -2.0))),
            Token(6, "c", -0.2),
        ]
        # Six tokens of a prompt at most, ten with what follows.
        room = [opened.can_continue([1] * n, new) for n, new in ((6, 4), (7, 1), (6, 5), (5, 5))]
        assert room == [True, False, False, True]
    assert engine.is_closed
    with open_reference(AuditSettings()) as opened:
        assert opened is None


@pytest.mark.parametrize(
    ("method", "length", "options"),
    [
        ("medusa", 2, {"medusa_choices": "[[0], [0, 0]]"}),
        ("eagle", 1, {"eagle_choices": "[[0]]"}),
        ("dflash", 5, {"dflash_tokens": 5, "dflash_top_k": 1}),
        ("redrafter", 5, {}), ("medusa", None, {}),
    ],
)  # fmt: skip
def test_it_drafts_as_the_server_does(
    method: str, length: int | None, options: dict[str, Any], engines: list[Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from specdec.engine import layout

    found: Any = SimpleNamespace(name=method)
    monkeypatch.setattr(reference, "read_backend", lambda folder: "torch")
    monkeypatch.setattr(layout, "read_engine_config", lambda folder, backend: SimpleNamespace(
        checkpoint=SimpleNamespace(method=found)
    ))  # fmt: skip
    opened = EngineReference(SETTINGS)
    opened.start_drafting(length)
    assert [engine.is_closed for engine in engines] == [True, False]
    taken = {k: v for k, v in engines[1].options.items() if k not in ("tokenizer", "device")}
    assert taken == {"draft_budget": "fixed", **options}
    found = None
    with pytest.raises(SpecDecError, match="e holds no drafter, which --same-drafter says"):
        opened.start_drafting(length)


# ---- The report.


def test_a_report_in_words_and_its_error() -> None:
    """The first of many faults are printed; the gravest checks are the error."""
    faults = [f"text {number} differs" for number in range(8)]
    checks = [
        {"name": "greedy", "verdict": "failed", "summary": "8 texts", "faults": faults},
        {"name": "seeds", "verdict": "suspect", "summary": "1 seed", "faults": ["seed 3"]},
    ]  # fmt: skip
    server = {"base_url": "http://a/v1", "model": "m", "endpoint": "chat", "version": "0.9"}
    report: dict[str, Any] = {
        "server": server, "reference": None, "verdict": "failed", "requests": 9, "checks": checks,
    }  # fmt: skip
    lines = cli.format_report(report).splitlines()
    assert lines[:3] == [
        "http://a/v1: failed", "  m (0.9), chat, 9 answers; reference: none",
        "  greedy: failed; 8 texts",
    ]  # fmt: skip
    assert lines[8:] == [
        "    text 5 differs", "    and 2 more", "  seeds: suspect; 1 seed", "    seed 3",
    ]  # fmt: skip
    error = cli.find_error(report)
    assert error is not None
    assert error.message == "http://a/v1 is failed in greedy: text 0 differs"
    assert error.hint == cli.HINTS["greedy"]
    assert cli.find_error(report | {"verdict": "ok"}) is None
