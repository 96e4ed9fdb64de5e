#!/usr/bin/env python3
"""Prompts that a server with --session-dir keeps over restarts, and over kills in mid work.

    python benchmarks/sessions.py restart --engine-dir ENGINE [--tokens 8000] [-- SERVE_OPTIONS...]
    python benchmarks/sessions.py kill --engine-dir ENGINE [--points 20] [-- SERVE_OPTIONS...]

restart: a prompt of so many tokens is asked for cold, then of a server that was ended and started
again, and by a conversation's next turn; prompt tokens that each answer computed, seconds to the
first token (of use on a quiet machine), and whether texts and log-probabilities are those of a
server without sessions. kill: conversations of three turns; the server is killed by SIGKILL at
times spread evenly over the third, started again, and asked for it: which texts are wrong, and
whether the second turn was lost. Exits with 1 where a text is wrong. --output FILE writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import httpx

from specdec.decode.sessions import BLOCK_TOKENS
from specdec.engine.layout import read_engine_config
from specdec.files.reading import write_json

MAX_TOKENS = 32  # of an answer
START_SECONDS = 900.0
FIGURES = ("prompt_tokens", "computed_tokens", "first_token_s")


class Server:
    """A server process and its address."""

    def __init__(self, engine_dir: Path, folder: Path | None, options: Sequence[str]) -> None:
        session_words = [] if folder is None else ["--session-dir", str(folder)]
        words = [
            sys.executable, "-m", "specdec", "serve", "--engine-dir", str(engine_dir), "--port",
            "0", *session_words, *options,
        ]  # fmt: skip
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if " at http://" in line:
                self.url = "http://" + line.rpartition("http://")[2].strip()
                break
        else:
            raise SystemExit("error: the server did not start:\n" + "".join(lines))
        self.client = httpx.Client(base_url=self.url, timeout=START_SECONDS)

    def ask(self, prompt: Sequence[int], stop_after: float | None = None) -> dict[str, Any]:
        """Return an answer's tokens, log-probabilities and seconds to the first token.

        stop_after: kill the server so many seconds after the request was sent.
        """
        started = time.monotonic()
        body = {
            "prompt": list(prompt), "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 1,
            "stream": True, "return_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        answer: dict[str, Any] = {"tokens": [], "logprobs": [], "first_token_s": None}
        if stop_after is not None:
            with contextlib.suppress(httpx.TimeoutException):
                self.client.post("/v1/completions", json=body, timeout=stop_after)
            self.end(kill=True)
            return answer
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:]).get("choices", ()):
                    answer["tokens"] += choice.get("token_ids") or []
                    if (logprobs := choice.get("logprobs")) is not None:
                        answer["logprobs"] += logprobs["token_logprobs"]
                    if answer["tokens"] and answer["first_token_s"] is None:
                        answer["first_token_s"] = time.monotonic() - started
        return answer

    def count(self, name: str) -> int:
        """Return one of the server's counters."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"specdec:{name}_total"):
                return int(float(line.rpartition(" ")[2]))
        raise SystemExit(f"error: /metrics has no {name}")

    def end(self, *, kill: bool = False) -> None:
        """End the process, as a signal ends it."""
        if kill:
            self.process.kill()
        else:
            self.process.terminate()
        self.process.wait(START_SECONDS)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextlib.contextmanager
def start(args: argparse.Namespace, folder: Path | None) -> Iterator[Server]:
    server = Server(args.engine_dir, folder, args.options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()


def make_prompt(engine_dir: Path, seed: int, num_tokens: int) -> list[int]:
    vocab_size = read_engine_config(engine_dir).checkpoint.model.vocab_size
    numbers = random.Random(seed)
    return [numbers.randrange(3, vocab_size - 3) for _ in range(num_tokens)]


def ask_counting(server: Server, prompt: Sequence[int]) -> dict[str, Any]:
    """Return an answer, and how many of the prompt's tokens were computed for it."""
    before = server.count("prefix_cache_hits")
    answer = server.ask(prompt)
    num_computed = len(prompt) - (server.count("prefix_cache_hits") - before)
    return {**answer, "prompt_tokens": len(prompt), "computed_tokens": num_computed}


def measure_restart(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    prompt = make_prompt(args.engine_dir, 1, args.tokens)
    question = make_prompt(args.engine_dir, 2, 20)
    with start(args, folder) as server:
        cold = ask_counting(server, prompt)
    later = [*prompt, *cold["tokens"], *question]
    with start(args, folder) as server:
        again = ask_counting(server, prompt)
    with start(args, folder) as server:
        turn = ask_counting(server, later)
    with start(args, None) as server:
        plain = [server.ask(prompt), server.ask(later)]
    answers = {"cold": cold, "again": again, "next turn": turn}
    expected = {"cold": plain[0], "again": plain[0], "next turn": plain[1]}
    return {
        "holds": all(
            answers[name][key] == expected[name][key]
            for name in answers for key in ("tokens", "logprobs")
        ),
        "share_computed": again["computed_tokens"] / len(prompt),
        "share_of_time": again["first_token_s"] / cold["first_token_s"],
        "answers": {
            name: {key: answer[key] for key in FIGURES} for name, answer in answers.items()
        },
    }  # fmt: skip


class Conversation:
    """Three turns, and what a server without sessions answers to the last."""

    def __init__(self, plain: Server, engine_dir: Path, number: int) -> None:
        first = make_prompt(engine_dir, 100 + number, 200)
        question = make_prompt(engine_dir, 7, 150)
        second = [*first, *plain.ask(first)["tokens"], *question]
        third = [*second, *plain.ask(second)["tokens"], *question]
        self.prompts, started = (first, second, third), time.monotonic()
        self.answer = plain.ask(third)
        self.seconds = time.monotonic() - started

    def is_right(self, answer: dict[str, Any]) -> bool:
        """Return whether an answer to the third turn has the right text and log-probabilities."""
        return all(answer[key] == self.answer[key] for key in ("tokens", "logprobs"))


def measure_kills(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with start(args, None) as plain:
        talks = [Conversation(plain, args.engine_dir, number) for number in range(args.points)]
    points: list[dict[str, Any]] = []
    server = Server(args.engine_dir, folder, args.options)
    try:
        for number, talk in enumerate(talks):
            first, second, third = talk.prompts
            for prompt in (first, second):
                server.ask(prompt)
            time.sleep(1.0)  # these turns are over, and written
            share = (number + 0.5) / len(talks)
            server.ask(third, stop_after=max(0.001, talk.seconds * share))
            server = Server(args.engine_dir, folder, args.options)
            answer = ask_counting(server, third)
            num_restored = len(third) - answer["computed_tokens"]
            points.append({
                "share_of_turn": share, "prompt_tokens": len(third), "restored": num_restored,
                "is_right": talk.is_right(answer),
                # A hybrid goes on where its state was written: after an answer or a prompt.
                "has_earlier_turns": num_restored >= len(second) - BLOCK_TOKENS,
            })  # fmt: skip
            print(json.dumps(points[-1]), file=sys.stderr, flush=True)
    finally:
        server.end(kill=True)
    holds = all(point["is_right"] and point["has_earlier_turns"] for point in points)
    return {"holds": holds, "points": points}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["restart", "kill"])
    parser.add_argument("--engine-dir", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--output", type=Path, help="of the figures, as JSON")
    all_words = sys.argv[1:] if words is None else words
    end = all_words.index("--") if "--" in all_words else len(all_words)
    args = parser.parse_args(all_words[:end])
    args.options = all_words[end + 1 :]
    with tempfile.TemporaryDirectory(prefix="specdec-sessions-") as folder:
        measure = measure_restart if args.mode == "restart" else measure_kills
        report = measure(args, Path(folder) / "sessions")
    print(json.dumps(report, indent=2))
    if args.output is not None:
        write_json(args.output, report)
    if not report["holds"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
