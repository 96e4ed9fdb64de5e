#!/usr/bin/env python3
"""Count tokens a step while edits are written: files changed, diffs applied, logs quoted.

    python -m examples.pycode.edits              # from the project's root; others may run beside
    python -m examples.pycode.edits --only suffix prompt_lookup

edits.jsonl has prompts that quote a file or a log and begin the answer, and as `reference` the rest
of the answer as a good model would write it. The shipped target is too small to write it. So it is
held to it: it decodes as always, one verify step after another with every method's drafts, but may
choose only the reference's next token. So lookups are counted as with a target that writes edits
well. Drafters that learned what this target writes are not: here they guess a text unlike it.
Writes edits.json and edits.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.pycode.methods import VARIANTS, CallStage, make_engine
from examples.pycode.recipe import Recipe
from specdec.command.settings import resolve_settings
from specdec.decode.api import Engine
from specdec.decode.requests import Request
from specdec.engine.tree import Tree
from specdec.measure.settings import BenchSettings
from specdec.system.processes import call_stage
from specdec.text.grammar import Grammar, GrammarState
from specdec.text.pretrained import load_tokenizer

EDITS = Path(__file__).parent / "edits.jsonl"
ALL = "all"


class Held(Grammar):
    """One text: whatever the target thinks, its next token is chosen."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    def follow(self, output_ids: Sequence[int]) -> HeldState:
        return HeldState(self._ids, output_ids)


class HeldState(GrammarState):
    """Where a request is in that text."""

    is_cut = False

    def __init__(self, ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self._ids, self._output_ids = ids, output_ids

    def shape(self, tree: Tree, logits: Tensor) -> Tensor:
        """Lift the text's tokens on its own way through the tree; nobody asks for others."""
        shaped = logits[: tree.num_nodes].float().clone()
        node: int | None = 0
        for token in self._ids[len(self._output_ids) :]:
            if node is None:
                break
            shaped[node, token] = torch.inf
            below = (tree.parents == node) & (tree.tokens == token)
            node = int(below.argmax()) if below.any() else None
        return shaped

    def list_kept(self, tree: Tree, *, is_drawn: bool) -> list[int]:
        """List all nodes: a target that chooses by itself verifies wrong drafts, too."""
        return [*range(tree.num_nodes)]


def make_requests(path: Path, tokenizer: Any) -> list[tuple[str, Request]]:
    """Category and request of each line; its output can only be the line's reference."""
    requests = []
    for index, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        entry = json.loads(line)
        ids = tokenizer(entry["reference"])["input_ids"]
        request = Request(
            index=index, input_ids=tokenizer(entry["prompt"])["input_ids"],
            max_output_len=len(ids), end_ids=frozenset(), input_text=entry["reference"],
            grammar=Held(ids),
        )  # fmt: skip
        requests.append((entry["category"], request))
    return requests


def count(recipe: Path, edits: Path) -> dict[str, float]:
    """Tokens per verify step of each category, and of all, by the engine of a recipe."""
    settings = resolve_settings(BenchSettings, "bench", {}, recipe).to_decode()
    # In every step, however fast this machine is just now.
    settings = dataclasses.replace(settings, draft_budget="fixed")
    tokenizer = load_tokenizer(str(settings.tokenizer_dir))
    emitted: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    with Engine.open(settings, tokenizer) as engine:
        for category, request in make_requests(edits, tokenizer):
            (result,) = engine.run([request])  # one request at a time, as when a person edits
            if tokenizer.decode(result.output_ids) != request.input_text:
                raise RuntimeError(f"line {request.index + 1}: the output is not the reference")
            for name in (category, ALL):
                emitted[name] += result.stats.num_output_tokens - 1  # the first is the prompt's
                steps[name] += result.stats.num_verify_steps
    return {name: round(emitted[name] / steps[name], 3) for name in emitted}


def format_table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    categories = [*report["lines"]]
    lines = [
        f"| tokens per verify step | {' | '.join(categories)} |",
        f"| --- |{' --- |' * len(categories)}",
        *(
            f"| {name} | {' | '.join(f'{found[c]:.2f}' for c in categories)} |"
            for name, found in report["rows"].items()
        ),
    ]
    return "\n".join(lines) + "\n"


def main(
    words: Sequence[str] | None = None,
    paths: Mapping[str, str] | None = None,
    changes: Recipe | None = None,
    call: CallStage = call_stage,
) -> None:
    """`paths`, `changes` and `call` let a test put other models and calls in their places."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, default=EDITS)
    parser.add_argument("--work-dir", type=Path, default=Path("out/methods"))
    parser.add_argument("--output-dir", type=Path, default=EDITS.parent)
    parser.add_argument("--only", nargs="+", help="some methods, written into --work-dir")
    args = parser.parse_args(words)
    kinds = [json.loads(line)["category"] for line in args.prompts.read_text("utf-8").splitlines()]
    rows: dict[str, dict[str, float]] = {}
    for variant in VARIANTS:
        # A length that adapts to what is fast here is no fixed number of tokens.
        adapts = variant.changes.get("bench", {}).get("draft_len") == "auto"
        if not adapts and (args.only is None or variant.method in args.only):
            recipe = make_engine(variant, args.work_dir, paths or {}, changes or {}, call)
            rows[variant.name] = count(recipe, args.prompts)
            print(f"{variant.name}: {rows[variant.name]}", flush=True)
    report = {"lines": {**Counter(kinds), ALL: len(kinds)}, "rows": rows}
    output = args.work_dir if args.only else args.output_dir
    data, table = (output / f"{args.prompts.stem}{suffix}" for suffix in (".json", ".md"))
    data.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    table.write_text(format_table(report), encoding="utf-8")
    print(table.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
