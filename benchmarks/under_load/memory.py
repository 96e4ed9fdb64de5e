"""A server's resident memory after few requests and after many."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .client import Body, ask, get
from .ours import make_engine, serve

FIRST = 100
CONCURRENCY = 16
TOLERANCE = 0.02  # of what there was after the first
REGEX = "[a-z]{2,5}"


def make_bodies(start: int, end: int) -> list[Body]:
    """Requests of a few tokens, no two alike: streamed and not, sampled, stopped, to a grammar."""
    bodies = []
    for n in range(start, end):
        body: Body = {"prompt": f"value_{n} = ", "max_tokens": 2 + n % 3, "seed": n}
        body |= {"stream": n % 2 == 0, "temperature": float(n % 4 == 1)}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if n % 5 == 0:
            body["stop"] = [str(n), ")"]
        if n % 7 == 0:
            body["guided_regex"] = f"{REGEX}_{n}" if n % 2 else REGEX
        if n % 3 == 0:
            body["logprobs"] = 2
        bodies.append(body)
    return bodies


async def ask_all(address: str, bodies: Sequence[Body]) -> None:
    """Ask, CONCURRENCY at a time; every ninth client leaves after the first event."""
    left = iter(enumerate(bodies))

    async def work() -> None:
        for at, body in left:
            await ask(address, body, leave_after=0 if at % 9 == 0 and body["stream"] else None)

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    await get(address, "/metrics")


def read_memory(pid: int) -> int:
    """Resident memory of a process in kB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def measure(number: int, dtype: str) -> dict[str, Any]:
    """Resident memory after FIRST requests and after `number`, and in between."""
    with tempfile.TemporaryDirectory() as folder:
        with serve(make_engine(Path(folder), dtype)) as (address, pid):
            resident: dict[int, int] = {}
            done = 0
            for end in sorted({FIRST, *(number * part // 10 for part in range(1, 11))}):
                asyncio.run(ask_all(address, make_bodies(done, end)))
                done, resident[end] = end, read_memory(pid)
                print(f"after {end}: {resident[end] / 1024:.1f} MiB", file=sys.stderr, flush=True)
    first, last = resident[FIRST], resident[number]
    return {
        "requests": number, "dtype": dtype, "resident_kb": resident,
        "growth": round(last / first - 1, 4), "tolerance": TOLERANCE,
        "is_met": last <= first * (1 + TOLERANCE),
    }  # fmt: skip
