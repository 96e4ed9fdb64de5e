"""Marks of turns and rows that say whether they are learned: `weight: 0`, `train: false`.

Every trainer has its own key: `weight` (OpenAI, Mistral, Together, ShareGPT in axolotl), `train`
and `training` (axolotl), `loss` (ms-swift, XTuner), `masked` (torchtune), `step_loss_mask` (slime),
`trainable` (Tinker). So a key is read by its words: it is a mark if all of them are about learning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specdec.errors import shorten

LEARNING = frozenset(
    "train trained training trainable learn learned learning learnable loss weight weights label"
    " labels supervise supervised supervision grad gradient backprop backpropagate finetune"
    " finetuned finetuning unmask unmasked".split()
)
# Words that turn the meaning round; a noun after a word of learning (loss_mask) does not.
NEGATING = frozenset(
    "no not non dont without never mask masks masked masking ignore ignored skip skipped exclude"
    " excluded disable disabled untrained unlearned unsupervised".split()
)
MASK_NOUNS = ("mask", "masks")
NEUTRAL = frozenset(
    "is be are has use used should shall must do does to on in of for from the this it turn step"
    " message token tokens sample example row answer response assistant content part requires"
    " require need needs compute calculate apply contributes contribute include included flag"
    " scale factor multiplier coefficient detail details completion out with enable enabled".split()
)
# Whose mask has 1 for what is learned, as a mask of the loss has.
LEARNED_PARTS = frozenset("assistant answer response completion".split())
# A number beside 0 and 1 under one of these asks for a part of the loss; elsewhere it counts.
AMOUNTS = frozenset("weight weights loss scale factor multiplier coefficient".split())
ONLY_NEGATIONS = frozenset(
    "no not non dont without never disable disabled".split()
)  # of some other word, not of learning
TRUTH_WORDS = {
    "true": True, "yes": True, "on": True, "false": False, "no": False, "off": False,
}  # fmt: skip


def read_mark(fields: Mapping[str, Any], location: str) -> tuple[bool, list[str]]:
    """Return whether a turn's fields let it be learned, and the names of the fields that say so.

    where: the turn, for the error. Raises MarkError for a mark that is neither yes nor no.
    """
    marks = {}
    for name, value in fields.items():
        mark = _read_field(name, value)
        if mark is not None:
            marks[name] = mark
        elif _asks_for_a_part(name, value):
            raise MarkError(
                f"{location} has {name} {shorten(value)}: a turn is learned whole or not at all"
            )
    return all(marks.values()), list(marks)


def read_turn(turn: Mapping[str, Any], location: str) -> tuple[bool, list[str]]:
    """Read a turn's marks as `read_mark` does, with those that parts of its content have."""
    is_learned, names = read_mark(turn, location)
    content = turn.get("content", turn.get("value"))
    content_parts = (
        [content_part for content_part in content if isinstance(content_part, dict)]
        if isinstance(content, list)
        else []
    )
    marks = {read_mark(content_part, f"a part of {location}")[0] for content_part in content_parts}
    if len(marks) > 1:
        raise MarkError(f"{location} has parts that are learned and others that are not")
    return is_learned and marks != {False}, names


def is_row_learned(row: Mapping[str, Any], roles: Mapping[str, str]) -> bool:
    """Return whether a row's own marks let it be learned.

    roles: of data sets, and whose turn each is. NeMo's `mask` names the role that is not learned.
    """
    mask = row.get("mask")
    if isinstance(mask, str) and roles.get(mask.lower()) == "assistant":
        return False
    if row.get("kto_tag") is False:
        return False
    is_text = isinstance(row.get("text"), str)  # whose label is a class of texts
    return all(
        _read_field(name, value) is not False
        for name, value in row.items()
        if not isinstance(value, (list, dict)) and not (is_text and name == "label")
    )


class MarkError(ValueError):
    """Error for a mark that asks training for something that it does not do."""

    hint = (
        "write 1 or true for a turn that is to be learned, 0 or false for one that is not, or"
        " leave such rows out"
    )


def _read_field(name: str, value: Any) -> bool | None:
    """Return what a field says of learning, None where it says nothing that is yes or no."""
    is_positive = _find_meaning(name)
    values = value if isinstance(value, list) else [value]
    if is_positive is None or (name.startswith("label") and not isinstance(value, bool)):
        return None  # a label that is no bool is a class, as `quality:4`
    answers = {_read_value(item) for item in values}
    return answers.pop() is is_positive if len(answers) == 1 and None not in answers else None


def _read_value(value: Any) -> bool | None:
    if isinstance(value, dict):  # a part of a turn, as axolotl's train_detail has them
        marks = {_read_field(name, item) for name, item in value.items()} - {None}
        return marks.pop() if len(marks) == 1 else None
    if isinstance(value, str) and (answer := TRUTH_WORDS.get(value.strip().lower())) is not None:
        return answer
    number = _read_number(value)
    return bool(number) if number in (0, 1) else None


def _read_number(value: Any) -> float | None:
    """Return a number, also of a text that is one; None of anything else."""
    if not isinstance(value, (bool, int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _asks_for_a_part(name: str, value: Any) -> bool:
    """Return whether a mark wants a part of a turn to be learned, or a turn in part."""
    if _find_meaning(name) is None or name.startswith("label") or isinstance(value, bool):
        return False
    if isinstance(value, list):
        return bool(value)
    return _read_number(value) is not None and not AMOUNTS.isdisjoint(split_words(name))


def split_words(name: str) -> list[str]:
    """Return the words of a key, whichever way it joins them."""
    return re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def _find_meaning(name: str) -> bool | None:
    """Return True for a key whose yes lets learn, False for one whose yes forbids it, else None."""
    words = split_words(name)
    if not LEARNING | NEGATING | NEUTRAL >= set(words) or NEUTRAL | ONLY_NEGATIONS >= set(words):
        return None
    is_positive, has_subject = True, False
    for word in words:
        if word in NEGATING and not (has_subject and word in MASK_NOUNS):
            is_positive = not is_positive
        has_subject |= word in LEARNING or word in LEARNED_PARTS
    return is_positive
