#!/usr/bin/env python3
"""Decoding speed in one run: speculation, plain decoding on the same engine, and transformers.

    python benchmarks/decode.py [--dtype bfloat16] [--prompts 8] [--repeat 5] [--output FILE]

Uses the pycode models. The three are alternated, medians are taken; every repeat decodes the same
prompts, one request at a time, and texts are compared before a speed is reported. Also reports how
the time of a verify step grows with its tokens, which bounds what speculation can win.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PYCODE = ROOT / "examples" / "pycode"
STEP_SIZES = (1, 4, 8, 16, 24)


def make_engine(folder: Path, dtype: str, beams: int, length: int) -> Path:
    """Convert and build through the commands."""
    checkpoint, engine = folder / "checkpoint", folder / "engine"
    convert = [
        "convert", "--model-dir", PYCODE / "target", "--drafter-model-dir", PYCODE / "redrafter",
        "--output-dir", checkpoint, "--dtype", dtype, "--redrafter-num-beams", beams,
        "--redrafter-draft-len-per-beam", length,
    ]  # fmt: skip
    build = ["build", "--checkpoint-dir", checkpoint, "--output-dir", engine]
    for arguments in (convert, build):
        command = [sys.executable, "-m", "specdec", *map(str, arguments)]
        subprocess.run(command, check=True, cwd=ROOT)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--length", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-output-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from specdec.bench.machine import LoadMeter, describe_machine
    from specdec.bench.steps import time_steps
    from specdec.decode.engine import TorchEngine
    from specdec.decode.requests import Request, sum_stats
    from specdec.pretrained import load_model, load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        path = make_engine(Path(folder), args.dtype, args.beams, args.length)
        engines = {
            "speculation": TorchEngine(path, device="cpu"),
            "plain": TorchEngine(path, device="cpu", speculate=False),
        }
    tokenizer = load_tokenizer(PYCODE / "target")
    model = load_model(PYCODE / "target")
    model = model.to(getattr(torch, args.dtype)).eval()
    lines = (PYCODE / "prompts.jsonl").read_text().splitlines()[: args.prompts]
    requests = [
        Request(
            index=i,
            input_ids=tokenizer(json.loads(line)["prompt"])["input_ids"],
            max_output_len=args.max_output_len,
            end_ids=frozenset([tokenizer.eos_token_id]),
        )
        for i, line in enumerate(lines)
    ]

    def run_transformers() -> list[list[int]]:
        outputs = []
        for request in requests:
            ids = torch.tensor([request.input_ids])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.max_output_len,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
            outputs.append(out[0, ids.shape[1] :].tolist())
        return outputs

    meter = LoadMeter()
    rates: dict[str, list[float]] = {"speculation": [], "plain": [], "transformers": []}
    texts: dict[str, list[list[int]]] = {}
    acceptance = 0.0
    for index in range(args.repeat + 1):
        for name in rates:
            began = time.perf_counter()
            if name == "transformers":
                texts[name] = run_transformers()
            else:
                results = [engines[name].generate([request])[0] for request in requests]
                texts[name] = [result.output_ids for result in results]
                if name == "speculation":
                    acceptance = sum_stats(results)["acceptance_length"] or 0.0
            seconds = time.perf_counter() - began
            if index:  # the first round warms up
                rates[name].append(sum(map(len, texts[name])) / seconds)
    medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    steps = time_steps(engines["plain"].decoder, STEP_SIZES, past_len=256, repeat=20 * args.repeat)
    report = {
        **describe_machine(),
        "processors_used_by_others": meter.measure(),
        "dtype": args.dtype,
        "beams": args.beams,
        "length": args.length,
        "prompts": len(requests),
        "tokens_per_second": medians,
        "spread": {n: [round(min(v), 1), round(max(v), 1)] for n, v in rates.items()},
        "speculation_over_plain": round(medians["speculation"] / medians["plain"], 3),
        "plain_over_transformers": round(medians["plain"] / medians["transformers"], 3),
        "acceptance_length": acceptance,
        "prompts_with_equal_text": {
            name: sum(a == b for a, b in zip(texts["speculation"], texts[name], strict=True))
            for name in ("plain", "transformers")
        },
        "verify_step_ms_by_tokens": {n: round(1000 * value, 3) for n, value in steps.items()},
    }
    print(json.dumps(report, indent=2))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
