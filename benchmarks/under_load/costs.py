"""Time that serving takes of a step, and that /health takes of serving."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.side_by_side.processes import Conditions, count_group_seconds
from specdec.engine.compiler import call_compiler, find_compiler
from specdec.errors import SpecDecError
from specdec.measure.measure import summarize

from . import compare
from .client import Body, Reply, ask_all, make_head
from .figures import join_bursts
from .servers import OURS, Server, list_ours

PROBE_SECONDS = 1.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="full", choices=compare.SHAPES)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--length", type=int, default=4, help="of drafts; 0 drafts nothing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--health", type=float, default=200, help="requests a second")
    parser.add_argument("--health-rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("out/serve"), help="kept for next time")


@dataclasses.dataclass
class Run:
    """Tokens per second, and processor milliseconds per token, of the server's process.

    http_share: of its processor time, what others than the engine's threads took.
    """

    rate: float
    busy_ms: float
    http_share: float


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The share of HTTP in the server's processor time, then what /health takes.

    What clients take of the processors counts as /health's, where they are all in use.
    """
    args.servers, args.lengths = [OURS], [max(1, args.length)]
    weights = compare.prepare(args)
    name = f"draft {args.length}" if args.length else "plain"
    rows = max(args.concurrency)
    setting = next(
        one for one in list_ours(weights, args.lengths, rows, args.threads) if one.name == name
    )
    conditions = Conditions()
    log = args.folder.resolve() / "logs"
    with contextlib.ExitStack() as stack:
        server = Server(setting, log / "costs-server.log")
        stack.callback(server.end)
        prompts = compare.Prompts(1, args.max_tokens)
        program = make_prober(args.folder.resolve())
        conditions.watch([server.group])

        def run_server(bodies: list[Body], concurrency: int) -> Run:
            busy, began = count_group_seconds([server.group]), time.perf_counter()
            threads = count_thread_seconds(server.group)
            replies = asyncio.run(ask_all(server.address, bodies, concurrency))
            seconds = time.perf_counter() - began
            share = share_of_http(threads, count_thread_seconds(server.group), args.threads)
            busy = count_group_seconds([server.group]) - busy
            count = sum(reply.num_tokens for reply in replies)
            return Run(count / seconds, 1000 * busy / count, share)

        table = []
        for concurrency in args.concurrency:
            per_round = concurrency * (4 if concurrency == 1 else 1)
            # The first round warms up.
            runs = [
                run_server(prompts.make_bodies(per_round), concurrency)
                for _ in range(args.rounds + 1)
            ][1:]
            count = args.health_rounds * per_round
            health = run_probed(
                program, server.address, prompts.make_bodies(count), concurrency, args.health
            )
            table.append({"concurrency": concurrency, **describe(runs), "health": health})
            print(json.dumps(table[-1]), file=sys.stderr, flush=True)
        head = conditions.describe()
    return head | {
        "size": args.size, "setting": setting.key, "health_per_second": args.health,
        "costs": table,
    }  # fmt: skip


def run_probed(
    program: Path, address: str, bodies: list[Body], concurrency: int, per_second: float
) -> dict[str, Any]:
    """Ask while /health is asked for every other second; tell what that took."""
    prober = start_prober(program, address, "/health", per_second, PROBE_SECONDS)
    try:
        replies = asyncio.run(ask_all(address, bodies, concurrency))
    finally:
        prober.terminate()
        told, failure = prober.communicate()
        lines = told.splitlines()
    if failure:
        raise SpecDecError(f"asking for /health failed: {failure.strip()}", "see the server's log")
    return compare_steps(replies, [[float(word) for word in line.split()] for line in lines])


def make_prober(folder: Path) -> Path:
    """Compile what asks; raise SpecDecError."""
    program, source = folder / "prober", Path(__file__).with_name("prober.cpp")
    compiler = find_compiler()
    if compiler is None:
        raise SpecDecError("there is no C++ compiler", "install one, or set CXX")
    folder.mkdir(parents=True, exist_ok=True)
    words = ["-O2", "-o", str(program), str(source)]
    call_compiler([*shlex.split(compiler), *words], output=program)
    return program


def start_prober(
    program: Path, address: str, path: str, per_second: float, seconds: float
) -> subprocess.Popen[str]:
    """Ask for a path so many times a second for so many seconds, pause as long, and so on."""
    parts = urlsplit(address)
    request = make_head(address, path, None, keep=True).decode()
    return subprocess.Popen(
        [program, str(parts.hostname), str(parts.port), request, str(per_second), str(seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def compare_steps(replies: Sequence[Reply], probed: Sequence[Sequence[float]]) -> dict[str, Any]:
    """How much longer steps were while something was asked for than right after that.

    A step is the time between two events of a reply. probed: begin and end of each while, and its
    requests; as long a while after it is compared with it. Raises ValueError where there are fewer
    than two of them with steps. of_tokens_per_second is in 95 of 100 such runs in the range.
    """
    middles = [
        ((before + after) / 2, after - before)
        for reply in replies
        for (before, _), (after, _) in itertools.pairwise(join_bursts(reply.arrivals))
    ]
    pairs: list[tuple[list[float], list[float]]] = []
    for begin, end, _ in probed:
        within = [gap for at, gap in middles if begin <= at < end]
        after = [gap for at, gap in middles if end <= at < 2 * end - begin]
        if within and after:
            pairs.append((within, after))
    if len(pairs) < 2:
        raise ValueError(f"{len(pairs)} of {len(probed)} whiles have steps: ask for more tokens")

    def compare(chosen: Sequence[tuple[list[float], list[float]]]) -> float:
        within, after = (list(itertools.chain(*side)) for side in zip(*chosen, strict=True))
        return 1 - statistics.fmean(after) / statistics.fmean(within)

    dice = random.Random(1)
    again = sorted(compare(dice.choices(pairs, k=len(pairs))) for _ in range(1000))
    return {
        "of_tokens_per_second": round(compare(pairs), 4),
        "range": [round(again[25], 4), round(again[975], 4)],
        "pairs": len(pairs), "requests": int(sum(count for _, _, count in probed)),
        "per_second": round(sum(n for _, _, n in probed) / sum(e - b for b, e, _ in probed), 1),
        "steps": sum(len(a) + len(b) for a, b in pairs),
    }  # fmt: skip


def count_thread_seconds(pid: int) -> dict[str, float]:
    """Processor seconds of each thread of a process."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            found[folder.name] = int((folder / "schedstat").read_text().split()[0]) / 1e9
    return found


def share_of_http(before: dict[str, float], after: dict[str, float], threads: int) -> float:
    """The share of processor time that threads took alongside the engine's, which are the busiest.

    Those take requests apart, tokenize prompts and send events; tokens become text in the engine's.
    """
    spent = sorted(seconds - before.get(name, 0.0) for name, seconds in after.items())
    return sum(spent[: max(0, len(spent) - threads)]) / sum(spent)


def describe(runs: Sequence[Run]) -> dict[str, Any]:
    """The figures of several rounds."""
    return {
        "tokens_per_second": summarize([run.rate for run in runs]),
        "processor_ms_per_token": summarize([run.busy_ms for run in runs]),
        "http_share": round(statistics.median(run.http_share for run in runs), 4),
    }
