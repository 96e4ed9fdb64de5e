#!/usr/bin/env python3
"""A drafter by each recipe of training, from the same answers in the same minutes, beside the rest.

    python benchmarks/training_study.py --data answers.jsonl --spec-bench FOLDER [--minutes 10]
                                        [--model-dir MODEL] [--only RECIPE...] [--list]
                                        [--start-from DRAFTER] [--tokens N]
                                        [--curve TOKENS...] [--output-dir out/training-study]

Without --model-dir the target is the chat model that examples/smollm2/get.py fetches; the answers
are those of examples/smollm2/train.sh. Every recipe is a training of its own in a process of its
own, with as many steps as --minutes hold by the rate that `specdec train --plan` measures first;
then the engine drafts with it at every step, greedily, for Spec-Bench's prompts. All rates are
measured before the first training, so that other programs may run beside the trainings. BASELINE is
the recipe of the shipped EAGLE-3. `together` joins what was better than it of the losses, of the
weights by depth, of the optimizers and of the first weights, and begins when these are done. A
recipe of --curve is the baseline with that many training tokens; `fp8` is the baseline, in as many
steps, from hidden states in that type. With --start-from every recipe goes on from an EAGLE-3,
which is measured as it is, too: `start`. With --tokens all recipes have as many training tokens,
instead of minutes, and EAGLE's read hidden states that the first one keeps. Finished recipes are
kept: started again, the study goes on. study.json and a table of tokens per verify step are written
after each recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import field
from benchmarks.side_by_side import models
from benchmarks.side_by_side.processes import Conditions
from benchmarks.side_by_side.report import lay_out
from examples.smollm2.get import get_model
from specdec.errors import SpecDecError
from specdec.files.reading import hash_file, write_json
from specdec.measure.prompts import read_prompt_set
from specdec.run.settings import RunSettings

BASELINE = "kl"
EAGLE3 = (
    "--method", "eagle", "--eagle-version", "3", "--eagle-draft-vocab-size", "4096",
    "--eagle-intermediate-size", "768", "--eagle-num-steps", "3",
)  # fmt: skip
DSPARK = (
    "--method", "dflash", "--dflash-block-size", "5", "--dflash-markov-rank", "64",
    "--dflash-intermediate-size", "768", "--loss", "ce_l1", "--learning-rate", "2e-3",
)  # fmt: skip
TENFOLD = "tenfold"  # stands for ten times --learning-rate
# Groups of recipes of which each changes one thing; the best of a group joins `together`.
GROUPS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "loss": {name: ("--loss", name) for name in ("ce", "tv", "lk", "lk_hybrid", "ce_l1")},
    "depths": {name: ("--depth-weighting", name) for name in ("uniform", "reach", "dpace")},
    "optimizer": {
        "muon": ("--optimizer", "muon"),
        "muon_x10": ("--optimizer", "muon", "--muon-learning-rate", TENFOLD),
    },
    # With a learning rate of 1e-3 or more, such as the baseline's, the loss soon was far higher.
    "first weights": {
        "least_squares": ("--eagle-start", "least-squares", "--learning-rate", "5e-4")
    },
}
TOGETHER, FP8, DSPARK_NAME, CURVE, START = "together", "fp8", "dspark", "tokens", "start"
ALONE = {name: flags for group in GROUPS.values() for name, flags in group.items()}
RECIPES = (BASELINE, *ALONE, DSPARK_NAME, FP8, TOGETHER)


def join_best(results: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the flags of the best recipe of each group that is better than the baseline."""
    flags: list[str] = []
    least_length = results[BASELINE]["tokens_per_step"]
    for group in GROUPS.values():
        lengths = {name: results[name]["tokens_per_step"] for name in group if name in results}
        best_name = max(lengths, key=lambda name: lengths[name], default="")
        if best_name and lengths[best_name] > least_length:
            flags += group[best_name]
    return tuple(flags)


def list_flags(args: argparse.Namespace, name: str, results: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a recipe's flags of specdec-train, without the number of its steps."""
    if name == DSPARK_NAME:
        return DSPARK
    flags = [*EAGLE3, "--eagle-start", args.eagle_start]
    if args.start_from is not None:
        flags += ["--start-from", str(args.start_from)]
    if name == FP8:
        states = ("--hidden-states-dir", str(args.output_dir / "states-fp8"))
        return (*flags, *states, "--hidden-states-dtype", "fp8")
    if args.tokens is not None:
        flags += ["--hidden-states-dir", str(args.output_dir / "states")]
    flags += join_best(results) if name == TOGETHER else ALONE.get(name, ())
    rate = f"{10 * float(args.learning_rate):g}"
    return tuple(rate if flag == TENFOLD else flag for flag in flags)


def call(words: Sequence[str], log: Path) -> str:
    """Run a command in a process of its own; return what it prints; its log is kept in a file."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("a", encoding="utf-8") as errors:
        done = subprocess.run(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=errors, text=True, check=False,
            env=environment,
        )  # fmt: skip
    if done.returncode:
        last_lines = log.read_text(encoding="utf-8").splitlines()[-2:]
        raise SystemExit("\n".join([f"FAILED: {' '.join(words)}; {log} ends with", *last_lines]))
    return done.stdout


def make_words(args: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """Return the training's command, without its steps and output."""
    return [
        "-m", "specdec", "train", "--model-dir", str(args.model_dir), "--data", str(args.data),
        "--self-distillation", "1", "--model-max-length", str(args.model_max_length),
        "--batch-size", str(args.batch_size), "--dtype", args.dtype, "--seed", "1",
        "--eval-prompts", "0", "--eval-steps", "0", "--json", "--learning-rate",
        args.learning_rate, *flags,
    ]  # fmt: skip


def count_steps(args: argparse.Namespace, name: str, flags: Sequence[str], log: Path) -> int:
    """Return the steps of a recipe: what its minutes hold, or what its tokens take."""
    is_alike = args.tokens is not None and (name in ALONE or name == TOGETHER)
    if name == FP8 or is_alike:  # it is compared with the baseline, whatever it costs here
        return int(plan(args, BASELINE, {})["steps"])
    words = [*make_words(args, flags), "--max-steps", "1", "--plan"]
    rates: dict[str, float] = json.loads(call(words, log))
    tokens_per_step = rates["training_tokens"]
    num_tokens: float = args.tokens or args.minutes * 60 * rates["training_tokens_per_second"]
    if name.startswith(CURVE):
        num_tokens = int(name.removeprefix(CURVE))
    return max(1, round(num_tokens / tokens_per_step))


def plan(args: argparse.Namespace, name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's flags and steps, which are settled when they are first asked for."""
    path = args.output_dir / f"{name}.started.json"
    if not path.exists():
        flags = list_flags(args, name, results)
        steps = count_steps(args, name, flags, args.output_dir / f"{name}.log")
        write_json(path, {"flags": flags, "steps": steps})
    recipe: dict[str, Any] = json.loads(path.read_text())
    return recipe


def train(args: argparse.Namespace, name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Train a recipe, or go on with it; return its flags, steps and the training's report."""
    if name == START:  # as it is
        flags = ["--start-from", str(args.start_from)]
        return {"flags": flags, "steps": 0, "tokens": 0, "top_1": []}
    folder, log = args.output_dir / name, args.output_dir / f"{name}.log"
    recipe = plan(args, name, results)
    if not (folder / "manifest.json").exists():
        steps = ["--max-steps", str(recipe["steps"]), "--save-steps", "100", "--resume"]
        call([*make_words(args, recipe["flags"]), *steps, "--output-dir", str(folder)], log)
    report = json.loads((folder / "manifest.json").read_text())["results"]
    top_1 = [row[0] for row in report["eval"]["top_k_accuracy"]]
    return {**recipe, "tokens": report["tokens"], "top_1": top_1}


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the tokens per verify step of a trained recipe, over all of Spec-Bench and by task."""
    prompts = read_prompt_set(
        Path(f"spec-bench:{args.spec_bench}"), num_each=args.prompts_per_category
    )
    shape = argparse.Namespace(
        model_dir=args.model_dir, num_tokens=8, drafter_weights="same", eagle_choices=None,
        quantization=None, draft_budget="fixed", default=False,
    )  # fmt: skip
    folder = args.start_from if name == START else args.output_dir / name
    with field.open_engine(shape, folder) as bench:
        settings = RunSettings(engine_dir=Path(), max_output_len=args.max_output_len)
        bench.take_prompts(prompts, settings)
        ways = field.list_ways(bench, name, shape)
        (row,) = field.describe(field.measure(ways, bench.groups))[1:]
    total = row["all"]
    if total["like_plain"] < total["texts"]:
        raise SystemExit(f"FAILED: {name}: texts differ from plain decoding's")
    tasks = {task: row[task]["tokens_per_step"] for task in row if task not in ("way", "all")}
    return {
        "tokens_per_step": total["tokens_per_step"], "tasks": tasks, "texts": total["texts"],
        "tokens_per_step_without_loops": total["tokens_per_step_without_loops"],
    }  # fmt: skip


def run_recipe(args: argparse.Namespace, name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Train and measure a recipe, each in its own process, as far as that is not done."""
    path = args.output_dir / f"{name}.json"
    if not path.exists():
        trained = train(args, name, results)
        words = [__file__, "--measure", name, *args.words]
        found = json.loads(call(words, args.output_dir / f"{name}.log").splitlines()[-1])
        write_json(path, trained | found)
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def format_table(results: Mapping[str, Any]) -> str:
    """Lay out the tokens per step of all recipes, over the baseline's."""
    baseline = results.get(BASELINE, {}).get("tokens_per_step")
    tasks = list(next(iter(results.values()))["tasks"])
    rows = []
    for name, result in results.items():
        length = result["tokens_per_step"]
        ratio = f"{100 * (length / baseline - 1):+.1f} %" if baseline else ""
        lengths = [f"{result['tasks'][task]:.2f}" for task in tasks]
        counts = [f"{result['tokens'] / 1e6:.2f}", str(result["steps"])]
        rows.append([name, f"{length:.3f}", ratio, *lengths, *counts])
    head = ["recipe", "tokens per step", f"over {BASELINE}", *tasks, "million tokens", "steps"]
    return lay_out(head, rows)


def make_parser(*, is_list: bool = False) -> argparse.ArgumentParser:
    """Return the parser of the command line. is_list: only --list is to be given."""
    parser = models.make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=not is_list)
    parser.add_argument("--spec-bench", type=Path, required=not is_list)
    parser.add_argument("--model-dir", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each training")
    parser.add_argument("--tokens", type=int, help="of each training, instead of its minutes")
    parser.add_argument("--start-from", type=Path, metavar="DRAFTER")
    parser.add_argument("--learning-rate", default="2e-3")
    parser.add_argument("--eagle-start", default="random", choices=("random", "least-squares"))
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--curve", nargs="*", type=int, default=[], metavar="TOKENS")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--model-max-length", type=int, default=384)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--prompts-per-category", type=int, default=8)
    parser.add_argument("--max-output-len", type=int, default=96)
    parser.add_argument("--output-dir", type=Path, default=ROOT / "out" / "training-study")
    parser.add_argument("--list", action="store_true", help="print the recipes' flags and end")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # a recipe, in a process of its own
    return parser


def parse_args(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    args = make_parser(is_list="--list" in words).parse_args(words)
    args.words = list(words)
    args.output_dir = args.output_dir.resolve()
    return args


def check_settings(args: argparse.Namespace) -> None:
    """Raise SystemExit where the output folder is of a study with other settings."""
    shared = (
        "model_dir", "minutes", "tokens", "start_from", "learning_rate", "eagle_start",
        "batch_size", "model_max_length", "dtype", "prompts_per_category", "max_output_len",
    )  # fmt: skip
    settings = {name: str(getattr(args, name)) for name in shared}
    settings["sha256 of the data"] = hash_file(args.data)
    path = args.output_dir / "settings.json"
    if not path.exists():
        write_json(path, settings)
    earlier = json.loads(path.read_text())
    changed = [
        f"{k} was {earlier.get(k)}, is {v}" for k, v in settings.items() if earlier.get(k) != v
    ]
    if changed:
        raise SystemExit(
            f"error: {args.output_dir} is of another study: {'; '.join(changed)}\n"
            "hint: name another --output-dir, or give what it was started with"
        )


def main(words: Sequence[str] | None = None) -> None:
    args = parse_args(sys.argv[1:] if words is None else words)
    if args.list:
        for name in RECIPES:
            flags = "the best of each group" if name == TOGETHER else None
            print(name, flags or " ".join(list_flags(args, name, {})), sep="\t")
        return
    try:
        args.model_dir = args.model_dir or get_model()
        if args.measure:
            print(json.dumps(measure(args, args.measure)))
            return
    except SpecDecError as error:
        raise SystemExit(f"error: {error.message}\nhint: {error.hint}") from None
    if BASELINE not in args.only:
        raise SystemExit(f"--only needs {BASELINE}, with which all others are compared")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    check_settings(args)
    conditions = Conditions()
    results: dict[str, Any] = {}
    curve = [f"{CURVE}{size}" for size in args.curve]
    start = [START] if args.start_from else []
    names = [*start, *(recipe for recipe in RECIPES if recipe in args.only), *curve]
    for name in names:
        is_over = (args.output_dir / f"{name}.json").exists()
        if not is_over and name not in (START, TOGETHER):  # of `together` nothing is known yet
            plan(args, name, results)
    for name in names:
        print(f"{name}:", file=sys.stderr, flush=True)
        results[name] = run_recipe(args, name, results)
        settings = {key: str(value) for key, value in vars(args).items() if key != "words"}
        report = conditions.describe() | {"settings": settings, "recipes": results}
        write_json(args.output_dir / "study.json", report)
        table = format_table(results)
        (args.output_dir / "study.md").write_text(table + "\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
