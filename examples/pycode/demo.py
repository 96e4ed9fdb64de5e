#!/usr/bin/env python3
"""`make demo`: convert, build and run the pycode model with its ReDrafter drafter.

Runs the three commands as a user would type them, shows a continuation, and measures the same
prompts with and without speculation on the same engine, by turns, for two beam shapes. Texts must
be equal, and equal to what transformers writes; the script fails if they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SAMPLE = 'def read_lines(path):\n    """Return the lines of a file."""'
TARGET, DRAFTER = "examples/pycode/target", "examples/pycode/redrafter"
NUM_PROMPTS, NUM_CHECKED, OUTPUT_LEN, REPEATS = 12, 3, 120, 3
# (beams, tokens a beam): the published kind of shape, and the one that pays best at this size.
BEAM_SHAPES = ((4, 5), (1, 3))


def run_stage(stage: str, *args: str) -> str:
    """Run one specdec command, shown as typed; return its stdout."""
    print(f"$ specdec-{stage} {shlex.join(args)}", flush=True)
    command = [sys.executable, "-m", "specdec", stage, *args]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"specdec-{stage} failed with status {done.returncode}")
    return done.stdout


def generate_with_transformers(prompts: list[str], limit: int) -> list[list[int]]:
    """What the target alone writes: greedy, float32, one prompt at a time."""
    import torch

    from specdec.pretrained import load_model, load_tokenizer

    tokenizer = load_tokenizer(HERE / "target")
    model = load_model(HERE / "target", dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        outputs.append(out[0, ids.shape[1] :].tolist())
    return outputs


def make_engine(work_dir: str, beams: int, length: int) -> str:
    """Convert and build with one beam shape; return the engine folder."""
    checkpoint, engine = (
        f"{work_dir}/checkpoint-{beams}x{length}",
        f"{work_dir}/engine-{beams}x{length}",
    )
    print("Two Hugging Face folders become one checkpoint, the checkpoint an engine:")
    run_stage(
        "convert", "--model-dir", TARGET, "--drafter-model-dir", DRAFTER,
        "--output-dir", checkpoint, "--dtype", "float32", "--redrafter-num-beams", str(beams),
        "--redrafter-draft-len-per-beam", str(length), "--force",
    )  # fmt: skip
    # One request at a time is what speculation is for: a batch of 8 fills this CPU without it.
    run_stage(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", engine, "--max-batch-size", "1",
        "--force",
    )  # fmt: skip
    return engine


def measure(engine: str, prompts: list[str], prompt_file: str) -> tuple[list[list[int]], str]:
    """Run with and without speculation by turns; return the tokens and a line of figures."""
    args = [
        "--engine-dir", engine, "--tokenizer-dir", TARGET, "--max-output-len", str(OUTPUT_LEN),
        "--input-file", prompt_file, "--json",
    ]  # fmt: skip
    reports: dict[str, list[dict[str, Any]]] = {"speculation": [], "plain": []}
    for _ in range(REPEATS):
        reports["speculation"].append(json.loads(run_stage("run", *args)))
        reports["plain"].append(json.loads(run_stage("run", *args, "--no-speculation")))
    texts = {
        tuple(tuple(output["output_ids"]) for output in report["outputs"])
        for runs in reports.values()
        for report in runs
    }
    if len(texts) != 1:
        sys.exit("FAILED: the text with speculation differs from the text without")
    speed = {
        name: statistics.median(report["stats"]["tokens_per_second"] for report in runs)
        for name, runs in reports.items()
    }
    acceptance = reports["speculation"][0]["stats"]["acceptance_length"]
    return [list(ids) for ids in next(iter(texts))], (
        f"acceptance length {acceptance:.2f} tokens per verify step;"
        f" {speed['speculation']:.0f} tokens/s with speculation, {speed['plain']:.0f} without:"
        f" {speed['speculation'] / speed['plain']:.2f} times"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", default="out/demo", help="relative to the project's root")
    work_dir: str = parser.parse_args().work_dir
    prompts = [json.loads(line)["prompt"] for line in (HERE / "prompts.jsonl").open()]
    prompts = prompts[:NUM_PROMPTS]
    (ROOT / work_dir).mkdir(parents=True, exist_ok=True)
    prompt_file = f"{work_dir}/prompts.jsonl"
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    (ROOT / prompt_file).write_text("".join(lines))

    figures: dict[str, str] = {}
    for beams, length in BEAM_SHAPES:
        engine = make_engine(work_dir, beams, length)
        if not figures:
            print("The engine writes Python, several tokens a step:")
            sample = [
                "--engine-dir", engine, "--tokenizer-dir", TARGET,
                "--max-output-len", "80", "--input-text", SAMPLE,
            ]  # fmt: skip
            print(run_stage("run", *sample))
        print("The same prompts with and without speculation, by turns:")
        ids, line = measure(engine, prompts, prompt_file)
        figures[f"{beams} beams x {length} tokens"] = line
    if ids[:NUM_CHECKED] != generate_with_transformers(prompts[:NUM_CHECKED], OUTPUT_LEN):
        sys.exit("FAILED: the text differs from what transformers generates")
    print(
        f"\nThe text is the target's own: {len(prompts)} prompts equal with and without"
        f" speculation, {NUM_CHECKED} of them compared with transformers, token for token."
    )
    print(f"Medians of {REPEATS}, one request at a time, float32:")
    for name, line in figures.items():
        print(f"  {name}: {line}")


if __name__ == "__main__":
    main()
