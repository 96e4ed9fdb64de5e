#!/usr/bin/env python3
"""Cost of a verify step by its number of tokens, at the size of a real model.

    python benchmarks/verify_cost.py [--layers 22] [--hidden 2048]
                                     [--dtype bfloat16|float16|float32] [--quantization int8|int4]
                                     [--contexts 256,8192,32768] [--prompt 8192] [--chart FILE.png]
    python benchmarks/verify_cost.py --experts 32 --top-k 4 --intermediate 768 [--shared 0] ...

Random weights of a Llama shape (the default has 986M parameters and needs 2 GB), batch 1, 256
positions in the cache. Times one target forward with logits; sizes alternate, medians. A step has
two limits, both measured in the same run: reading as many bytes, and as many products with a matrix
by many tokens at a time. The report has the time over the larger one, and --chart draws the three.

--contexts: positions in the cache, each its own table; the limits are of the first. --prompt: the
time to read so many tokens. --busy-core: what a step of one token keeps of its speed alongside a
program that keeps one core busy, by turns.

With --experts it is a mixture, whose experts have the size --intermediate: with each step's time
stand the experts a layer that its tokens read, and the bytes of all that is read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specdec.system.threads import calm_threads, count_usable_cores

calm_threads()

import torch

from benchmarks.side_by_side import models
from specdec.engine import int8
from specdec.engine.compiler import find_compiler
from specdec.engine.decoder import Decoder
from specdec.engine.layout import list_engine_tensors, list_integers, name_int8_scales
from specdec.engine.native import NativeKernels
from specdec.engine.native_library import LIBRARY_NAME, compile_kernels
from specdec.files.reading import write_json
from specdec.files.torch_tensors import TORCH_DTYPES
from specdec.measure.machine import LoadMeter, describe_machine
from specdec.measure.steps import draw_steps, make_step, time_steps
from specdec.model.config import ModelConfig
from specdec.model.experts import Experts
from specdec.model.quantization import INT4, INT8, WEIGHT_SCALE
from specdec.model.tensors import get_stored_dtype

SIZES = (1, 2, 4, 8, 16, 32, 64)
PAST_LEN = 256
COUNTED = 10  # steps that experts are counted in
TURN = 20  # steps of a turn with or without a busy neighbour


@torch.inference_mode()
def count_experts(decoder: Decoder, sizes: Sequence[int], *, past_len: int) -> dict[int, float]:
    """Experts a layer that a step of so many random tokens reads; nothing without any."""
    cache = decoder.make_cache(1, past_len + max(sizes))
    cache.fill(past_len)
    counts = {}
    for size in sizes if decoder.count_experts() else ():
        before = decoder.count_experts()[2]
        for step in itertools.islice(draw_steps(decoder, past_len, size, 1), COUNTED):
            decoder.forward(step, cache)
        counts[size] = (decoder.count_experts()[2] - before) / COUNTED
    return counts


def make_decoder(
    model: ModelConfig, kernels: NativeKernels | None, quantization: str | None, group_size: int
) -> tuple[Decoder, int, int]:
    """A decoder with random weights, the bytes that one step reads, and the numbers in them."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    shapes = list_engine_tensors(model, None)
    for name, shape in shapes.items():
        # A block repeated: making a billion normal numbers would take a minute.
        count = math.prod(shape)
        block = torch.randn(min(1 << 20, count), generator=generator) * 0.02
        stored = TORCH_DTYPES[get_stored_dtype(name, model.dtype)]
        filled = block.repeat(-(-count // len(block)))[:count]
        weights[name] = filled.view(shape).to(stored)
    for name in list_integers(model) if quantization == INT8 else []:
        weights[name], weights[name_int8_scales(name)] = int8.quantize(weights[name], name)
    for name in list_integers(model) if quantization == INT4 else []:
        # Their time does not depend on what the codes are.
        num_rows, depth = weights[name].shape
        weights[name] = torch.randint(
            -128, 128, (num_rows // 2, depth), generator=generator, dtype=torch.int8
        )
        scales = torch.full((num_rows, depth // group_size), 0.004)
        weights[f"{name.removesuffix('.weight')}.{WEIGHT_SCALE}"] = scales
    embedding = weights["transformer.vocab_embedding.weight"]
    num_weights = sum(map(math.prod, shapes.values())) - embedding.numel()
    num_bytes = sum(w.nbytes for w in weights.values()) - embedding.nbytes
    decoder = Decoder(
        model, weights, num_positions=model.max_position_embeddings, device=torch.device("cpu"),
        kernels=kernels,
    )  # fmt: skip
    return decoder, num_bytes, num_weights


def count_bytes(
    model: ModelConfig, quantization: str | None, num_bytes: int, counts: dict[int, float]
) -> dict[int, int]:
    """Bytes of weights that a step of a mixture reads, by its tokens; counts: of experts."""
    assert model.experts is not None
    width = 1 if quantization == INT8 else TORCH_DTYPES[model.dtype].itemsize
    one = 3 * model.hidden_size * model.experts.inner * width * model.num_hidden_layers
    return {
        size: round(num_bytes - (model.experts.num - count) * one) for size, count in counts.items()
    }


def measure_bandwidth() -> float:
    """GB/s of reading 1 GB, the best of several: a plain sum, and a product with one vector."""
    data = torch.ones(1 << 16, 1 << 12)
    vector = torch.ones(data.shape[1])
    best = 0.0
    for turn in range(10):
        began = time.perf_counter()
        data.mv(vector) if turn % 2 else data.sum()
        best = max(best, data.numel() * 4 / (time.perf_counter() - began) / 1e9)
    return best


def measure_arithmetic(decoder: Decoder) -> float:
    """GFLOP/s of 256 tokens' products with one matrix over and over: few reads for many products.

    On a shared host it changes with what others compute, while the bandwidth stays: then only the
    larger steps become dearer.
    """
    dense = decoder.stack.layers[0].dense
    x = torch.ones(256, decoder.model.hidden_size, dtype=decoder.dtype)
    num_products = x.numel() * dense.num_outputs
    best = 0.0
    for _ in range(50):
        began = time.perf_counter()
        dense(x)
        best = max(best, 2 * num_products / (time.perf_counter() - began) / 1e9)
    return best


@torch.inference_mode()
def time_prompt(decoder: Decoder, length: int) -> float:
    """Seconds to read a prompt, up to its last token's logits."""
    cache = decoder.make_cache(1, length)
    began = time.perf_counter()
    for start in range(0, length, decoder.max_chunk_tokens):
        size = min(decoder.max_chunk_tokens, length - start)
        hidden = decoder.forward(make_step(start, size), cache)
        cache.past_lens[:] += size
    decoder.compute_logits(hidden[:, -1:])
    return time.perf_counter() - began


def measure_alongside(decoder: Decoder, context: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step of one token, and with another program that keeps a core busy.

    It runs by turns. With n cores the fair share next to it is (n - 1/2) / n of the quiet speed.
    """
    times: dict[signal.Signals, list[float]] = {signal.SIGSTOP: [], signal.SIGCONT: []}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            for _ in range(rounds):
                for told, found in times.items():
                    os.kill(neighbour.pid, told)
                    steps = time_steps(decoder, [1], past_len=context, repeat=TURN)
                    found.append(1000 * steps[1])
        finally:
            neighbour.kill()
    quiet, busy = map(statistics.median, times.values())
    cores = count_usable_cores()
    return {
        "quiet_ms": round(quiet, 2), "alongside_ms": round(busy, 2),
        "kept": round(quiet / busy, 3), "fair_share": round((cores - 0.5) / cores, 3),
    }  # fmt: skip


def draw_chart(path: Path, measured: dict[int, float], limits: dict[int, dict[str, float]]) -> None:
    """Step time by tokens, and both limits."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.plot(list(measured), list(measured.values()), "o-", label="verify step")
    for kind in ("reading", "multiplying"):
        alone = [limits[size][kind] for size in limits]
        axes.plot(list(limits), alone, "--", label=f"{kind} alone")
    axes.set(xscale="log", yscale="log", xlabel="tokens in a step", ylabel="ms")
    axes.set_xticks(list(measured), [str(size) for size in measured])
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def make_parser() -> argparse.ArgumentParser:
    parser = models.make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quantization", choices=(INT8, INT4))
    parser.add_argument("--group-size", type=int, default=128, help="of int4")
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--shared", type=int, default=0, help="size of an expert for all tokens")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--contexts", default=str(PAST_LEN), help="numbers with commas")
    parser.add_argument("--prompt", type=int, default=0, help="tokens")
    parser.add_argument("--busy-core", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--chart", type=Path)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.experts and args.quantization == INT4:
        raise SystemExit("error: experts have no four-bit form")
    contexts = [int(number) for number in args.contexts.split(",")]
    experts = None
    if args.experts:
        experts = Experts(
            num=args.experts, top_k=args.top_k, inner=args.intermediate, shared_inner=args.shared
        )
    model = ModelConfig(
        architecture="LlamaForCausalLM" if experts is None else "Qwen2MoeForCausalLM",
        hidden_act="silu" if experts is None else "swiglu", experts=experts,
        dtype=args.dtype, vocab_size=args.vocab,
        hidden_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads, head_size=args.hidden // args.heads,
        intermediate_size=args.intermediate, norm_epsilon=1e-5,
        max_position_embeddings=max(1024, args.prompt, max(contexts) + SIZES[-1]),
    )  # fmt: skip
    kernels = None
    if find_compiler() is not None:
        with tempfile.TemporaryDirectory() as folder:
            compile_kernels(Path(folder))
            kernels = NativeKernels(Path(folder) / LIBRARY_NAME, TORCH_DTYPES[args.dtype])
    decoder, num_bytes, num_weights = make_decoder(
        model, kernels, args.quantization, args.group_size
    )
    meter = LoadMeter()
    bandwidth, arithmetic = measure_bandwidth(), measure_arithmetic(decoder)
    by_context = {}
    for context in contexts:
        costs = time_steps(decoder, SIZES, past_len=context, repeat=args.repeat)
        by_context[context] = {size: 1000 * seconds for size, seconds in costs.items()}
    medians = by_context[contexts[0]]
    counts = count_experts(decoder, SIZES, past_len=contexts[0])
    read = dict.fromkeys(SIZES, num_bytes)
    if counts:
        read = count_bytes(model, args.quantization, num_bytes, counts)
    prompt_seconds = time_prompt(decoder, args.prompt) if args.prompt else None
    after = measure_arithmetic(decoder)
    alongside = None
    if args.busy_core:
        alongside = measure_alongside(decoder, contexts[0], args.busy_core)
    limits = {
        size: {
            "reading": read[size] / bandwidth / 1e6,
            "multiplying": 2 * num_weights * size / max(arithmetic, after) / 1e6,
        }
        for size in SIZES
    }
    report = {
        **describe_machine(),
        "processors_used_by_others": meter.measure(),
        "dtype": args.dtype,
        "quantization": args.quantization,
        "layers": args.layers,
        "hidden": args.hidden,
        "native_kernels": kernels is not None,
        "weight_gb": round(num_bytes / 1e9, 3),
        "experts_by_tokens": {size: round(count, 1) for size, count in counts.items()},
        "weight_gb_by_tokens": {size: round(count / 1e9, 3) for size, count in read.items()},
        "step_ms_by_tokens": {size: round(value, 2) for size, value in medians.items()},
        "step_ms_by_context": {
            context: {size: round(value, 2) for size, value in steps.items()}
            for context, steps in by_context.items()
        },
        "prompt_tokens": args.prompt,
        "prompt_seconds": prompt_seconds,
        "relative_to_one_token": {s: round(v / medians[1], 2) for s, v in medians.items()},
        "relative_bytes": {s: round(v / read[1], 2) for s, v in read.items()},
        "one_token_gb_per_second": round(read[1] / medians[1] / 1e6, 1),
        "machine_gb_per_second": round(bandwidth, 1),
        "products_gflops_before_and_after": [round(arithmetic), round(after)],
        "busy_core": alongside,
    }
    if not args.experts:  # of which a token multiplies with some
        report["limits_ms_by_tokens"] = {
            size: {kind: round(value, 2) for kind, value in kinds.items()}
            for size, kinds in limits.items()
        }
        report["over_larger_limit"] = {
            size: round(medians[size] / max(limits[size].values()), 2) for size in SIZES
        }
    print(json.dumps(report, indent=2))
    if args.output is not None:
        write_json(args.output, report)
    if args.chart is not None:
        draw_chart(args.chart, medians, limits)


if __name__ == "__main__":
    main()
