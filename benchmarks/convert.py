#!/usr/bin/env python3
"""Conversion beside a copy of the same bytes: time, memory, and where the limit is.

    python benchmarks/convert.py [--quick] [--repeat 5] [--ten-times] [--output FILE.json]

Makes a random bfloat16 Llama of TinyLlama's shape (1.1B parameters, 2.2 GB; --quick: 40 MB) in a
temporary folder and converts it in processes of their own, start-up included, in turn with `cp` +
fsync of the model. Source in the page cache; everything dirty is written out before each run.
Medians. The other rows tell what bounds the first ones:

hashes:     sha256 of the source and of the output, at once in two threads, and nothing else
unhashed:   the conversion with sha256 replaced by nothing (no option of the command: its manifest
            would vouch for nothing)

--ten-times also converts a model of ten times the size, a file with a hole in place of weights.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specdec.bench.machine import LoadMeter, describe_machine, read_cpu_flags
from specdec.files.casts import cast
from specdec.files.tensor_file import TensorInfo, encode_header, write_tensor_file

Found = dict[str, list[dict[str, float]]]  # runs by case
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHAPE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,
}  # fmt: skip
QUICK_SHAPE = SHAPE | {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
                       "num_attention_heads": 8, "vocab_size": 8000}  # fmt: skip
# The peak is told by the process itself: the one that wait4 tells includes that of its parent.
RUN = """
import atexit, sys
def tell():
    with open("/proc/self/status") as status:
        print(next(line for line in status if line.startswith("VmHWM")), file=sys.stderr)
atexit.register(tell)
from specdec.command.entry import convert
convert()
"""
RUN_UNHASHED = """
import hashlib
class Nothing:
    def __init__(self, *data): pass
    def update(self, data): pass
    def copy(self): return self
    def digest(self): return bytes(32)
    def hexdigest(self): return "0" * 64
hashlib.sha256 = Nothing
"""


def list_tensors(shape: dict[str, int]) -> dict[str, TensorInfo]:
    """The tensors of a Hugging Face Llama."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv_size = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{i}.{name}.weight": sizes
        for i in range(shape["num_hidden_layers"])
        for name, sizes in layer.items()
    }
    shapes |= {
        "model.embed_tokens.weight": (shape["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (shape["vocab_size"], hidden),
    }
    return {name: TensorInfo("bfloat16", sizes) for name, sizes in shapes.items()}


def write_config(folder: Path, **config: Any) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def make_model(folder: Path, shape: dict[str, int], *, is_hollow: bool = False) -> Path:
    """Write a model of random weights, or of a hole where they would be."""
    write_config(
        folder, architectures=["LlamaForCausalLM"], model_type="llama", torch_dtype="bfloat16",
        rms_norm_eps=1e-5, max_position_embeddings=2048, rope_theta=10000.0, hidden_act="silu",
        tie_word_embeddings=False, **shape,
    )  # fmt: skip
    tensors = list_tensors(shape)
    path = folder / "model.safetensors"
    if is_hollow:
        header = encode_header(tensors, {"format": "pt"})
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(info.num_bytes for info in tensors.values()))
        return folder
    generator = np.random.default_rng(0)
    # One block of normal numbers, entered anywhere: a billion of them would take a minute.
    values = generator.standard_normal(1 << 24, dtype=np.float32) * np.float32(0.02)
    block = cast(values, "float32", "bfloat16")

    def produce(name: str) -> Iterator[Any]:
        left = int(np.prod(tensors[name].shape))
        while left:
            start = int(generator.integers(0, block.size))
            part = block[start : start + left]
            left -= part.size
            yield part

    write_tensor_file(path, tensors, produce, {"format": "pt"})
    return folder


def make_drafter(folder: Path, shape: dict[str, int]) -> Path:
    """Write a ReDrafter drafter of random weights for the model."""
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    write_config(
        folder, hidden_size=hidden, exit_dim=2 * hidden, num_draft_layers=2, rnn=True,
        vocab_size=vocab, torch_dtype="bfloat16",
    )  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        f"lm_head.{i}.linear.{kind}": (2 * hidden,) * (2 if kind == "weight" else 1)
        for i in range(2)
        for kind in ("weight", "bias")
    }
    shapes |= {
        "lm_head.2.weight": (vocab, 2 * hidden), "rnn_u.weight": (hidden, hidden),
        "rnn_u.bias": (hidden,), "rnn_w.weight": (hidden, hidden),
    }  # fmt: skip
    tensors = {name: TensorInfo("bfloat16", sizes) for name, sizes in shapes.items()}
    write_tensor_file(
        folder / "model.safetensors", tensors,
        lambda name: np.full(tensors[name].shape, 0x3C00, np.uint16), {"format": "pt"},
    )  # fmt: skip
    return folder


def convert(*args: object, before: str = "") -> tuple[float, float]:
    """Run specdec-convert as a process; return its seconds and its peak memory in MB."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", before + RUN, *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stderr)
    peak = re.search(r"VmHWM:\s+(\d+) kB", done.stderr)
    return seconds, int(peak[1]) * 1024 / 1e6 if peak else float("nan")


def copy(source: Path, target: Path) -> tuple[float, float]:
    """Run cp, then wait until the bytes are on the disk."""
    began = time.perf_counter()
    subprocess.run(["cp", source, target], check=True)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - began, 0.0


def hash_both(*paths: Path) -> tuple[float, float]:
    """Hash files at once, one thread each."""

    def work(path: Path) -> None:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(1 << 19)
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])

    began = time.perf_counter()
    threads = [threading.Thread(target=work, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began, 0.0


def settle(*outputs: Path) -> None:
    """Remove what a run has written, and let nothing of it be on its way to the disk."""
    for path in outputs:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
    os.sync()


def measure(folder: Path, shape: dict[str, int], repeat: int) -> Found:
    """Run every case in turn, `repeat` times over."""
    model = make_model(folder / "model", shape)
    drafter = make_drafter(folder / "drafter", shape)
    weights, copied = model / "model.safetensors", folder / "copied"
    out, base = folder / "out", folder / "base"
    common = ("--model-dir", model, "--output-dir", out)
    convert("--model-dir", model, "--output-dir", base)
    cases: dict[str, Callable[[], tuple[float, float]]] = {
        "cp + fsync": lambda: copy(weights, copied),
        "hashes": lambda: hash_both(weights, base / "rank0.safetensors"),
        "tp 1": lambda: convert(*common),
        "tp 1, unhashed": lambda: convert(*common, before=RUN_UNHASHED),
        "tp 2": lambda: convert(*common, "--tp-size", 2),
        "tp 1, bf16 -> fp16": lambda: convert(*common, "--dtype", "float16"),
        "tp 1, bf16 -> fp16, unhashed": lambda: convert(
            *common, "--dtype", "float16", before=RUN_UNHASHED
        ),
        "drafter added": lambda: convert(
            "--base-model-checkpoint-dir", base, "--drafter-model-dir", drafter,
            "--output-dir", out,
        ),
    }  # fmt: skip
    found: Found = {name: [] for name in cases}
    for _ in range(repeat):
        for name, run in cases.items():
            settle(copied, out)
            found[name].append(measure_run(run))
    settle(copied, out)
    return found


def measure_run(run: Callable[[], tuple[float, float]]) -> dict[str, float]:
    """Run a case; return its seconds, those of processors, and its peak memory."""
    before = os.times()
    seconds, peak_mb = run()
    processors = sum(os.times()[:4]) - sum(before[:4])
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(processors, 2),
        "peak_mb": round(peak_mb, 1),
    }


def measure_ten_times(folder: Path, shape: dict[str, int]) -> Found:
    """Convert a model of ten times as many layers, at tp 1 and 2, once each."""
    large = make_model(
        folder / "large", shape | {"num_hidden_layers": 10 * shape["num_hidden_layers"]},
        is_hollow=True,
    )  # fmt: skip
    found: Found = {}
    for tp_size in (1, 2):
        words = ("--model-dir", large, "--output-dir", folder / "out", "--tp-size", tp_size)
        found[f"ten times, tp {tp_size}"] = [measure_run(functools.partial(convert, *words))]
        settle(folder / "out")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a model of 40 MB")
    parser.add_argument("--ten-times", action="store_true")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to work; the system's for such files")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    shape = QUICK_SHAPE if args.quick else SHAPE
    meter = LoadMeter()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        found = measure(Path(name), shape, args.repeat)
        if args.ten_times:
            found |= measure_ten_times(Path(name), shape)
    others = meter.measure()
    num_bytes = sum(info.num_bytes for info in list_tensors(shape).values())
    copy_seconds = statistics.median(run["seconds"] for run in found["cp + fsync"])
    rows = {}
    for case, runs in found.items():
        seconds = statistics.median(run["seconds"] for run in runs)
        rows[case] = {
            "seconds": seconds,
            "times_cp": round(seconds / copy_seconds, 2),
            "cpu_seconds": statistics.median(run["cpu_seconds"] for run in runs),
            "peak_mb": max(run["peak_mb"] for run in runs),
            "runs": runs,
        }
    print(f"{num_bytes / 1e9:.3f} GB, {args.repeat} repeats")
    print(f"{'':<32}{'seconds':>9}{'x cp':>8}{'CPU s':>9}{'peak MB':>10}")
    for case, row in rows.items():
        print(
            f"{case:<32}{row['seconds']:>9.2f}{row['times_cp']:>8.2f}{row['cpu_seconds']:>9.2f}"
            f"{row['peak_mb']:>10.0f}"
        )
    report = {
        **describe_machine(),
        "sha_instructions": bool(read_cpu_flags() & {"sha_ni", "sha2"}),
        "numpy": np.__version__,
        "processors_used_by_others": others,
        "model_bytes": num_bytes,
        "repeat": args.repeat,
        "cases": rows,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
