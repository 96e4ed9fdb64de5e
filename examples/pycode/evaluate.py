#!/usr/bin/env python3
"""Measure the acceptance of an engine on held-out prompts.

    python evaluate.py --engine-dir ENGINE --tokenizer-dir target \
                       --prompts prompts.jsonl --output evaluation.json

Runs `specdec-run` with and without speculation and checks that both write the same text; with
half-precision engines texts may part at near-ties, which is counted. Small models fall into loops,
which are easy to draft; so acceptance is also given over the texts that do not loop.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from specdec.bench.repetition import is_looping


def run_engine(args: argparse.Namespace, max_output_len: int, *flags: str) -> dict[str, Any]:
    """Return what `specdec-run --json` prints."""
    command = [
        sys.executable, "-m", "specdec", "run", "--engine-dir", str(args.engine_dir),
        "--tokenizer-dir", str(args.tokenizer_dir), "--input-file", str(args.prompts),
        "--max-output-len", str(max_output_len), "--json", *flags,
    ]  # fmt: skip
    report: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True).stdout
    )
    return report


def measure_acceptance(outputs: list[dict[str, Any]]) -> float | None:
    """Tokens emitted per verify step over some outputs."""
    steps = sum(o["stats"]["num_verify_steps"] for o in outputs)
    tokens = sum(o["stats"]["num_output_tokens"] - 1 for o in outputs)
    return round(tokens / steps, 4) if steps else None


def evaluate(args: argparse.Namespace, max_output_len: int) -> dict[str, Any]:
    """Acceptance with outputs of at most `max_output_len` tokens."""
    drafting = ["--draft-budget", "fixed"]  # in every step, whether it pays or not
    if args.draft_engine_dir is not None:
        drafting += ["--draft-engine-dir", str(args.draft_engine_dir)]
        drafting += ["--draft-len", str(args.draft_len)]
    drafted = run_engine(args, max_output_len, *drafting)
    plain = run_engine(args, max_output_len, "--no-speculation")
    outputs = drafted["outputs"]
    steps = sum(o["stats"]["num_verify_steps"] for o in outputs)
    histograms = [o["stats"]["accepted_histogram"] for o in outputs]
    histogram = [sum(counts) for counts in zip(*histograms, strict=True)]
    return {
        "max_output_len": max_output_len,
        "prompts": len(outputs),
        "same_text_as_plain": sum(
            o["output_ids"] == p["output_ids"]
            for o, p in zip(outputs, plain["outputs"], strict=True)
        ),
        "looping": sum(is_looping(o["output_ids"]) for o in outputs),
        "acceptance_length": measure_acceptance(outputs),
        "acceptance_length_without_loops": measure_acceptance(
            [o for o in outputs if not is_looping(o["output_ids"])]
        ),
        "accepted_histogram": histogram,
        # Share of steps in which at least n draft tokens were accepted, n = 1, 2, ...
        "accepted_by_position": [
            round(sum(histogram[n:]) / steps, 4) for n in range(1, len(histogram))
        ],
        "dtype": drafted["stats"]["dtype"],
        "device": drafted["stats"]["device"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-dir", type=Path, required=True)
    parser.add_argument("--draft-engine-dir", type=Path, help="a draft model's engine")
    parser.add_argument("--draft-len", type=int, default=4, help="what that engine drafts a step")
    parser.add_argument("--tokenizer-dir", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--max-output-len", type=int, nargs="+", default=[16, 32, 64, 128])
    args = parser.parse_args()
    report = [evaluate(args, length) for length in args.max_output_len]
    args.output.write_text(json.dumps(report, indent=2) + "\n")
    for row in report:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
