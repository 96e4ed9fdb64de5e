#!/usr/bin/env python3
"""Collect the texts whose n-grams the tables of specdec/tables count; the README has the sources.

    git clone https://github.com/allenai/WildBench
    git clone https://github.com/teknium1/GPTeacher
    git clone https://github.com/openai/grade-school-math
    python collect.py --wild-bench WildBench --teacher GPTeacher \\
        --grade-school-math grade-school-math \\
        --without Spec-Bench/data/spec_bench/question.jsonl HumanEval.jsonl.gz \\
        --output texts.jsonl
    specdec train ngrams --data texts.jsonl --tokenizer-dir MODEL --output TABLE.safetensors

Answers of three models to tasks that people set (WildBench), written code and played roles
(GPTeacher), worked answers to school mathematics, and modules of Python's standard library. A text
that shares 8 words in a row with a benchmark's prompt is left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path("eval_results/v2.0522/score.v2/eval=gpt-4o-2024-05-13")
MODELS = ("Qwen1.5-72B-Chat-greedy", "Qwen1.5-72B-Chat", "Phi-3-mini-128k-instruct")
TEACHER = (
    "Codegen/codegen-instruct.json", "Roleplay/roleplay-simple-deduped-roleplay-instruct.json"
)  # fmt: skip
NUM_WORDS = 8  # in a row, by which a text gives a benchmark away
CODE_CHARACTERS = 6_000_000  # of the standard library, at most
LEFT_OUT_MODULES = ("test", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings")


def list_runs(text: str) -> Iterator[tuple[str, ...]]:
    """Yield every run of words of a text."""
    words = re.findall(r"\w+", text.lower())
    for start in range(len(words) - NUM_WORDS + 1):
        yield tuple(words[start : start + NUM_WORDS])


def read_benchmark(path: Path) -> Iterator[str]:
    """Yield the prompts of a benchmark's file, of lines with `turns` or `prompt`."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8")
    with opened as file:
        for line in file:
            row = json.loads(line)
            yield from row.get("turns") or [row["prompt"]]


def read_answers(wild_bench: Path) -> Iterator[str]:
    """Yield the answers of the models."""
    for model in MODELS:
        rows = json.loads((wild_bench / RESULTS / f"{model}.json").read_text(encoding="utf-8"))
        for row in rows:
            if isinstance(row["model_output"], str):
                yield row["model_output"]


def read_teacher(folder: Path) -> Iterator[str]:
    """Yield responses to instructions."""
    for name in TEACHER:
        for row in json.loads((folder / name).read_text(encoding="utf-8")):
            yield row["response"]


def read_mathematics(folder: Path) -> Iterator[str]:
    """Yield worked answers, without the marks of a calculator."""
    path = folder / "grade_school_math" / "data" / "train.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines():
        yield re.sub(r"<<.*?>>", "", json.loads(line)["answer"])


def read_library() -> Iterator[str]:
    """Yield modules of the standard library, in an order that its names do not choose."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if not {*LEFT_OUT_MODULES} & {*path.parts})
    random.Random(0).shuffle(paths)
    num_characters = 0
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if num_characters + len(text) <= CODE_CHARACTERS:
            num_characters += len(text)
            yield text


def main() -> None:
    """Write the texts, and say how many there are of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wild-bench", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--grade-school-math", type=Path, required=True)
    parser.add_argument("--without", type=Path, nargs="+", default=[])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    benchmark_runs = {
        run for path in args.without for text in read_benchmark(path) for run in list_runs(text)
    }
    sources = {
        "answers": read_answers(args.wild_bench), "teacher": read_teacher(args.teacher),
        "mathematics": read_mathematics(args.grade_school_math), "library": read_library(),
    }  # fmt: skip
    with args.output.open("w", encoding="utf-8") as file:
        for name, texts in sources.items():
            num_texts = num_left_out = 0
            for text in texts:
                if any(run in benchmark_runs for run in list_runs(text)):
                    num_left_out += 1
                    continue
                num_texts += 1
                file.write(json.dumps({"text": text}) + "\n")
            print(f"{name}: {num_texts} texts, {num_left_out} left out")


if __name__ == "__main__":
    main()
