"""The audit of servers in vLLM's and llama-server's form."""

from __future__ import annotations

import itertools
import json
import random
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from specdec.audit import drafter
from specdec.audit import server as audited
from specdec.audit.answers import Counts
from specdec.audit.drafter import Pair, find_length, find_margin, judge
from specdec.audit.events import find_broken_characters, find_faults, read_events
from specdec.audit.server import read_counters
from specdec.audit.settings import CHECKS
from tests.audit.doubles import MODEL, Double
from tests.conftest import read_error_lines
from tests.engines import run_cli_here
from tests.loopback import LoopbackServer


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audited, "SETTLING", 0.0)
    monkeypatch.delenv("SPECDEC_API_KEY", raising=False)


def audit(url: str, *flags: object) -> tuple[int, dict[str, Any], str]:
    """Status, report and stderr of a command."""
    process = run_cli_here(
        "audit", "--base-url", url, "--model", MODEL, "--max-tokens", 24, "--json", *flags
    )
    return process.returncode, json.loads(process.stdout) if process.stdout else {}, process.stderr


def find_wrong(report: dict[str, Any]) -> dict[str, str]:
    return {
        check["name"]: check["verdict"]
        for check in report["checks"]
        if check["verdict"] not in ("ok", "skipped")
    }


def get(report: dict[str, Any], name: str) -> dict[str, Any]:
    check: dict[str, Any] = next(c for c in report["checks"] if c["name"] == name)
    return check


class Router(LoopbackServer):
    """Router that hands each request to the next of its servers."""

    def __init__(self, servers: list[Double]) -> None:
        self.turns = itertools.cycle(servers)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        next(self.turns).answer(handler)


def test_replicas_behind_a_router() -> None:
    """The counters of all replicas are added; one replica's alone would contradict the answers."""
    with Double("vllm") as one, Double("vllm") as other, Router([one, other]) as router:
        pages = [f"{server.url}/metrics" for server in (one, other)]
        status, report, err = audit(f"{router.url}/v1", "--metrics-url", *pages)
        assert (status, find_wrong(report)) == (0, {}), err
        evidence = get(report, "acceptance")["evidence"]
        assert (evidence["source"], evidence["acceptance_length"]) == ("metrics", 3.0)
        assert evidence["drafts"] == 2 * 6 * 8  # rounds, prompts, steps of 24 tokens
        status, _, err = audit(router.url, "--metrics-url", pages[0], f"{one.url}/v1/models")
        assert "/v1/models counts no drafts of model 'double'" in read_error_lines(err)[0]
        status, _, err = audit(router.url, "--metrics-url", pages[0], pages[0])
        assert (status, "names a page twice" in err) == (2, True)


def test_an_audit_says_that_it_tests_no_distribution() -> None:
    """But of an agent; checks that were chosen are all that is reported."""
    with Double("vllm") as server:
        status, report, err = audit(server.url)
        assert status == 0, err
        assert [check["name"] for check in report["checks"]] == [*CHECKS, "sampled"]
        untested = get(report, "sampled")
        assert (untested["verdict"], untested["faults"]) == ("skipped", [])
        assert untested["summary"].endswith("was not tested: --agent tests it")
        _, report, _ = audit(server.url, "--checks", "limits")
        assert [check["name"] for check in report["checks"]] == ["limits"]


@pytest.mark.parametrize("style", ["vllm", "llama", "bare"])
def test_a_sound_server(style: str) -> None:
    with Double(style) as server, Double(style, has_metrics=False) as plain:
        status, report, err = audit(f"{server.url}/v1", "--reference-url", plain.url)
    assert find_wrong(report) == {}
    assert (status, report["verdict"]) == (0, "ok")
    greedy, evidence = get(report, "greedy"), get(report, "acceptance")["evidence"]
    by = "characters" if style == "bare" else "token ids"
    assert greedy["evidence"]["compared_by"] == by
    assert evidence["source"] == ("events" if style == "bare" else "metrics")
    if style != "bare":
        assert evidence["acceptance_length"] == 3.0
        assert evidence["per_position"] == [evidence["drafts"]] * 2
    assert "greedy: ok" in err


def test_differences_and_near_ties() -> None:
    """The reference's margin tells them apart; after a near-tie the rest is compared."""
    with Double("vllm", other_at=5) as server:
        with Double("vllm") as plain:
            status, report, err = audit(server.url, "--reference-url", plain.url)
        differences = get(report, "greedy")["evidence"]["differences"]
        assert status == 1
        assert find_wrong(report) == {"greedy": "failed"}
        assert [d["position"] for d in differences] == [5] * 6
        assert {d["cause"] for d in differences} == {"differs"}
        assert differences[0]["margin"] == pytest.approx(3.0, abs=0.1)
        assert differences[0]["server_token"] == differences[0]["reference_token"] + 1
        fact, hint = read_error_lines(err)
        assert "is failed in greedy: prompt 0, token 5:" in fact
        assert "accept rule" in hint
        with Double("vllm", margin=0.2) as plain:
            _, report, _ = audit(server.url, "--reference-url", plain.url, "--checks", "greedy")
        differences = get(report, "greedy")["evidence"]["differences"]
        assert {d["cause"] for d in differences if d["position"] == 5} == {"near-tie"}
        with Double("bare") as plain:
            _, report, _ = audit(server.url, "--reference-url", plain.url, "--checks", "greedy")
        check = get(report, "greedy")
        assert (check["verdict"], check["evidence"]["compared_by"]) == ("suspect", "characters")
        assert "margin not known" in check["faults"][0]


def test_a_short_audit_samples_no_longer_than_its_greedy_texts() -> None:
    with Double("vllm") as server:
        status, report, _ = audit(server.url, "--checks", "narrow_sampling", "--max-tokens", "12")
    assert (status, get(report, "narrow_sampling")["verdict"]) == (0, "ok")


@pytest.mark.parametrize("style", ["vllm", "llama"])
@pytest.mark.parametrize("margin", [0.0, 0.75])
def test_the_margin_is_that_of_the_token_that_was_written(style: str, margin: float) -> None:
    """Of a tie none; not the distance to the last that is told of, where ids are told alone."""
    with Double(style, narrow_at=3, margin=margin) as server:
        status, report, _ = audit(server.url, "--checks", "narrow_sampling")
    check = get(report, "narrow_sampling")
    differences = check["evidence"]["differences"]
    assert len(differences) == 4
    assert [d["margin"] for d in differences] == pytest.approx([margin] * 4, abs=0.01)
    assert not any(d["is_least"] for d in differences)
    assert {d["cause"] for d in differences} == {"differs" if margin else "near-tie"}
    assert (status, check["verdict"]) == ((1, "failed") if margin else (0, "ok"))
    assert ("4 near-ties, margins up to" in check["summary"]) == (not margin)


@pytest.mark.thorough
@pytest.mark.parametrize("style", ["vllm", "llama", "llama-answers", "bare"])
def test_nothing_is_accepted(style: str) -> None:
    """By the metrics, by the answers, and by how tokens come."""
    kind, _, answers = style.partition("-")
    with Double(kind, accepted=0, block=1, has_metrics=not answers) as server:
        status, report, _ = audit(server.url)
    check = get(report, "acceptance")
    assert (status, find_wrong(report)) == (1, {"acceptance": check["verdict"]})
    if style == "bare":
        assert check["verdict"] == "suspect"
        assert "no sign of speculation" in check["faults"][0]
    else:
        assert check["verdict"] == "failed"
        assert "drafted tokens was accepted" in check["faults"][0]
        assert check["evidence"]["source"] == ("answers" if answers else "metrics")


@pytest.mark.thorough
def test_dead_positions_collapse_and_counters() -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"accepted": 1}, "suspect", "position 1 accepts nothing, position 0 "),
        (
            {"accepted_later": 0, "change_after": 12},
            "suspect",
            "acceptance collapses: 2 at first, 0",
        ),
        ({"positions": (5, 9)}, "failed", "add up to 0, not to the"),
    ]
    for options, verdict, fact in cases:
        with Double("vllm", **options) as server:
            status, report, _ = audit(server.url, "--checks", "acceptance")
        check = get(report, "acceptance")
        assert (status, check["verdict"]) == (1, verdict)
        assert fact in check["faults"][0]
    with Double("vllm") as server:
        flags = ("--checks", "acceptance", "--min-acceptance-length")
        assert audit(server.url, *flags, 3)[0] == 0
        status, report, _ = audit(server.url, *flags, 3.1)
    assert status == 1
    assert get(report, "acceptance")["faults"] == ["the acceptance length is 3.00, less than 3.1"]


def test_counters_of_several_models_and_names() -> None:
    page = (
        'a:spec_decode_num_draft_tokens_total{model_name="x\\"y"} 5\n'
        "a:spec_decode_num_accepted_tokens_total 2.0\n"
        'a:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 1\n'
        'a:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 1e0\n'
        "a:spec_decode_num_drafts NaN\na:other 7\n"
    )
    assert read_counters(page, "z") == Counts(None, 5, 2, (1, 1))
    assert read_counters(page, 'x\\"y') == Counts(None, 5, 0, None)
    assert read_counters("up 1\n", "z") is None


def chunk(text: str = "", **choice: Any) -> dict[str, Any]:
    return {
        "id": "a", "model": "m", "created": 1, "object": "text_completion",
        "choices": [{"index": 0, "text": text, "finish_reason": None, **choice}],
    }  # fmt: skip


def test_the_form_of_events() -> None:
    """Each fault of a stream is seen, and told once."""
    end = chunk(finish_reason="stop")
    usage = {**chunk(), "choices": [], "usage": {"completion_tokens": 1}}
    cases: list[tuple[list[dict[str, Any]], bool, list[str]]] = [
        ([chunk("a"), end], False, []),
        ([chunk("a"), end, usage], True, []),
        ([chunk("a"), end, usage], False, ["usage is told that was not asked for"]),
        ([chunk("a"), usage, end], True, ["chunks come after that with the usage"]),
        ([chunk("a"), end], True, ["0 chunks have a usage"]),
        ([chunk("a"), {**end, "usage": {"x": 1}}], True, ["the chunk with the usage has choices"]),
        ([chunk("a"), end, end], False, ["2 finish_reasons"]),
        ([chunk("a")], False, ["0 finish_reasons"]),
        ([chunk("a"), end, chunk("b")], False, ["text comes after the finish_reason"]),
        ([chunk("a"), {**end, "id": "b"}], False, ["id changes: 'a', 'b'"]),
        ([chunk("a"), {**end, "created": 2}], False, ["created changes"]),
        ([{"error": {"message": "oh"}}, chunk("a"), end], False, ["an event is an error"]),
    ]
    for chunks, has_usage, expected in cases:
        texts = [f.text for f in find_faults(chunks, is_chat=False, has_usage=has_usage)]
        if "error" in chunks[0]:
            texts = texts[:1]
        assert len(texts) == len(expected), texts
        assert all(beginning in text for beginning, text in zip(expected, texts, strict=True))
    assert find_faults([chunk("a"), {**end, "created": 2}], is_chat=False, has_usage=False)[
        0
    ].is_mild
    roleless = [{**chunk(), "object": "chat.completion.chunk",
                 "choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}]  # fmt: skip
    texts = [f.text for f in find_faults(roleless, is_chat=True, has_usage=False)]
    assert texts == ["the first chunk has no role"]


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        ("data: {}\n\n", "0 times [DONE]"),
        ("data: {}\n\ndata: [DONE]\n\ndata: [DONE]\n\n", "2 times [DONE]"),
        ("data: [DONE]\n\ndata: {}\n\n", "the first after 0 events; it must be the last"),
        ("data: {\n\ndata: [DONE]\n\n", "an event is no JSON object"),
        ("{}\n\ndata: [DONE]\n\n", "a line is neither data nor a comment"),
        (b"data: {}\n\ndata: \"\xc3\"\n\ndata: [DONE]\n\n", "is not UTF-8"),
        (": ping\r\n\r\ndata: {}\r\n\r\ndata: [DONE]\r\n\r\n", None),
    ],
)  # fmt: skip
def test_the_form_of_lines(sent: str | bytes, fault: str | None) -> None:
    _, faults = read_events(sent if isinstance(sent, bytes) else sent.encode())
    assert (fault in faults[0].text) if fault else not faults


def test_halves_of_characters() -> None:
    pieces = [chunk("a\ufffd"), chunk("\ufffdb")]
    assert "2 halves" in find_broken_characters(pieces, "aäb")[0].text
    assert not find_broken_characters(pieces, "a\ufffd\ufffdb")


# --- what keeps an audit from its work ---


def test_errors_have_facts_and_remedies(tmp_path: Path) -> None:
    with Double("vllm", key="secret") as server:
        url = server.url
        path = tmp_path / "key"
        path.write_text("secret\n")
        assert audit(url, "--api-key-file", path, "--checks", "limits")[0] == 0
        status, report, err = audit(url)
        assert (status, report) == (1, {})
        fact, hint = read_error_lines(err)
        assert "HTTP 401, 'Unauthorized'" in fact
        assert "--api-key-file or SPECDEC_API_KEY" in hint
        path.write_text("wrong")
        assert "HTTP 401" in read_error_lines(audit(url, "--api-key-file", path)[2])[0]
    fact, hint = read_error_lines(audit(url)[2])
    assert f"no server answers at {url}/v1/models: Connection refused" in fact
    assert "check --base-url" in hint
    with Double("vllm") as server:
        process = run_cli_here("audit", "--base-url", server.url, "--model", "other")
        fact, hint = read_error_lines(process.stderr)
        assert (process.returncode, "has no model 'other'; it has 'double'" in fact) == (1, True)
        assert "--model" in hint
        metrics = audit(server.url, "--metrics-url", f"{server.url}/none")
        assert "has no metrics: HTTP 404" in read_error_lines(metrics[2])[0]


@pytest.mark.parametrize(
    ("flags", "fact"),
    [
        (["--model", "m"], "missing --base-url"),
        (["--base-url", "ftp://x", "--model", "m"], "--base-url is 'ftp://x'"),
        (["--base-url", "http://x", "--model", "m", "--checks", "gredy"], "no check 'gredy' (did"),
        (["--base-url", "http://x", "--model", "m", "--tokenizer-dir", "t"],
         "--tokenizer-dir without --reference-engine"),
        (["--base-url", "http://x", "--model", "m", "--same-drafter", "--reference-url", "http://y"],
         "--same-drafter without --reference-engine"),
        (["--base-url", "http://x", "--model", "m", "--reference-model", "t"],
         "--reference-model without --reference-url"),
        (["--base-url", "http://x", "--model", "m", "--reference-url", "http://y",
          "--reference-engine", "tests"], "are both given"),
    ],
)  # fmt: skip
def test_wrong_usage(flags: list[str], fact: str) -> None:
    process = run_cli_here("audit", *flags)
    assert process.returncode == 2
    assert fact in read_error_lines(process.stderr)[0]


def test_a_server_that_dies_is_reported() -> None:
    with Double("vllm", fail_after=16) as server:
        status, report, err = audit(server.url, "--checks", "limits", "acceptance")
    assert (status, report["verdict"]) == (1, "failed")
    assert get(report, "repeat")["faults"] == ["HTTP 500, 'the engine is dead'"]
    assert get(report, "limits")["verdict"] == "failed"


def test_a_slow_server_is_told() -> None:
    class Slow(Double):
        def _complete(self, *args: Any, **options: Any) -> None:
            import threading

            threading.Event().wait(0.5)

    with Slow("vllm") as server:
        fact, hint = read_error_lines(audit(server.url, "--timeout", 0.2)[2])
    assert "no answer within 0.2 s" in fact
    assert "--timeout" in hint


# --- the drafter alongside the reference's ---


def make_pairs(
    steps: list[tuple[int, int]], *, drafted: int = 3, num_dropped: int = 0
) -> list[Pair]:
    """Texts of 32 tokens in so many verify steps of the server and of the reference."""
    pairs = []
    for server_steps, reference_steps in steps:
        counts = Counts(
            server_steps - (num_dropped > 0),
            drafted * server_steps - num_dropped,
            31 - server_steps,
        )
        reference = Counts(reference_steps, drafted * reference_steps, 31 - reference_steps)
        pairs.append(Pair(32, counts, reference))
    return pairs


def test_the_margin_is_that_of_signs_drawn_at_random() -> None:
    """Against all the draws themselves; where no draw is rare enough, nothing is accused."""
    for differences in ([1] * 12, [3, 0, 2, 2, 1, 1, 5, 1, 1, 2, 4], [2] * 9, [0] * 5, []):
        sums = [
            sum(sign * size for sign, size in zip(signs, differences, strict=True))
            for signs in itertools.product((1, -1), repeat=len(differences))
        ]
        margin = find_margin(differences)
        assert sum(total >= margin for total in sums) <= drafter.FALSE_ALARMS * len(sums)
        below = max(total for total in sums if total < margin)
        assert sum(total >= below for total in sums) > drafter.FALSE_ALARMS * len(sums)
        assert find_margin([-size for size in differences]) == margin


def test_equal_drafters_are_seldom_accused() -> None:
    """Of servers that differ by rounding, at most one of a thousand; another drafter always."""
    draw = random.Random(5)
    accused = 0
    for _ in range(500):
        steps = []
        for _ in range(36):
            num_steps = draw.randint(9, 16)
            steps.append((num_steps + draw.choice((-2, -1, 0, 0, 1, 2)), num_steps))
        accused += judge(make_pairs(steps), 3, 36).verdict != "ok"
    assert accused <= 3  # half of one is expected at most
    worse = [(num_steps + draw.choice((0, 0, 1, 2, 3)), num_steps) for num_steps in [12] * 36]
    check = judge(make_pairs(worse), 3, 36)
    assert check.verdict == "failed"
    assert check.evidence["reference_tokens_per_step"] == pytest.approx(31 / 12)


def test_what_is_no_worse_drafter() -> None:
    """Few texts, a little more than the reference, counts that end as llama-server's do."""
    num_steps = [12] * 36
    assert judge(make_pairs([(12, 12)] * 36), 3, 36).verdict == "ok"
    assert judge(make_pairs([(n - 3, n) for n in num_steps]), 3, 36).verdict == "ok"
    # Each of 13 texts a step longer is no chance, but within what number formats may cost.
    assert judge(make_pairs([(13, 12)] * 12 + [(12, 12)] * 24), 3, 36).verdict == "ok"
    assert judge(make_pairs([(13, 12)] * 14 + [(12, 12)] * 22), 3, 36).verdict == "failed"
    ended_pairs = make_pairs([(12, 12)] * 36, num_dropped=6)
    assert [pair.num_steps for pair in ended_pairs] == [12] * 36
    assert judge(ended_pairs, 3, 36).verdict == "ok"
    less = judge(make_pairs([(20, 12)] * 36, drafted=2), 3, 36)
    assert (less.verdict, "drafts 2.00 tokens a step" in less.summary) == ("skipped", True)
    # In float32 the same drafter takes the same steps, text by text.
    pairs = make_pairs([(13, 12), (12, 13)] * 2 + [(12, 12)] * 32)
    assert judge(pairs, 3, 36).verdict == "ok"
    check = judge(pairs, 3, 36, is_exact=True)
    assert (check.verdict, check.faults[0][:13]) == ("failed", "4 of 36 texts")
    assert judge(pairs[2:], 3, 34, is_exact=True).verdict == "ok"
    tree = make_pairs([(20, 12)] * 36, drafted=7)
    assert judge(tree, None, 36).verdict == "failed"


def test_chains_and_trees_are_told_apart() -> None:
    assert find_length(Counts(10, 30, 12, (6, 4, 2)), 24) == 3
    assert find_length(Counts(10, 26, 12, (6, 4, 2)), 24) == 3
    assert find_length(Counts(10, 70, 12, (6, 4, 2)), 24) is None
    assert find_length(Counts(None, 26, 13), 24) == 3
