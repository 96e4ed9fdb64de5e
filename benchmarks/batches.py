#!/usr/bin/env python3
"""Speculation over plain decoding by batch size: every method as set, and with a budget.

    python benchmarks/batches.py [--small] [--batch-sizes 1,2,4,8,16] [--output-dir out/batches]

Grows the pycode model to the 305M shape of `make demo` (--small: leaves it as it is), builds an
engine for outside drafts and one of its ReDrafter drafter, and decodes the same held-out prompts
with every method and plainly, by turns in one process. A batch size decodes as many prompts as it
has rows, at least four. Medusa and EAGLE are measured with --small alone: they are not grown.
Writes batches.json and batches.png; fails where a text differs from plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from specdec.bench.combine import pace  # noqa: E402
from specdec.bench.engine import Bench, open_bench  # noqa: E402
from specdec.bench.machine import LoadMeter, describe_machine  # noqa: E402
from specdec.bench.measure import alternate, compare_texts, divide, summarize  # noqa: E402
from specdec.bench.prompts import read_prompt_set  # noqa: E402
from specdec.decode.drafters.base import Proposer  # noqa: E402
from specdec.decode.drafters.chain import join_proposers  # noqa: E402
from specdec.decode.drafters.prompt_lookup import PromptLookupProposer  # noqa: E402
from specdec.decode.drafters.suffix import SuffixProposer  # noqa: E402
from specdec.methods.prompt_lookup import LookupOptions  # noqa: E402
from specdec.methods.suffix import SuffixOptions  # noqa: E402
from specdec.run.settings import RunSettings  # noqa: E402

PYCODE = ROOT / "examples" / "pycode"
# Of the grown model: that of `make demo`.
SHAPE = (
    "--layers", "12", "--hidden", "1536", "--intermediate", "4096", "--heads", "24",
    "--kv-heads", "4", "--exit-dim", "1024",
)  # fmt: skip
EXTERNAL = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", "8")
BEAMS = ("--redrafter-num-beams", "1", "--redrafter-draft-len-per-beam", "3")
LEAST_PROMPTS = 4
NUM_LOOKED_UP, NUM_DRAFTED = 8, 4
AUTO = ", budget auto"
# Flags of specdec-convert for a drafter in the checkpoint.
DRAFTERS: Mapping[str, list[str]] = {
    "ReDrafter 1 x 3": ["--drafter-model-dir", "{redrafter}", *BEAMS],
    "Medusa": ["--medusa-model-dir", str(PYCODE / "medusa")],
    "EAGLE": ["--eagle-model-dir", str(PYCODE / "eagle")],
}


def call(name: str, *words: object) -> None:
    """Run a command of specdec, or a script."""
    program = [name] if name.endswith(".py") else ["-m", "specdec", name]
    subprocess.run([sys.executable, *program, *map(str, words)], check=True, cwd=ROOT)


def make_engine(folder: Path, model: Path, dtype: str, rows: int, *convert: str,
                build: tuple[str, ...] = ()) -> Path:  # fmt: skip
    """Convert and build."""
    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    call("convert", "--model-dir", model, "--output-dir", checkpoint, "--dtype", dtype, "--force",
         *convert)  # fmt: skip
    call("build", "--checkpoint-dir", checkpoint, "--output-dir", folder, "--force",
         "--max-batch-size", rows, *build)  # fmt: skip
    return folder


def open_engine(engine: Path, args: argparse.Namespace, **flags: Any) -> tuple[Bench, RunSettings]:
    """Load an engine whose drafter drafts as set."""
    settings = RunSettings(
        engine_dir=engine, tokenizer_dir=str(PYCODE / "target"), device="cpu",
        max_output_len=args.max_output_len, **{"draft_budget": "fixed", **flags},
    )  # fmt: skip
    return open_bench(settings), settings


def measure(
    bench: Bench, settings: RunSettings, ways: Mapping[str, Proposer], args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """By method, a row for each batch size."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    prompts = read_prompt_set(PYCODE / "prompts.jsonl")
    for size in args.batch_sizes:
        bench.take_prompts(prompts[: max(size, LEAST_PROMPTS)], settings)
        rounds = alternate(bench, {"plain": bench.plain, **ways}, size, args.repeat)
        plain = rounds["plain"]
        for name in ways:
            rates, texts = rounds[name].list_rates(), rounds[name].warm_up.texts
            ratio = divide(rates, plain.list_rates())
            found[name].append(
                {
                    "batch_size": size, "ratio": ratio, "tokens_per_second": summarize(rates),
                    "plain_tokens_per_second": summarize(plain.list_rates()),
                    "texts": compare_texts(texts, plain.warm_up.texts),
                }
            )  # fmt: skip
            print(f"  batch {size:2}: {name:40} {ratio['median']:.3f}", flush=True)
    return found


def add_budgets(ways: Mapping[str, Proposer]) -> dict[str, Proposer]:
    """Each as it is, and within a budget."""
    return {
        name + suffix: pace(proposer) if suffix else proposer
        for name, proposer in ways.items()
        for suffix in ("", AUTO)
    }


def draw(report: Mapping[str, Any], path: Path) -> None:
    """A line for each method, broken for the same one within a budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    names = [name for name in report["methods"] if not name.endswith(AUTO)]
    for number, name in enumerate(names):
        for suffix, style in (("", "-"), (AUTO, "--")):
            rows = report["methods"][name + suffix]
            axes.plot(
                [row["batch_size"] for row in rows], [row["ratio"]["median"] for row in rows],
                style, marker="o", color=f"C{number}", label=name + suffix,
            )  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(report["batch_sizes"], [str(size) for size in report["batch_sizes"]])
    axes.set_xlabel("requests at once")
    axes.set_ylabel("speculation / plain, tokens per second")
    axes.set_title(f"{report['model']}, {report['dtype']}, {report['processor']}", fontsize=8)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=ROOT / "out" / "batches")
    parser.add_argument("--small", action="store_true", help="the 10M model itself, in float32")
    parser.add_argument("--batch-sizes", default="1,2,4,8,16")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--max-output-len", type=int, default=64)
    args = parser.parse_args()
    args.batch_sizes = [int(size) for size in args.batch_sizes.split(",")]
    rows, dtype = max(args.batch_sizes), "float32" if args.small else "bfloat16"
    folder = args.output_dir.resolve() / "work"
    folder.mkdir(parents=True, exist_ok=True)
    target, redrafter = PYCODE / "target", PYCODE / "redrafter"
    if not args.small:
        target, redrafter = folder / "model", folder / "redrafter-model"
        if not target.exists():
            call(
                "benchmarks/grow.py", "--model-dir", PYCODE / "target", "--output-dir", target,
                "--drafter-model-dir", PYCODE / "redrafter", "--drafter-output-dir", redrafter,
                *SHAPE,
            )  # fmt: skip
    meter = LoadMeter()
    methods: dict[str, list[dict[str, Any]]] = {}
    engine = make_engine(folder / "target", target, dtype, rows, build=EXTERNAL)
    draft = make_engine(folder / "draft", PYCODE / "draft", dtype, rows)
    bench, settings = open_engine(
        engine, args, draft_engine_dir=draft, draft_len=str(NUM_DRAFTED)
    )  # fmt: skip
    model, lookup = bench.engine.proposer, SuffixOptions(max_tokens=NUM_LOOKED_UP)
    ways: dict[str, Proposer] = {
        f"prompt lookup of {NUM_LOOKED_UP}": PromptLookupProposer(
            LookupOptions(num_tokens=NUM_LOOKED_UP, max_ngram_size=3)
        ),
        f"suffix of {NUM_LOOKED_UP}": SuffixProposer(lookup),
        f"draft model, {NUM_DRAFTED}": model,
        "suffix, else draft model": join_proposers([[SuffixProposer(lookup)], [model]]),
    }
    methods |= measure(bench, settings, add_budgets(ways), args)
    bench.engine.close()
    for name in DRAFTERS if args.small else [*DRAFTERS][:1]:
        flags = [word.format(redrafter=redrafter) for word in DRAFTERS[name]]
        path = make_engine(folder / name.split()[0].lower(), target, dtype, rows, *flags)
        bench, settings = open_engine(path, args)
        methods |= measure(bench, settings, add_budgets({name: bench.engine.proposer}), args)
        bench.engine.close()
    report = {
        **describe_machine(), "processors_used_by_others": meter.measure(),
        "model": "pycode" if args.small else "pycode grown to 305M", "dtype": dtype,
        "batch_sizes": args.batch_sizes, "repeat": args.repeat,
        "max_output_len": args.max_output_len, "methods": methods,
    }  # fmt: skip
    (args.output_dir / "batches.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(report, args.output_dir / "batches.png")
    different = [
        f"{name} at batch {row['batch_size']}"
        for name, found in methods.items()
        for row in found
        if row["texts"]["equal"] < row["texts"]["compared"]
    ]
    if different:
        sys.exit(f"FAILED: texts differ from plain decoding's: {', '.join(different)}")


if __name__ == "__main__":
    main()
