#!/usr/bin/env python3
"""What int8 and int4 weights cost in accuracy: loss, distance, choices, acceptance; pycode models.

    python benchmarks/int8.py [--heldout heldout.jsonl] [--windows 60] [--output FILE]

Held-out text is read in windows, each token predicted from those before it in its window. Distance
is KL(P || Q) in nats, where P is the unquantized engine's distribution in the same type, or in
float32, and Q the engine's. Without --heldout the corpus is collected anew by
examples/pycode/corpus.py, whose files depend on the version of Python. The variants are what was
tried besides: rounded otherwise, or the head too. Times are not measured: verify_cost.py does that.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specdec.bench.machine import describe_machine
from specdec.bench.repetition import is_looping
from specdec.decode.drafters.draft_target import attach_draft
from specdec.decode.engine import TorchEngine
from specdec.decode.requests import Request, Result, sum_stats
from specdec.engine import int8
from specdec.engine.decoder import Decoder
from specdec.engine.layout import (
    list_integers,
    name_int8_scales,
    read_engine_config,
)
from specdec.engine.loading import load_weights
from specdec.engine.step import Step
from specdec.processes import call_stage

ROOT = Path(__file__).resolve().parent.parent
PYCODE = ROOT / "examples" / "pycode"
DTYPES = ("float32", "bfloat16")
# Endings of engines' names, and how they are built; the pycode target's sizes are multiples of 64.
KINDS = {
    "": (), "-int8": ("--quantization", "int8"),
    "-int4": ("--quantization", "int4", "--group-size", 64),
    "-int4-32": ("--quantization", "int4", "--group-size", 32),
}  # fmt: skip
DRAFT_KINDS = ("", "-int8")  # the draft model's 144 columns make no groups: it stays as it is
WINDOW = 512
MAX_OUTPUT_LEN, DRAFT_LEN = 64, 4
DRAFTERS = {
    "redrafter": (
        "--drafter-model-dir", PYCODE / "redrafter", "--redrafter-num-beams", 1,
        "--redrafter-draft-len-per-beam", 3,
    ),
    "medusa": ("--medusa-model-dir", PYCODE / "medusa"),
    "eagle": ("--eagle-model-dir", PYCODE / "eagle"),
}  # fmt: skip
CPU = torch.device("cpu")


def call(stage: str, *arguments: object) -> None:
    call_stage(stage, [str(argument) for argument in arguments])


def make_engines(folder: Path, dtype: str) -> None:
    """Every method's engine of the pycode target, named METHOD-DTYPE, and the same quantized."""
    for method, flags in DRAFTERS.items():
        make_pair(folder, f"{method}-{dtype}", PYCODE / "target", dtype, flags, ())
    external = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 4)
    make_pair(folder, f"draft_target-{dtype}", PYCODE / "target", dtype, (), external)
    make_pair(folder, f"draft-{dtype}", PYCODE / "draft", dtype, (), (), DRAFT_KINDS)


def make_pair(
    folder: Path,
    name: str,
    model: Path,
    dtype: str,
    convert: Sequence[object],
    build: Sequence[object],
    kinds: Iterable[str] = KINDS,
) -> None:
    checkpoint = folder / f"{name}-checkpoint"
    call("convert", "--model-dir", model, "--output-dir", checkpoint, "--dtype", dtype, *convert)
    for ending in kinds:
        call(
            "build", "--checkpoint-dir", checkpoint, "--output-dir", folder / f"{name}{ending}",
            "--backend", "torch", *build, *KINDS[ending],
        )  # fmt: skip


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


def choose_by_row(weight: Tensor) -> Tensor:
    """What the build does: the largest magnitude becomes 127."""
    return int8.make_scales(int8.find_largest(weight), "weight")


def choose_least_squares(weight: Tensor) -> Tensor:
    """The scale with the least squared error of each row, of 21 up to the build's own."""
    whole = choose_by_row(weight)
    best, least = whole, torch.full_like(whole, torch.inf)
    for part in np.linspace(1, 0.6, 21):
        scales = whole * float(part)
        rounded = int8.round_weight(weight, scales).float() * scales[:, None]
        error = (rounded - weight.float()).square().sum(1)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best


def choose_by_matrix(weight: Tensor) -> Tensor:
    """One scale for all rows."""
    return choose_by_row(weight).amax().expand(len(weight)).contiguous()


def make_variant(
    folder: Path, choose: Callable[[Tensor], Tensor], *, has_head: bool, has_layers: bool
) -> Decoder:
    """The unquantized engine with weights that are rounded here, without kernels."""
    config = read_engine_config(folder)
    model = config.checkpoint.model
    weights = load_weights(folder, config, CPU, drafts=False)
    names = list_integers(model) if has_layers else []
    for name in [*names, "lm_head.weight"] if has_head else names:
        scales = choose(weights[name])
        weights[name_int8_scales(name)] = scales
        weights[name] = int8.round_weight(weights[name], scales)
    return Decoder(model, weights, num_positions=WINDOW, device=CPU)


def load_engine(folder: Path, method: str, ending: str) -> TorchEngine:
    engine = TorchEngine(folder / f"{method}-{ending}", device="cpu")
    if method == "draft_target":
        dtype = ending.split("-")[0]
        own = ending if ending.removeprefix(dtype) in DRAFT_KINDS else dtype
        draft = TorchEngine(folder / f"draft-{own}", device="cpu")
        attach_draft(engine, draft, draft_len=DRAFT_LEN, use_logits=False)
    return engine


def measure_acceptance(folder: Path, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Tokens a verify step by method, and how many texts are those of the unquantized engine."""

    def average(results: Sequence[Result]) -> float:
        return round(sum_stats(results)["acceptance_length"] or 0.0, 4)

    rows = []
    for method in (*DRAFTERS, "draft_target"):
        for dtype in DTYPES:
            texts: dict[str, list[list[int]]] = {}
            for ending in (f"{dtype}{kind}" for kind in KINDS):
                results = load_engine(folder, method, ending).generate(requests)
                texts[ending] = [result.output_ids for result in results]
                plain = TorchEngine(folder / f"{method}-{ending}", device="cpu", speculate=False)
                own = [result.output_ids for result in plain.generate(requests)]
                varied = [r for r in results if not is_looping(r.output_ids)]
                rows.append(
                    {
                        "method": method,
                        "engine": ending,
                        "acceptance_length": average(results),
                        "without_loops": average(varied) if varied else None,
                        "equal_to_plain": sum(
                            a == b for a, b in zip(own, texts[ending], strict=True)
                        ),
                        "equal_to_unquantized": sum(
                            a == b for a, b in zip(texts[dtype], texts[ending], strict=True)
                        ),
                        "prompts": len(results),
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heldout", type=Path, help="heldout.jsonl of examples/pycode/corpus.py")
    parser.add_argument("--windows", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    from specdec.pretrained import load_tokenizer

    tokenizer = load_tokenizer(PYCODE / "target")
    lines = (PYCODE / "prompts.jsonl").read_text().splitlines()[: args.prompts]
    requests = [
        Request(
            index=index,
            input_ids=tokenizer(json.loads(line)["prompt"])["input_ids"],
            max_output_len=MAX_OUTPUT_LEN,
            end_ids=frozenset([tokenizer.eos_token_id]),
        )
        for index, line in enumerate(lines)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.heldout is None:
            script = str(PYCODE / "corpus.py")
            collect = [sys.executable, script, "--output-dir", str(folder / "corpus")]
            subprocess.run(collect, check=True, stdout=subprocess.DEVNULL)
        heldout = args.heldout or folder / "corpus" / "heldout.jsonl"
        windows = read_windows(heldout, tokenizer, args.windows)
        for dtype in DTYPES:
            make_engines(folder, dtype)
        endings = [f"{dtype}{kind}" for dtype in DTYPES for kind in KINDS]
        decoders = {
            ending: TorchEngine(folder / f"draft_target-{ending}", device="cpu").decoder
            for ending in endings
        }
        references = {ending: ending.partition("-")[0] for ending in endings}
        base = folder / "draft_target-float32"
        for variant, choose, has_layers, has_head in (
            ("layers and head", choose_by_row, True, True),
            ("head alone", choose_by_row, False, True),
            ("least squares", choose_least_squares, True, False),
            ("one scale a matrix", choose_by_matrix, True, False),
        ):
            variant = f"float32, variant: {variant}"
            decoders[variant] = make_variant(
                base, choose, has_layers=has_layers, has_head=has_head
            )  # fmt: skip
            references[variant] = "float32"
        rows = compare_decoders(decoders, references, windows)
        acceptance = measure_acceptance(folder, requests)
        sizes = {
            e: (folder / f"draft_target-{e}/weights.safetensors").stat().st_size for e in endings
        }
    report = {
        **describe_machine(),
        "windows": len(windows),
        "tokens": len(windows) * WINDOW,
        "weights_bytes": sizes,
        "accuracy": rows,
        "max_output_len": MAX_OUTPUT_LEN,
        "acceptance": acceptance,
    }
    print(json.dumps(report, indent=2))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
