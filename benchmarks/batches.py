#!/usr/bin/env python3
"""Speculation over plain decoding by batch size: every method as set, and with a budget.

    python benchmarks/batches.py [--size full|small|pycode] [--prepare]
                                 [--batch-sizes 1,2,4,8,16] [--repeat 1]
                                 [--max-output-len 48] [--only NAME...]
                                 [--more METHOD-NAME=FOLDER...]

Decodes the same held-out prompts with every method, between two passes of plain decoding, in one
process for each engine. A batch size decodes as many prompts as it has rows, at least four, of
those whose plain greedy texts do not run in circles, which would flatter drafts. The models are
those of benchmarks/peers.py, grown once; trained drafters' weights are int8. Engines are built if
they are not there, or by --prepare, which ends then: some minutes that need no quiet machine. Build
them again after a change of the engine. --more measures further drafters of the pycode target
alongside, such as one that a recipe has just trained.
Writes into --output-dir batches-SIZE.json, batches.png and the chosen prompts, which
benchmarks/peers.py (--prompt-file) and specdec-bench (--prompts) can read, as without-loops.jsonl;
fails where a text differs from plain decoding's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.drafters import list_trees, pace, put_suffix_before
from benchmarks.grow import parse_args as parse_shape
from benchmarks.side_by_side import models
from benchmarks.side_by_side.drafters import write_drafter
from benchmarks.side_by_side.models import DTYPE, PYCODE, SIZES, Models
from benchmarks.side_by_side.processes import Conditions
from benchmarks.side_by_side.report import lay_out
from specdec import Engine
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.lookahead import LookaheadDrafter
from specdec.decode.drafters.prompt_lookup import PromptLookupDrafter
from specdec.decode.drafters.suffix import SuffixDrafter
from specdec.files.reading import write_json
from specdec.measure.engine import Bench, BenchRun, open_bench
from specdec.measure.measure import (
    Rounds,
    compare_texts,
    describe_acceptance,
    divide,
    list_results,
    summarize,
)
from specdec.measure.prompts import BenchPrompt, read_prompt_set
from specdec.measure.repetition import is_looping
from specdec.methods.lookahead import LookaheadConfig
from specdec.methods.prompt_lookup import DEFAULT_NGRAM_SIZE, LookupOptions
from specdec.methods.suffix import SuffixOptions
from specdec.run.settings import RunSettings

LEAST_PROMPTS = 4
LEAST_LENGTH = 64  # tokens of a text that is looked at for loops: what benchmarks/peers.py writes
NUM_DRAFTED = 8
CHAIN = f"draft model, {NUM_DRAFTED}"
BEAMS, TREE_LENGTH = 1, 5  # of ReDrafter
LOOKAHEAD = LookaheadConfig(4, 4, 4)
# Drafters that are grown here, by their folders.
DRAFTERS = {"eagle3": "EAGLE-3", "eagle": "EAGLE-1", "medusa": "Medusa", "dflash": "DFlash"}
AUTO = ", budget auto"
WARM_UP_TOKENS = 8


def build_drafter(found: Models, size: str, name: str, source: Path) -> Path:
    """Build the engine with a drafter, which is grown first."""
    shape, drafter = SIZES[size].shape, source
    if shape:
        drafter = found.folder / name
        shutil.rmtree(drafter, ignore_errors=True)
        words = ["--model-dir", str(source), "--output-dir", str(drafter)]
        write_drafter(source, drafter, parse_shape([*words, *shape]))
    method = name.partition("-")[0].removesuffix("3")
    return models.build_engine(
        found.target, found.folder / "engines" / name, [f"--{method}-model-dir", str(drafter)],
        ["--max-batch-size", str(models.MAX_BATCH_SIZE), *models.DRAFTER_FLAGS],
    )  # fmt: skip


def choose(engine_dir: Path, lines: list[str], max_output_len: int) -> list[str]:
    """Those lines of a prompt file whose texts do not loop."""
    prompts: list[str] = [json.loads(line)["prompt"] for line in lines]
    with Engine.load(engine_dir, tokenizer=PYCODE / "target", speculation=False) as engine:
        outputs = engine.generate(prompts, max_output_len=max_output_len)
    texts = [list(output.token_ids) for output in outputs]
    return [line for line, text in zip(lines, texts, strict=True) if not is_looping(text)]


def choose_prompts(path: Path, engine_dir: Path, args: argparse.Namespace) -> list[BenchPrompt]:
    """Write those whose texts do not loop into a file, and read it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    chosen = choose(engine_dir, lines, max(LEAST_LENGTH, args.max_output_len))
    needed = max(LEAST_PROMPTS, *args.batch_sizes)
    if len(chosen) < needed:
        sys.exit(f"FAILED: {len(chosen)} of {len(lines)} texts do not loop, {needed} are needed")
    written = args.output_dir / "without-loops.jsonl"
    args.output_dir.mkdir(parents=True, exist_ok=True)
    written.write_text("".join(f"{line}\n" for line in chosen), encoding="utf-8")
    found: list[BenchPrompt] = read_prompt_set(written)
    return found


def list_drafters(more: Sequence[str]) -> dict[str, Path]:
    """Their folders by name. more: METHOD-NAME=FOLDER, each."""
    found = {name: PYCODE / name for name in DRAFTERS}
    for given in more:
        name, _, folder = given.partition("=")
        if name in found or name.partition("-")[0] not in DRAFTERS or not Path(folder).is_dir():
            methods = ", ".join(DRAFTERS)
            sys.exit(
                f"--more {given}: wanted is METHOD-NAME=FOLDER, with a method of {methods} and a"
                " folder that is there"
            )
        found[name] = Path(folder)
    return found


def find_engines(
    found: Models, args: argparse.Namespace, drafters: Mapping[str, Path]
) -> dict[str, Path]:
    """Those that an earlier run has left, or new ones; those of --more are always new."""
    names = ("redrafter", "draft-target", "draft", *DRAFTERS)
    engines = None if args.prepare else models.find_engines(found, names)
    if engines is None:
        print("building the engines", file=sys.stderr, flush=True)
        longest = max(NUM_DRAFTED, LOOKAHEAD.max_draft_tokens)
        engines = models.build_engines(found, BEAMS, TREE_LENGTH, longest, [])
    for name, source in drafters.items():
        if name not in engines:
            engines[name] = build_drafter(found, args.size, name, source)
    return engines


def list_ways(name: str, bench: Bench) -> dict[str, Drafter]:
    """Those of an engine, by their names, each as it is and, where it can be, within a budget."""
    drafter = bench.engine.drafter
    if name == "draft-target":
        suffix = SuffixDrafter(SuffixOptions(max_tokens=NUM_DRAFTED))
        (tree,) = list_trees(bench, [NUM_DRAFTED])
        lookup = LookupOptions(num_tokens=NUM_DRAFTED, max_ngram_size=DEFAULT_NGRAM_SIZE)
        ways: dict[str, Drafter] = {
            f"suffix of {NUM_DRAFTED}": suffix,
            f"prompt lookup of {NUM_DRAFTED}": PromptLookupDrafter(lookup),
            f"lookahead {LOOKAHEAD}": LookaheadDrafter(LOOKAHEAD, bench.engine.decoder),
            CHAIN: drafter,
            f"draft model, {tree.name}": tree.drafter,
            "suffix, else draft model": put_suffix_before(bench, drafter, NUM_DRAFTED),
        }
    elif name == "redrafter":
        ways = {f"ReDrafter {BEAMS} x {TREE_LENGTH}": drafter}
    else:
        ways = {DRAFTERS.get(name, name): drafter}
    # Within a budget a draft model's chain is a tree of as many tokens.
    return {
        label + mark: pace(bench, way) if mark else way
        for label, way in ways.items()
        for mark in ("", AUTO)
        if not (mark and label == CHAIN)
    }


def join_pairs(rates: Sequence[float]) -> list[float]:
    """The rate of each two passes together, which emit the same tokens."""
    return [2 / (1 / a + 1 / b) for a, b in zip(rates[::2], rates[1::2], strict=True)]


def measure(
    bench: Bench, settings: RunSettings, ways: Mapping[str, Drafter],
    prompts: Sequence[BenchPrompt], args: argparse.Namespace,
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """By method, a row for each batch size.

    A method stands between two passes of plain decoding, and its ratio is to both: on a shared host
    speed drifts within minutes.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    brief = dataclasses.replace(settings, max_output_len=WARM_UP_TOKENS)
    bench.take_prompts(prompts[:1], brief)
    for drafter in (bench.plain, *ways.values()):
        bench.run(drafter, 1)
    labels = list(dict.fromkeys(name.removesuffix(AUTO) for name in ways))
    for size in args.batch_sizes:
        bench.take_prompts(prompts[: max(size, LEAST_PROMPTS)], settings)
        passes: dict[str, list[BenchRun]] = {name: [] for name in ways}
        around: dict[str, list[BenchRun]] = {name: [] for name in ways}
        for number in range(args.repeat):
            before = bench.run(bench.plain, size)
            for label in labels[:: -1 if number % 2 else 1]:
                pair = [name for name in (label, label + AUTO) if name in ways]
                for name in pair:
                    passes[name].append(bench.run(ways[name], size))
                after = bench.run(bench.plain, size)
                for name in pair:
                    around[name] += (before, after)
                before = after
        for name in ways:
            ours, plain = (Rounds(turns[0], turns) for turns in (passes[name], around[name]))
            ratio = divide(ours.list_rates(), join_pairs(plain.list_rates()))
            found[name].append(
                {
                    "batch_size": size, "rounds": args.repeat, "ratio": ratio,
                    "tokens_per_second": summarize(ours.list_rates()),
                    "plain_tokens_per_second": summarize(plain.list_rates()),
                    "step_ms": ours.describe_step(), "plain_step_ms": plain.describe_step(),
                    "acceptance": describe_acceptance(list_results(ours.warm_up)),
                    "texts": compare_texts(ours.warm_up.texts, plain.warm_up.texts),
                }
            )  # fmt: skip
            print(f"  batch {size:2}: {name:40} {ratio['median']:.3f}", flush=True)
    return found


def draw(report: Mapping[str, Any], path: Path) -> None:
    """A line for each method, broken for the same one within a budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    names = list(dict.fromkeys(name.removesuffix(AUTO) for name in report["methods"]))
    for name, rows in report["methods"].items():
        axes.plot(
            [row["batch_size"] for row in rows], [row["ratio"]["median"] for row in rows],
            "--" if name.endswith(AUTO) else "-", marker="o", label=name,
            color=f"C{names.index(name.removesuffix(AUTO))}",
        )  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(report["batch_sizes"], [str(size) for size in report["batch_sizes"]])
    axes.set_xlabel("requests at once")
    axes.set_ylabel("speculation / plain, tokens per second")
    axes.set_title(f"{report['model']}, {report['dtype']}, {report['processor']}", fontsize=8)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120, bbox_inches="tight")


def format_table(report: Mapping[str, Any]) -> str:
    """Ratios to plain decoding, a row for each method."""
    head = ("times plain, by requests at once", *map(str, report["batch_sizes"]))
    rows = [
        [name, *(f"{row['ratio']['median']:.2f}" for row in rows)]
        for name, rows in report["methods"].items()
    ]
    return lay_out(head, rows)


def format_costs(report: Mapping[str, Any]) -> str:
    """Format a step's time and tokens with the fewest requests, a row for each method."""
    head = (
        f"with {report['batch_sizes'][0]} at once", "tokens a step", "drafted a step",
        "drafting, ms", "verifying, ms", "the rest, ms", "drafting, of a step",
        "step, times plain",
    )  # fmt: skip
    rows = []
    for name, (row, *_) in report["methods"].items():
        parts, acceptance = row["step_ms"], row["acceptance"]
        length, total = acceptance["acceptance_length"], parts["total"]
        rows.append(
            [
                name, "" if length is None else f"{length:.2f}",
                f"{acceptance['draft_tokens_per_step']:.1f}",
                f"{parts['draft']:.1f}", f"{parts['verify']:.1f}",
                f"{parts['accept'] + parts['other']:.1f}", f"{parts['draft'] / total:.0%}",
                f"{total / row['plain_step_ms']['total']:.2f}",
            ]
        )  # fmt: skip
    return lay_out(head, rows)


def main() -> None:
    parser = models.make_parser(__doc__, "batches")
    parser.add_argument("--prepare", action="store_true", help="build the engines, and end")
    parser.add_argument("--only", nargs="+", help="ways whose names hold one of these, and plain")
    parser.add_argument("--more", nargs="+", default=[], metavar="METHOD-NAME=FOLDER",
                        help="further drafters, as eagle-parallel=out/pycode-p-eagle")  # fmt: skip
    parser.add_argument("--batch-sizes", default="1,2,4,8,16")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--max-output-len", type=int, default=48)
    args = parser.parse_args()
    args.batch_sizes = [int(size) for size in args.batch_sizes.split(",")]
    if max(args.batch_sizes) > models.MAX_BATCH_SIZE:
        parser.error(f"--batch-sizes end at {models.MAX_BATCH_SIZE}")
    found = models.prepare_models(SIZES[args.size], args.folder)
    drafters = list_drafters(args.more)
    engines = find_engines(found, args, drafters)
    if args.prepare:
        return
    conditions = Conditions()
    prompts = choose_prompts(PYCODE / "prompts.jsonl", engines["draft-target"], args)
    methods: dict[str, list[dict[str, Any]]] = {}
    for name in ("draft-target", "redrafter", *drafters):
        drafts: dict[str, Any] = {}
        if name == "draft-target":
            drafts = {"draft_engine_dir": engines["draft"], "draft_len": str(NUM_DRAFTED)}
        settings = RunSettings(
            engine_dir=engines[name], tokenizer_dir=str(PYCODE / "target"), device="cpu",
            max_output_len=args.max_output_len, draft_budget="fixed", **drafts,
        )  # fmt: skip
        bench = open_bench(settings)
        ways = {
            label: way
            for label, way in list_ways(name, bench).items()
            if args.only is None or any(word in label for word in args.only)
        }
        if ways:
            methods |= measure(bench, settings, ways, prompts, args)
        bench.engine.close()
    gigabytes = (found.target / "model.safetensors").stat().st_size / 1e9
    report = {
        **conditions.describe(),
        "model": f"pycode, size {args.size}, {gigabytes:.2f} GB", "dtype": DTYPE,
        "batch_sizes": args.batch_sizes, "repeat": args.repeat,
        "max_output_len": args.max_output_len, "methods": methods,
    }  # fmt: skip
    write_json(args.output_dir / f"batches-{args.size}.json", report)
    draw(report, args.output_dir / "batches.png")
    print(format_table(report), format_costs(report), sep="\n\n")
    different = [
        f"{name} at batch {row['batch_size']}"
        for name, found_rows in methods.items()
        for row in found_rows
        if row["texts"]["equal"] < row["texts"]["compared"]
    ]
    if different:
        sys.exit(f"FAILED: texts differ from plain decoding's: {', '.join(different)}")


if __name__ == "__main__":
    main()
