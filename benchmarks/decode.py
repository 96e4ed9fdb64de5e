#!/usr/bin/env python3
"""Decoding speed in one run: speculation, plain decoding on the same engine, and transformers.

    python benchmarks/decode.py [--dtype bfloat16] [--prompts 8] [--repeat 5] [--output FILE]

Uses the pycode models. The three are alternated, medians are taken; every repeat decodes the same
prompts, one request at a time, and texts are compared before a speed is reported. Also reports how
the time of a verify step grows with its tokens, which bounds what speculation can win.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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


def measure_median(run: Callable[[], object], repeat: int) -> float:
    """Median milliseconds of a call, two unmeasured calls before."""
    times = []
    for index in range(repeat + 2):
        began = time.perf_counter()
        run()
        if index >= 2:
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def time_verify_steps(engine: Any, past_len: int, repeat: int) -> dict[int, float]:
    """Milliseconds of one target forward with logits, by tokens in the step, batch 1."""
    from specdec.engine.decoder import Step

    decoder = engine.decoder
    cache = decoder.make_cache(1, past_len + max(STEP_SIZES))
    cache.past_lens[0] = past_len
    times = {}
    for size in STEP_SIZES:
        step = Step(
            rows=np.zeros(1, np.int64),
            tokens=np.full((1, size), 5, np.int64),
            positions=past_len + np.arange(size)[None],
            tree_mask=np.tril(np.ones((1, size, size), np.bool_)),
        )

        def verify(step: Step = step) -> None:
            decoder.compute_logits(decoder.forward(step, cache)).argmax(-1)

        with torch.inference_mode():
            times[size] = measure_median(verify, repeat)
    return {size: round(value, 3) for size, value in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-output-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from specdec.run.backends.torch_engine import TorchEngine
    from specdec.run.requests import Request, sum_stats

    with tempfile.TemporaryDirectory() as folder:
        path = make_engine(Path(folder), args.dtype, args.beams, args.length)
        engines = {
            "speculation": TorchEngine(path, device="cpu"),
            "plain": TorchEngine(path, device="cpu", speculate=False),
        }
    tokenizer = AutoTokenizer.from_pretrained(PYCODE / "target")
    model = AutoModelForCausalLM.from_pretrained(PYCODE / "target")
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
                    acceptance = sum_stats(results)["acceptance_length"]
            seconds = time.perf_counter() - began
            if index:  # the first round warms up
                rates[name].append(sum(map(len, texts[name])) / seconds)
    medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    steps = time_verify_steps(engines["plain"], 256, 20 * args.repeat)
    report = {
        "date": datetime.date.today().isoformat(),
        "cpu": next(
            (
                line.split(":", 1)[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")
            ),
            platform.processor(),
        ),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
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
        "verify_step_ms_by_tokens": steps,
        "load_average": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(report, indent=2))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
