#!/usr/bin/env python3
"""Choose the prompts whose plain greedy texts do not run in circles: others flatter drafts.

    python benchmarks/without_loops.py --output FILE.jsonl [--prompt-file FILE.jsonl]
                                       [--size full|small|pycode] [--engine-dir ENGINE]
                                       [--max-output-len 64]

--size takes the engine that benchmarks/batches.py or peers.py has left for it. Without an engine
the shipped pycode model writes in bfloat16; what benchmarks/grow.py makes of it parts from its
texts at near-ties, and loops elsewhere. For --prompt-file of benchmarks/peers.py and --prompts of
specdec-bench; bench/repetition.py says what a circle is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.side_by_side.models import (
    PYCODE,
    ROOT,
    SIZES,
    build_engine,
    find_engines,
    prepare_models,
)
from specdec import Engine
from specdec.bench.repetition import is_looping


def choose(engine_dir: Path, lines: list[str], max_output_len: int) -> list[str]:
    """Those lines of a prompt file whose texts do not loop."""
    prompts = [json.loads(line)["prompt"] for line in lines]
    with Engine.load(engine_dir, tokenizer=PYCODE / "target", speculation=False) as engine:
        outputs = engine.generate(prompts, max_output_len=max_output_len)
    return [
        line
        for line, output in zip(lines, outputs, strict=True)
        if not is_looping(list(output.token_ids))
    ]


def find_engine(args: argparse.Namespace) -> Path | None:
    """The one that is left of a size; raise SystemExit where there is none."""
    if args.size is None:
        return None
    log = args.folder / "logs" / "without-loops.log"
    found = prepare_models(SIZES[args.size], args.folder.resolve() / "models", log)
    engines = find_engines(found, ["draft-target"])
    if engines is None:
        raise SystemExit(f"no engine: run benchmarks/batches.py --size {args.size} --prepare first")
    return engines["draft-target"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompt-file", type=Path, default=PYCODE / "prompts.jsonl")
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "peers",
                        help="models, as of benchmarks/peers.py")  # fmt: skip
    parser.add_argument("--engine-dir", type=Path)
    parser.add_argument("--max-output-len", type=int, default=64)
    args = parser.parse_args()
    lines = args.prompt_file.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        engine_dir = args.engine_dir or find_engine(args)
        engine_dir = engine_dir or build_engine(PYCODE / "target", Path(folder) / "engine")
        chosen = choose(engine_dir, lines, args.max_output_len)
    args.output.write_text("".join(f"{line}\n" for line in chosen), encoding="utf-8")
    print(f"{len(chosen)} of {len(lines)} texts do not loop")


if __name__ == "__main__":
    main()
