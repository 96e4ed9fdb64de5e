#!/usr/bin/env python3
"""`make demo`: convert, build and run the pycode model with its ReDrafter drafter.

Runs the three commands as a user would type them, shows a continuation, and measures the same
prompts with and without speculation on the same engine, alternating. The texts must be equal, and
equal to what transformers writes; the script fails if they are not.
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
NUM_PROMPTS, NUM_CHECKED, OUTPUT_LEN, REPEATS = 12, 3, 120, 3


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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(HERE / "target")
    model = AutoModelForCausalLM.from_pretrained(HERE / "target").to(torch.float32).eval()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", default="out/demo", help="relative to the project's root")
    work_dir: str = parser.parse_args().work_dir
    checkpoint, engine = f"{work_dir}/checkpoint", f"{work_dir}/engine"
    model = "examples/pycode"

    print("1. Two Hugging Face folders become one checkpoint.")
    run_stage(
        "convert", "--model-dir", f"{model}/target", "--drafter-model-dir", f"{model}/redrafter",
        "--output-dir", checkpoint, "--dtype", "float32", "--redrafter-num-beams", "4",
        "--redrafter-draft-len-per-beam", "5", "--force",
    )  # fmt: skip
    print("2. The checkpoint becomes an engine for this machine.")
    # One request at a time is what speculation is for: a batch of 8 fills this CPU without it.
    run_stage(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", engine, "--max-batch-size", "1",
        "--force",
    )  # fmt: skip

    print("3. The engine writes Python, several tokens a step.")
    prompts = [json.loads(line)["prompt"] for line in (HERE / "prompts.jsonl").open()]
    prompts = prompts[:NUM_PROMPTS]
    prompt_file = ROOT / work_dir / "prompts.jsonl"
    prompt_file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    common = [
        "--engine-dir", engine, "--tokenizer-dir", f"{model}/target",
        "--max-output-len", str(OUTPUT_LEN),
    ]  # fmt: skip
    print(run_stage("run", *common, "--input-text", SAMPLE))

    print("4. The same prompts with and without speculation, alternating.")
    reports: dict[str, list[dict[str, Any]]] = {"speculation": [], "plain": []}
    for _ in range(REPEATS):
        for name, flags in (("speculation", []), ("plain", ["--no-speculation"])):
            args = [*common, "--input-file", str(prompt_file.relative_to(ROOT)), "--json", *flags]
            reports[name].append(json.loads(run_stage("run", *args)))
    texts = {
        tuple(tuple(o["output_ids"]) for o in report["outputs"])
        for runs in reports.values()
        for report in runs
    }
    if len(texts) != 1:
        sys.exit("FAILED: the text with speculation differs from the text without")
    own = [list(ids) for ids in next(iter(texts))[:NUM_CHECKED]]
    if own != generate_with_transformers(prompts[:NUM_CHECKED], OUTPUT_LEN):
        sys.exit("FAILED: the text differs from what transformers generates")
    speed = {
        name: statistics.median(r["stats"]["tokens_per_second"] for r in runs)
        for name, runs in reports.items()
    }
    stats = reports["speculation"][0]["stats"]
    print(
        f"\nThe text is the target's own: {len(prompts)} prompts equal with and without"
        f" speculation, {NUM_CHECKED} of them compared with transformers, token for token."
    )
    print(f"acceptance length: {stats['acceptance_length']:.2f} tokens per verify step")
    print(
        f"speed (median of {REPEATS}): {speed['speculation']:.0f} tokens/s with speculation,"
        f" {speed['plain']:.0f} without: {speed['speculation'] / speed['plain']:.2f} times"
    )


if __name__ == "__main__":
    main()
