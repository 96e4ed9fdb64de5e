"""The server as people run it: the command, signals, ranks, clients of others, the docs' lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.under_load.client import ask
from specdec import Engine, Prompt, SpecDecError
from specdec.decode.ranks import processes
from specdec.serve import cli, scheduler, server
from specdec.serve.server import EngineServer
from specdec.system.processes import _list_family
from tests.conftest import ROOT, make_llama, make_tokenizer
from tests.engines import call, run_cli_here
from tests.forks import fork, run_main
from tests.serve.servers import CLIENT, MODEL, post, serve_here, wait_until

LONG = {"prompt": "hello ab", "max_tokens": 250, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serve_here(folder, draft_budget="fixed") as (_, url):
        yield url


# --- the command and signals ---


INTERRUPT_SECONDS = 0.3  # for which it waits for ranks that do not come


def start(folder: Path, *flags: object) -> tuple[subprocess.Popen[str], str]:
    """`specdec serve` in a process of its own, when it listens: with its address."""

    def work() -> None:
        processes.INTERRUPT_SECONDS = INTERRUPT_SECONDS
        run_main("serve", "--engine-dir", folder, "--port", 0, *flags)

    process = fork(work)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"at (http://\S+)", line):
            return process, found[1]
    raise AssertionError(process.wait())


def test_a_signal_lets_requests_end_and_a_second_does_not(folder: Path) -> None:
    """The first: what runs is finished, nothing new is taken, status 0. The second: at once."""
    process, url = start(folder, "--served-model-name", MODEL)
    body = LONG | {"stream": True}
    with CLIENT.stream("POST", f"{url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert process.wait(30) == 0
    with pytest.raises(httpx.TransportError):
        CLIENT.get(f"{url}/health")

    process, url = start(folder)
    reader = CLIENT.stream("POST", f"{url}/v1/completions", json=body | {"n": 100})
    address = httpx.URL(url)
    whole = json.dumps(LONG).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with reader as answer, socket.create_connection((address.host, address.port)) as other:
        other.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(whole), whole))
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        with pytest.raises(httpx.TransportError):  # so it did not wait for the answers' ends
            list(lines)
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()


def test_half_a_body_does_not_keep_a_server_from_ending(folder: Path) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        with serve_here(folder) as (running, url):
            address = httpx.URL(url).host, httpx.URL(url).port
            halves = [stack.enter_context(socket.create_connection(address)) for _ in range(2)]
            for connection, length in zip(halves, (b"999", b"16"), strict=True):
                connection.sendall(head + b'Content-Length: %s\r\n\r\n{"prompt": ' % length)
                connection.settimeout(30)
            wait_until(lambda: len(running._http.server_state.tasks) == 2)
            started = time.monotonic()
            running._http.should_exit = True
            halves[1].sendall(b'"ab"}')  # the rest comes in time
            answers = [connection.makefile("rb").read() for connection in halves]
        assert time.monotonic() - started < 20
    assert answers[0].startswith(b"HTTP/1.1 503 ")
    assert b"the server is about to end" in answers[0]
    assert answers[1].startswith(b"HTTP/1.1 200 ")


def test_signals_while_a_server_ends_change_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of its end gets two more, of both kinds, from the third signal on."""
    told = []

    def interrupt(place: type, name: str) -> None:
        real = getattr(place, name)

        def call(*values: Any, **others: Any) -> Any:
            told.append(name)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
            return real(*values, **others)

        monkeypatch.setattr(place, name, call)

    interrupt(server.Http, "main_loop")
    interrupt(server.Http, "shutdown")
    interrupt(scheduler.JobScheduler, "stop")
    interrupt(Engine, "close")
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    done = run_cli_here("serve", "--engine-dir", folder, "--port", 0)
    assert done.returncode == 0, done.stderr
    assert told == ["main_loop", "shutdown", "stop", "close"]
    assert not {"error:", "Traceback"} & set(done.stderr.split())
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def test_what_keeps_a_server_from_starting(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_cli_here("serve", "--engine-dir", folder, "--host", "0.0.0.0")
    assert done.returncode == 2
    assert "can be reached from elsewhere, and there is no key" in done.stderr
    done = run_cli_here("serve", "--engine-dir", tmp_path / "none", "--port", 0)
    assert done.returncode == 1
    assert "does not exist" in done.stderr
    done = run_cli_here("serve", "--engine-dir", folder, "--host", "192.0.2.1", "--allow-anonymous")
    assert done.returncode == 1
    assert "192.0.2.1:8000 cannot be listened on" in done.stderr
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    done = run_cli_here("serve", "--engine-dir", folder)
    assert done.returncode == 1
    assert "pip install 'starlette>=" in done.stderr


# --- ranks ---


def test_a_launchers_other_rank_follows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, whose SIGTERM reaches all ranks: rank 0 drains with the others' help."""
    followed = []
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "specdec.decode.ranks.follower.follow_launcher",
        lambda: followed.append(signal.getsignal(signal.SIGTERM)),
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        done = run_cli_here("serve", "--engine-dir", folder)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.returncode == 0, done.stderr
    assert followed == [signal.SIG_IGN]


def check_lost(server: EngineServer) -> None:
    """The server ends, and says which rank it lost."""
    deadline = time.monotonic() + 30
    while not server._http.should_exit:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lost = server.scheduler.lost_error
    assert isinstance(lost, SpecDecError)
    assert "rank 1 of 2 was killed by signal 9" in lost.message
    assert not server.scheduler.is_ready


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an engine of one rank, and the same of two."""
    parent = tmp_path_factory.mktemp("split")
    target = make_llama(parent, seed=5)
    make_tokenizer(target)
    for size in (1, 2):
        checkpoint = parent / f"ckpt{size}"
        call("convert", "--model-dir", target, "--output-dir", checkpoint, "--tp-size", size)
        call(
            "build", "--checkpoint-dir", checkpoint, "--output-dir", parent / f"tp{size}",
            "--optimize", "none", "--max-batch-size", 2, "--tokenizer-dir", target,
            "--max-seq-len", 300,
        )  # fmt: skip
    return parent


def test_two_ranks_serve_and_a_lost_one_ends_the_server(
    split: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = Prompt(text="hello ab", temperature=0, end_ids=())
    with Engine.load(split / "tp1", device="cpu") as engine:
        (expected,) = engine.generate(prompt, max_output_len=20)
    with serve_here(split / "tp2") as (server, url):
        body = LONG | {"max_tokens": 20}
        assert post(url, "/v1/completions", **body)["choices"][0]["text"] == expected.text
        core: Any = server.scheduler.engine._core
        answers: list[Any] = []

        def ask() -> None:
            answers.append(CLIENT.post(f"{url}/v1/completions", json=LONG))

        thread = threading.Thread(target=ask)
        thread.start()
        while not server.scheduler.num_running:
            time.sleep(0.001)
        core._ranks._children[0].kill()
        thread.join(60)
        assert answers[0].status_code == 500
        assert "rank 1 of 2 was killed by signal 9" in answers[0].text
        check_lost(server)
    assert not any(record.exc_info for record in caplog.records), "a message tells it all"
    with serve_here(split / "tp2") as (server, _):  # nobody asks for anything
        core = server.scheduler.engine._core
        core._ranks._children[0].kill()
        check_lost(server)


def test_a_rank_that_is_stopped_ends_the_server_that_is_told_to_end(
    split: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "SILENT_SECONDS", 0.5)
    with serve_here(split / "tp2", request_timeout=0.5) as (server, url):
        core = server.scheduler.engine._core
        (child,) = core._ranks._children
        os.kill(child.pid, signal.SIGSTOP)
        assert CLIENT.post(f"{url}/v1/completions", json=LONG).status_code == 504
        assert server.scheduler.lost_error is None, "it may go on"
        answer = CLIENT.get(f"{url}/health")
        assert answer.status_code == 503
        assert f"rank 1 of 2 is stopped (process {child.pid})" in answer.text
    assert isinstance(server.scheduler.lost_error, SpecDecError)
    assert f"rank 1 of 2 is stopped (process {child.pid})" in server.scheduler.lost_error.message
    assert child.poll() == -signal.SIGKILL


def test_a_server_is_healthy_again_once_its_rank_goes_on(split: Path) -> None:
    with serve_here(split / "tp2") as (server, url):
        (child,) = server.scheduler.engine._core._ranks._children
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: CLIENT.get(f"{url}/health").status_code == 503)
        os.kill(child.pid, signal.SIGCONT)
        wait_until(lambda: CLIENT.get(f"{url}/health").is_success)


def test_the_first_signal_leaves_a_rank_alone_that_takes_its_time(split: Path) -> None:
    """Requests are finished."""
    process, url = start(split / "tp2")
    (other,) = _list_family(process.pid)
    os.kill(other, signal.SIGSTOP)
    try:
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(CLIENT.post(f"{url}/v1/completions", json=LONG))
        )
        thread.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(INTERRUPT_SECONDS + 0.7)
        os.kill(other, signal.SIGCONT)
        thread.join(60)
        assert answers[0].status_code == 200
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_a_second_signal_while_a_rank_is_stopped(split: Path) -> None:
    """The engine cannot be closed in a step: a message and status 1."""
    process, url = start(split / "tp2", "--request-timeout", 0.5)
    (other,) = _list_family(process.pid)
    os.kill(other, signal.SIGSTOP)
    try:
        assert CLIENT.post(f"{url}/v1/completions", json=LONG).status_code == 504
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "no more requests" in process.stderr.readline()
        time.sleep(0.5)  # nobody is left to be answered
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
        *_, message, _ = process.stderr.read().splitlines()
        assert message.startswith(f"error: rank 1 of 2 is stopped (process {other})")
    finally:
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)


# --- clients ---


def test_openais_own_client(url: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    messages: Any = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=12, temperature=0, logprobs=True,
        top_logprobs=2, stop=["@@"], seed=4, n=1, logit_bias={"7": -5}, presence_penalty=0.1,
    )  # fmt: skip
    (choice,) = whole.choices
    assert choice.finish_reason in ("length", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    pieces, reasons, usage = [], [], None
    for chunk in client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=12, temperature=0, stop="@@", seed=4,
        logit_bias={"7": -5}, presence_penalty=0.1, stream=True,
        stream_options={"include_usage": True},
    ):  # fmt: skip
        usage = chunk.usage
        for part in chunk.choices:
            pieces.append(part.delta.content or "")
            reasons.append(part.finish_reason)
    assert "".join(pieces) == choice.message.content
    assert [reason for reason in reasons if reason] == [choice.finish_reason]
    assert usage == whole.usage
    texts = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=3, echo=True)
    assert [part.text[0] for part in texts.choices] == ["a", "b"]
    for extra, kind in (
        ({"max_tokens": 9999}, openai.BadRequestError), ({"model": "x"}, openai.NotFoundError),
        ({"extra_body": {"typo": 1}}, openai.BadRequestError),
    ):  # fmt: skip
        arguments: Any = {"model": MODEL, "messages": messages, **extra}
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**arguments)
        assert caught.value.body


def test_the_docs_lines_work(url: str) -> None:
    """Every curl command of docs/serve.md, as it stands there."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    text = (ROOT / "docs" / "serve.md").read_text()
    commands = re.findall(r"```bash\n(curl .*?)```", text, re.DOTALL)
    assert len(commands) >= 3
    for command in commands:
        words = shlex.split(command.replace("\\\n", " ").replace("http://127.0.0.1:8000", url))
        done = subprocess.run([*words, "-sSf"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr, done.stdout)
        assert '"usage":' in done.stdout or '"tokens":' in done.stdout


def test_data_of_specdec_train_are_made_with_it(url: str, tmp_path: Path) -> None:
    source, made = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"messages": [{"role": "user", "content": "hi"}]}\n'
        '{"messages": [{"role": "user", "content": "ho"}]}\n'
    )
    done = run_cli_here(
        "train", "data", "--input", source, "--output", made, "--base-url", f"{url}/v1",
        "--model", MODEL, "--max-tokens", 8,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(made.read_text().splitlines()) == 2


def test_nothing_is_held_back_until_the_client_acknowledges(folder: Path) -> None:
    """Nagle's algorithm is off: it delays a body after its headers, and events, by 40 ms."""
    with serve_here(folder) as (server, url), httpx.Client() as client:
        assert client.get(f"{url}/health").status_code == 200
        (connection,) = server._http.server_state.connections
        connected = connection.transport.get_extra_info("socket")
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_load_generators_client(url: str) -> None:
    body = {"prompt": "ab", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    whole = asyncio.run(ask(url, body))
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    reply, left = asyncio.run(ask(url, streamed)), asyncio.run(ask(url, streamed, leave_after=1))
    assert (whole.text, whole.num_tokens) == (reply.text, reply.num_tokens)
    assert (whole.finish_reason, reply.finish_reason, left.text) == ("length", "length", "")
    assert len(whole.arrivals) == 1 < len(reply.arrivals)
    with pytest.raises(SystemExit, match="status 400"):
        asyncio.run(ask(url, {"prompt": ""}))
