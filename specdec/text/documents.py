"""Data files: texts and conversations, as lines or a list of JSON objects, or plain text."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError
from specdec.text.chat import ChatError, Conversation, parse_conversation

KEYS = "text, messages, conversations or prompt and completion"
# Names that data sets give the answer to a prompt.
ANSWERS = (
    "completion", "completions", "response", "responses", "output", "answer", "chosen", "target",
    "reply", "generation", "preferred_output", "solution",
)  # fmt: skip
SUFFIXES = (".jsonl", ".json", ".txt")


def check_data_file(path: Path, flag: str) -> None:
    """Raise SpecDecError for a data file that is absent, empty or of another kind."""
    if path.is_dir():
        raise SpecDecError(f"{flag} {path} is a folder", "give one of its files")
    if path.suffix not in SUFFIXES and (path.suffix or path.exists()):
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
        number += error.object.count(b"\n", 0, error.start)  # of a text that was read whole
        fault = f"is not UTF-8 ({error.reason})"
        hint = "save the file as UTF-8, as by `iconv -f CODING -t UTF-8`; CODING may be latin1"
    except RecursionError:
        fault = "is nested too deeply"
    except ValueError as error:
        fault = f"cannot be used: {error}"
        hint = getattr(error, "hint", None)
    else:
        return
    line_noun = "line" if path.suffix in (".jsonl", ".txt") else "row"
    raise SpecDecError(
        f"{path} {line_noun} {number} {fault}", hint or f"write JSON objects with the key {keys}"
    )


def parse_object(line: bytes) -> dict[str, Any]:
    """Read a line's JSON object; ValueError if it is none."""
    row = json.loads(line.decode("utf-8"))
    if not isinstance(row, dict):
        raise ValueError(f"it is a {type(row).__name__}, not an object")
    return row


def holds_conversation(row: dict[str, Any]) -> bool:
    """Return whether an object has turns; a table's rows have every field, null where unused."""
    return any(row.get(key) is not None for key in ("messages", "conversations"))


class PromptedText(str):
    """A text whose beginning is a prompt, which is context and not learned."""

    num_prompt_characters: int

    def __new__(cls, prompt: str, completion: str) -> PromptedText:
        """Join a prompt and its completion."""
        text = super().__new__(cls, prompt + completion)
        text.num_prompt_characters = len(prompt)
        return text


def read_document(row: dict[str, Any], keys: str = KEYS) -> str | Conversation:
    """Return an object's text or conversation; ValueError if it has neither.

    A prompt and its completion are a PromptedText, or where they are messages a conversation of
    which the completion's are learned.
    """
    if holds_conversation(row):
        _check_characters(row)
        return parse_conversation(row)
    if isinstance(row.get("text"), str):
        _check_characters(row["text"])
        return str(row["text"])
    if row.get("text") is not None:
        raise ValueError(f"text is a {type(row['text']).__name__}")
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        _check_characters([prompt, completion])
        return PromptedText(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        _check_characters(row)
        conversation = parse_conversation({**row, "messages": prompt + completion})
        num_added = len(conversation.messages) - len(completion)  # a row's system text is one more
        unlearned = conversation.unlearned | frozenset(range(num_added))
        return dataclasses.replace(conversation, unlearned=unlearned)
    raise ChatError(
        f"it has none of the keys {keys}, only {', '.join(row) or 'none at all'}", _advise(row)
    )


def _advise(row: dict[str, Any]) -> str | None:
    """Return how a row of another form is written so that it can be read; None of no such form."""
    turns, texts = _list_keys(row, _holds_turns), _list_keys(row, _is_text)
    sources = turns + texts
    answers = [name for name in sources if name.lower() in ANSWERS]
    if "prompt" in sources and answers:
        return f"rename {answers[0]} to completion if it is the answer to the prompt"
    if "prompt" in sources:
        return "a prompt alone teaches nothing: let the target answer it with `specdec-train data`"
    if turns and not answers:
        return f"rename {turns[0]} to messages if it is the conversation"
    if len(texts) > 1 or answers:
        return (
            'write what is asked and what is answered as {"prompt": "...", "completion": "..."},'
            ' or as {"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}'
        )
    return None


def _list_keys(row: Mapping[str, Any], holds: Callable[[object], bool]) -> list[str]:
    """List the keys of a row whose values hold something."""
    return [name for name, value in row.items() if holds(value)]


def _is_text(value: object) -> bool:
    """Return whether a value is a text that is not empty."""
    return isinstance(value, str) and bool(value.strip())


def _holds_turns(value: object) -> bool:
    """Return whether a value is a list of turns: objects that say who speaks."""
    return isinstance(value, list) and any(
        isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value
    )


def _check_characters(value: object) -> None:
    """Raise ValueError for half of a character, which no tokenizer takes."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a character, an escape between \\ud800 and \\udfff") from None
