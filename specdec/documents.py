"""Data files: texts and conversations, one JSON object a line, or plain text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.chat import Message, parse_messages
from specdec.errors import SpecDecError

KEYS = "text, messages or conversations"


def check_data_file(path: Path, flag: str) -> None:
    """Raise SpecDecError for a data file that is absent, empty or of another kind."""
    if path.suffix not in (".txt", ".jsonl"):
        raise SpecDecError(
            f"{flag} {path} is neither .txt nor .jsonl",
            "`jq -c '.[]' FILE.json > FILE.jsonl` turns a JSON list into one object a line",
        )
    if not path.is_file():
        raise SpecDecError(f"{flag} {path} does not exist", "check the path")
    if path.stat().st_size == 0:
        raise SpecDecError(f"{flag} {path} is empty", "give a file with text or conversations")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that hold something, with their numbers."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line


@contextlib.contextmanager
def name_line(path: Path, number: int, keys: str = KEYS) -> Iterator[None]:
    """Turn what a bad line makes the body raise into an error that names the line."""
    try:
        yield
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 ({error.reason})"
    except RecursionError:
        what = "is nested too deeply"
    except ValueError as error:
        what = f"cannot be used: {error}"
    else:
        return
    raise SpecDecError(
        f"{path} line {number} {what}", f"write one JSON object a line, with the key {keys}"
    )


def parse_object(line: bytes) -> dict[str, Any]:
    """Read a line's JSON object; ValueError if it is none."""
    row = json.loads(line.decode("utf-8"))
    if not isinstance(row, dict):
        raise ValueError(f"it is a {type(row).__name__}, not an object")
    return row


def read_document(row: dict[str, Any], keys: str = KEYS) -> str | list[Message]:
    """Return an object's text or conversation; ValueError if it has neither."""
    if "messages" in row or "conversations" in row:
        messages = parse_messages(row)
        for message in messages:
            _check_characters(*message.values())
        return messages
    if isinstance(row.get("text"), str):
        _check_characters(row["text"])
        return str(row["text"])
    if "text" in row:
        raise ValueError(f"text is a {type(row['text']).__name__}")
    raise ValueError(f"it has none of the keys {keys}, only {', '.join(row) or 'none at all'}")


def _check_characters(*texts: str) -> None:
    """Raise ValueError for half of a character, which no tokenizer takes."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a character, an escape between \\ud800 and \\udfff") from None
