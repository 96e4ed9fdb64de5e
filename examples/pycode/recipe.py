#!/usr/bin/env python3
"""Run a recipe from data to text: every command of configs/NAME-pycode.yaml, in order.

    python examples/pycode/recipe.py prompt_lookup
    python examples/pycode/recipe.py medusa --quick     # toy length, minutes, in out/quick
    python examples/pycode/recipe.py medusa --shipped   # no training: the drafter that is there

Each command is shown as typed; what an earlier run has finished is not done again, and what one has
begun is resumed. With `--quick` or `--output-dir` the commands are the same, and read a copy of the
recipe that says where, and how little.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Each method's, and those of EAGLE-3, P-EAGLE and DSpark.
NAMES = tuple(
    path.name.removesuffix("-pycode.yaml")
    for path in sorted((ROOT / "configs").glob("*-pycode.yaml"))
    if path.name != "target-pycode.yaml"
)
# In this order; a recipe has a section for each of its commands.
STAGES = ("data", "train", "convert", "build", "verify", "bench", "run")
RESUMED = ("data", "train")
WRITTEN = {"data": "output", "train": "output_dir", "convert": "output_dir", "build": "output_dir"}
NUM_TRAINING_PROMPTS, PROMPTS_PER_FILE = 4000, 8
PROMPTS = "examples/pycode/prompts.jsonl"
CORPUS = "examples/pycode/work/corpus"
TRAINING_PROMPTS = "examples/pycode/work/train_prompts.jsonl"

Recipe = dict[str, dict[str, Any]]
# Changes by `--quick` in each section.
QUICK_NUM_PROMPTS = 4
QUICK: Recipe = {
    "data": {"max_rows": 8, "max_tokens": 24},
    "train": {
        "max_steps": 2, "batch_size": 2, "model_max_length": 48, "eval_rows": 4, "eval_prompts": 2,
        "eval_output_len": 8,
    },
    "verify": {"max_output_len": 8, "num_alone": 0},
    "bench": {"max_output_len": 16, "repeat": 1},
    "run": {"max_output_len": 16},
}  # fmt: skip


def read_recipe(path: Path) -> Recipe:
    """The sections of a recipe."""
    sections: Recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    return sections


def list_recipes(method: str, *, shipped: bool = False) -> list[str]:
    """The names in configs/ that a method takes: its own last, before it whose engines it needs."""
    sections = read_recipe(ROOT / "configs" / f"{method}-pycode.yaml")
    names = ["target-pycode"] if "data" in sections and not shipped else []
    if "draft_engine_dir" in sections["run"]:
        names.append(f"{method}-pycode-draft")
    return [*names, f"{method}-pycode"]


def take_shipped(method: str, sections: Recipe) -> Recipe:
    """The recipe without data and training, and with the drafter that ships with the project."""
    kept = {name: dict(values) for name, values in sections.items() if name not in RESUMED}
    if "train" in sections:
        trained = sections["train"]["output_dir"]
        (key,) = (key for key, value in kept["convert"].items() if value == trained)
        kept["convert"][key] = f"examples/pycode/{method}"
    return kept


def change_recipe(sections: Recipe, changes: Recipe, paths: Mapping[str, str]) -> Recipe:
    """Change values of sections that are there, and the beginnings of paths."""

    def move(value: Any) -> Any:
        for old, new in paths.items():
            if isinstance(value, str) and value.startswith(old):
                return new + value.removeprefix(old)
        return value

    return {
        name: {key: move(value) for key, value in (values | changes.get(name, {})).items()}
        for name, values in sections.items()
    }


def list_commands(recipe: Path, stages: Sequence[str] = STAGES) -> list[list[str]]:
    """A recipe's commands in order: name and arguments.

    Left out are those whose output is there, as long as nothing before them is to be done.
    """
    commands: list[list[str]] = []
    sections = read_recipe(recipe)
    for stage in (stage for stage in stages if stage in sections):
        output = sections[stage].get(WRITTEN.get(stage, ""))
        is_there = output is not None and Path(output).exists()
        if is_there and not commands:
            continue
        name = ["specdec-train", "data"] if stage == "data" else [f"specdec-{stage}"]
        flags = ["--force"] if is_there else ["--resume"] if stage in RESUMED else []
        commands.append([*name, "--config", str(recipe), *flags])
    return commands


def list_input_commands() -> list[list[str]]:
    """The commands that make the training prompts, without those whose output is there."""
    commands = {
        f"{CORPUS}/train.jsonl": ["corpus.py", "--output-dir", CORPUS],
        TRAINING_PROMPTS: [
            "make_prompts.py", "--data", f"{CORPUS}/train.jsonl", "--output", TRAINING_PROMPTS,
            "--num-prompts", str(NUM_TRAINING_PROMPTS), "--per-file", str(PROMPTS_PER_FILE),
        ],
    }  # fmt: skip
    return [
        ["python", f"examples/pycode/{words[0]}", *words[1:]]
        for output, words in commands.items()
        if not Path(output).exists()
    ]


def run_command(words: list[str]) -> None:
    """Show a command as typed and run it; end with it where it fails."""
    print(f"$ {shlex.join(words)}", flush=True)
    name, *arguments = words
    program = [sys.executable]
    if name.startswith("specdec-"):
        program += ["-m", "specdec", name.removeprefix("specdec-")]
    done = subprocess.run(
        [*program, *arguments], check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{name} ended with status {done.returncode}")


def write_recipes(
    method: str, folder: Path, changes: Recipe, paths: Mapping[str, str], *, shipped: bool = False
) -> list[Path]:
    """Write a method's recipes, changed, into a folder; return them, its own last."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in list_recipes(method, shipped=shipped):
        sections = read_recipe(ROOT / "configs" / f"{name}.yaml")
        if shipped:
            sections = take_shipped(method, sections)
        changed = change_recipe(sections, changes, paths)
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(changed, sort_keys=False), encoding="utf-8")
        written.append(path)
    return written


def choose_recipes(args: argparse.Namespace) -> list[Path]:
    """The recipes in configs/, or changed copies where the flags ask for what these do not say."""
    if not (args.quick or args.shipped or args.output_dir):
        return [Path("configs") / f"{name}.yaml" for name in list_recipes(args.method)]
    folder = Path(args.output_dir or ("out/quick" if args.quick else "out/shipped"))
    paths = {"out/": f"{folder}/"}
    if args.quick:
        lines = (ROOT / PROMPTS).read_text(encoding="utf-8").splitlines(keepends=True)
        folder.mkdir(parents=True, exist_ok=True)
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(lines[:QUICK_NUM_PROMPTS]), encoding="utf-8")
        paths[PROMPTS] = str(prompts)
    return write_recipes(
        args.method, folder / "recipes", QUICK if args.quick else {}, paths, shipped=args.shipped
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="toy length")
    parser.add_argument("--shipped", action="store_true", help="take the drafter that ships")
    parser.add_argument("--output-dir", help="instead of out; from the project's root if relative")
    args = parser.parse_args()
    os.chdir(ROOT)
    trains = "train" in read_recipe(Path("configs") / f"{args.method}-pycode.yaml")
    if args.shipped and trains and not (HERE / args.method).is_dir():
        parser.error(f"no drafter ships for {args.method}: leave out --shipped")
    *others, own = choose_recipes(args)
    for command in list_input_commands() if "data" in read_recipe(own) else []:
        run_command(command)
    for recipe in others:
        for command in list_commands(recipe, ("convert", "build")):
            run_command(command)
    for command in list_commands(own):
        run_command(command)


if __name__ == "__main__":
    main()
