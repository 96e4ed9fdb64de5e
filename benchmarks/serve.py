#!/usr/bin/env python3
"""Load on OpenAI-compatible servers: tokens a second, times to first and between tokens, memory.

    python benchmarks/serve.py [--requests 32] [--concurrency 1 4 16] [--max-tokens 64]
        [--peer llama-server=http://127.0.0.1:8080 ...] [--health 200] [--memory 10000]
        [--exact 500] [--output FILE]

Without more it builds the pycode model with its drafter and serves it twice, with speculation and
without. Peers are servers that run already, of the same weights: llama.cpp's llama-server, vLLM.
Each round asks all servers in turn, with the same prompts in the same order; medians of the rounds
are taken. --health: requests a second of /health during the last round of ours. --memory: resident
memory after 100 short requests and after so many. --exact: so many mixed requests at concurrency
32, compared with what the engine gives each alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
PYCODE = ROOT / "examples" / "pycode"


def make_engine(folder: Path, dtype: str) -> Path:
    """Convert and build through the commands."""
    checkpoint, engine = folder / "checkpoint", folder / "engine"
    convert = [
        "convert", "--model-dir", PYCODE / "target", "--drafter-model-dir", PYCODE / "redrafter",
        "--output-dir", checkpoint, "--dtype", dtype, "--redrafter-num-beams", 1,
        "--redrafter-draft-len-per-beam", 3,
    ]  # fmt: skip
    build = [
        "build", "--checkpoint-dir", checkpoint, "--output-dir", engine, "--max-batch-size", 16,
        "--tokenizer-dir", PYCODE / "target",
    ]  # fmt: skip
    for arguments in (convert, build):
        command = [sys.executable, "-m", "specdec", *map(str, arguments)]
        subprocess.run(command, check=True, cwd=ROOT)
    return engine


@contextlib.contextmanager
def serve(engine: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """A server of ours in a process of its own: its address and process."""
    command = [sys.executable, "-m", "specdec", "serve", "--engine-dir", str(engine)]
    process = subprocess.Popen(
        [*command, "--port", "0", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"at (http://\S+)", line):
                yield found[1], process.pid
                return
        raise SystemExit(f"the server ended with status {process.wait()}")
    finally:
        process.terminate()
        process.wait(60)


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask for one completion: when its events came, and its text."""
    began = time.perf_counter()
    times, text = [], ""
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{url}: {answer.status_code} {(await answer.aread())[:500]!r}")
        usage: dict[str, Any] = {}
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if chunk["choices"] and chunk["choices"][0].get("text"):
                times.append(time.perf_counter())
                text += chunk["choices"][0]["text"]
    return {"began": began, "times": times, "text": text, "tokens": usage["completion_tokens"]}


async def run_load(
    url: str, bodies: list[dict[str, Any]], concurrency: int, health: float = 0
) -> dict[str, Any]:
    """Ask for completions, so many at a time; return what that took."""
    left = iter(bodies)
    answers: list[dict[str, Any]] = []
    limits = httpx.Limits(max_connections=None)

    async def ask(client: httpx.AsyncClient) -> None:
        for body in left:
            answers.append(await stream(client, url, body))

    async def look(client: httpx.AsyncClient) -> None:
        while True:
            await client.get(f"{url}/health")
            await asyncio.sleep(1 / health)

    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        looking = asyncio.ensure_future(look(client)) if health else None
        began = time.perf_counter()
        await asyncio.gather(*(ask(client) for _ in range(concurrency)))
        seconds = time.perf_counter() - began
        if looking is not None:
            looking.cancel()
    first = [answer["times"][0] - answer["began"] for answer in answers if answer["times"]]
    between = [b - a for x in answers for a, b in zip(x["times"], x["times"][1:], strict=False)]
    return {
        "tokens_per_second": sum(answer["tokens"] for answer in answers) / seconds,
        "ttft": quantiles(first),
        "itl": quantiles(between),
        "texts": sorted(answer["text"] for answer in answers),
    }


def quantiles(values: list[float]) -> tuple[float, float]:
    """Median and 99th percentile, in milliseconds."""
    values = sorted(values) or [0.0]
    at = min(len(values) - 1, int(0.99 * len(values)))
    return 1000 * statistics.median(values), 1000 * values[at]


def read_memory(pid: int) -> int:
    """Resident memory of a process in kB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def measure_memory(url: str, pid: int, number: int) -> dict[str, int]:
    """Resident kB after 100 requests of two tokens, and after `number`."""
    made = {}
    for count, name in ((100, "after_100"), (number - 100, f"after_{number}")):
        bodies = [{"prompt": f"x = {n}", "max_tokens": 2, "stream": True,
                   "stream_options": {"include_usage": True}} for n in range(count)]  # fmt: skip
        asyncio.run(run_load(url, bodies, 16))
        made[name] = read_memory(pid)
    return made


def compare_with_alone(engine: Path, url: str, prompts: list[str], number: int) -> int:
    """How many of mixed requests at concurrency 32 differ from what the engine gives alone.

    Every fifth client leaves in the middle, and asks again.
    """
    from specdec import Engine, Prompt

    dice = random.Random(3)
    mixed = []
    for index in range(number):
        sampled = {"temperature": dice.choice([0.6, 1.0]), "top_p": dice.choice([0.8, 1.0])}
        mixed.append(
            {
                "prompt": dice.choice(prompts)[: dice.randint(4, 200)],
                "max_tokens": dice.randint(1, 48), "seed": dice.randrange(2**32),
                "temperature": 0.0, **(sampled if index % 2 else {}),
                **({"stop": dice.choice(["\n\n", "self", ":"])} if index % 3 == 0 else {}),
                **({"frequency_penalty": 0.5} if index % 7 == 0 else {}),
            }
        )  # fmt: skip
    found: list[str] = [""] * number

    async def ask_all() -> None:
        left = iter(enumerate(mixed))

        async def ask(client: httpx.AsyncClient) -> None:
            for index, body in left:
                if index % 5 == 0:
                    with contextlib.suppress(httpx.TimeoutException):
                        await client.post(f"{url}/v1/completions", json=body, timeout=0.05)
                answer = await client.post(f"{url}/v1/completions", json=body)
                found[index] = answer.json()["choices"][0]["text"]

        async with httpx.AsyncClient(timeout=600) as client:
            await asyncio.gather(*(ask(client) for _ in range(32)))

    asyncio.run(ask_all())
    num_different = 0
    with Engine.load(engine, speculation=False) as alone:
        for body, text in zip(mixed, found, strict=True):
            own = {key: value for key, value in body.items() if key != "prompt"}
            given: dict[str, Any] = {"text": body["prompt"], **own}
            given["max_output_len"] = given.pop("max_tokens")
            num_different += alone.generate(Prompt(**given))[0].text != text
    return num_different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-dir", type=Path, help="instead of the pycode model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", nargs="*", default=[], metavar="NAME=URL")
    parser.add_argument("--health", type=float, default=0, help="requests a second")
    parser.add_argument("--memory", type=int, default=0, help="requests; 0 leaves it out")
    parser.add_argument("--exact", type=int, default=0, help="requests; 0 leaves it out")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from specdec.bench.machine import describe_machine

    lines = (PYCODE / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    bodies = [
        {"prompt": prompts[n % len(prompts)], "max_tokens": args.max_tokens, "temperature": 0,
         "stream": True, "stream_options": {"include_usage": True}}
        for n in range(args.requests)
    ]  # fmt: skip
    report: dict[str, Any] = {"machine": describe_machine(), "arguments": vars(args) | {
        "engine_dir": str(args.engine_dir), "output": str(args.output)
    }}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        engine = args.engine_dir or make_engine(Path(folder), args.dtype)
        with serve(engine) as (url, pid), serve(engine, "--no-speculation") as (plain, _):
            peers = dict(peer.split("=", 1) for peer in args.peer)
            servers = {"specdec": url, "specdec, no drafts": plain, **peers}
            table = []
            for concurrency in args.concurrency:
                runs: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
                for _ in range(args.rounds):
                    for name, address in servers.items():
                        runs[name].append(asyncio.run(run_load(address, bodies, concurrency)))
                if args.health:
                    beside = asyncio.run(run_load(url, bodies, concurrency, args.health))
                    runs[f"specdec, /health {args.health:g} times a second"] = [beside]
                if runs["specdec"][0]["texts"] != runs["specdec, no drafts"][0]["texts"]:
                    raise SystemExit("the texts with drafts are not those without")
                for name, made in runs.items():
                    row: dict[str, Any] = {"server": name, "concurrency": concurrency}
                    row["tokens_per_second"] = statistics.median(
                        run["tokens_per_second"] for run in made
                    )
                    for key in ("ttft", "itl"):
                        for at, part in enumerate(("median", "p99")):
                            row[f"{key}_{part}_ms"] = statistics.median(r[key][at] for r in made)
                    table.append(row)
                    shown = [f"{k} {v:.1f}" for k, v in row.items() if isinstance(v, float)]
                    print(f"{name}, {concurrency} at a time: {', '.join(shown)}")
            report["load"] = table
            if args.memory:
                report["resident_kb"] = measure_memory(url, pid, args.memory)
                print(report["resident_kb"])
            if args.exact:
                different = compare_with_alone(engine, url, prompts, args.exact)
                report["different_of_exact"] = different
                print(f"{different} of {args.exact} texts under load differ from those alone")
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    if report.get("different_of_exact"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
