#!/usr/bin/env python3
"""What plain decoding keeps of its speed alongside a program that keeps one core busy.

    python benchmarks/busy_core.py [--kinds float32 bfloat16 int8 int4] [--flags=-mno-avx512f]
                                   [--context 200] [--rounds 9]

A Llama of random weights in the shapes of a 135M model decodes in this process, with all cores; the
other program runs by turns. With n cores the fair share alongside it is (n - 1/2) / n of the quiet
speed. --flags: of the compiler, such as those that leave instructions out.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specdec.threads import calm_threads, count_usable_cores

calm_threads()

import torch

from benchmarks.verify_cost import make_decoder
from specdec.bench.steps import make_step
from specdec.engine import native
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.files.torch_tensors import TORCH_DTYPES
from specdec.model.config import ModelConfig

MODEL = {
    "architecture": "LlamaForCausalLM", "vocab_size": 49152, "hidden_size": 576,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_size": 64,
    "intermediate_size": 1536, "norm_epsilon": 1e-5,
}  # fmt: skip
GROUP = 64  # inputs that share a scale of int4
SECONDS = 1.0  # of a turn


def load_decoder(kind: str, library: Path, num_positions: int) -> Decoder:
    """A model whose weights are of this kind."""
    dtype = kind if kind in TORCH_DTYPES else "bfloat16"
    model = ModelConfig(**MODEL, dtype=dtype, max_position_embeddings=num_positions)  # type: ignore[arg-type]
    kernels = native.NativeKernels(library, TORCH_DTYPES[dtype])
    return make_decoder(model, kernels, None if kind == dtype else kind, GROUP)[0]


@torch.inference_mode()
def decode(decoder: Decoder, cache: KVCache, context: int) -> float:
    """Tokens per second, each behind a context of the same length."""
    step = make_step(context, 1)
    count, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < SECONDS:
        cache.past_lens[0] = context
        state = decoder.forward(step, cache)
        step.tokens[0, 0] = int(decoder.compute_logits(state).argmax())
        count += 1
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=["float32", "bfloat16", "int8", "int4"])
    parser.add_argument("--flags", nargs="+", default=[])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    cores = count_usable_cores()
    fair = (cores - 0.5) / cores
    native.FLAGS = (*native.FLAGS, *args.flags)
    print(f"{cores} cores, {torch.get_num_threads()} threads; fair share {fair:.3f}")
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with tempfile.TemporaryDirectory() as folder:
            native.compile_kernels(Path(folder))
            for kind in args.kinds:
                decoder = load_decoder(kind, Path(folder) / native.LIBRARY_NAME, args.context + 64)
                cache = decoder.make_cache(1, args.context + 64)
                speeds: dict[signal.Signals, list[float]] = {signal.SIGSTOP: [], signal.SIGCONT: []}
                for _ in range(args.rounds + 1):
                    for told, found in speeds.items():
                        os.kill(neighbour.pid, told)
                        found.append(decode(decoder, cache, args.context))
                # The first round warms up.
                quiet, busy = (statistics.median(found[1:]) for found in speeds.values())
                print(
                    f"{kind:8} quiet {quiet:7.2f} tokens/s, alongside a busy core {busy:7.2f}:"
                    f" {busy / quiet:.2f}, {busy / quiet / fair:.2f} times the fair share",
                    flush=True,
                )
    finally:
        neighbour.kill()
        neighbour.wait()


if __name__ == "__main__":
    main()
