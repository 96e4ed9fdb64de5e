"""`specdec-train data` on several servers and several hosts."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UsageError
from specdec.system import http_client
from specdec.train.data.shards import RowShard, parse_shard
from tests.conftest import ROOT
from tests.train.chat_server import ChatServer, Reply
from tests.train.conftest import Finished, run_here

NUM_ROWS = 40
RunData = Callable[..., Finished]
# A server in a process of its own, which can be killed. It prints its address, and a word when it
# has as many requests as it gets at once, none of which it ever answers.
SERVER = """
import time
from tests.train.chat_server import ChatServer
with ChatServer(lambda number, body: {"sleep": 600}) as server:
    print(server.url, flush=True)
    while len(server.bodies) < 2:
        time.sleep(0.01)
    print("busy", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def run_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> RunData:
    """Run `specdec-train data` in this process, on NUM_ROWS prompts unless it merges."""
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.01)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"prompt": "question {n}"}}\n' for n in range(NUM_ROWS)))

    def run(urls: list[str], output: str, *words: object, ends: int = 0) -> Finished:
        target = ["--input", path, "--base-url", *urls, "--model", "toy"] if urls else []
        return run_here(("data", *target, "--output", tmp_path / output, *words), capsys, ends)

    return run


@pytest.fixture
def expected(run_data: RunData, tmp_path: Path) -> bytes:
    """The rows as one server and one host answer them."""
    with ChatServer() as server:
        run_data([server.url], "whole.jsonl")
    return (tmp_path / "whole.jsonl").read_bytes()


def test_a_killed_server_and_a_slow_one(run_data: RunData, expected: bytes, tmp_path: Path) -> None:
    """Nothing is lost or written twice; the killed one's rows go to the others."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()

    def wait_and_kill(number: int, body: Any) -> Reply | None:
        if number == 4:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "busy"
            process.send_signal(signal.SIGKILL)
        return None

    with ChatServer(wait_and_kill) as fast, ChatServer(lambda *_: {"sleep": 0.05}) as slow:
        done = run_data([url, fast.url, slow.url], "out.jsonl", "--concurrency", 2)
        assert (tmp_path / "out.jsonl").read_bytes() == expected
        assert len(fast.bodies) + len(slow.bodies) == NUM_ROWS
        assert max(fast.most_at_once, slow.most_at_once) <= 2
    process.wait()
    assert "its rows go to the other servers" in done.err


def test_a_server_that_fails_is_asked_again(
    run_data: RunData, expected: bytes, tmp_path: Path
) -> None:
    """One request at a time finds out whether it is back."""
    failing = {"status": 503, "body": b""}
    with (
        ChatServer(lambda number, body: failing if number < 3 else None) as flaky,
        ChatServer(lambda *_: {"sleep": 0.01}) as steady,
    ):
        done = run_data([flaky.url, steady.url], "out.jsonl", "--concurrency", 1)
        assert (tmp_path / "out.jsonl").read_bytes() == expected
        assert len(flaky.bodies) > 3
        assert len(flaky.bodies) + len(steady.bodies) == NUM_ROWS + 3
    assert f"{flaky.url}/chat/completions answers again" in done.err


def test_turns_of_a_conversation_stay_at_one_server(run_data: RunData, tmp_path: Path) -> None:
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant") * 3]
    rows = [{"messages": [{"role": "system", "content": f"row {n}"}, *turns]} for n in range(6)]
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ChatServer() as first, ChatServer() as second:
        run_data([first.url, second.url], "out.jsonl", "--input", path, "--concurrency", 2)
        homes = [{body["messages"][0]["content"] for body in s.bodies} for s in (first, second)]
    assert homes[0] | homes[1] == {f"row {n}" for n in range(6)}
    assert not homes[0] & homes[1]
    assert all(homes)


def test_all_servers_failing_end_the_run(run_data: RunData) -> None:
    failing = {"status": 503, "body": b""}
    with ChatServer(lambda *_: failing) as first, ChatServer(lambda *_: failing) as second:
        done = run_data([first.url, second.url], "out.jsonl", "--max-retries", 1, ends=1)
    assert "2 servers have failed 2 times or more in succession, the last one: HTTP 503" in done.err


def test_an_address_without_a_server(run_data: RunData) -> None:
    """A wrong address among right ones is no failure that passes."""
    with ChatServer() as server:
        done = run_data([server.url, "http://127.0.0.1:9/v1"], "out.jsonl", ends=1)
    assert "no server answers at http://127.0.0.1:9/v1/chat/completions" in done.err


# ---- Shards.


def test_shards_are_put_together(run_data: RunData, expected: bytes, tmp_path: Path) -> None:
    with ChatServer() as server:
        for number in range(3):
            run_data([server.url], "part.jsonl", "--shard", f"{number}/3", "--seed", 5)
            body = server.bodies[-1]
            assert int(body["messages"][0]["content"].split()[1]) == body["seed"] - 5
        asked = [body["messages"][0]["content"] for body in server.bodies]
    assert sorted(asked) == sorted(f"question {n}" for n in range(NUM_ROWS))
    files = [tmp_path / f"part.{number}-of-3.jsonl" for number in (2, 0, 1)]
    done = run_data([], "merged.jsonl", "--merge", *files, "--json")
    assert (tmp_path / "merged.jsonl").read_bytes() == expected
    report = json.loads(done.out)
    assert (report["rows"], report["answered"], report["failed"]) == (NUM_ROWS, NUM_ROWS, 0)
    manifest = json.loads((tmp_path / "merged.manifest.json").read_text())
    assert manifest["facts"]["seed"] == 5
    assert "shard" not in manifest["facts"]


@pytest.fixture
def shard_files(run_data: RunData, tmp_path: Path) -> list[Path]:
    with ChatServer() as server:
        for number in range(2):
            run_data([server.url], "part.jsonl", "--shard", f"{number}/2")
    return [tmp_path / f"part.{number}-of-2.jsonl" for number in range(2)]


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest_path = path.with_suffix(".manifest.json")
    manifest = json.loads(manifest_path.read_text())
    change(manifest)
    manifest_path.write_text(json.dumps(manifest))


def test_shards_that_do_not_fit(run_data: RunData, shard_files: list[Path], tmp_path: Path) -> None:
    first, second = shard_files

    def refuse(*files: Path) -> str:
        done = run_data([], "merged.jsonl", "--merge", *files, ends=1)
        assert not (tmp_path / "merged.jsonl").exists()
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".merged")]
        return done.err

    assert "shard 1 of 2 is missing" in refuse(first)
    assert "shard 1 of 2 is missing, shard 0 of 2 is there twice" in refuse(first, first)
    assert "does not exist" in refuse(first, tmp_path / "nothing.jsonl")
    assert "in.manifest.json does not exist" in refuse(first, tmp_path / "in.jsonl")
    text = second.read_bytes()
    second.write_bytes(text.replace(b"answer", b"Answer", 1))
    assert "its bytes are not those that its manifest describes" in refuse(first, second)
    second.write_bytes(text)
    edit_manifest(second, lambda m: m["facts"].update(temperature=0.5))
    assert "temperature is 0.0 and 0.5" in refuse(first, second)
    edit_manifest(second, lambda m: m["facts"].update(temperature=0.0, shard="1/3"))
    assert "the files are shards of 2 and of 3" in refuse(first, second)
    edit_manifest(second, lambda m: m["facts"].pop("shard"))
    assert "is not the manifest of a shard" in refuse(first, second)


def test_lines_that_are_no_rows_of_a_shard(
    run_data: RunData, shard_files: list[Path], tmp_path: Path
) -> None:
    from specdec.files.manifest import describe_file

    first, second = shard_files
    lines = second.read_bytes().splitlines(keepends=True)
    for wrong in (lines[::-1], [lines[0], lines[0]], [b"{}\n"], [b'{"index": 2}\n']):
        second.write_bytes(b"".join(wrong))
        edit_manifest(second, lambda m: m.update(output=describe_file(second)))
        done = run_data([], "merged.jsonl", "--merge", first, second, ends=1)
        assert "it is no next row of shard 1 of 2" in done.err
        assert not (tmp_path / "merged.jsonl").exists()


@pytest.mark.parametrize("text", ["2/2", "-1/2", "1", "0/0", "a/b", "1/2/3", ""])
def test_shards_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--shard is"):
        parse_shard(text)


def test_every_row_belongs_to_one_shard() -> None:
    shards = [RowShard(number, 7) for number in range(7)]
    assert all(sum(index in shard for shard in shards) == 1 for index in range(100))
    names = {shard.name_output(Path("a/data.jsonl")) for shard in shards}
    assert names == {Path(f"a/data.{number}-of-7.jsonl") for number in range(7)}
    assert all(shard.name_output(name) in names for shard, name in itertools.product(shards, names)
               if f".{shard.number}-of" in name.name)  # fmt: skip


def test_more_shards_than_rows(run_data: RunData) -> None:
    with ChatServer() as server:
        done = run_data([server.url], "out.jsonl", "--shard", "50/99", ends=1)
    assert f"has {NUM_ROWS} rows to share" in done.err
