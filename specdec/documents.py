"""Data files: texts and conversations, as lines or a list of JSON objects, or plain text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.chat import ChatError, Conversation, parse_conversation
from specdec.errors import SpecDecError

KEYS = "text, messages or conversations"
SUFFIXES = (".jsonl", ".json", ".txt")


def check_data_file(path: Path, flag: str) -> None:
    """Raise SpecDecError for a data file that is absent, empty or of another kind."""
    if path.suffix not in SUFFIXES:
        fact = f"{flag} {path} is none of {', '.join(SUFFIXES)}"
        raise SpecDecError(fact, "unpack or rewrite it as one of them, named by what it holds")
    if not path.is_file():
        raise SpecDecError(f"{flag} {path} does not exist", "check the path")
    if path.stat().st_size == 0:
        raise SpecDecError(f"{flag} {path} is empty", "give a file with text or conversations")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that hold something, with their numbers; of a .json list, its rows."""
    if path.suffix == ".json":
        for number, row in enumerate(_read_list(path), 1):
            yield number, json.dumps(row).encode() + b"\n"
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line


def _read_list(path: Path) -> list[Any]:
    advice = "one object a line is a .jsonl file"
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise SpecDecError(f"{path} is not JSON: {error}", f"correct the file; {advice}") from None
    if not isinstance(rows, list):
        raise SpecDecError(f"{path} is a {type(rows).__name__}, not a list of rows", advice)
    return rows


@contextlib.contextmanager
def name_line(path: Path, number: int, keys: str = KEYS) -> Iterator[None]:
    """Turn what a bad line makes the body raise into an error that names the line."""
    hint = None
    try:
        yield
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 ({error.reason})"
    except RecursionError:
        what = "is nested too deeply"
    except ValueError as error:
        what = f"cannot be used: {error}"
        hint = getattr(error, "hint", None)
    else:
        return
    place = "line" if path.suffix in (".jsonl", ".txt") else "row"
    raise SpecDecError(
        f"{path} {place} {number} {what}", hint or f"write JSON objects with the key {keys}"
    )


def parse_object(line: bytes) -> dict[str, Any]:
    """Read a line's JSON object; ValueError if it is none."""
    row = json.loads(line.decode("utf-8"))
    if not isinstance(row, dict):
        raise ValueError(f"it is a {type(row).__name__}, not an object")
    return row


def holds_conversation(row: dict[str, Any]) -> bool:
    """Whether an object has turns; rows of tables have every field, null where it is another's."""
    return any(row.get(key) is not None for key in ("messages", "conversations"))


def read_document(row: dict[str, Any], keys: str = KEYS) -> str | Conversation:
    """Return an object's text or conversation; ValueError if it has neither."""
    if holds_conversation(row):
        _check_characters(row)
        return parse_conversation(row)
    if isinstance(row.get("text"), str):
        _check_characters(row["text"])
        return str(row["text"])
    if "text" in row:
        raise ValueError(f"text is a {type(row['text']).__name__}")
    raise ChatError(
        f"it has none of the keys {keys}, only {', '.join(row) or 'none at all'}",
        "a prompt alone teaches nothing: let the target answer it with `specdec-train data`"
        if "prompt" in row
        else None,
    )


def _check_characters(value: object) -> None:
    """Raise ValueError for half of a character, which no tokenizer takes."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a character, an escape between \\ud800 and \\udfff") from None
