"""The input's rows, of any usual format, and how each is answered turn by turn."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec.chat import (
    OPTIONS,
    Conversation,
    Message,
    convert_arguments,
    get_speaker,
    parse_conversation,
)
from specdec.decode.text import INCOMPLETE
from specdec.documents import (
    SUFFIXES,
    check_data_file,
    holds_conversation,
    name_line,
    parse_object,
    read_lines,
)
from specdec.errors import SpecDecError
from specdec.files.manifest import describe_file
from specdec.hub import describe_answer

from .settings import DataSettings

PROMPT_KEYS = ("prompt", "text")
ASKING_ROLES = ("user", "tool")


class RowError(Exception):
    """A row cannot be answered; the others can. is_passing: another try may succeed."""

    def __init__(self, reason: str, *, is_passing: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_passing = is_passing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row as it was read: a line of a file, or a dataset's value."""

    index: int  # from 0, of the input's rows
    place: int  # line of the file, or number in the list or dataset, from 1
    line: bytes | None = None
    value: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The input: how many rows, and what a manifest tells of it."""

    name: str
    num_rows: int
    facts: dict[str, Any]
    path: Path | None = None
    rows: Any = None  # a dataset, where it is no file

    def read(self) -> Iterator[Row]:
        """Yield the rows in order."""
        if self.path is not None:
            for index, (number, line) in enumerate(read_lines(self.path)):
                if index >= self.num_rows:
                    return
                yield Row(index=index, place=number, line=line)
        else:
            for index in range(self.num_rows):
                yield Row(index=index, place=index + 1, value=self.rows[index])


def open_source(settings: DataSettings) -> Source:
    """Find the input: a file, or else a dataset of the Hub."""
    name = settings.input
    path = Path(name)
    if not path.is_file() and path.suffix not in SUFFIXES:
        source = _load_dataset(name, settings.dataset_split)
    else:
        check_data_file(path, "--input")
        num_rows = sum(1 for _ in read_lines(path))
        source = Source(name=name, path=path, num_rows=num_rows, facts=describe_file(path))
    if not source.num_rows:
        raise SpecDecError(f"--input {name} holds no row", "give a file with rows")
    wanted = settings.max_rows or source.num_rows
    return dataclasses.replace(source, num_rows=min(wanted, source.num_rows))


def _load_dataset(name: str, split: str) -> Source:
    try:
        from datasets import load_dataset
    except ImportError:
        raise SpecDecError(
            f"--input {name} is not a file, and to take it from the Hub"
            " `datasets` is not installed",
            "check the path, or pip install datasets",
        ) from None
    try:
        rows = load_dataset(name, split=split)
    except Exception as error:  # noqa: BLE001 - `datasets` raises whatever it likes
        raise SpecDecError(
            f"--input {name} is not a file, and `datasets` cannot load its split {split}: the"
            f" Hub {describe_answer(error)}",
            "check the path or the Hub id, and --dataset-split",
        ) from None
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    facts = {"dataset": name, "split": split, "rows": len(rows), "sha256": digest.hexdigest()}
    return Source(name=name, rows=rows, num_rows=len(rows), facts=facts)


class Dialogue:
    """One row on its way: what is asked next, and the answers so far.

    In a chat an assistant's turn is made again wherever one follows a user's or a tool's, and after
    the last of those; every answer is given in view of the new ones before it. A tool's turn that
    follows a call is an answer to that call: where the target does not call the same, the
    conversation ends with what it says.
    """

    def __init__(self, row: Row, settings: DataSettings, source: Source) -> None:
        self.row = row
        self.id: Any = None
        self.is_truncated = False
        self.num_answers = 0
        self._prompt: str | None = None
        self._messages: list[Message] = []
        self._options: Mapping[str, Any] = {}
        self._turns = self._plan(row, settings, source)

    def ask(self) -> str | Conversation | None:
        """Return the prompt or the messages that are to be answered next; None at the end."""
        while self._turns and self._turns[0]["role"] != "assistant":
            self._messages.append(self._turns.pop(0))
        if not self._turns:
            return None
        return Conversation(self._messages, self._options) if self._prompt is None else self._prompt

    def add(self, answer: Message, *, is_truncated: bool) -> None:
        """Take the answer. One that was cut ends the conversation, without half a character."""
        if is_truncated:
            answer = {**answer, "content": answer["content"].rstrip(INCOMPLETE)}
        self.num_answers += 1
        old = self._turns.pop(0)
        calls, old_calls = (_list_calls(message) for message in (answer, old))
        if calls and calls == old_calls:
            answer = {**answer, "tool_calls": old["tool_calls"]}  # whose ids the results name
        self._messages.append({"role": "assistant", **answer})
        is_lost = calls != old_calls and bool(self._turns) and get_speaker(self._turns[0]) == "tool"
        if is_truncated or is_lost:
            self.is_truncated = is_truncated
            self._turns.clear()

    def to_json(self) -> dict[str, Any]:
        """The row of the output, as `specdec-train --data` takes it."""
        document: dict[str, Any] = {"index": self.row.index}
        if self.id is not None:
            document["id"] = self.id
        if self._prompt is None:
            document["messages"] = self._messages
            document |= {k: v for k, v in self._options.items() if k in OPTIONS}
            if more := {k: v for k, v in self._options.items() if k not in OPTIONS}:
                document["chat_template_kwargs"] = more
        else:
            document["prompt"] = self._prompt
            document["text"] = self._prompt + self._messages[-1]["content"]
        if self.is_truncated:
            document["truncated"] = True
        return document

    def _plan(self, row: Row, settings: DataSettings, source: Source) -> list[Message]:
        """Return the turns to come; those of the assistant are what the data says."""
        try:
            with name_line(Path(source.name), row.place, "messages, conversations, prompt or text"):
                value = self._parse(row, source)
                json.dumps(value, ensure_ascii=False, default=str).encode()  # or it is no text
                is_chat = holds_conversation(value)
                prompt = next((value[k] for k in PROMPT_KEYS if k in value), None)
                if not is_chat and isinstance(prompt, list):  # TRL's form
                    is_chat, value = True, {**value, "messages": prompt}
                if is_chat and not settings.completion:
                    conversation = parse_conversation(value)
                    self._options = conversation.options
                    return _plan_answers(conversation.messages, settings.system_prompt)
                if not isinstance(prompt, str) or not prompt.strip():
                    kind = "a plain prompt" if settings.completion else "a conversation or a prompt"
                    raise ValueError(
                        f"it does not hold {kind}, only {', '.join(value) or 'nothing'}"
                    )
        except SpecDecError as error:
            raise RowError(error.message) from None
        if settings.completion:
            self._prompt = prompt
            return [{"role": "assistant", "content": ""}]
        return _plan_answers([{"role": "user", "content": prompt}], settings.system_prompt)

    def _parse(self, row: Row, source: Source) -> dict[str, Any]:
        value = row.value
        if row.line is not None and source.path is not None and source.path.suffix == ".txt":
            value = {"prompt": row.line.decode("utf-8").rstrip("\r\n")}
        elif row.line is not None:
            value = parse_object(row.line)
        if not isinstance(value, dict):
            raise ValueError(f"it is a {type(value).__name__}, not an object")
        if isinstance(value.get("id"), (str, int)):
            self.id = value["id"]
        return value


def _list_calls(message: Message) -> list[Any]:
    """The functions that a message calls, with their arguments."""
    (plain,) = convert_arguments([message], to_text=False)
    calls = [call["function"] for call in plain.get("tool_calls", [])]
    return [(call["name"], call["arguments"]) for call in calls]


def _plan_answers(messages: list[Message], system_prompt: str | None) -> list[Message]:
    turns: list[Message] = []
    if system_prompt is not None and all(get_speaker(m) != "system" for m in messages):
        turns.append({"role": "system", "content": system_prompt})
    for message in [*messages, {"role": "assistant", "content": ""}]:
        if message["role"] != "assistant" or (turns and get_speaker(turns[-1]) in ASKING_ROLES):
            turns.append(message)
    if all(turn["role"] != "assistant" for turn in turns):
        raise ValueError("there is no user's turn to answer")
    return turns
