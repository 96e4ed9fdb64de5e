"""benchmarks/serve.py without any peer: figures of replies, settings chosen, the table."""

from __future__ import annotations

import argparse
import http.server
import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serve
from benchmarks.side_by_side.processes import PeerError
from benchmarks.under_load import compare
from benchmarks.under_load.client import Body, Reply
from benchmarks.under_load.costs import (
    compare_steps,
    count_thread_seconds,
    make_prober,
    share_of_http,
    start_prober,
)
from benchmarks.under_load.exact import mix_bodies
from benchmarks.under_load.figures import count_tokens, describe, join_bursts
from benchmarks.under_load.servers import LLAMA_CPP, OURS, VLLM, Setting


class Words:
    """A tokenizer whose tokens are single letters, of two together where the first is a capital."""

    def encode(self, text: str) -> Any:
        ends, index = [], 0
        while index < len(text):
            index = min(len(text), index + 1 + text[index].isupper())
            ends.append((0, index))
        return argparse.Namespace(offsets=ends, ids=ends)


def test_what_one_step_gives_is_one_arrival() -> None:
    arrivals = [(1.0, "a"), (1.0004, "b"), (1.0009, "c"), (1.5, "d")]
    assert join_bursts(arrivals) == [(1.0009, "abc"), (1.5, "d")]
    assert count_tokens(["aB", "cd", "e"], Words()) == [1, 2, 1], "Bc ends within the second"


def test_the_busiest_threads_are_the_engines() -> None:
    start_seconds = {"1": 5.0, "2": 1.0}
    end_seconds = {"1": 6.0, "2": 41.0, "3": 58.0, "4": 1.0}
    assert share_of_http(start_seconds, end_seconds, 2) == pytest.approx(0.02)
    assert share_of_http(start_seconds, end_seconds, 1) == pytest.approx(0.42)
    seconds = count_thread_seconds(os.getpid())
    assert seconds[str(os.getpid())] > 0


def test_steps_are_compared_with_those_right_after() -> None:
    moments, moment = [], 0.0
    while moment < 8:
        moments.append((moment, "a"))
        moment += 0.11 if moment % 2 < 1 else 0.1  # slower in every other second
    probed = [[begin, begin + 1.0, 200] for begin in (0.0, 2.0, 4.0, 6.0)]
    costs = compare_steps([Reply(0.0, moments)], probed)
    assert costs["of_tokens_per_second"] == pytest.approx(1 - 0.1 / 0.11, abs=0.01)
    assert costs["range"][0] <= costs["of_tokens_per_second"] <= costs["range"][1]
    assert (costs["pairs"], costs["requests"], costs["per_second"]) == (4, 800, 200.0)
    costs_of_equal_steps = compare_steps([Reply(0.0, [(0.1 * n, "a") for n in range(80)])], probed)
    assert costs_of_equal_steps["of_tokens_per_second"] == pytest.approx(0, abs=1e-4)
    with pytest.raises(ValueError, match="1 of 1 whiles"):
        compare_steps([Reply(0.0, moments)], probed[:1])


def test_the_prober_asks_as_often_as_told(tmp_path: Path) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    program = make_prober(tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            with start_prober(program, address, "/health", 100, 0.1) as prober:
                assert prober.stdout is not None
                lines = [prober.stdout.readline().split() for _ in range(2)]
                prober.terminate()
            with start_prober(program, address, "/elsewhere", 100, 0.1) as refused:
                assert "404" in refused.communicate()[1]
        finally:
            server.shutdown()
    (start, end, count), (next_start, _, next_count) = lines
    assert count == next_count == "10"
    assert float(end) - float(start) >= 0.09
    assert float(next_start) - float(end) >= 0.1


def test_tokens_of_a_step_share_its_time() -> None:
    reply = Reply(1.0, [(1.25, "a"), (1.75, "bc"), (2.0, "d")], "length", 4)
    figures = describe([reply, Reply(1.0)], 2.0, Words())
    assert figures["tokens_per_second"] == 2.0
    assert figures["ttft"] == {"median": 250.0, "p99": 250.0}
    assert figures["itl"] == {"median": 250.0, "p99": 250.0}
    assert figures["gap"] == {"median": 375.0, "p99": 500.0}


class FakeField:
    """Servers whose speed depends on the setting and how many ask."""

    def __init__(self) -> None:
        self.kept_keys: list[set[str]] = []
        self.groups: list[int] = []

    def start(self, setting: Setting) -> None:
        if setting.name == "broken":
            raise PeerError("ended with status 1: no such model")

    def end(self, kept: Collection[str] = ()) -> None:
        self.kept_keys.append(set(kept))

    def run(self, key: str, bodies: Sequence[Body], concurrency: int) -> dict[str, Any]:
        fast = "draft" in key if concurrency == 1 else "plain" in key
        rate = (30.0 if fast else 20.0) * (2 if key.startswith(OURS) else 1)
        times = {"median": 120 / rate, "p99": 240 / rate}
        return {
            "tokens_per_second": rate, "tokens": 8, "seconds": 1.0, "texts": ["x"] * len(bodies),
            **dict.fromkeys(compare.FIGURES, times),
        }  # fmt: skip


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(compare, "SETTLING", 0.0)
    args = argparse.Namespace(concurrency=[1, 4], rounds=2)
    names = ((OURS, "plain"), (OURS, "draft 4"), (LLAMA_CPP, "plain"), (LLAMA_CPP, "draft 4"),
             (VLLM, "broken"))  # fmt: skip
    settings = [Setting(server, name, ()) for server, name in names]
    field: Any = FakeField()
    errors: dict[str, str] = {}
    prompts = compare.Prompts(0, 16)
    tried = compare.try_settings(args, field, prompts, settings, errors)
    assert errors == {"vLLM: broken": "ended with status 1: no such model"}
    assert field.kept_keys[-1] == {setting.key for setting in settings[:4]}, (
        "each is best somewhere"
    )
    return {
        "load": compare.run_rounds(args, field, prompts, tried), "errors": errors,
        "processors_used_by_others": 0.0, "warnings": [], "size": "full", "date": "d",
        "processor": "p", "usable_cores": 2, "specdec": "0", "commit": "c", "threads": 2,
        "target_gb": 2.0, "dtype": "bfloat16", "max_tokens": 16, "rounds": 2,
    }  # fmt: skip


def test_each_server_is_measured_at_its_best(report: dict[str, Any]) -> None:
    assert [row["setting"] for row in report["load"]] == [
        "specdec: draft 4", "llama.cpp: draft 4", "specdec: plain", "llama.cpp: plain",
    ]  # fmt: skip
    section = compare.format_markdown(report)
    assert section.startswith("## Servers under load, full: `serve.py load`\n")
    assert "| 1 | specdec: draft 4 | 60.0 (60.0-60.0) | 2.0 / 4.0 |" in section
    assert "Not measured: vLLM: broken: ended with status 1: no such model." in section


def test_prompts_are_recorded_ones_in_an_order_of_the_seed() -> None:
    bodies, same_bodies, other_bodies = (
        compare.Prompts(seed, 8).make_bodies(5) for seed in (0, 0, 1)
    )
    assert bodies == same_bodies != other_bodies
    assert len({body["prompt"] for body in bodies}) == 5, "none is in a cache already"


def test_mixed_requests_have_all_kinds() -> None:
    bodies = mix_bodies(60)
    assert bodies == mix_bodies(60)
    for key in ("stop", "guided_json", "guided_regex", "top_k", "min_p"):
        assert any(key in body for body in bodies), key
    assert {body["stream"] for body in bodies} == {True, False}


def test_options_of_each_mode() -> None:
    assert serve.parse_args(["load", "--size", "pycode"]).concurrency == [1, 4, 16]
    assert serve.parse_args(["costs"]).health == 200
    assert serve.parse_args(["exact"]).dtypes == ["bfloat16", "float32"]
