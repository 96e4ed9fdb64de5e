"""Prompt sets by category, in the style of Spec-Bench, and requests made of them."""

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
from specdec.text.prompts import Line, read_prompts
from specdec.text.prompts import Prompt as Asked

# Keys of a line besides those of specdec-run; Spec-Bench's files have the first three and `turns`.
OWN_KEYS = ("question_id", "category", "reference", "turns")
ONLY_CATEGORY = "all"
# Spec-Bench's tasks are its file's categories, but for those of MT-bench, which are one together.
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
class Prompt:
    """One entry of a set: a prompt of specdec-run, or the user's turns of a conversation."""

    category: str
    asked: Asked
    turns: tuple[str, ...] = ()


def read_prompt_set(
    path: Path | None, batch_size: int = 1, num_each: int | None = None
) -> list[Prompt]:
    """Read a file or a benchmark's prompts, or take the built-in ones.

    path: a file, or the name of a benchmark, a colon and where it lies. batch_size: the largest;
    built-in prompts are one category where it needs more than each has. num_each: prompts of each
    category, None for all; they stand at even distances in the file.
    """
    if path is None:
        counts = collections.Counter(category for category, _ in BUILT_IN)
        is_enough = batch_size <= min(num_each or len(BUILT_IN), *counts.values())
        found = [
            Prompt(category if is_enough else ONLY_CATEGORY, Asked(text=text))
            for category, text in BUILT_IN
        ]
    else:
        benchmark, _, place = str(path).partition(":")
        read = BENCHMARKS.get(benchmark) if place else None
        found = _read_file(path) if read is None else read(Path(place))
    return found if num_each is None else _thin(found, num_each)


def _thin(prompts: Sequence[Prompt], num_each: int) -> list[Prompt]:
    by_category: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_category.setdefault(prompt.category, []).append(index)
    kept = {
        own[number * len(own) // num_each] if num_each < len(own) else own[number]
        for own in by_category.values()
        for number in range(min(num_each, len(own)))
    }
    return [prompts[index] for index in sorted(kept)]


def _read_file(path: Path) -> list[Prompt]:
    return [_make_prompt(line) for line in read_prompts(path, "--prompts", OWN_KEYS)]


def read_spec_bench(folder: Path) -> list[Prompt]:
    """The questions of a clone of https://github.com/hemingkx/Spec-Bench, by its six tasks."""
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


def read_human_eval(path: Path) -> list[Prompt]:
    """The beginnings of functions of https://github.com/openai/human-eval, each a user's turn."""
    lines = read_prompts(path, "--prompts", HUMAN_EVAL_KEYS)
    for line in lines:
        if line.prompt.text is None or "task_id" not in line.others:
            raise SpecDecError(
                f'{line.where} has no "task_id" or no "prompt"',
                "name HumanEval.jsonl or HumanEval.jsonl.gz",
            )
    return [Prompt(HUMAN_EVAL, Asked(), (str(line.prompt.text),)) for line in lines]


SPEC_BENCH_FILES = ("data/spec_bench/question.jsonl", "question.jsonl")
BENCHMARKS = {"spec-bench": read_spec_bench, "humaneval": read_human_eval}


def _make_prompt(line: Line) -> Prompt:
    where = line.where
    category, turns = line.others.get("category", ONLY_CATEGORY), line.others.get("turns")
    if not isinstance(category, str) or not category:
        raise SpecDecError(f"{where}: category is {category!r}, not a text", "correct category")
    if turns is None:
        return Prompt(category, line.prompt)
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise SpecDecError(f"{where}: turns is {turns!r}, not a list of texts", "correct turns")
    return Prompt(category, line.prompt, tuple(turns))


def group_requests(
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    tokenizer: Any,
    answer: Callable[[Sequence[Request]], list[list[int]]],
) -> dict[str, list[Request]]:
    """Make requests, by category; `answer` decodes what a later turn is asked after.

    Every turn is a request of its own, with the conversation so far in its prompt.
    """
    grouped: dict[str, list[Request]] = {prompt.category: [] for prompt in prompts}
    talks: list[list[str]] = [[] for _ in prompts]
    last: dict[int, Request] = {}  # of each prompt
    numbers = itertools.count()
    for turn in range(max((max(1, len(prompt.turns)) for prompt in prompts), default=0)):
        going_on = [index for index, p in enumerate(prompts) if turn < max(1, len(p.turns))]
        if turn:
            answers = answer([last[index] for index in going_on])
            for index, ids in zip(going_on, answers, strict=True):
                talks[index].append(tokenizer.decode(ids, skip_special_tokens=True))
        entries = []
        for index in going_on:
            asked = prompts[index].asked
            if prompts[index].turns:
                talks[index].append(prompts[index].turns[turn])
                asked = _join_talk(asked, talks[index], tokenizer)
            entries.append(asked)
        made = make_requests(entries, settings, tokenizer)
        for index, request in zip(going_on, made, strict=True):
            last[index] = request
            own = dataclasses.replace(request, index=next(numbers))
            grouped[prompts[index].category].append(own)
    return grouped


def _join_talk(prompt: Asked, talk: Sequence[str], tokenizer: Any) -> Asked:
    """Return a prompt of a conversation, the user's turn first and last."""
    if tokenizer is None or not tokenizer.chat_template:
        return dataclasses.replace(prompt, text="\n".join(talk))
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(talk)]
    return dataclasses.replace(prompt, messages=messages)
