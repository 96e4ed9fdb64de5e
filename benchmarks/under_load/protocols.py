"""Processor time that each protocol of our server takes: one chat, asked by all of them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.processes import Conditions
from examples.smollm2.get import get_model
from specdec.errors import SpecDecError
from specdec.system.processes import make_environment

from .client import Body, ask_bytes
from .costs import count_thread_seconds, share_of_http
from .servers import OURS, Server, Setting

QUESTION = "Write a long story about a lighthouse keeper who learns to play the violin."
TURN = [{"role": "user", "content": QUESTION}]
NUM_TOKENS = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)": ?(\d+)')
WAITED = 8  # requests that a round asks for, one after the other


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-dir", type=Path, help="SmolLM2-135M-Instruct if not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("out/serve"))


def list_requests(max_tokens: int) -> Mapping[str, tuple[str, Body]]:
    """Return path and body of the chat in each protocol, all streamed and greedy."""
    common = {"model": "target", "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    greedy = {"temperature": 0, "max_tokens": max_tokens}
    options = {"temperature": 0, "num_predict": max_tokens}
    return {
        "completions": ("/v1/completions", {**common, **usage, **greedy, "prompt": QUESTION}),
        "chat completions": (
            "/v1/chat/completions", {**common, **usage, **greedy, "messages": TURN}
        ),
        "responses": (
            "/v1/responses",
            {**common, "temperature": 0, "max_output_tokens": max_tokens, "input": QUESTION},
        ),
        "messages": ("/v1/messages", {**common, **greedy, "messages": TURN}),
        "Ollama's chat": ("/api/chat", {**common, "options": options, "messages": TURN}),
        "Ollama's generate": ("/api/generate", {**common, "options": options, "prompt": QUESTION}),
    }  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return processor milliseconds a token, and HTTP's share, by protocol."""
    model = args.model_dir or get_model()
    setting = Setting(
        OURS, "protocols",
        (sys.executable, "-m", "specdec", "serve", "--model-dir", str(model), "--no-speculation",
         "--device", "cpu", "--served-model-name", "target"),
        {**make_environment(), "OMP_NUM_THREADS": str(args.threads)},
    )  # fmt: skip
    conditions, rows = Conditions(), {}
    with contextlib.ExitStack() as stack:
        server = Server(setting, args.folder.resolve() / "logs" / "protocols-server.log")
        stack.callback(server.end)
        requests = list_requests(args.max_tokens)
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in requests}
        for number in range(args.rounds + 1):  # the first one warms up
            for name, (path, body) in requests.items():
                run = ask_round(server, path, body, args.threads)
                if number:
                    runs[name].append(run)
        for name, found in runs.items():
            busy, shares = zip(*found, strict=True)
            rows[name] = {
                "processor_ms_per_token": round(statistics.median(busy), 3),
                "http_share": round(statistics.median(shares), 4),
                "http_ms_per_token": round(
                    statistics.median(ms * share for ms, share in found), 4
                ),
            }  # fmt: skip
            print(json.dumps({name: rows[name]}), file=sys.stderr, flush=True)
    return conditions.describe() | {"model": model.name, "protocols": rows}


def ask_round(server: Server, path: str, body: Body, threads: int) -> tuple[float, float]:
    """Return the server's processor milliseconds a token, and the share beside the engine's."""
    before, count = count_thread_seconds(server.group), 0
    for _ in range(WAITED):
        answer = asyncio.run(ask_bytes(server.address, path, body))
        counts = NUM_TOKENS.findall(answer)
        if not counts:
            raise SpecDecError(f"{path} tells no number of tokens", "see the server's log")
        count += int(counts[-1])
    after = count_thread_seconds(server.group)
    spent = sum(after.values()) - sum(before.get(name, 0.0) for name in after)
    return 1000 * spent / count, share_of_http(before, after, threads)
