#!/usr/bin/env python3
"""Compare the methods: acceptance and speed of each on the same held-out prompts.

    python -m examples.pycode.methods              # from the project's root, on a quiet machine
    python -m examples.pycode.methods --render     # table and plot anew, of what was measured
    python -m examples.pycode.methods --prompts FILE.jsonl    # other prompts, one object a line

Makes every method's engine by its recipe, with the drafter that ships, and measures it by
specdec-bench, which decodes with and without speculation by turns on the same weights: acceptance
at several output lengths, speed at the longest. Texts must be those of plain decoding. Small models
fall into loops, which are easy to draft, so acceptance is also given over the texts that do not.
Writes methods.json and methods.md, and methods.png where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.pycode.recipe import NAMES, PROMPTS, Recipe, list_commands, write_recipes
from specdec.errors import name_extra
from specdec.measure.plots import has_matplotlib
from specdec.methods import METHODS
from specdec.system.processes import call_stage

OUTPUT_LENGTHS = (16, 64)
REPEAT = 3
SUFFIXES = (".json", ".md", ".png")  # of what is written: data, table and plot
# Facts of the machine and its state that specdec-bench tells with every measurement.
MACHINE = (
    "date", "processor", "usable_cores", "threads", "torch", "load_average",
    "processors_used_by_others", "dtype", "device",
)  # fmt: skip

CallStage = Callable[[str, Sequence[str]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A recipe, by its method or its name, and what of it is changed."""

    name: str
    method: str
    changes: Recipe = dataclasses.field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Variants that are converted alike share their engines."""
        changed = self.changes.get("convert", {})
        return "-".join([self.method, *(str(value) for value in changed.values())])


SHOWN = (
    Variant("ReDrafter, 4 beams x 5 tokens", "redrafter"),
    Variant(
        "ReDrafter: the best 15 of 4 x 5", "redrafter", {"bench": {"redrafter_tree_tokens": 15}}
    ),
    Variant(
        "ReDrafter, 1 beam x 3 tokens", "redrafter",
        {"convert": {"redrafter_num_beams": 1, "redrafter_draft_len_per_beam": 3}},
    ),
    Variant("Medusa, its default tree", "medusa"),
    Variant("EAGLE-1, its default tree", "eagle"),
    Variant("EAGLE-2: a dynamic tree", "eagle", {"bench": {"eagle_use_dynamic_tree": True}}),
    Variant("EAGLE-3: a dynamic tree", "eagle3"),
    Variant("draft model, 4 tokens", "draft_target"),
    Variant(
        "draft model, a tree of 8", "draft_target",
        {"bench": {"draft_len": 8, "draft_tree_tokens": 8}},
    ),
    Variant("draft model, as much as pays", "draft_target", {"bench": {"draft_len": "auto"}}),
    Variant(
        "suffix decoding, else the draft model", "draft_target",
        {"bench": {"draft_chain": "suffix,draft_target", "suffix_max_tokens": 8}},
    ),
    Variant("prompt lookup, 8 tokens", "prompt_lookup"),
    Variant("n-gram table, 7 tokens", "ngram"),
    Variant("lookahead, W 4, N 4, G 4", "lookahead"),
)  # fmt: skip
VARIANTS = SHOWN + tuple(  # a method that is not listed is measured by its recipe
    Variant(method.title, name)
    for name, method in METHODS.items()
    if name in NAMES and name not in {variant.method for variant in SHOWN}
)


def make_engine(
    variant: Variant, folder: Path, paths: Mapping[str, str], changes: Recipe, call: CallStage
) -> Path:
    """Convert and build what is not there yet; return the recipe to measure by."""
    merged = {
        name: changes.get(name, {}) | variant.changes.get(name, {})
        for name in {*changes, *variant.changes}
    }
    own = folder / variant.folder
    # Variants that share engines differ in what is asked of them.
    slug = re.sub(r"[^a-z0-9]+", "-", variant.name.lower())
    moved = {"out/": f"{own}/", **paths}
    *others, recipe = write_recipes(
        variant.method, folder / "recipes" / slug, merged, moved, shipped=True
    )
    for path in (*others, recipe):
        for name, *arguments in list_commands(path, ("convert", "build")):
            call(name.removeprefix("specdec-"), arguments)
    return recipe


def measure(recipe: Path, length: int, repeat: int, call: CallStage) -> tuple[Any, dict[str, Any]]:
    """Run specdec-bench at one output length; return its report, and what of it is kept."""
    report = call(
        "bench",
        ["--config", str(recipe), "--max-output-len", str(length), "--repeat", str(repeat)],
    )
    (batch,) = report["batches"]
    accepted, loops = batch["acceptance"], batch["looping"]
    return report, {
        "max_output_len": length,
        "prompts": report["num_prompts"],
        "same_text_as_plain": batch["texts"]["equal"],
        "draft_tokens_per_step": accepted["draft_tokens_per_step"],
        "acceptance_length": accepted["acceptance_length"],
        "looping": loops["texts"],
        "acceptance_length_without_loops": loops["acceptance_length_of_others"],
        "accepted_by_position": accepted["accepted_by_position"],
        "rounds": repeat,
        "speed_ratio": batch["ratio"],
        "tokens_per_second": batch["speculation"]["tokens_per_second"],
        "plain_tokens_per_second": batch["plain"]["tokens_per_second"],
        "warnings": report["warnings"],
    }


def compare(
    variants: Sequence[Variant],
    lengths: Sequence[int],
    repeat: int,
    folder: Path,
    paths: Mapping[str, str],
    changes: Recipe,
    call: CallStage,
) -> dict[str, Any]:
    """Measure all variants; speed is repeated at the longest output alone."""
    rows = []
    machine: dict[str, Any] = {}
    # All of them first: what is missing shows before anything is measured.
    recipes = [make_engine(variant, folder, paths, changes, call) for variant in variants]
    for variant, recipe in zip(variants, recipes, strict=True):
        measured = []
        for length in lengths:
            is_longest = length == max(lengths)
            report, found = measure(recipe, length, repeat if is_longest else 1, call)
            measured.append(found)
        machine = machine or {key: report.get(key) for key in MACHINE}
        rows.append({
            "name": variant.name,
            "method": report["method"],
            "load_average": report["load_average"],
            "processors_used_by_others": report["processors_used_by_others"],
            "lengths": measured,
        })  # fmt: skip
        print(format_row(rows[-1]), flush=True)
    return {"machine": machine, "max_output_lens": list(lengths), "rows": rows}


def format_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    longest = row["lengths"][-1]
    ratio, alone = longest["speed_ratio"], longest["acceptance_length_without_loops"]
    cells = [
        row["name"],
        f"{longest['draft_tokens_per_step']:.1f}",
        *(f"{found['acceptance_length']:.2f}" for found in row["lengths"]),
        f"{longest['looping']} of {longest['prompts']}",
        "none left" if alone is None else f"{alone:.2f}",
        f"**{ratio['median']:.2f}** ({ratio['lowest']:.2f} to {ratio['highest']:.2f})",
    ]
    return f"| {' | '.join(cells)} |"


def format_table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    machine, lengths = report["machine"], report["max_output_lens"]
    head = [
        "method", "drafted a step", *(f"accepted, {length} tokens" for length in lengths),
        "texts that loop", "accepted without loops", "speed / plain",
    ]  # fmt: skip
    lines = [
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(format_row(row) for row in report["rows"]),
        "",
        f"Tokens emitted per verify step, by output length; loops and speed at {lengths[-1]} tokens"
        f" a prompt, speed as the median of {report['rows'][0]['lengths'][-1]['rounds']} rounds"
        " (lowest to highest), one request at a time, with and without speculation by turns.",
        f"{machine['processor']}, {machine['usable_cores']} cores, {machine['dtype']} on"
        f" {machine['device']}, torch {machine['torch']}, {machine['date']}.",
    ]
    return "\n".join(lines) + "\n"


def draw(report: dict[str, Any], path: Path) -> None:
    """Acceptance by output length, and speed, as one picture."""
    from matplotlib.figure import Figure

    rows = report["rows"]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in rows:
        lengths = [found["max_output_len"] for found in row["lengths"]]
        accepted = [found["acceptance_length"] for found in row["lengths"]]
        left.plot(lengths, accepted, marker="o")
    left.set_xlabel("new tokens a prompt")
    left.set_ylabel("tokens emitted per verify step")
    left.set_xscale("log", base=2)
    left.set_xticks(report["max_output_lens"], report["max_output_lens"])
    left.minorticks_off()
    ratios = [row["lengths"][-1]["speed_ratio"] for row in rows]
    medians = [ratio["median"] for ratio in ratios]
    below = [ratio["median"] - ratio["lowest"] for ratio in ratios]
    above = [ratio["highest"] - ratio["median"] for ratio in ratios]
    # The bars' colours are those of the lines, for which their labels are the legend.
    colors = [line.get_color() for line in left.lines]
    right.barh(range(len(rows)), medians, xerr=[below, above], capsize=3, color=colors)
    right.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    right.invert_yaxis()
    right.axvline(1, color="black", linewidth=0.8)
    right.set_xlabel("tokens per second / plain decoding's")
    machine = report["machine"]
    figure.suptitle(f"{machine['processor']}, {machine['dtype']}, {machine['date']}", fontsize=8)
    figure.savefig(path, dpi=120)


def write_files(report: dict[str, Any], path: Path) -> None:
    """Write path's name with each of SUFFIXES."""
    data, table, plot = (path.with_suffix(suffix) for suffix in SUFFIXES)
    data.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    table.write_text(format_table(report), encoding="utf-8")
    if has_matplotlib():
        draw(report, plot)
    else:
        print(f"no plot: matplotlib is not installed; {name_extra('plot')} installs it")
    print(f"{table}:\n\n{format_table(report)}")


def main(
    arguments: Sequence[str] | None = None,
    paths: Mapping[str, str] | None = None,
    changes: Recipe | None = None,
    call: CallStage = call_stage,
) -> None:
    """`paths`, `changes` and `call` let a test put other models and calls in their places."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, default=Path("out/methods"))
    parser.add_argument("--output-dir", type=Path, default=Path("examples/pycode"))
    parser.add_argument("--only", nargs="+", help="some methods, written into --work-dir")
    parser.add_argument(
        "--prompts", type=Path, default=Path(PROMPTS),
        help="other prompts; the results are then called NAME-methods.*, after the file",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="two prompts, into --work-dir")
    parser.add_argument("--render", action="store_true", help="of the methods.json that is there")
    args = parser.parse_args(arguments)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    output = args.work_dir if args.quick or args.only else args.output_dir
    named = "methods" if args.prompts == Path(PROMPTS) else f"{args.prompts.stem}-methods"
    output /= named
    if args.render:
        write_files(json.loads(output.with_suffix(".json").read_text(encoding="utf-8")), output)
        return
    lengths: Sequence[int] = OUTPUT_LENGTHS
    repeat, moved = REPEAT, {PROMPTS: str(args.prompts), **(paths or {})}
    if args.quick:
        lengths, repeat = (8, 16), 1
        lines = Path(moved[PROMPTS]).read_text(encoding="utf-8").splitlines()
        few = args.work_dir / "prompts.jsonl"
        few.write_text("\n".join(lines[:2]) + "\n", encoding="utf-8")
        moved[PROMPTS] = str(few)
    variants = [v for v in VARIANTS if args.only is None or v.method in args.only]
    report = compare(variants, lengths, repeat, args.work_dir, moved, changes or {}, call)
    write_files(report, output)


if __name__ == "__main__":
    main()
