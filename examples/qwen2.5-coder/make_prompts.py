#!/usr/bin/env python3
"""Make prompts for the drafter of Qwen2.5-Coder from data that others published.

    python make_prompts.py --gsm8k grade-school-math --self-instruct self-instruct \\
        --turns prompts.jsonl --without question.jsonl HumanEval.jsonl.gz --output more.jsonl

--gsm8k: a clone of https://github.com/openai/grade-school-math (MIT), of which the training part is
read. --self-instruct: a clone of https://github.com/yizhongw/self-instruct (Apache-2.0), which has
instructions by people, and tasks of T0 about texts, questions and dialogues. --turns: prompts of
examples/smollm2/make_prompts.py, of which those about code and translations are taken. --known:
files whose prompts are left out. Of each kind there are as many as the constants below say, those
of the lowest hash. Prompts of more than 1,400 characters, and those that share 8 words in a row
with a benchmark's (--without), are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.smollm2.make_prompts import list_runs, read_benchmark, sort_by_hash

MAX_CHARACTERS = 1400
TASKS = "data/finetuning/t0_train_50k/data_per_template"
# How many prompts of a kind are taken, and the tasks of T0 that have them.
KINDS: dict[str, tuple[int, Sequence[str]]] = {
    "questions": (180, (
        "kilt_tasks_hotpotqa_straighforward_qa", "kilt_tasks_hotpotqa_final_exam",
        "sciq_Direct_Question_Closed_Book_", "wiki_qa_Direct_Answer_to_Question",
    )),
    "contexts": (120, (
        "quoref_Given_Context_Answer_Question", "adversarial_qa_dbidaf_based_on",
        "adversarial_qa_droberta_question_context_answer",
    )),
    "summaries": (170, (
        "cnn_dailymail_3_0_0_2_or_3_sentences", "cnn_dailymail_3_0_0_news_summary",
        "xsum_summarize_DOC", "xsum_DOC_write_summary_of_above", "samsum_Summarize_this_dialogue_",
        "multi_news_summarize",
    )),
    "writing": (60, ("gigaword_write_an_article", "cnn_dailymail_3_0_0_generate_story")),
}  # fmt: skip
NUM_PROBLEMS, NUM_TRANSLATIONS, NUM_FUNCTIONS = 300, 90, 200


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def list_instructions(clone: Path) -> Iterator[str]:
    """Yield instructions that people wrote, each with its first input."""
    for name in ("human_eval/user_oriented_instructions.jsonl", "data/seed_tasks.jsonl"):
        for row in read_rows(clone / name):
            yield f"{row['instruction']}\n\n{row['instances'][0]['input']}"


def list_kinds(args: argparse.Namespace) -> Iterator[tuple[int | None, list[str]]]:
    """Yield the prompts of each kind, and how many of these are taken; None: all."""
    problems = read_rows(args.gsm8k / "grade_school_math/data/train.jsonl")
    yield NUM_PROBLEMS, [row["question"] for row in problems]
    yield None, list(list_instructions(args.self_instruct))
    for count, tasks in KINDS.values():
        rows = [
            row for task in tasks for row in read_rows(args.self_instruct / TASKS / f"{task}.jsonl")
        ]
        yield count, [row["prompt"] for row in rows]
    turns = [row["prompt"] for row in read_rows(args.turns)]
    yield NUM_TRANSLATIONS, [text for text in turns if text.startswith("Translate ")]
    yield NUM_FUNCTIONS, [text for text in turns if "def " in text or "Python" in text]


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--gsm8k", "--self-instruct", "--turns", "--output"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="benchmarks' prompts")
    parser.add_argument(
        "--known", type=Path, nargs="*", default=[], help="files of prompts to leave out"
    )
    args = parser.parse_args()
    known_runs = set[tuple[str, ...]]().union(*map(read_benchmark, args.without))
    known_texts = {row["prompt"] for path in args.known for row in read_rows(path)}
    prompts: list[str] = []
    for count, texts in list_kinds(args):
        kept = [
            text
            for text in sort_by_hash({text.strip() for text in texts} - known_texts)
            if len(text) <= MAX_CHARACTERS and known_runs.isdisjoint(list_runs(text))
        ]
        prompts += kept[:count]
    lines = (json.dumps({"prompt": text}) + "\n" for text in sort_by_hash(prompts))
    args.output.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
