"""Rows of the input, in any usual format, and the dialogues that answer them turn by turn."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError
from specdec.files.hub import describe_answer
from specdec.files.manifest import describe_file
from specdec.text.chat import (
    OPTIONS,
    Conversation,
    Message,
    get_speaker,
    parse_conversation,
)
from specdec.text.documents import (
    SUFFIXES,
    check_data_file,
    holds_conversation,
    name_line,
    parse_object,
    read_lines,
)
from specdec.text.text_stream import INCOMPLETE
from specdec.text.tool_calls import convert_arguments

from .settings import DataSettings
from .shards import RowShard, parse_shard

PROMPT_KEYS = ("prompt", "text")
ASKING_ROLES = ("user", "tool")


class RowError(Exception):
    """Error of one row, which leaves the others alone; is_transient: another run may succeed."""

    def __init__(self, reason: str, *, is_transient: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_transient = is_transient


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Row of the input: a line of a file, or a dataset's value."""

    index: int  # from 0, of the input's rows
    number: int  # line of the file, or number in the list or dataset, from 1
    line: bytes | None = None
    value: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource:
    """Input file or dataset: its name, its number of rows, its facts for the manifest.

    shard: whose rows are read.
    """

    name: str
    num_rows: int
    shard: RowShard = RowShard()
    facts: dict[str, Any]
    path: Path | None = None
    rows: Any = None  # a dataset of the Hub, where there is no path

    @property
    def num_shard_rows(self) -> int:
        return len(range(self.shard.number, self.num_rows, self.shard.count))

    def read(self) -> Iterator[Row]:
        """Yield the shard's rows in order."""
        return (row for row in self._read_all() if row.index in self.shard)

    def _read_all(self) -> Iterator[Row]:
        if self.path is not None:
            for index, (number, line) in enumerate(read_lines(self.path)):
                if index >= self.num_rows:
                    return
                yield Row(index=index, number=number, line=line)
        else:
            for index in range(self.num_rows):
                yield Row(index=index, number=index + 1, value=self.rows[index])


def open_source(settings: DataSettings) -> DataSource:
    """Open the input: a file, or else a dataset of the Hub."""
    name = settings.input
    path = Path(name)
    if not path.is_file() and path.suffix not in SUFFIXES:
        source = _load_dataset(name, settings.dataset_split)
    else:
        check_data_file(path, "--input")
        num_rows = sum(1 for _ in read_lines(path))
        source = DataSource(name=name, path=path, num_rows=num_rows, facts=describe_file(path))
    if not source.num_rows:
        raise SpecDecError(f"--input {name} holds no row", "give a file with rows")
    max_rows = settings.max_rows or source.num_rows
    shard = parse_shard(settings.shard) if settings.shard is not None else RowShard()
    source = dataclasses.replace(source, num_rows=min(max_rows, source.num_rows), shard=shard)
    if not source.num_shard_rows:
        raise SpecDecError(
            f"--shard {settings.shard}: --input {name} has {source.num_rows} rows to share",
            f"make at most {source.num_rows} shards",
        )
    return source


def _load_dataset(name: str, split: str) -> DataSource:
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
    except Exception as error:  # noqa: BLE001 - `datasets` raises any error
        raise SpecDecError(
            f"--input {name} is not a file, and `datasets` cannot load its split {split}: the"
            f" Hub {describe_answer(error)}",
            "check the path or the Hub id, and --dataset-split",
        ) from None
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    facts = {"dataset": name, "split": split, "rows": len(rows), "sha256": digest.hexdigest()}
    return DataSource(name=name, rows=rows, num_rows=len(rows), facts=facts)


class Dialogue:
    """Conversation or prompt of one row, with the target's answers so far.

    In a chat the target answers wherever an assistant's turn follows a user's or a tool's turn, and
    after the last of those; it reads its own answers before, not the data's. A tool's turn that
    follows a call is the result of that call: where the target makes another call, the conversation
    ends with the target's answer.
    """

    def __init__(self, row: Row, settings: DataSettings, source: DataSource) -> None:
        self.row = row
        self.id: Any = None
        self.is_truncated = False
        self.num_answers = 0
        self._prompt: str | None = None
        self._messages: list[Message] = []
        self._options: Mapping[str, Any] = {}
        self._turns = self._plan_turns(row, settings, source)

    def ask(self) -> str | Conversation | None:
        """Return the prompt or the messages that the target answers next; None at the end."""
        while self._turns and self._turns[0]["role"] != "assistant":
            self._messages.append(self._turns.pop(0))
        if not self._turns:
            return None
        return Conversation(self._messages, self._options) if self._prompt is None else self._prompt

    def add(self, answer: Message, *, is_truncated: bool) -> None:
        """Add the target's answer; one that was cut ends the dialogue, without half a character."""
        if is_truncated:
            answer = {**answer, "content": answer["content"].rstrip(INCOMPLETE)}
        self.num_answers += 1
        replaced_turn = self._turns.pop(0)
        calls, old_calls = (_list_calls(message) for message in (answer, replaced_turn))
        if calls and calls == old_calls:
            # The data's results name the ids of its calls.
            answer = {**answer, "tool_calls": replaced_turn["tool_calls"]}
        self._messages.append({"role": "assistant", **answer})
        is_without_results = (
            calls != old_calls and bool(self._turns) and get_speaker(self._turns[0]) == "tool"
        )
        if is_truncated or is_without_results:
            self.is_truncated = is_truncated
            self._turns.clear()

    def to_json(self) -> dict[str, Any]:
        """Return the row of the output, in the form that `specdec-train --data` reads."""
        document: dict[str, Any] = {"index": self.row.index}
        if self.id is not None:
            document["id"] = self.id
        if self._prompt is None:
            document["messages"] = self._messages
            document |= {k: v for k, v in self._options.items() if k in OPTIONS}
            if template_arguments := {k: v for k, v in self._options.items() if k not in OPTIONS}:
                document["chat_template_kwargs"] = template_arguments
        else:
            document["prompt"] = self._prompt
            document["text"] = self._prompt + self._messages[-1]["content"]
        if self.is_truncated:
            document["truncated"] = True
        return document

    def _plan_turns(self, row: Row, settings: DataSettings, source: DataSource) -> list[Message]:
        """Return the turns to come; the target replaces the assistant's turns of the data."""
        try:
            with name_line(
                Path(source.name), row.number, "messages, conversations, prompt or text"
            ):
                value = self._parse_row(row, source)
                json.dumps(
                    value, ensure_ascii=False, default=str
                ).encode()  # raises for half of a surrogate pair
                prompt = next((value[k] for k in PROMPT_KEYS if k in value), None)
                if not settings.completion and (chat := _find_chat(value, prompt)) is not None:
                    conversation = parse_conversation(chat)
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

    def _parse_row(self, row: Row, source: DataSource) -> dict[str, Any]:
        """Return the object of a row, and note its id."""
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


def _find_chat(value: dict[str, Any], prompt: Any) -> dict[str, Any] | None:
    """Return a row's object that holds a conversation, whose messages TRL names `prompt`."""
    if holds_conversation(value):
        return value
    return {**value, "messages": prompt} if isinstance(prompt, list) else None


def _list_calls(message: Message) -> list[Any]:
    """Return the functions that a message calls, with their arguments."""
    (plain_message,) = convert_arguments([message], to_text=False)
    calls = [call["function"] for call in plain_message.get("tool_calls", [])]
    return [(call["name"], call["arguments"]) for call in calls]


def _plan_answers(messages: list[Message], system_prompt: str | None) -> list[Message]:
    """Return the turns without answers that follow neither a user's nor a tool's turn."""
    turns: list[Message] = []
    if system_prompt is not None and all(get_speaker(m) != "system" for m in messages):
        turns.append({"role": "system", "content": system_prompt})
    for message in [*messages, {"role": "assistant", "content": ""}]:
        if message["role"] != "assistant" or (turns and get_speaker(turns[-1]) in ASKING_ROLES):
            turns.append(message)
    if all(turn["role"] != "assistant" for turn in turns):
        raise ValueError("there is no user's turn to answer")
    return turns
