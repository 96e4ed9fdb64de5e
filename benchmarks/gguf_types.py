#!/usr/bin/env python3
"""Plain decoding from a GGUF file in every type, by specdec and by llama.cpp, on the same bytes.

    python benchmarks/gguf_types.py --model-dir MODEL.gguf [--types Q4_0 Q5_K_M ...] [--rounds 7]
                                    [--llama-bin FOLDER]

llama.cpp's own quantizer writes the model in each type, one at a time, and the file is deleted when
it has been measured. Both then continue one prompt greedily, by turns, in processes that have the
file loaded, with the prompt's time counted: the medians of tokens per second and of the turns'
ratios, with the lowest and the highest. So is a prompt of --prompt tokens read. Beside these
stand a step of one token, a verify step of 4 and 8 in steps of one, and the peak memory of
`specdec run` and of llama-server, mapped file included. Types that the quantizer refuses are told
with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.side_by_side import models
from benchmarks.side_by_side.processes import Conditions, PeerError, run_logged
from benchmarks.side_by_side.report import lay_out
from benchmarks.side_by_side.workers.llama_cpp import Server, Servers
from specdec.decode.requests import Request
from specdec.decode.timing import Timing
from specdec.errors import SpecDecError
from specdec.files.reading import write_json
from specdec.generate.pipeline import hold_engines
from specdec.generate.settings import GenerateSettings
from specdec.measure.engine import Bench, open_bench
from specdec.measure.steps import time_steps
from specdec.run.settings import RunSettings

TYPES = (
    "Q2_K", "Q3_K_M", "Q4_0", "Q4_1", "Q4_K_M", "Q5_0", "Q5_1", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_NL",
    "IQ4_XS", "MXFP4_MOE",
)  # fmt: skip
PROGRAMS = ROOT / "out" / "peers" / "environments" / "llama.cpp" / "build" / "bin"
PROMPT = "Write a short story about a lighthouse keeper who learns to play the violin."
STEP_SIZES, PAST_LEN = (1, 4, 8), 200
POSITIONS = 1024
# A process begins with the peak of the one that started it, so a small one starts what is measured.
LAUNCHER = """
import os, sys
process = os.spawnv(os.P_NOWAIT, sys.argv[2], sys.argv[2:])
_, status, usage = os.wait4(process, 0)
open(sys.argv[1], "w").write(str(usage.ru_maxrss))
sys.exit(os.waitstatus_to_exitcode(status))
"""
Row = dict[str, Any]


def measure_types(args: argparse.Namespace) -> Iterator[Row]:
    """Yield each type's row."""
    log = args.folder / "gguf-types.log"
    for kind in args.types:
        file = args.folder / f"{args.model_dir.stem}-{kind}.gguf"
        try:
            run_logged(
                [
                    args.llama_bin / "llama-quantize", "--allow-requantize",
                    args.model_dir, file, kind, args.threads,
                ],
                log, f"quantizing as {kind}",
            )  # fmt: skip
            yield {"type": kind} | measure_file(file, args)
        except (PeerError, SpecDecError) as error:
            yield {"type": kind, "error": str(error)}
        finally:
            file.unlink(missing_ok=True)


def measure_file(file: Path, args: argparse.Namespace) -> Row:
    """Return the figures of a file."""
    settings = GenerateSettings(
        texts=[PROMPT], model_dir=str(file), max_batch_size=1, device="cpu", no_cache=True
    )
    servers = Servers(
        str(args.llama_bin / "llama-server"), [], str(file), "", args.threads, POSITIONS
    )
    with hold_engines(settings) as run:
        ours = measure_memory(run["engine_dir"], file, args)
        bench = open_bench(RunSettings(**run))
        try:
            server = servers.get("plain", {})
            figures = take_turns(bench, server, args)
            theirs = read_peak(server.process.pid)
            steps = time_steps(
                bench.engine.decoder, STEP_SIZES, past_len=PAST_LEN, repeat=args.rounds
            )
        finally:
            servers.end()
            bench.engine.close()
    size = file.stat().st_size
    return figures | {
        "file_mb": size / 1e6, "memory_mb": ours / 1e6, "llama_memory_mb": theirs / 1e6,
        "step_ms": {tokens: seconds * 1e3 for tokens, seconds in steps.items()},
    }  # fmt: skip


def take_turns(bench: Bench, server: Server, args: argparse.Namespace) -> Row:
    """Return tokens per second of both, written and read, and the ratios of the turns."""
    prompt = bench.tokenizer.encode(PROMPT)
    long_prompt = (prompt * -(-args.prompt // len(prompt)))[: args.prompt]

    def time_here(input_ids: list[int], max_output_len: int) -> float:
        request = Request(
            index=0, input_ids=input_ids, max_output_len=max_output_len, end_ids=frozenset()
        )
        began = time.perf_counter()
        (result,) = bench.decode([request], bench.plain, 1, Timing())
        assert len(result.output_ids) == max_output_len
        return time.perf_counter() - began

    def time_there(input_ids: list[int], max_output_len: int) -> float:
        began = time.perf_counter()
        answer = server.complete(input_ids, max_output_len, ends=False)
        assert answer["timings"]["predicted_n"] == max_output_len
        return time.perf_counter() - began

    written: dict[str, list[float]] = {"specdec": [], "llama.cpp": []}
    read: dict[str, list[float]] = {name: [] for name in written}
    turns = {"specdec": time_here, "llama.cpp": time_there}
    for number in range(args.rounds + 1):  # the first one warms up
        for name in list(turns)[:: -1 if number % 2 else 1]:
            seconds = turns[name](prompt, args.tokens), turns[name](long_prompt, 1)
            if number:
                written[name].append(args.tokens / seconds[0])
                read[name].append(len(long_prompt) / seconds[1])
    return {
        "tokens_per_second": written, "ratios": divide_turns(written),
        "prompt_tokens_per_second": read, "prompt_ratios": divide_turns(read),
    }  # fmt: skip


def divide_turns(rates: dict[str, list[float]]) -> list[float]:
    """Return the first one's rate in each turn over the other's."""
    return [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]


def measure_memory(engine: Path, file: Path, args: argparse.Namespace) -> int:
    """Return the most bytes that `specdec run` holds while it answers a prompt."""
    words = [
        sys.executable, "-m", "specdec", "run", "--engine-dir", str(engine), "--input-text", PROMPT,
        "--tokenizer-dir", str(file), "--max-output-len", str(args.tokens), "--no-speculation",
        "--apply-chat-template",
    ]  # fmt: skip
    report = args.folder / "gguf-types.json"
    command = [sys.executable, "-c", LAUNCHER, str(report), *words]
    run_logged(command, args.folder / "gguf-types.log", "specdec run")
    return int(json.loads(report.read_text())) * 1024


def read_peak(process: int) -> int:
    """Return the most bytes that a running process has held."""
    status = Path(f"/proc/{process}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def format_table(rows: Sequence[Row]) -> str:
    """Return the types as a Markdown table."""
    head = (
        "type", "file, MB", "specdec, tokens/s", "llama.cpp", "by turns", "prompt, tokens/s",
        "llama.cpp", "by turns", "step of 1, ms", "steps of 4, 8", "memory over the file, MB",
        "llama.cpp's",
    )  # fmt: skip
    cells = []
    for row in rows:
        if "error" in row:
            cells.append([row["type"], row["error"], *[""] * (len(head) - 2)])
            continue
        steps = row["step_ms"]
        cells.append([
            row["type"], f"{row['file_mb']:.0f}",
            *format_turns(row["tokens_per_second"], row["ratios"]),
            *format_turns(row["prompt_tokens_per_second"], row["prompt_ratios"]),
            f"{steps[1]:.1f}",
            ", ".join(f"{steps[size] / steps[1]:.2f}" for size in STEP_SIZES[1:]),
            f"{row['memory_mb'] - row['file_mb']:.0f}",
            f"{row['llama_memory_mb'] - row['file_mb']:.0f}",
        ])  # fmt: skip
    return lay_out(head, cells)


def format_turns(rates: dict[str, list[float]], ratios: list[float]) -> list[str]:
    """Return three cells: the median rates of both, and the ratios of the turns."""
    ours, theirs = map(statistics.median, rates.values())
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return [f"{ours:.1f}", f"{theirs:.1f}", spread]


def make_common_parser(description: str | None, folder: Path) -> argparse.ArgumentParser:
    """Return a parser with the options of every script that measures GGUF files."""
    parser = models.make_parser(description)
    parser.add_argument("--folder", type=Path, default=folder)
    parser.add_argument("--llama-bin", type=Path, default=PROGRAMS)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32, help="new ones, in each turn")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the long prompt")
    return parser


def report_rows(
    measure: Callable[[argparse.Namespace], Iterator[Row]], args: argparse.Namespace, name: str
) -> None:
    """Measure, write a report with the conditions to --folder, and print the table."""
    import torch

    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    conditions, rows = Conditions(), []
    for row in measure(args):
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    settings = {key: str(value) for key, value in vars(args).items()}
    write_json(
        args.folder / f"{name}.json",
        conditions.describe() | {"settings": settings, "rows": rows},
    )
    print(format_table(rows))


def main(words: Sequence[str] | None = None) -> None:
    parser = make_common_parser(__doc__, ROOT / "out" / "gguf-types")
    parser.add_argument("--model-dir", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--types", nargs="+", default=list(TYPES), metavar="TYPE")
    args = parser.parse_args(words)
    report_rows(measure_types, args, f"gguf-types-{args.model_dir.stem}")


if __name__ == "__main__":
    main()
