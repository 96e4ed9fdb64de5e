"""Sets of prompts by category, in the style of Spec-Bench, and requests made of them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specdec.decode.prompt_requests import make_requests
from specdec.decode.requests import Request
from specdec.decode.settings import DecodeSettings
from specdec.errors import SpecDecError
from specdec.text.prompts import Line, Prompt, read_prompts

# Keys of a line besides those of specdec-run; Spec-Bench's files have the first three and `turns`.
OWN_KEYS = ("question_id", "category", "reference", "turns")
ONLY_CATEGORY = "all"
# Spec-Bench's tasks are its file's categories; those of MT-bench together are one task.
MT_BENCH, MT_BENCH_CATEGORIES = "mt_bench", (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
HUMAN_EVAL, HUMAN_EVAL_KEYS = (
    "humaneval", ("task_id", "entry_point", "canonical_solution", "test"),
)  # fmt: skip
BUILT_IN = (
    ("code", "def read_lines(path):\n    "),
    ("code", "import json\n\n\nclass Settings:\n    def __init__(self, path):\n        "),
    ("question", "Question: Why is the sky blue?\nAnswer:"),
    ("question", "Question: How does a refrigerator work?\nAnswer:"),
    ("story", "Once upon a time, in a village by the sea, there lived a fisherman who"),
    ("story", "The letter had been lying on the table for three days before anyone"),
    ("list", "The planets of the solar system, from the sun outwards, are: 1."),
    ("list", "Things to take along on a hike:\n-"),
)


@dataclasses.dataclass(frozen=True)
class BenchPrompt:
    """Entry of a set: a prompt of specdec-run, or the user's turns of a conversation."""

    category: str
    prompt: Prompt
    turns: tuple[str, ...] = ()


def read_prompt_set(
    path: Path | None, batch_size: int = 1, num_each: int | None = None
) -> list[BenchPrompt]:
    """Read a file or a benchmark's prompts, or take the built-in ones.

    path: a file, or a benchmark's name, a colon and the benchmark's path. batch_size: the largest
    batch; where the categories of built-in prompts are smaller, they become one. num_each: number
    of prompts of each category, at even distances in the file; None for all.
    """
    if path is None:
        counts = collections.Counter(category for category, _ in BUILT_IN)
        is_enough = batch_size <= min(num_each or len(BUILT_IN), *counts.values())
        entries = [
            BenchPrompt(category if is_enough else ONLY_CATEGORY, Prompt(text=text))
            for category, text in BUILT_IN
        ]
    else:
        benchmark, _, benchmark_path = str(path).partition(":")
        read = BENCHMARKS.get(benchmark) if benchmark_path else None
        entries = _read_file(path) if read is None else read(Path(benchmark_path))
    return entries if num_each is None else _sample_evenly(entries, num_each)


def _sample_evenly(entries: Sequence[BenchPrompt], num_each: int) -> list[BenchPrompt]:
    """Return at most `num_each` entries of each category, at even distances."""
    by_category: dict[str, list[int]] = {}
    for index, entry in enumerate(entries):
        by_category.setdefault(entry.category, []).append(index)
    sample = {
        indices[number * len(indices) // min(num_each, len(indices))]
        for indices in by_category.values()
        for number in range(min(num_each, len(indices)))
    }
    return [entries[index] for index in sorted(sample)]


def _read_file(path: Path) -> list[BenchPrompt]:
    return [_make_prompt(line) for line in read_prompts(path, "--prompts", OWN_KEYS)]


def read_spec_bench(folder: Path) -> list[BenchPrompt]:
    """Read the questions of a clone of https://github.com/hemingkx/Spec-Bench, by its tasks."""
    path = next((p for p in (folder / name for name in SPEC_BENCH_FILES) if p.is_file()), None)
    if path is None:
        raise SpecDecError(
            f"{folder} holds no Spec-Bench: there is neither {' nor '.join(SPEC_BENCH_FILES)}",
            "git clone https://github.com/hemingkx/Spec-Bench, and name that folder",
        )
    return [
        dataclasses.replace(p, category=MT_BENCH) if p.category in MT_BENCH_CATEGORIES else p
        for p in _read_file(path)
    ]


def read_human_eval(path: Path) -> list[BenchPrompt]:
    """Read the function heads of https://github.com/openai/human-eval, each as a user's turn."""
    lines = read_prompts(path, "--prompts", HUMAN_EVAL_KEYS)
    for line in lines:
        if line.prompt.text is None or "task_id" not in line.other_fields:
            raise SpecDecError(
                f'{line.location} has no "task_id" or no "prompt"',
                "name HumanEval.jsonl or HumanEval.jsonl.gz",
            )
    return [BenchPrompt(HUMAN_EVAL, Prompt(), (str(line.prompt.text),)) for line in lines]


SPEC_BENCH_FILES = ("data/spec_bench/question.jsonl", "question.jsonl")
BENCHMARKS = {"spec-bench": read_spec_bench, "humaneval": read_human_eval}


def _make_prompt(line: Line) -> BenchPrompt:
    source = line.location
    fields = line.other_fields
    category, turns = fields.get("category", ONLY_CATEGORY), fields.get("turns")
    if not isinstance(category, str) or not category:
        raise SpecDecError(f"{source}: category is {category!r}, not a text", "correct category")
    if turns is None:
        return BenchPrompt(category, line.prompt)
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise SpecDecError(f"{source}: turns is {turns!r}, not a list of texts", "correct turns")
    return BenchPrompt(category, line.prompt, tuple(turns))


def group_requests(
    entries: Sequence[BenchPrompt],
    settings: DecodeSettings,
    tokenizer: Any,
    answer: Callable[[Sequence[Request]], list[list[int]]],
) -> dict[str, list[Request]]:
    """Make requests of a set of prompts, by category.

    Every turn is a request of its own, with the conversation so far in its prompt; `answer`
    decodes the requests of earlier turns, whose answers later turns follow.
    """
    groups: dict[str, list[Request]] = {entry.category: [] for entry in entries}
    talks: list[list[str]] = [[] for _ in entries]
    requests: dict[int, Request] = {}  # of the latest turn, by the entry's index
    numbers = itertools.count()
    lengths = [max(1, len(entry.turns)) for entry in entries]
    for turn in range(max(lengths, default=0)):
        indices = [index for index, length in enumerate(lengths) if turn < length]
        if turn:
            answers = answer([requests[index] for index in indices])
            for index, ids in zip(indices, answers, strict=True):
                talks[index].append(tokenizer.decode(ids, skip_special_tokens=True))
        prompts = [_take_turn(entries[index], turn, talks[index], tokenizer) for index in indices]
        turn_requests = make_requests(prompts, settings, tokenizer)
        for index, request in zip(indices, turn_requests, strict=True):
            requests[index] = request
            numbered_request = dataclasses.replace(request, index=next(numbers))
            groups[entries[index].category].append(numbered_request)
    return groups


def _take_turn(entry: BenchPrompt, turn: int, talk: list[str], tokenizer: Any) -> Prompt:
    """Add the user's words of a turn to the conversation, and return the prompt of the turn."""
    if not entry.turns:
        return entry.prompt
    talk.append(entry.turns[turn])
    return _join_talk(entry.prompt, talk, tokenizer)


def _join_talk(prompt: Prompt, talk: Sequence[str], tokenizer: Any) -> Prompt:
    """Return the prompt of a conversation, whose first and last turn are the user's."""
    if tokenizer is None or not tokenizer.chat_template:
        return dataclasses.replace(prompt, text="\n".join(talk))
    roles = ("user", "assistant")
    messages = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(talk)]
    return dataclasses.replace(prompt, messages=messages)
