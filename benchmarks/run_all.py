#!/usr/bin/env python3
"""All benchmarks of this folder, one after another: what `make bench` runs.

    python benchmarks/run_all.py [--size full|small|pycode] [--peers NAME...]
        [--peers-flags '--rounds 2'] [--only STEP...] [--output-dir DIR] [--list]

Each is a process of its own. One that fails stops no other: it is named at the end, and the exit
status is then 1. DIR gets the reports, what each step printed as STEP.log, and steps.json with
every step's command, seconds and exit status. Models and environments stay in --folder for the next
run. peers.py decodes the prompts that batches.py has chosen, whose texts do not loop.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(ROOT))

from benchmarks.side_by_side import models
from benchmarks.side_by_side.processes import read_commit
from benchmarks.side_by_side.ways import LLAMA_CPP, PEERS, QUANTIZED
from specdec.command.signals import take_ending_signals
from specdec.files.reading import write_json
from specdec.measure.machine import describe_machine

WEIGHTS = {
    "bf16": (),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4", "--group-size", "64"),
}


# Shapes of a 135M model, which a busy core disturbs more.
SMALL = ("--layers", "30", "--hidden", "576", "--intermediate", "1536", "--heads", "9",
         "--kv-heads", "3", "--vocab", "49152")  # fmt: skip


def list_steps(args: argparse.Namespace, has_gpu: bool) -> dict[str, list[str]]:
    """The commands by their names, in order: later ones use engines of earlier ones."""
    out = args.output_dir
    grown = ["--size", args.size, "--folder", str(args.folder)]
    served = ["--size", "full" if args.size == "full" else "pycode"]

    def script(name: str, *words: str | Path) -> list[str]:
        return [str(ROOT / "benchmarks" / f"{name}.py"), *map(str, words)]

    def report(name: str) -> list[str]:
        return ["--output", str(out / f"{name}.json")]

    steps = {
        "batches": script("batches", *grown, "--output-dir", out),
        "edits": script("edits", *grown, "--output-dir", out),
        "peers": script(
            "peers", *grown, "--output-dir", out, "--prompt-file", out / "without-loops.jsonl",
            "--peers", *args.peers, *shlex.split(args.peers_flags),
        ),
    }  # fmt: skip
    for name, words in WEIGHTS.items():
        steps[f"verify-{name}"] = script("verify_cost", *words, *report(f"verify-{name}"))
        small = (*SMALL, *words, "--busy-core", "7")
        steps[f"busy-core-{name}"] = script("verify_cost", *small, *report(f"busy-core-{name}"))
    steps["methods"] = [
        "-m", "examples.pycode.methods", "--work-dir", str(out / "methods"),
        "--output-dir", str(out),
    ]  # fmt: skip
    steps["serve-costs"] = script("serve", "costs", *served, *report("serve-costs"))
    if LLAMA_CPP in args.peers:  # which peers.py has compiled
        program = args.folder / "environments" / LLAMA_CPP / "build" / "bin" / "llama-server"
        server = ["--llama-server", str(program)]
        steps["serve-load"] = script("serve", "load", *served, *server, *report("serve-load"))
    if has_gpu:
        steps["gpu"] = script("gpu", "--output-dir", out)
    return steps


def run_step(name: str, words: Sequence[str], log: Path) -> dict[str, object]:
    """Run one in a process of its own; what it prints is shown, and kept in `log`."""
    command = [sys.executable, *words]
    print(f"== {name}: {shlex.join(command)}", flush=True)
    began = time.monotonic()
    with (
        log.open("w", encoding="utf-8", buffering=1) as file,  # a line at a time
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                file.write(line)
        except BaseException:  # Ctrl-C, or SIGTERM: it ends what it has started, too
            process.terminate()
            raise
    seconds = round(time.monotonic() - began, 1)
    return {"command": command, "seconds": seconds, "exit_status": process.returncode}


def run_steps(steps: Mapping[str, Sequence[str]], out: Path) -> list[str]:
    """Run all; the names of those that failed. steps.json is written after each."""
    out.mkdir(parents=True, exist_ok=True)
    done: dict[str, dict[str, object]] = {}
    head = describe_machine() | {"commit": read_commit()}
    for name, words in steps.items():
        done[name] = run_step(name, words, out / f"{name}.log")
        write_json(out / "steps.json", head | {"steps": done})
    return [name for name, step in done.items() if step["exit_status"]]


def make_parser() -> argparse.ArgumentParser:
    parser = models.make_parser(__doc__, "bench")
    parser.add_argument(
        "--peers", nargs="+", default=list(PEERS), choices=[*PEERS, *QUANTIZED], metavar="NAME"
    )
    parser.add_argument("--peers-flags", default="", help="more of peers.py, in one word")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="some of those that --list tells")
    parser.add_argument("--list", action="store_true", help="print the commands, and end")
    return parser


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    args = make_parser().parse_args(words)
    args.folder, args.output_dir = args.folder.resolve(), args.output_dir.resolve()
    return args


def main(words: Sequence[str] | None = None) -> None:
    import torch

    args = parse_args(words)
    steps = list_steps(args, torch.cuda.is_available())
    if unknown := [name for name in args.only or () if name not in steps]:
        raise SystemExit(f"error: no step {', '.join(unknown)}\nhint: {', '.join(steps)}")
    chosen = {name: steps[name] for name in args.only or steps}
    if args.list:
        for name, command in chosen.items():
            print(f"{name}: {shlex.join(command)}")
        return
    try:
        with take_ending_signals():
            failed = run_steps(chosen, args.output_dir)
    except KeyboardInterrupt:
        raise SystemExit(f"error: stopped\nhint: what ended is in {args.output_dir}") from None
    if failed:
        raise SystemExit(
            f"error: {len(failed)} of {len(chosen)} steps failed: {', '.join(failed)}\n"
            f"hint: what they printed is in {args.output_dir}, STEP.log"
        )


if __name__ == "__main__":
    main()
