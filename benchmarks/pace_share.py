#!/usr/bin/env python3
"""Speed of `--draft-budget auto`, as a share of the better of a fixed budget and plain decoding.

    python benchmarks/pace_share.py [--size pycode] [--folder out/peers] [--prepare]
                                    [--processes 3] [--batch-sizes 1,4,16]
                                    [--max-output-len 64] [--repeat 2] [--only NAME...]

Every measurement has a process of its own, as a user's command has, and `auto`, fixed and plain
decoding take turns, so that each turn gives one share. The models are those of examples/pycode, as
they are or grown to a larger size. --prepare builds the engines into --folder, chooses the prompts
and ends; without it, what is there is used. Costs are measured when an engine is loaded first, and
kept beside it, as ever. Writes pace-share.json into --output-dir; fails where a text differs from
plain decoding's.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import batches
from benchmarks.side_by_side import models
from benchmarks.side_by_side.models import PYCODE, SIZES
from benchmarks.side_by_side.processes import Conditions
from benchmarks.side_by_side.report import lay_out
from specdec.files.reading import write_json
from specdec.measure.engine import open_bench
from specdec.measure.prompts import read_prompt_set
from specdec.run.settings import RunSettings

WAYS = ("auto", "fixed", "plain")
LENGTH = batches.NUM_DRAFTED
PAIR: dict[str, Any] = {"draft_engine_dir": "draft", "draft_len": str(LENGTH)}
SUFFIX: dict[str, Any] = {"suffix_max_tokens": LENGTH}
# Of each method, the engine's folder and the options that specdec-run has for it. A chain of one
# is the engine's drafter alone, without the suffixes of the default.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "suffix": ("draft-target", SUFFIX),
    "prompt lookup": ("draft-target", {"prompt_lookup_num_tokens": LENGTH}),
    "draft model": ("draft-target", PAIR),
    "suffix, else draft model": (
        "draft-target", {"draft_chain": "suffix,draft_target", **SUFFIX, **PAIR},
    ),
    "ReDrafter": ("redrafter", {"draft_chain": "redrafter"}),
    "EAGLE-3": ("eagle3", {"draft_chain": "eagle"}),
    "EAGLE-1": ("eagle", {"draft_chain": "eagle"}),
    "Medusa": ("medusa", {"draft_chain": "medusa"}),
    "DFlash": ("dflash", {"draft_chain": "dflash"}),
    "default of EAGLE-3": ("eagle3", {}),
    "default of a plain engine": ("draft-target", {}),
}  # fmt: skip
WARM_UP_TOKENS = 8
PROMPTS = "pace-prompts"  # folder beside the engines


def find_engine_folder(args: argparse.Namespace) -> Path:
    """Return the folder of the prepared engines."""
    return models.find_folder(SIZES[args.size], args.folder.resolve() / "models") / "engines"


def prepare(args: argparse.Namespace) -> None:
    """Build the engines and choose prompts whose texts do not run in circles."""
    found = models.prepare_models(SIZES[args.size], args.folder)
    args.prepare = True
    engines = batches.find_engines(found, args, batches.list_drafters([]))
    folder = find_engine_folder(args).parent / PROMPTS
    shape = argparse.Namespace(
        output_dir=folder, batch_sizes=args.batch_sizes, max_output_len=args.max_output_len
    )
    batches.choose_prompts(PYCODE / "prompts.jsonl", engines["draft-target"], shape)


def measure(args: argparse.Namespace, method: str, way: str) -> dict[str, Any]:
    """Return the tokens per second of one way, by requests at once, and a hash of its texts."""
    folder, (name, options) = find_engine_folder(args), METHODS[method]
    options = dict(options)
    if way != "auto" and "," not in options.get("draft_chain", ","):
        del options["draft_chain"]  # which a fixed budget means anyway
    if way != "auto" and name == "draft-target" and not options:
        options = dict(SUFFIX)  # a plain engine has no drafter of its own to be fixed
    if "draft_engine_dir" in options:
        options["draft_engine_dir"] = folder / options["draft_engine_dir"]
    settings = RunSettings(
        engine_dir=folder / name, tokenizer_dir=str(PYCODE / "target"), device="cpu",
        max_output_len=args.max_output_len, draft_budget="auto" if way == "auto" else "fixed",
        **options,
    )  # fmt: skip
    bench = open_bench(settings)
    drafter = bench.plain if way == "plain" else bench.engine.drafter
    prompts = read_prompt_set(folder.parent / PROMPTS / "without-loops.jsonl")
    bench.take_prompts(prompts[:1], dataclasses.replace(settings, max_output_len=WARM_UP_TOKENS))
    bench.run(drafter, 1)
    rates: dict[str, float] = {}
    digest = hashlib.sha256()
    for size in args.batch_sizes:
        bench.take_prompts(prompts[: max(size, batches.LEAST_PROMPTS)], settings)
        runs = [bench.run(drafter, size) for _ in range(args.repeat)]
        tokens = sum(len(text) for run in runs for text in run.texts)
        rates[str(size)] = tokens / sum(sum(run.seconds.values()) for run in runs)
        digest.update(json.dumps(runs[0].texts).encode())
    bench.engine.close()
    return {"rates": rates, "texts": digest.hexdigest()}


def call(args: argparse.Namespace, method: str, way: str) -> dict[str, Any]:
    """Measure one way in a process of its own."""
    sizes = ",".join(map(str, args.batch_sizes))
    command = [
        sys.executable, __file__, "--size", args.size, "--folder", str(args.folder),
        "--batch-sizes", sizes, "--max-output-len", str(args.max_output_len),
        "--repeat", str(args.repeat), "--measure", method, way,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"FAILED: {method}, {way}: {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def summarize(turns: Sequence[Mapping[str, Any]], size: str) -> dict[str, Any]:
    """Return the shares of a method's turns at one number of requests.

    share: of `auto`, of the better of fixed and plain. of_plain: of `auto`, of plain decoding.
    plain: of each turn's plain decoding, of the median of all turns, which is chance.
    """
    rates = [{way: turn[way]["rates"][size] for way in WAYS} for turn in turns]
    usual = statistics.median(rate["plain"] for rate in rates)
    shares = {
        "share": [r["auto"] / max(r["fixed"], r["plain"]) for r in rates],
        "of_plain": [r["auto"] / r["plain"] for r in rates],
        "fixed_of_plain": [r["fixed"] / r["plain"] for r in rates],
        "plain": [r["plain"] / usual for r in rates],
    }
    return {
        name: {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
        for name, values in shares.items()
    }


def format_table(report: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a row for each method and number of requests: medians, in brackets the spread."""
    names = ("share", "of_plain", "fixed_of_plain", "plain")
    rows = [
        [
            method, size,
            *(
                f"{part['median']:.2f} ({part['lowest']:.2f} to {part['highest']:.2f})"
                for part in (shares[name] for name in names)
            ),
        ]
        for method, sizes in report.items()
        for size, shares in sizes.items()
    ]  # fmt: skip
    head = (
        "method", "requests", "auto / better of both", "auto / plain", "fixed / plain",
        "plain / its median",
    )  # fmt: skip
    return lay_out(head, rows)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="pycode")
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "peers")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "out" / "pace-share")
    parser.add_argument("--prepare", action="store_true", help="build the engines, and end")
    parser.add_argument("--processes", type=int, default=3, help="of each way")
    parser.add_argument("--batch-sizes", default="1,4,16")
    parser.add_argument("--max-output-len", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=[*METHODS], metavar="NAME")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.batch_sizes = [int(size) for size in args.batch_sizes.split(",")]
    return args


def main() -> None:
    args = parse_args()
    if args.measure:
        print(json.dumps(measure(args, *args.measure)))
        return
    prompts = find_engine_folder(args).parent / PROMPTS / "without-loops.jsonl"
    if args.prepare or not prompts.exists():
        prepare(args)
        print(f"prepared: {prompts.parent.parent}", file=sys.stderr)
        return
    conditions = Conditions()
    report: dict[str, dict[str, Any]] = {}
    different = []
    for method in args.only:
        turns = []
        for turn in range(args.processes):
            ways = WAYS[:: -1 if turn % 2 else 1]  # a drift of the machine favours none
            turns.append({way: call(args, method, way) for way in ways})
        if len({result["texts"] for turn in turns for result in turn.values()}) > 1:
            different.append(method)
        report[method] = {str(size): summarize(turns, str(size)) for size in args.batch_sizes}
        print(format_table({method: report[method]}), flush=True)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_json(
        args.output_dir / "pace-share.json",
        {
            **conditions.describe(),
            "size": args.size,
            "processes": args.processes,
            "methods": report,
        },
    )
    print(format_table(report))
    if different:
        sys.exit(f"FAILED: texts differ from plain decoding's: {', '.join(different)}")


if __name__ == "__main__":
    main()
