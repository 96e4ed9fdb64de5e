"""`specdec-train data` with a server: what it asks, survives, records, and never tells."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from specdec.errors import SpecDecError, UsageError, name_extra
from specdec.system import http_client, logs
from specdec.train.data import client, servers
from specdec.train.data.journal import Journal
from tests.conftest import ROOT
from tests.train.chat_server import ChatServer, Reply, write_answer
from tests.train.conftest import Finished, run_here

KEY = "sk-never-to-be-seen-4711"
RunData = Callable[..., Finished]
HANGS = 120  # seconds after which something hangs: no test waits so long for what is slow only


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], bool]:
    """Wait until so many rows are in the journal: an answer that was sent is not there yet."""
    condition, real = threading.Condition(), Journal.add_row
    num_rows = 0

    def add_row(self: Journal, index: int, row: dict[str, Any]) -> None:
        nonlocal num_rows
        real(self, index, row)
        with condition:
            num_rows = len(self)
            condition.notify_all()

    def wait(number: int) -> bool:
        with condition:
            return condition.wait_for(lambda: num_rows >= number, HANGS)

    monkeypatch.setattr(Journal, "add_row", add_row)
    return wait


@pytest.fixture
def run_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> RunData:
    """Run `specdec-train data` in this process, into `tmp_path / out.jsonl`."""
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(server: ChatServer | str, *args: object, ends: int = 0) -> Finished:
        url = server if isinstance(server, str) else server.url
        path = tmp_path / "in.jsonl"
        words = [
            "data", "--base-url", url, "--model", "toy", "--output", tmp_path / "out.jsonl",
            "--timeout", 120, *(["--input", path] if path.is_file() else []), *args,
        ]  # fmt: skip
        return run_here(words, capsys, ends)

    return run


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(count)))
    return path


def read_output(folder: Path, name: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def list_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answered(*turns: dict[str, str]) -> list[dict[str, str]]:
    """Answer every user's turn as the server does."""
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append(turn)
        if turn["role"] == "user":
            messages.append({"role": "assistant", "content": write_answer(messages)})
    return messages


# ---- What is asked, and what comes out.

ROWS: list[tuple[dict[str, Any], list[dict[str, str]]]] = [
    ({"messages": [user("a"), {"role": "assistant", "content": "old"}, user("b")]},
     [user("a"), user("b")]),
    ({"id": "share-1", "conversations": [
        {"from": "gpt", "value": "begins"}, {"from": "human", "value": "a"},
        {"from": "gpt", "value": "old"}, {"from": "gpt", "value": "goes on"},
        {"from": "human", "value": "b"}, {"from": "gpt", "value": "old"}]},
     [user("a"), user("b")]),
    ({"system": "Be brief.", "mask": "User", "type": "VALUE_TO_TEXT", "conversations": [
        {"from": "User", "value": "a", "label": None},
        {"from": "Assistant", "value": "old", "label": "x"}]},
     [{"role": "system", "content": "Be brief."}, user("a")]),
    ({"prompt": "only this"}, [user("only this")]),
    ({"text": "or this"}, [user("or this")]),
    ({"prompt": "not this", "messages": [user("but this")]}, [user("but this")]),
]  # fmt: skip


def test_every_format_is_answered_turn_by_turn(run_data: RunData, tmp_path: Path) -> None:
    """In view of the new answers, in the input's order, whatever comes back first."""
    path = tmp_path / "in.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row, _ in ROWS))
    with ChatServer(lambda number, body: {"sleep": 0.05 * max(0, 6 - number)}) as server:
        done = run_data(server, "--max-tokens", 50, "--json")
    out = read_output(tmp_path)
    assert [row["messages"] for row in out] == [answered(*turns) for _, turns in ROWS]
    assert [row["index"] for row in out] == list(range(len(ROWS)))
    assert [row.get("id") for row in out] == [None, "share-1", None, None, None, None]
    assert set(server.paths) == {"/v1/chat/completions"}
    asked = {"model": "toy", "max_tokens": 50, "temperature": 0.0, "stream": False}
    for body in server.bodies:
        assert body == asked | {"messages": body["messages"]}
    report = json.loads(done.out)
    assert (report["rows"], report["answered"], report["failed"]) == (6, 6, 0)
    assert list_files(tmp_path) == ["in.jsonl", "out.jsonl", "out.manifest.json"]
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["input"]["bytes"] == path.stat().st_size
    assert manifest["settings"]["max_tokens"] == 50


def test_options_reach_the_server(run_data: RunData, tmp_path: Path) -> None:
    write_prompts(tmp_path / "in.jsonl", 3)
    with ChatServer() as server:
        run_data(
            server, "--temperature", 0.7, "--top-p", 0.9, "--seed", 5,
            "--system-prompt", "Be kind.", "--max-rows", 2,
        )  # fmt: skip
    assert server.keys == {None}, "without a key none is sent"
    bodies = sorted(server.bodies, key=lambda body: body["seed"])
    assert [body["seed"] for body in bodies] == [5, 6]
    assert {(body["temperature"], body["top_p"]) for body in bodies} == {(0.7, 0.9)}
    assert bodies[1]["messages"] == [
        {"role": "system", "content": "Be kind."}, user("question 1"),
    ]  # fmt: skip


def test_calls_of_functions(run_data: RunData, tmp_path: Path) -> None:
    """The server gets the tools; a result goes on only from the call that it was made for."""
    tools = [{"type": "function", "function": {"name": "weather"}}]
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    other = {"name": "weather", "arguments": '{"city": "Rome"}'}
    old = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function}]}
    turns = [user("Rain?"), old, {"role": "tool", "content": "wet"}]
    path = tmp_path / "in.json"
    path.write_text(json.dumps([{"messages": turns, "tools": tools}] * 2))
    new = [{"id": "x", "type": "function", "function": one} for one in (function, other)]

    def script(number: int, body: Any) -> Reply | None:
        is_asked = body["messages"][-1]["role"] == "user"
        called = {"content": None, "tool_calls": [new.pop(0)]} if is_asked else {}
        return {"message": called, "finish_reason": "tool_calls" if called else "stop"}

    with ChatServer(script) as server:
        run_data(server, "--input", path, "--concurrency", 1)
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 1]
    assert all(body["tools"] == tools for body in server.bodies)
    _, call, result = server.bodies[1]["messages"]
    assert call["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert result["tool_call_id"] == "c1"
    first, second = read_output(tmp_path)
    assert [message["role"] for message in first["messages"]] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    (call,) = second["messages"][1]["tool_calls"]
    assert call["function"] == other
    assert len(second["messages"]) == 2
    assert first["tools"] == second["tools"] == tools


def test_the_folder_of_the_output_is_made(run_data: RunData, tmp_path: Path) -> None:
    """And removed where nothing came of it."""
    path = write_prompts(tmp_path / "prompts.jsonl", 1)
    flags = ["--input", path, "--output", tmp_path / "no" / "out.jsonl"]
    run_data("http://127.0.0.1:9/v1", *flags, ends=1)
    assert list_files(tmp_path) == ["prompts.jsonl"]
    with ChatServer() as server:
        run_data(server, *flags)
    assert len(read_output(tmp_path / "no")) == 1


@pytest.mark.parametrize("suffix", [".txt", ".json", ".jsonl"])
def test_completions(run_data: RunData, tmp_path: Path, suffix: str) -> None:
    texts = ["def add(a, b):", "class \u00e9t\u00e9:"]
    path = tmp_path / f"in{suffix}"
    rows = [{"text": text} for text in texts]
    content = {".txt": "\n".join(texts), ".json": json.dumps(rows)}
    path.write_text(content.get(suffix, "\n".join(map(json.dumps, rows))))
    with ChatServer() as server:
        run_data(server, "--input", path, "--completion")
    assert set(server.paths) == {"/v1/completions"}
    assert [row["text"] for row in read_output(tmp_path)] == [t + write_answer(t) for t in texts]


# ---- A server that fails.


def stall(answer: bytes) -> Iterator[bytes]:
    """A good answer, if one waits for it; so late that no pause of this process reaches it."""
    threading.Event().wait(HANGS)
    yield b"HTTP/1.1 200 OK\r\n\r\n" + answer


def trickle_body(answer: bytes) -> Iterator[bytes]:
    """The same, with a byte now and then."""
    yield b"HTTP/1.1 200 OK\r\n\r\n"
    yield from [b" "] * TRICKLED
    yield answer


def trickle_head(answer: bytes) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nX-Filler: "
    yield from [b"x"] * TRICKLED
    yield b"\r\n\r\n" + answer


TRICKLE_PAUSE = 0.05  # seconds before each byte
TRICKLED = int(HANGS / TRICKLE_PAUSE)  # bytes before an answer
TOO_LATE: dict[str, Reply] = {
    "stalls": {"pieces": stall, "pause": 0},
    "trickling body": {"pieces": trickle_body, "pause": TRICKLE_PAUSE},
    "trickling head": {"pieces": trickle_head, "pause": TRICKLE_PAUSE},
}
FAILURES: dict[str, Reply] = {
    "long body": {"body": b" " * (client.OTHER_BYTES + 256 * 2048) + b"{}"},
    "500": {"status": 500, "body": b"oops"},
    "503": {"status": 503, "body": b"{}"},
    "429": {"status": 429, "headers": {"Retry-After": "0.3"}, "body": b'{"error": {"message": 1}}'},
    "429 until": {"status": 429, "headers": {"Retry-After": formatdate(0)}},
    "cut": {"cut": 20},
    "closed": {"cut": 0, "status": 200},
    "no JSON": {"body": b"<html>busy</html>"},
    "half JSON": {"body": b'{"choices": [{"message"'},
    "no choices": {"body": b'{"choices": []}'},
    "no text": {"message": {"content": 7}},
    "half a surrogate pair": {"message": {"content": "\ud83d"}},
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", FAILURES)
def test_what_passes_is_tried_again(run_data: RunData, tmp_path: Path, kind: str) -> None:
    write_prompts(tmp_path / "in.jsonl", 2)
    with ChatServer(lambda number, body: FAILURES[kind] if number in (1, 2) else None) as server:
        done = run_data(server, "--concurrency", 1, "--debug")
    expected = [answered(user(f"question {n}")) for n in range(2)]
    assert [row["messages"] for row in read_output(tmp_path)] == expected
    assert len(server.bodies) == 4
    if kind == "long body":
        assert "the answer is longer than 1572864 bytes" in done.err
    if kind == "429":
        assert server.times[2] - server.times[1] >= 0.3, "Retry-After"


@pytest.mark.parametrize("kind", TOO_LATE)
def test_what_comes_too_late_is_asked_again(
    run_data: RunData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A good answer, of which something comes all the time: what counts is when it is whole."""
    real = http_client.HttpClient.exchange
    num_asked = 0

    def exchange(self: http_client.HttpClient, *args: Any) -> http_client.Response:
        """Wait without end for what will be answered, however long this process is paused."""
        nonlocal num_asked
        num_asked += 1
        self.timeout = 0.3 if num_asked in (2, 3) else math.inf
        return real(self, *args)

    monkeypatch.setattr(http_client.HttpClient, "exchange", exchange)
    write_prompts(tmp_path / "in.jsonl", 2)
    with ChatServer(lambda number, body: TOO_LATE[kind] if num_asked in (2, 3) else None) as server:
        done = run_data(server, "--concurrency", 1, "--debug")
    expected = [answered(user(f"question {n}")) for n in range(2)]
    assert [row["messages"] for row in read_output(tmp_path)] == expected
    assert num_asked == 4
    assert done.err.count("no answer within 0.3 s; again in") == 2


def test_ctrl_c_amid_an_exchange_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python told of a task whose exception nobody had taken, below the error and its hint."""

    async def send(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(httpx.AsyncClient, "send", send)
    with pytest.raises(KeyboardInterrupt):
        http_client.HttpClient(None, HANGS).exchange("http://127.0.0.1:1/", None, 10)
    gc.collect()
    assert not caplog.records


def test_an_endless_answer_is_no_matter_of_memory(run_data: RunData, tmp_path: Path) -> None:
    """What is kept of a body is bounded, whatever comes; the server is blamed for it."""
    num_sent = 0

    def pour(answer: bytes) -> Iterator[bytes]:
        nonlocal num_sent
        yield b"HTTP/1.1 200 OK\r\n\r\n"
        while num_sent < 2**28:  # else this would be the test that fills the memory
            num_sent += 2**20
            yield b" " * 2**20
        yield answer

    with ChatServer(lambda number, body: {"pieces": pour, "pause": 0}) as server:
        done = run_data(
            server, "--input", write_prompts(tmp_path / "in.jsonl", 1), "--max-retries", 0,
            "--max-tokens", 10, "--timeout", 60, ends=1,
        )  # fmt: skip
    assert "the answer is longer than 1051136 bytes" in done.last_lines[0]
    assert num_sent < 2**27


def test_the_status_of_an_error_whose_body_never_ends(
    run_data: RunData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trickle(answer: bytes) -> Iterator[bytes]:
        yield b"HTTP/1.1 401 Unauthorized\r\n\r\n"
        yield from [b" "] * 400

    # The head has all the time there is, and leaves a little of it to the body.
    clock = iter([0.0, HANGS - 0.2])
    monkeypatch.setattr(http_client, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with ChatServer(lambda number, body: {"pieces": trickle, "pause": 0.05}) as server:
        write_prompts(tmp_path / "in.jsonl", 1)
        done = run_data(server, "--timeout", HANGS, ends=1)
    assert done.last_lines[0].endswith("refuses every request: HTTP 401")
    assert len(server.bodies) == 1


def test_waits_grow_and_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waits: list[float] = []
    monkeypatch.setattr(servers.Servers, "_pause", lambda self, reason, wait: waits.append(wait))
    from specdec.train.data.settings import DataSettings

    with ChatServer(lambda number, body: {"status": 502, "body": b""}) as server:
        asked = servers.Servers(DataSettings(base_url=[server.url], model="m", max_retries=9))
        for _ in range(2):
            with pytest.raises(client.RowError, match=r"HTTP 502 \(after 10 tries\)") as caught:
                asked.ask("p", None)
            assert caught.value.is_transient
    first, second = waits[:9], waits[9:]
    assert first != second
    for number, wait in enumerate(first):
        assert 0.5 <= wait / min(http_client.MAX_WAIT, 2**number) <= 1.5


NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        (None, 0, 0), ("2.5", 2.5, 2.5), ("-1", 0, 0), ("nan", 0, 0), ("soon", 0, 0),
        ("inf", 3600, 3600), ("99999", 3600, 3600),
        (formatdate(NOW + 3000), 3000, 3000), (formatdate(NOW - 1), 0, 0),
    ],
)  # fmt: skip
def test_retry_after(
    value: str | None, low: float, high: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    assert low <= http_client._read_wait(value) <= high


def test_rows_that_fail_are_reported_and_tried_again(run_data: RunData, tmp_path: Path) -> None:
    write_prompts(tmp_path / "in.jsonl", 6)
    broken = True

    def script(number: int, body: Any) -> Reply | None:
        text = body["messages"][-1]["content"]
        if broken and text == "question 1":
            return {"status": 400, "body": b'{"error": {"message": "the prompt is too long"}}'}
        return {"status": 500, "body": b""} if broken and text == "question 4" else None

    with ChatServer(script) as server:
        first = run_data(server, "--max-retries", 1, ends=1)
        assert first.last_lines[0].startswith(
            "error: 2 of 6 rows failed, the first one (row 2): HTTP 400, 'the prompt is too long'"
        )
        failed = read_output(tmp_path, "out.failed.jsonl")
        assert [(row["index"], row["row"]) for row in failed] == [(1, 2), (4, 5)]
        assert "HTTP 500 (after 2 tries)" in failed[1]["reason"]
        assert not (tmp_path / "out.jsonl").exists()
        assert len(server.bodies) == 4 + 1 + 2, "400 is not tried again"

        again = run_data(server, ends=1)
        assert "--resume" in again.last_lines[1]
        broken = False
        server.bodies.clear()
        run_data(server, "--resume")
        asked = sorted(body["messages"][-1]["content"] for body in server.bodies)
    assert asked == ["question 1", "question 4"]
    assert [row["index"] for row in read_output(tmp_path)] == list(range(6))
    assert list_files(tmp_path) == ["in.jsonl", "out.jsonl", "out.manifest.json"]


def test_failures_can_be_allowed(run_data: RunData, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    unasked = json.dumps({"messages": [{"role": "assistant", "content": "x"}]})
    lines = ['{"prompt": "good"}', "{broken", unasked, "[1]", '{"url": "x"}', '{"prompt": ""}']
    lines.append('{"prompt": "\\ud800"}')
    path.write_text("\n".join(lines))
    with ChatServer() as server:
        done = run_data(server, "--allow-failures", "--json")
    report = json.loads(done.out)
    assert (report["rows"], report["answered"], report["failed"]) == (7, 1, 6)
    assert len(server.bodies) == 1
    reasons = [row["reason"] for row in read_output(tmp_path, "out.failed.jsonl")]
    for reason, expected in zip(
        reasons,
        ("line 2 cannot be used", "no user's turn", "is a list", "a conversation or a prompt",
         "a conversation or a prompt", "surrogates"),
        strict=True,
    ):  # fmt: skip
        assert expected in reason


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"message": {"content": ""}}, "empty"),
        ({"message": {"content": None, "tool_calls": [{}]}, "finish_reason": "tool_calls"}, "tool"),
        ({"message": {"reasoning_content": "hm"}}, "without a reasoning parser"),
        ({"finish_reason": "content_filter"}, "content_filter"),
    ],
)
def test_answers_that_are_none(
    run_data: RunData, tmp_path: Path, reply: Reply, reason: str
) -> None:
    write_prompts(tmp_path / "in.jsonl", 1)
    with ChatServer(lambda number, body: reply) as server:
        run_data(server, "--allow-failures", ends=1)
    assert reason in read_output(tmp_path, "out.failed.jsonl")[0]["reason"]
    assert len(server.bodies) == 1


@pytest.mark.parametrize("drop", [False, True])
def test_a_cut_answer_ends_its_conversation(run_data: RunData, tmp_path: Path, drop: bool) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(ROWS[n][0]) for n in (3, 0)))

    def script(number: int, body: Any) -> Reply | None:
        return {"finish_reason": "length"} if body["messages"][0] == user("a") else None

    with ChatServer(script) as server:
        done = run_data(server, *(["--drop-truncated"] if drop else []), ends=drop)
    assert len(server.bodies) == 2
    if drop:
        assert "cut at 2048 tokens" in done.last_lines[0]
        return
    assert "1 of 2 rows end with an answer that was cut" in done.err
    rows = read_output(tmp_path)
    assert rows[1] == {"index": 1, "messages": answered(user("a")), "truncated": True}
    assert "truncated" not in rows[0]


@pytest.mark.parametrize(
    ("status", "hint"),
    [(401, "OPENAI_API_KEY"), (403, "OPENAI_API_KEY"), (404, "/v1"), (307, "--base-url")],
)
def test_what_no_row_can_pass_ends_the_run(
    run_data: RunData, tmp_path: Path, status: int, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redirect is not followed: it would carry the key elsewhere."""
    write_prompts(tmp_path / "in.jsonl", 50)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with ChatServer() as elsewhere:
        reply = {
            "status": status, "headers": {"Location": f"{elsewhere.url}/chat/completions"},
            "body": json.dumps({"detail": f"not with {KEY}"}).encode(),
        }  # fmt: skip
        with ChatServer(lambda number, body: reply) as server:
            done = run_data(server, "--concurrency", 2, "--debug", ends=1)
    assert f"refuses every request: HTTP {status}, 'not with [key]'" in done.last_lines[0]
    assert hint in done.last_lines[1]
    assert len(server.bodies) <= 4
    assert elsewhere.bodies == []
    assert KEY not in done.err


def test_no_thread_outlives_the_run(run_data: RunData, tmp_path: Path) -> None:
    """Where one row's error ends it while the server lets another row wait."""
    write_prompts(tmp_path / "in.jsonl", 2)
    is_waiting = threading.Event()
    logger = logging.getLogger(servers.__name__)

    def answer(number: int, body: Any) -> Reply:
        if number == 0:
            return {"status": 503, "headers": {"Retry-After": "3600"}}
        is_waiting.wait(HANGS)
        return {"status": 401}

    class Waits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            is_waiting.set()

    waits = Waits()
    before = set(threading.enumerate())
    logger.addHandler(waits)
    try:
        with ChatServer(answer) as server:
            run_data(server, "--concurrency", 2, "--debug", ends=1)
    finally:
        logger.removeHandler(waits)
    for thread in set(threading.enumerate()) - before:
        thread.join(HANGS)
        assert not thread.is_alive()


def test_nobody_listens(run_data: RunData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is told at once, without another try."""
    monkeypatch.setattr(servers.Servers, "_pause", lambda self, reason, wait: pytest.fail(reason))
    with ChatServer() as server:
        url = server.url
    done = run_data(url, "--input", write_prompts(tmp_path / "in.jsonl", 2), ends=1)
    assert f"no server answers at {url}/chat/completions: " in done.last_lines[0]
    assert "refused" in done.last_lines[0]
    assert list_files(tmp_path) == ["in.jsonl"], "nothing to resume"


@pytest.mark.thorough
def test_a_server_that_dies_ends_the_run(
    run_data: RunData, tmp_path: Path, recorded: Callable[[int], bool]
) -> None:
    """Rather than every row's failing; what was answered is kept."""
    write_prompts(tmp_path / "in.jsonl", 200)

    def die(number: int, body: Any) -> Reply | None:
        return {"status": 503} if number >= 10 and recorded(10) else None

    with ChatServer(die) as server:
        done = run_data(server, "--concurrency", 2, "--max-retries", 1, ends=1)
        assert re.search(r"8 rows in succession got no answer, .* HTTP 503", done.last_lines[0])
        assert "--resume" in done.last_lines[1]
        assert len(server.bodies) < 40
        server.script = lambda number, body: None
        done = run_data(server, "--resume", "--json")
    assert json.loads(done.out)["resumed"] == 10
    assert [row["index"] for row in read_output(tmp_path)] == list(range(200))


# ---- The key.


def test_the_key_is_sent_and_seen_nowhere_else(
    run_data: RunData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    write_prompts(tmp_path / "in.jsonl", 3)
    echo = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}."}}).encode()
    replies: list[Reply | None] = [{"status": 500, "body": echo}, {"status": 400, "body": echo}]
    with ChatServer(lambda n, body: replies[n] if n < 2 else None) as server:
        done = run_data(server, "--allow-failures", "--debug", "--json", "--concurrency", 1)
    assert server.keys == {f"Bearer {KEY}"}
    assert "Incorrect API key provided: [key]" in done.err, "the debug log tells of the retry"
    assert KEY not in done.err + done.out
    assert list_files(tmp_path) == [
        "in.jsonl", "out.failed.jsonl", "out.jsonl", "out.manifest.json",
    ]  # fmt: skip
    for file in tmp_path.iterdir():
        assert KEY not in file.read_text(), file


def test_a_key_that_no_header_can_carry(
    run_data: RunData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spaces around it are dropped; what is left is told of without being shown."""
    write_prompts(tmp_path / "in.jsonl", 1)
    with ChatServer() as server:
        monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
        run_data(server)
        monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\nX-Other: 1")
        done = run_data(server, "--force", ends=1)
    assert server.keys == {f"Bearer {KEY}"}
    assert "OPENAI_API_KEY holds characters" in done.last_lines[0]
    assert KEY not in done.err


def test_without_httpx(run_data: RunData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    path = write_prompts(tmp_path / "in.jsonl", 1)
    done = run_data("http://127.0.0.1:9/v1", "--input", path, ends=1)
    assert done.last_lines == [
        "error: --base-url: httpx is not installed",
        f"hint: {name_extra('train')}",
    ]


# ---- Many at once; interrupted; resumed.


@pytest.mark.parametrize("concurrency", [1, 5])
def test_requests_are_concurrent(run_data: RunData, tmp_path: Path, concurrency: int) -> None:
    """So many at once, and never more: each waits until all are there."""
    barrier = threading.Barrier(concurrency)

    def script(number: int, body: Any) -> None:
        barrier.wait(HANGS)

    with ChatServer(script) as server:
        write_prompts(tmp_path / "in.jsonl", 4 * concurrency)
        run_data(server, "--concurrency", concurrency)
    assert server.most_at_once == concurrency


@pytest.mark.thorough
def test_a_killed_run_goes_on(run_data: RunData, tmp_path: Path) -> None:
    """No row is lost, none comes twice, and only what was under way is asked again."""
    path = write_prompts(tmp_path / "in.jsonl", 60)
    partial, killed = tmp_path / ".out.jsonl.partial", threading.Event()

    def script(number: int, body: Any) -> Reply | None:
        if number >= 30:
            killed.wait(HANGS)
        return None

    with ChatServer(script) as server:
        words = [
            sys.executable, "-m", "specdec", "train", "data", "--input", path, "--base-url",
            server.url, "--model", "toy", "--output", tmp_path / "out.jsonl", "--concurrency", "4",
        ]  # fmt: skip
        process = subprocess.Popen(
            [str(w) for w in words], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + HANGS
        # 30 rows below the line of facts; four more are asked for.
        while len(server.bodies) < 34 or partial.read_bytes().count(b"\n") < 31:
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed.set()
        assert list_files(tmp_path) == [partial.name, "in.jsonl"]
        done = run_data(server, "--input", path, "--resume", "--json")
    rows = read_output(tmp_path)
    assert [row["index"] for row in rows] == list(range(60))
    assert [row["messages"] for row in rows] == [answered(user(f"question {n}")) for n in range(60)]
    resumed = json.loads(done.out)["resumed"]
    assert resumed == 30
    assert len(server.bodies) == 34 + 60 - resumed


def test_a_cut_line_is_dropped(run_data: RunData, tmp_path: Path) -> None:
    write_prompts(tmp_path / "in.jsonl", 3)
    broken = True

    def script(number: int, body: Any) -> Reply | None:
        return {"status": 400} if broken and "2" in body["messages"][0]["content"] else None

    with ChatServer(script) as server:
        run_data(server, "--concurrency", 1, ends=1)
        journal = tmp_path / ".out.jsonl.partial"
        lines = journal.read_bytes().splitlines(keepends=True)
        assert len(lines) == 4
        for cut in (b"".join(lines[:2]) + lines[2][:-9], lines[0][:10], b""):
            journal.write_bytes(cut)
            broken = False
            done = run_data(server, "--resume", "--json")
            assert json.loads(done.out)["resumed"] == cut.count(b"\n") // 2
            assert [row["index"] for row in read_output(tmp_path)] == [0, 1, 2]
            (tmp_path / "out.jsonl").unlink()
        journal.write_bytes(lines[0] + b"7\n")
        done = run_data(server, "--resume", ends=1)
        assert "is damaged" in done.last_lines[0]


def test_what_a_run_depends_on_must_be_the_same(run_data: RunData, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "in.jsonl", 3)
    with ChatServer(lambda number, body: {"status": 400}) as server:
        run_data(server, ends=1)
        other = run_data(server, "--resume", "--temperature", 1, ends=1)
        assert "temperature was 0.0, is 1.0" in other.last_lines[0]
        write_prompts(path, 4)
        other = run_data(server, "--resume", ends=1)
        assert "input was" in other.last_lines[0]
        run_data(server, "--resume", "--force", ends=2)
        server.script = lambda number, body: None
        run_data(server, "--force")
        assert len(read_output(tmp_path)) == 4
        before = (tmp_path / "out.jsonl").read_bytes()
        assert "exists" in run_data(server, ends=1).last_lines[0]
        run_data(server, "--force")
        assert (tmp_path / "out.jsonl").read_bytes() == before


def test_one_process_at_a_time(run_data: RunData, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.jsonl", {}, resume=True, force=False)
    with pytest.raises(SpecDecError, match="another process is writing"):
        Journal(tmp_path / "out.jsonl", {}, resume=True, force=False)
    journal.close()
    Journal(tmp_path / "out.jsonl", {}, resume=True, force=False).remove()
    assert list_files(tmp_path) == []


@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_appears_meanwhile_stays(
    run_data: RunData, tmp_path: Path, force: bool
) -> None:
    write_prompts(tmp_path / "in.jsonl", 3)

    def script(number: int, body: Any) -> Reply | None:
        (tmp_path / "out.jsonl").write_text("precious")
        return None

    with ChatServer(script) as server:
        done = run_data(server, *["--force"][:force], ends=not force)
        if force:
            assert len(read_output(tmp_path)) == 3
            return
        assert "out.jsonl was not there at the start" in done.last_lines[0]
        assert (tmp_path / "out.jsonl").read_text() == "precious"
        (tmp_path / "out.jsonl").unlink()
        done = run_data(server, "--resume", "--json")
        assert json.loads(done.out)["resumed"] == 3  # nothing was lost


def test_ctrl_c_tells_how_to_go_on(
    run_data: RunData, tmp_path: Path, recorded: Callable[[int], bool]
) -> None:
    """Without waiting for the server, and whichever thread the signal interrupts."""
    write_prompts(tmp_path / "in.jsonl", 20)
    has_ended, waited = threading.Event(), []

    def interrupt(number: int, body: Any) -> Reply | None:
        if number == 3:
            recorded(3)
            signal.raise_signal(signal.SIGINT)  # this thread takes it: the main one goes on waiting
            waited.append(has_ended.wait(HANGS / 2))
        return None

    with ChatServer(interrupt) as server:
        done = run_data(server, "--concurrency", 1, ends=1)
        assert not waited, "the command ended first"
        has_ended.set()
    assert done.last_lines[0] == "error: interrupted: 3 of 20 rows are done"
    assert "--resume" in done.last_lines[1]


def test_progress_is_told(
    run_data: RunData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "SECONDS_BETWEEN_REPORTS", 0.0)
    with ChatServer() as server:
        done = run_data(server, "--input", write_prompts(tmp_path / "in.jsonl", 4))
    assert re.search(r"rows: 3 of 4 in \d+ s, \d+\.\d\d/s, less than a minute left", done.err)
    assert "4 rows are in" in done.err


# ---- Wrong usage.


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000/v1", "ftp://h/v1", "http://", "http://h:x/v1", "http://h:99999/v1",
     "http://h/v1?key=1"],
)  # fmt: skip
def test_wrong_urls(url: str) -> None:
    with pytest.raises(UsageError, match="--base-url is"):
        client.check_url(url)


def test_a_url_holds_no_key() -> None:
    with pytest.raises(UsageError, match="user name or a password") as caught:
        client.check_url(f"http://me:{KEY}@host/v1")
    assert KEY not in caught.value.message


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["--input", "absent.jsonl"], 1, "does not exist"),
        (["--input", "x/y"], 1, "pip install datasets"),
        ([], 2, "missing --input"),
        (["--input", "{in}", "--engine-dir", "e"], 2, "must be one server or one engine"),
        (["--input", "{in}", "--output", "{in}/out.jsonl"], 1, "prompts.jsonl is a file"),
        (["--input", "{in}", "--output", "{in}"], 1, "exists"),
        (["--input", "{in}", "--concurrency", "0"], 2, "at least 1"),
        (["--input", "{in}", "--base-url", "h"], 2, "--base-url is 'h'"),
    ],
)
def test_wrong_usage(
    run_data: RunData, tmp_path: Path, args: list[str], status: int, message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = write_prompts(tmp_path / "prompts.jsonl", 1)
    words = [word.format(**{"in": path}) for word in args]
    done = run_data("http://127.0.0.1:9/v1", *words, ends=status)
    assert message in " ".join(done.last_lines)
    assert list_files(tmp_path) == ["prompts.jsonl"]


def test_a_dataset_of_the_hub(
    run_data: RunData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the optional library, which stands here for itself."""

    class Datasets:
        @staticmethod
        def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
            if name != "org/prompts":
                raise RuntimeError("no such dataset")
            return [{"prompt": f"{split} {n}"} for n in range(3)]

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    with ChatServer() as server:
        run_data(server, "--input", "org/prompts", "--dataset-split", "sft")
        absent = run_data(server, "--input", "org/absent", "--force", ends=1)
    assert [row["messages"][0]["content"] for row in read_output(tmp_path)] == [
        "sft 0", "sft 1", "sft 2",
    ]  # fmt: skip
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["input"]["dataset"] == "org/prompts"
    assert re.fullmatch("[0-9a-f]{64}", manifest["input"]["sha256"])
    assert "no such dataset" in absent.last_lines[0]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback needs none."""
    monkeypatch.setenv("no_proxy", "*")


def test_a_full_disk_leaves_no_journal_without_rows(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(SpecDecError, match="out.jsonl.partial cannot be written") as caught:
            Journal(tmp_path / "out.jsonl", {}, resume=False, force=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.hint == "free some space"
    assert not list(tmp_path.iterdir())
