#!/usr/bin/env python3
"""What memory an engine of four-bit weights takes: while it is loaded, and while it runs.

    python benchmarks/memory.py [--layers 30] [--hidden 4096] [--intermediate 11008]

Builds the pycode model at int4, makes its config.json that of a larger model (the default has 3.1
GB of codes and scales) and its weights a file of nothing: zeros, which take no disk. Loads it in a
process of its own and decodes a few tokens. Told is the most memory that this process had of its
own, by the kernel's count of anonymous pages, taken every 10 ms, less what it had before loading;
pages of the mapped file are not counted, for the kernel takes them back whenever it wants to.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specdec.bench.machine import describe_machine
from specdec.engine.layout import (
    WEIGHTS_NAME,
    describe_tensors,
    make_metadata,
    read_engine_config,
)
from specdec.files.reading import read_json, write_json
from specdec.files.tensor_file import TensorInfo, encode_header
from specdec.model.int4 import describe_int4
from specdec.processes import call_stage

PYCODE = Path(__file__).resolve().parent.parent / "examples" / "pycode"
GROUP = 128
OVERHEAD_GB = 0.3


def make_engine(folder: Path, sizes: dict[str, int]) -> tuple[Path, float]:
    """An int4 engine of a large model whose weights are zeros; GB of its matrices."""
    checkpoint, engine = folder / "checkpoint", folder / "engine"
    convert = ["--model-dir", str(PYCODE / "target"), "--dtype", "bfloat16"]
    call_stage("convert", [*convert, "--output-dir", str(checkpoint)])
    build = ["--checkpoint-dir", str(checkpoint), "--output-dir", str(engine)]
    # Not packed on disk: what is packed there would be of the small model.
    build += ["--quantization", "int4", "--group-size", "64", "--packed-weights", "disable"]
    call_stage("build", build)
    config = read_json(engine / "config.json")
    config["pretrained_config"] |= sizes
    write_json(engine / "config.json", config)
    described = read_engine_config(engine)
    tensors = dict(describe_tensors(described, WEIGHTS_NAME, {}))
    for name in [n for n in tensors if n.endswith(".weights_scaling_factor")]:
        module, num_rows = name.rpartition(".")[0], tensors[name].shape[0]
        num_inputs = tensors[f"{module}.weight"].shape[1]
        scales = TensorInfo("float32", (num_rows, num_inputs // GROUP))
        tensors |= describe_int4(module, (num_rows, num_inputs), {name: scales})
    metadata = make_metadata(WEIGHTS_NAME, described.build_id, tensors)
    header = encode_header(tensors, metadata)
    with (engine / WEIGHTS_NAME).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(info.num_bytes for info in tensors.values()))
    (engine / "manifest.json").unlink()  # whose sums are those of the smaller engine
    integers = [info for name, info in tensors.items() if ".layers." in name]
    return engine, sum(info.num_bytes for info in integers) / 1e9


def read_own_memory() -> float:
    """GB of anonymous pages of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / 1e9


def measure(engine_dir: Path) -> dict[str, Any]:
    """Load and run here; the most memory of each, above what there was before."""
    from specdec.decode.engine import TorchEngine
    from specdec.decode.requests import Request

    before = read_own_memory()
    peaks = {"load": 0.0, "run": 0.0}
    part, is_over = "load", False

    def watch() -> None:
        while not is_over:
            peaks[part] = max(peaks[part], read_own_memory() - before)
            time.sleep(0.01)

    thread = threading.Thread(target=watch, daemon=True)  # it ends with us, should loading fail
    thread.start()
    began = time.perf_counter()
    engine = TorchEngine(engine_dir, device="cpu")
    seconds, part = time.perf_counter() - began, "run"
    request = Request(index=0, input_ids=[5] * 64, max_output_len=8, end_ids=frozenset())
    engine.generate([request])
    is_over = True
    thread.join()
    return {"load_seconds": round(seconds, 2), "peak_gb": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        print(json.dumps(measure(args.engine)))
        return
    sizes = {
        "num_hidden_layers": args.layers, "hidden_size": args.hidden,
        "intermediate_size": args.intermediate, "head_size": 128,
        "num_attention_heads": args.hidden // 128, "num_key_value_heads": args.hidden // 128,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        engine, matrices_gb = make_engine(Path(name), sizes)
        done = subprocess.run(
            [sys.executable, __file__, "--engine", str(engine)],
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    most = max(found["peak_gb"].values())
    report = {
        **describe_machine(), "matrices_gb": round(matrices_gb, 3), **found,
        "above_the_matrices_gb": round(most - matrices_gb, 3),
        "is_within_bound": most - matrices_gb <= OVERHEAD_GB,
    }  # fmt: skip
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
