#!/usr/bin/env python3
"""What each quantization costs in quality: perplexity and KL on held-out text, on the pycode model.

    python benchmarks/quality.py [--corpus DIR] [--windows 32] [--calibration 128]
                                 [--engines-only] [--output FILE]

One evaluator for all: our engine in float32, on windows of 512 tokens, against the same engine with
the model's own bfloat16 weights; KL(P || Q) in nats a token, P that one's distribution. llama.cpp's
types are rounded by its package gguf and put back into the model's folder as float32. What our
engine does not execute is measured by specdec-convert on the same windows, in transformers, inputs
rounded too. Embedding and head stay as they are everywhere. Calibration: texts of the training
half. DIR has what examples/pycode/corpus.py writes; without it the corpus is collected anew.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.bench.machine import describe_machine
from specdec.decode.engine import TorchEngine
from specdec.engine.decoder import Decoder
from specdec.engine.step import Step
from specdec.pretrained import load_tokenizer
from specdec.processes import call_stage

PYCODE = Path(__file__).resolve().parent.parent / "examples" / "pycode"
WINDOW = 512
# Name, flags of convert, flags of build, whether it needs the calibration's data.
ENGINES: tuple[tuple[str, tuple[object, ...], tuple[object, ...], bool], ...] = (
    ("bfloat16 computing", ("--dtype", "bfloat16"), (), False),
    ("int8", (), ("--quantization", "int8"), False),
    ("fp8", ("--quantization", "fp8"), (), True),
    ("int4, groups of 64", (), ("--quantization", "int4", "--group-size", 64), False),
    ("int4, groups of 32", (), ("--quantization", "int4", "--group-size", 32), False),
    ("int4_awq, groups of 64", ("--quantization", "int4_awq", "--group-size", 64), (), True),
    ("int4_awq, groups of 32", ("--quantization", "int4_awq", "--group-size", 32), (), True),
)
REPORTED: dict[str, tuple[object, ...]] = {
    "int8_sq": (), "w4a8_awq": ("--group-size", 64), "nvfp4": (),
}  # fmt: skip
GGUF_TYPES = ("Q8_0", "Q4_0")


def call(stage: str, *arguments: object) -> None:
    call_stage(stage, [str(argument) for argument in arguments])


def read_windows(path: Path, tokenizer: Any, count: int) -> list[list[int]]:
    """The first WINDOW tokens of the first files that have so many."""
    windows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        tokens = tokenizer(json.loads(line)["text"])["input_ids"]
        if len(tokens) >= WINDOW:
            windows.append(tokens[:WINDOW])
        if len(windows) == count:
            break
    return windows


def compute_logits(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits [T, V], float32, after each token of a text that is read at once."""
    size = len(tokens)
    step = Step(
        rows=np.zeros(1, np.int64),
        tokens=np.array([tokens]),
        positions=np.arange(size)[None],
        tree_mask=np.tril(np.ones((1, size, size), np.bool_)),
    )
    hidden = decoder.forward(step, decoder.make_cache(1, size))
    return decoder.compute_logits(hidden)[0].float()


class Distance:
    """Sums over tokens of a pair of engines."""

    def __init__(self) -> None:
        self.divergences: list[Tensor] = []
        self.agreements: list[Tensor] = []

    def add(self, wanted: Tensor, found: Tensor) -> None:
        """Log-probabilities [T, V] of the reference and of what is compared with it."""
        self.divergences.append((wanted.exp() * (wanted - found)).sum(-1))
        self.agreements.append(wanted.argmax(-1) == found.argmax(-1))

    def describe(self) -> dict[str, float]:
        divergence, agreement = torch.cat(self.divergences), torch.cat(self.agreements)
        return {
            "mean_divergence": float(f"{divergence.mean():.4g}"),
            "largest_divergence": float(f"{divergence.max():.4g}"),
            "same_choice": round(float(agreement.float().mean()), 5),
        }


@torch.inference_mode()
def compare_decoders(
    decoders: dict[str, Decoder], references: dict[str, str], windows: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Loss of every decoder; its distance to its reference and to the first one."""
    losses: dict[str, list[Tensor]] = {name: [] for name in decoders}
    pairs = {(name, base) for name in decoders for base in (references[name], next(iter(decoders)))}
    distances = {pair: Distance() for pair in pairs if pair[0] != pair[1]}
    for tokens in windows:
        found = {n: compute_logits(d, tokens).log_softmax(-1) for n, d in decoders.items()}
        following = torch.tensor(tokens[1:])[:, None]
        for name, logs in found.items():
            losses[name].append(-logs[:-1].gather(-1, following)[:, 0])
        for (name, base), distance in distances.items():
            distance.add(found[base], found[name])
    rows = []
    for name in decoders:
        loss = float(torch.cat(losses[name]).double().mean())
        rows.append(
            {
                "engine": name,
                "loss": round(loss, 5),
                "perplexity": round(math.exp(loss), 4),
                "distance": {
                    base: distances[name, base].describe()
                    for base in decoders
                    if (name, base) in distances
                },
            }
        )
    return rows


def write_rows(path: Path, rows: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def make_engine(folder: Path, model: Path, convert: tuple[object, ...], build: Any) -> TorchEngine:
    if "--dtype" not in convert:
        convert = ("--dtype", "float32", *convert)
    call("convert", "--model-dir", model, "--output-dir", folder / "checkpoint", *convert)
    call(
        "build", "--checkpoint-dir", folder / "checkpoint", "--output-dir", folder / "engine",
        "--backend", "torch", *build,
    )  # fmt: skip
    return TorchEngine(folder / "engine", device="cpu")


def round_by_gguf(folder: Path, kind: str) -> Path:
    """The model with its layers' matrices as llama.cpp's type has them, in float32."""
    import gguf
    from safetensors.torch import load_file, save_file

    target = Path(shutil.copytree(PYCODE / "target", folder))
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if ".layers." in name and values.ndim == 2:
            number = gguf.GGMLQuantizationType[kind]
            values = gguf.quants.dequantize(gguf.quants.quantize(values, number), number)
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def report_conversion(
    folder: Path, data: Path, size: int, name: str, flags: tuple[object, ...]
) -> Any:
    """What specdec-convert measured on the rows behind the calibration's."""
    result = subprocess.run(
        [sys.executable, "-m", "specdec", "convert", "--model-dir", str(PYCODE / "target"),
         "--output-dir", str(folder), "--dtype", "float32", "--quantization", name,
         "--calibration-data", str(data), "--calib-size", str(size), "--json",
         *map(str, flags)],
        check=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    quality = json.loads(result.stdout)["quality"]
    return {
        "engine": name,
        "perplexity": round(quality["perplexity"], 4),
        "mean_divergence": float(f"{quality['kl']:.4g}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, help="output of examples/pycode/corpus.py")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--calibration", type=int, default=128, help="windows that calibrate")
    parser.add_argument("--engines-only", action="store_true", help="leave out convert's reports")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    tokenizer = load_tokenizer(PYCODE / "target")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus: Path = args.corpus or folder / "corpus"
        if args.corpus is None:
            script = str(PYCODE / "corpus.py")
            subprocess.run([sys.executable, script, "--output-dir", str(corpus)], check=True)
        windows = read_windows(corpus / "heldout.jsonl", tokenizer, args.windows)
        rows = read_windows(corpus / "train.jsonl", tokenizer, args.calibration)
        data = write_rows(folder / "rows.jsonl", [*rows, *windows])
        own = write_rows(folder / "calibration.jsonl", rows)
        calibration = ("--calibration-data", own, "--calib-size", args.calibration)
        decoders = {"float32": make_engine(folder / "float32", PYCODE / "target", (), ()).decoder}
        for engine, convert, build, needs_data in ENGINES:
            flags = (*convert, *calibration) if needs_data else convert
            made = make_engine(folder / engine, PYCODE / "target", flags, build)
            decoders[engine] = made.decoder
        for kind in GGUF_TYPES:
            model = round_by_gguf(folder / f"{kind}-model", kind)
            decoders[f"llama.cpp {kind}"] = make_engine(folder / kind, model, (), ()).decoder
        found = compare_decoders(decoders, dict.fromkeys(decoders, "float32"), windows)
        table = [
            {
                "engine": row["engine"],
                "perplexity": row["perplexity"],
                **row["distance"].get("float32", {}),
            }
            for row in found
        ]
        table += [
            report_conversion(folder / f"{kind}-reported", data, args.calibration, kind, flags)
            for kind, flags in ({} if args.engines_only else REPORTED).items()
        ]
    report = {
        **describe_machine(),
        "windows": len(windows),
        "tokens": len(windows) * WINDOW,
        "calibration_windows": args.calibration,
    }
    text = json.dumps({**report, "table": table}, indent=2)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
