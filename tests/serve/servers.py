"""Servers in this process, on a free port of loopback, and engines for them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx

from specdec.serve.server import EngineServer, load, open_socket
from specdec.serve.settings import ServeSettings
from specdec.system.http_client import read_key
from tests.conftest import make_drafter, make_llama, make_tokenizer
from tests.engines import make_engine

MODEL = "toy"
# Making one takes longer than most answers. No connection is used twice: a server closes what is
# idle for a while, perhaps just as the next request is sent. The time limit is no test's subject:
# where this process is stopped for a minute, as other programs' timings do, a shorter one is over.
CLIENT = httpx.Client(timeout=600, limits=httpx.Limits(max_keepalive_connections=0))
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'villain' %}{{ raise_exception('no villains') }}"
    "{% endif %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
# Of a model that thinks and calls tools.
CALLING_TEMPLATE = (
    "{% for t in tools or [] %}T:{{ t['function']['name'] }} {% endfor %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{{ m['reasoning_content'] }}"
    "{% for c in m['tool_calls'] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    " {% endfor %}a:"
)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def make_served_engine(parent: Path, **sizes: Any) -> Path:
    """An engine of four rows with a tokenizer that has a chat template."""
    target, drafter = make_llama(parent, seed=5), make_drafter(parent, exit_dim=96, scale=3.0)
    make_tokenizer(target)
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": TEMPLATE}
    path.write_text(json.dumps(config))
    return make_engine(
        parent, target, drafter, beams=3, length=4,
        build=["--max-batch-size", 4, "--tokenizer-dir", target, "--max-seq-len", 300],
    )  # fmt: skip


@contextlib.contextmanager
def serve_here(engine_dir: Path, **settings: Any) -> Iterator[tuple[EngineServer, str]]:
    """A server, and its address."""
    options = {"port": 0, "served_model_name": MODEL, "device": "cpu", "prompt_chunk": 16}
    made = ServeSettings(engine_dir=engine_dir, **(options | settings))
    with open_socket(made) as listener, load(made) as engine:
        server = EngineServer(made, engine, read_key(made.api_key_file), made.cors_origin)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=_run_quietly, args=(server, listener))
        thread.start()
        try:
            wait_until(lambda: server._http.started or not thread.is_alive())
            assert thread.is_alive(), "it could not start"
            yield server, url
        finally:
            server._http.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def _run_quietly(server: EngineServer, listener: Any) -> None:
    try:
        server.run_until_signal(listener)
    except Exception:  # a lost engine is what some tests are about
        if not server._http.started:
            raise


def post(url: str, path: str, **body: Any) -> Any:
    """A completion's JSON; the status is 200."""
    answer = CLIENT.post(url + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def read_events(url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, whose form is checked: `data:` and JSON, [DONE] last and once."""
    answer = CLIENT.post(url + path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


class SharedReader(io.BufferedReader):
    """Reader of a connection's answers: what it has read ahead is the next answer's."""

    def makefile(self, _: str) -> SharedReader:
        return self

    def close(self) -> None:
        """Stay open for the next answer; the connection's end closes it."""


def ask_and_send_no_more(url: str, path: str, *bodies: Any) -> list[str]:
    """The answers, all of status 200, to requests after which the client shuts its sending side.

    They are sent at once, so that all but the first wait for the one before.
    """
    host, port = url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sent = [json.dumps(body) for body in bodies]
    requests = [f"{head}Content-Length: {len(text)}\r\n\r\n{text}" for text in sent]
    texts = []
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("".join(requests).encode())
        connection.shutdown(socket.SHUT_WR)
        reader = SharedReader(socket.SocketIO(connection, "r"))
        for _ in bodies:
            answer = HTTPResponse(reader)  # type: ignore[arg-type]
            answer.begin()
            assert answer.status == 200
            texts.append(answer.read().decode())
        assert reader.read(1) == b""
    return texts


def change_template(folder: Path, parent: Path, template: str) -> Path:
    """The tokenizer of an engine folder with another chat template."""
    changed = parent / "tokenizer"
    shutil.copytree(folder / "tokenizer", changed)
    (changed / "chat_template.jinja").unlink(missing_ok=True)
    path = changed / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return changed
