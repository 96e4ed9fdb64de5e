"""Prompt sets by category, in the style of Spec-Bench, and requests made of them."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specdec.decode.prompts import make_requests, read_entries, read_line, read_lines
from specdec.decode.requests import Request
from specdec.decode.settings import DecodeSettings
from specdec.errors import SpecDecError

# Keys of a line besides those of specdec-run; Spec-Bench's files have the first three and `turns`.
OWN_KEYS = ("question_id", "category", "reference", "turns")
ONLY_CATEGORY = "all"
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
    """One entry of a set: a request line of specdec-run, or the user's turns of a conversation."""

    category: str
    entry: dict[str, Any]
    turns: tuple[str, ...] = ()


def read_prompt_set(path: Path | None, batch_size: int = 1) -> list[Prompt]:
    """Read a file, or take the built-in prompts; all are one category where a batch needs more."""
    if path is None:
        counts = collections.Counter(category for category, _ in BUILT_IN)
        is_enough = batch_size <= min(counts.values())
        return [
            Prompt(category if is_enough else ONLY_CATEGORY, {"prompt": text})
            for category, text in BUILT_IN
        ]
    read = functools.partial(read_line, more_keys=OWN_KEYS)
    entries = read_entries(path, read_lines(path, "--prompts"), path.suffix, read)
    return [_make_prompt(f"{path} line {n}", entry) for n, entry in enumerate(entries, 1) if entry]


def _make_prompt(where: str, entry: dict[str, Any]) -> Prompt:
    own = {key: entry.pop(key) for key in OWN_KEYS if key in entry}
    category, turns = own.get("category", ONLY_CATEGORY), own.get("turns")
    if not isinstance(category, str) or not category:
        raise SpecDecError(f"{where}: category is {category!r}, not a text", "correct category")
    if turns is None:
        return Prompt(category, entry)
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise SpecDecError(f"{where}: turns is {turns!r}, not a list of texts", "correct turns")
    return Prompt(category, entry, tuple(turns))


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
    talks: dict[int, list[str]] = {
        index: [prompt.turns[0]] for index, prompt in enumerate(prompts) if prompt.turns
    }
    entries = {
        index: dict(prompt.entry) | (_join_talk(talks[index], tokenizer) if prompt.turns else {})
        for index, prompt in enumerate(prompts)
    }
    number = 0
    while entries:
        made: list[Request] = make_requests(list(entries.values()), settings, tokenizer)
        for index, request in zip(entries, made, strict=True):
            grouped[prompts[index].category].append(dataclasses.replace(request, index=number))
            number += 1
        waiting = {
            index: request
            for index, request in zip(entries, made, strict=True)
            if index in talks and len(talks[index]) // 2 + 1 < len(prompts[index].turns)
        }
        answers = answer(list(waiting.values())) if waiting else []
        entries = {}
        for index, ids in zip(waiting, answers, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            talk = talks[index]
            talk += [text, prompts[index].turns[len(talk) // 2 + 1]]
            entries[index] = dict(prompts[index].entry) | _join_talk(talk, tokenizer)
    return grouped


def _join_talk(talk: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """Return a conversation, the user's turn first and last, as the keys of a request line."""
    if tokenizer is None or not tokenizer.chat_template:
        return {"prompt": "\n".join(talk)}
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(talk)]
    }
