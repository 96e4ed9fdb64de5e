"""What serving takes of a step, and what /health takes of serving."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.processes import Worker, count_group_seconds
from specdec.bench.machine import LoadMeter, describe_load, describe_machine
from specdec.bench.measure import divide, summarize

from . import compare
from .client import Body, ask_all, look_often
from .servers import OURS, Server, list_ours


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="full", choices=compare.SHAPES)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--length", type=int, default=4, help="of drafts; 0 drafts nothing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--health", type=float, default=200, help="requests a second")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("out/serve"), help="kept for next time")


@dataclasses.dataclass
class Run:
    """Tokens a second, and processor milliseconds a token, of the engine's process.

    http_share: of its processor time, what others than the engine's threads took.
    """

    rate: float
    busy_ms: float
    looked: int = 0
    http_share: float = 0.0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Three ways by turns: the engine in a process of its own, as a server, and with /health.

    The engine alone takes prompts as tokens and gives tokens. What the client takes of the
    processors counts as serving's, where they are all in use.
    """
    from tokenizers import Tokenizer

    args.servers, args.lengths = [OURS], [max(1, args.length)]
    weights = compare.prepare(args)
    name = f"draft {args.length}" if args.length else "plain"
    rows = max(args.concurrency)
    setting = next(
        one for one in list_ours(weights, args.lengths, rows, args.threads) if one.name == name
    )
    tokenizer = Tokenizer.from_file(str(weights.tokenizer / "tokenizer.json"))
    machine: dict[str, Any] = describe_machine()
    log = args.folder.resolve() / "logs"
    with contextlib.ExitStack() as stack:
        server = Server(setting, log / "costs-server.log")
        stack.callback(server.end)
        worker = Worker(
            "engine", [sys.executable, "-m", "side_by_side.workers.engine"],
            {"engine_dir": str(weights.engines["target"]), "beams": [1], "threads": args.threads,
             "draft_engine_dir": str(weights.engines["draft"]), "max_length": max(args.lengths),
             "tokenizer_dir": str(weights.tokenizer)},
            log / "costs-engine.log", threads=args.threads, timeout=1800,
        )  # fmt: skip
        stack.callback(worker.end)
        prompts = compare.Prompts(1, args.max_tokens)
        meter, began = LoadMeter(), time.monotonic()
        groups = [server.group, worker.group]
        own = count_group_seconds(groups)

        def run_engine(bodies: list[Body], concurrency: int) -> Run:
            ids = [tokenizer.encode(body["prompt"]).ids for body in bodies]
            busy = count_group_seconds([worker.group])
            answer = worker.call(
                "run", way="draft-target" if args.length else "plain", prompts=ids, end_id=0,
                setting={"length": args.length} if args.length else {},
                max_output_len=args.max_tokens, batch_size=concurrency,
            )  # fmt: skip
            busy = count_group_seconds([worker.group]) - busy
            count = answer["num_tokens"]
            return Run(count / answer["seconds"], 1000 * busy / count)

        def run_server(bodies: list[Body], concurrency: int, health: float = 0) -> Run:
            async def ask() -> tuple[int, int]:
                looking = asyncio.ensure_future(look_often(server.address, "/health", health or 1))
                if not health:
                    looking.cancel()
                replies = await ask_all(server.address, bodies, concurrency)
                looking.cancel()
                looked = 0
                with contextlib.suppress(asyncio.CancelledError):
                    looked = await looking
                return sum(reply.num_tokens for reply in replies), looked

            busy, began = count_group_seconds([server.group]), time.perf_counter()
            threads = count_thread_seconds(server.group)
            count, looked = asyncio.run(ask())
            seconds = time.perf_counter() - began
            share = share_of_http(threads, count_thread_seconds(server.group), args.threads)
            busy = count_group_seconds([server.group]) - busy
            return Run(count / seconds, 1000 * busy / count, looked, share)

        ways: dict[str, Callable[[list[Body], int], Run]] = {
            "engine": run_engine, "served": run_server,
            "served, /health": functools.partial(run_server, health=args.health),
        }  # fmt: skip
        table = []
        for concurrency in args.concurrency:
            runs: dict[str, list[Run]] = {name: [] for name in ways}
            for number in range(args.rounds + 1):
                bodies = prompts.make_bodies(concurrency * (4 if concurrency == 1 else 1))
                for name in list(ways) if number % 2 == 0 else list(ways)[::-1]:
                    made = ways[name](bodies, concurrency)
                    if number:  # the first warms up
                        runs[name].append(made)
            table.append({"concurrency": concurrency, **describe(runs)})
            print(json.dumps(table[-1]), file=sys.stderr, flush=True)
        others = meter.measure()
        if others is not None:
            ours = (count_group_seconds(groups) - own) / (time.monotonic() - began)
            others = round(max(0.0, others - ours), 2)
    return machine | {
        "size": args.size, "setting": setting.key, "health_per_second": args.health,
        "costs": table, "processors_used_by_others": others, "warnings": describe_load(others),
    }  # fmt: skip


def count_thread_seconds(pid: int) -> dict[str, float]:
    """Processor seconds of each thread of a process."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            found[folder.name] = int((folder / "schedstat").read_text().split()[0]) / 1e9
    return found


def share_of_http(before: dict[str, float], after: dict[str, float], threads: int) -> float:
    """The share of processor time that threads took beside the engine's, which are the busiest.

    Those take requests apart, tokenize prompts and send events; tokens become text in the engine's.
    """
    spent = sorted(seconds - before.get(name, 0.0) for name, seconds in after.items())
    return sum(spent[: max(0, len(spent) - threads)]) / sum(spent)


def describe(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Figures by way, and what each addition takes: of tokens a second, and of processor time."""
    found: dict[str, Any] = {
        name: {
            "tokens_per_second": summarize([run.rate for run in made]),
            "processor_ms_per_token": summarize([run.busy_ms for run in made]),
            "health_requests": statistics.median(run.looked for run in made),
            "http_share": round(statistics.median(run.http_share for run in made), 4),
        }
        for name, made in runs.items()
    }  # fmt: skip
    for name, over, under in (
        ("serving", "served", "engine"), ("health", "served, /health", "served"),
    ):  # fmt: skip
        rates = divide([run.rate for run in runs[over]], [run.rate for run in runs[under]])
        busy = divide([run.busy_ms for run in runs[over]], [run.busy_ms for run in runs[under]])
        found[f"{name} takes"] = {
            "of_tokens_per_second": round(1 - rates["median"], 4),
            "of_processor_time": round(busy["median"] - 1, 4),
        }
    return found
