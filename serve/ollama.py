"""Ollama's API: its bodies as conversations or prompts, its lines of answers, and its errors."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from specdec import Engine, Event, __version__
from specdec.files.reading import parse_json
from specdec.text.prompts import BOOL, Check

from .answers import ChatAnswer, Choice
from .protocol import BadRequest, refuse
from .schema import (
    LIMIT,
    MESSAGES,
    TEXT,
    TOP,
    Body,
    CompletionBody,
    ConversationBody,
    Message,
    Parameters,
    ResponseFormat,
    TextFormat,
    Turns,
    allow_number,
    is_object,
    is_text,
    parameter,
)

API_VERSION = "0.12.11"  # release of Ollama whose API this is: clients compare it with their needs
NEVER = "9999-12-31T23:59:59Z"  # the model is served until the server ends
NANOSECONDS = 10**9
FORMAT: Check = (lambda v: v in ("", "json") or is_object(v), "json or a JSON schema")
THINK: Check = (lambda v: isinstance(v, bool) or is_text(v), "true, false or an effort")
NOTHING: Check = (lambda v: v in ("", [], False), "empty: it is not supported here")
NOT_OFFERED = frozenset((
    "n", "best_of", "prompt_logprobs", "stream_options", "response_format", "enable_thinking",
    "return_token_ids", "return_origins", "return_trees", "parallel_tool_calls",
))  # fmt: skip


def describe_error(error: BadRequest) -> dict[str, Any]:
    """Return an error in Ollama's form, whose text names the parameter."""
    return {"error": error.named_message}


def _stream_setting() -> Any:
    """Declare `stream`, which is true where a body does not say."""
    return dataclasses.field(default=True, metadata={"rule": BOOL, "group": None})


def _read_format(form: Any) -> tuple[str, TextFormat | None]:
    """Return the path of the format of an answer, and that format."""
    if not form and form != {}:
        return "format", None
    if form == "json":
        return "format", TextFormat(type="json_object")
    return "format", TextFormat(type="json_schema", schema=form)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerParameters(Parameters):
    """Parameters of an answer that all bodies share.

    max_tokens: -1 and -2 are Ollama's: until the context is full.
    """

    clamps_output: ClassVar[bool] = True

    stream: bool | None = _stream_setting()
    format: Any = parameter(FORMAT)
    logprobs: bool | None = parameter(BOOL)
    top_logprobs: int | None = parameter(TOP)
    max_tokens: int | None = parameter(allow_number(-2, allow_number(-1, LIMIT)))

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_format(self) -> tuple[str, ResponseFormat | TextFormat | None]:
        return _read_format(self.format)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptParameters(Parameters):
    """Parameters of a body with one prompt, and those that are not supported in it."""

    prompt: str | None = parameter(TEXT)
    raw: bool | None = parameter(BOOL)
    template: str | None = parameter(NOTHING)
    suffix: str | None = parameter(NOTHING)
    images: list[str] | None = parameter(NOTHING)
    context: list[int] | None = parameter(NOTHING)

    @property
    def asks_for_load(self) -> bool:
        return not self.prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThinkingBody(AnswerParameters, ConversationBody):
    """Body of a conversation: the parameters that chats and prompts share."""

    limit_name = "max_tokens"
    not_offered = NOT_OFFERED

    think: bool | str | None = parameter(THINK)

    @property
    def effort(self) -> tuple[str, str | None]:
        return "think", self.think if isinstance(self.think, str) else None

    @property
    def thinking_switch(self) -> tuple[str, bool | None]:
        return "think", self.think if isinstance(self.think, bool) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OllamaChatBody(ThinkingBody):
    """Body of /api/chat."""

    source = "messages"
    continues_last_text = True
    answers_chat: ClassVar[bool] = True

    messages: list[Message] | None = parameter((lambda v: v == [] or MESSAGES[0](v), MESSAGES[1]))

    @property
    def asks_for_load(self) -> bool:
        return not self.messages

    def list_turns(self) -> Turns:
        paths = {f"messages.{i}": message for i, message in enumerate(self.messages or ())}
        return [(path, _read_message(message, path)) for path, message in paths.items()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateBody(PromptParameters, ThinkingBody):
    """Body of /api/generate: a prompt in the chat template."""

    source = "prompt"
    answers_chat: ClassVar[bool] = False
    not_offered = NOT_OFFERED | {"tools", "tool_choice"}

    system: str | None = parameter(TEXT)

    @classmethod
    def choose(cls, document: Mapping[str, Any]) -> type[Body]:
        return RawBody if document.get("raw") is True else cls

    def list_turns(self) -> Turns:
        turns = [("system", {"role": "system", "content": self.system})] if self.system else []
        return [*turns, ("prompt", {"role": "user", "content": self.prompt})]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RawBody(PromptParameters, AnswerParameters, CompletionBody):
    """Body of /api/generate whose prompt goes to the model as it is."""

    source = "prompt"
    default_limit = -1
    answers_chat: ClassVar[bool] = False
    not_offered = NOT_OFFERED | {"echo"}

    think: bool | None = parameter((lambda v: v is False, "false beside raw"))
    system: str | None = parameter(NOTHING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowBody(Body):
    """Body of /api/show."""

    ignored_names = ("verbose",)

    name: str | None = parameter(TEXT)  # older clients' word for the model


def _read_message(message: Message, path: str) -> Message:
    """Convert a message: its thoughts, and the name of the tool that it is of."""
    if message.get("images"):
        raise refuse(f"{path}.images", "is not supported: this server reads texts")
    names = {"thinking": "reasoning_content", "tool_name": "name"}
    fields = {names.get(key, key): value for key, value in message.items() if key != "images"}
    calls = fields.get("tool_calls")
    if isinstance(calls, list):
        fields["tool_calls"] = [
            {"type": "function", **call} if is_object(call) else call for call in calls
        ]
    return fields


class OllamaAnswer(ChatAnswer):
    """Answer to a chat or a prompt: lines of JSON, the last one with its times."""

    stream_type = "application/x-ndjson"
    ending = b""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._texts = {"content": "", "thinking": ""}
        self._logprobs: list[Any] = []
        self._last_line: dict[str, Any] = {}

    def open(self) -> Iterator[dict[str, Any]]:
        """Yield nothing: a stream begins with its first text."""
        return iter(())

    def add(self, choice: Choice, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """Yield the lines of a choice's new text; calls come whole, before the last line."""
        for chunk in super().add(choice, events):
            (document,) = chunk["choices"]
            delta, logprobs = document["delta"], (document["logprobs"] or {}).get("content", [])
            texts = {
                "content": delta.get("content") or "",
                "thinking": delta.get("reasoning_content") or "",
            }
            for key, text in texts.items():
                self._texts[key] += text
            self._logprobs += logprobs
            if any(texts.values()) or logprobs:
                yield self._make_line(**texts, logprobs=logprobs)
            if (reason := document["finish_reason"]) is not None:
                if calls := _list_calls(choice):
                    yield self._make_line(tool_calls=calls)
                self._last_line = self._make_line() | self._describe_end(choice, reason)
                yield self._last_line

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield nothing: the last line has the usage."""
        return iter(())

    def fail(self, error: BadRequest) -> dict[str, Any]:
        return describe_error(error)

    def encode(self, chunk: dict[str, Any]) -> bytes:
        """Return a chunk as a line of JSON."""
        return json.dumps(chunk, separators=(",", ":")).encode() + b"\n"

    def to_json(self) -> dict[str, Any]:
        """Return the whole answer, when it is over."""
        calls = _list_calls(self.choices[0])
        line = self._make_line(**self._texts, tool_calls=calls, logprobs=self._logprobs)
        return self._last_line | line | {"done": True}

    def load(self) -> dict[str, Any]:
        """Return the answer to a body that asks for nothing but the model."""
        ignored = {"specdec": {"ignored": self._ignored}}
        return self._make_line() | {"done": True, "done_reason": "load", **ignored}

    def _make_line(
        self, *, content: str = "", thinking: str = "", tool_calls: Sequence[Any] = (),
        logprobs: Sequence[Any] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """Return a line that does not end the answer."""
        line: dict[str, Any] = {"model": self.model, "created_at": _format_time(None)}
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if getattr(self.body, "answers_chat", False):
            more |= {"tool_calls": list(tool_calls)} if tool_calls else {}
            line["message"] = {"role": "assistant", "content": content, **more}
        else:
            line |= {"response": content, **more}
        return line | {"done": False} | ({"logprobs": list(logprobs)} if logprobs else {})

    def _describe_end(self, choice: Choice, reason: str) -> dict[str, Any]:
        """Return what the last line has more: counts of tokens and nanoseconds.

        load_duration is the time in the queue: the model is loaded before the first request.
        """
        times = (choice.queue_time, choice.row_time, choice.first_token_time,
                 choice.last_token_time)  # fmt: skip
        queue_time, row_time, first_time, last_time = (time or choice.queue_time for time in times)
        return {
            "done": True, "done_reason": "length" if reason == "length" else "stop",
            "total_duration": _count_nanoseconds(queue_time, last_time),
            "load_duration": _count_nanoseconds(queue_time, row_time),
            "prompt_eval_count": len(choice.request.input_ids),
            "prompt_eval_duration": _count_nanoseconds(row_time, first_time),
            "eval_count": choice.num_seen,
            "eval_duration": _count_nanoseconds(first_time, last_time), **self._last_fields,
        }  # fmt: skip


def _list_calls(choice: Choice) -> list[dict[str, Any]]:
    """Return the calls of an answer whose arguments are whole."""
    calls = []
    for index, call in enumerate(choice.parser.calls if choice.parser is not None else ()):
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError:  # a limit has cut it
            continue
        document = {"index": index, "name": function["name"], "arguments": arguments}
        calls.append({"id": call["id"], "function": document})
    return calls


def _count_nanoseconds(start: float, end: float) -> int:
    return max(0, round((end - start) * NANOSECONDS))


def _format_time(seconds: float | None) -> str:
    """Return a time as Ollama writes it; None: now."""
    utc = datetime.timezone.utc
    time = datetime.datetime.now(utc) if seconds is None else datetime.datetime.fromtimestamp(
        seconds, utc
    )  # fmt: skip
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")


class ModelCard:
    """Description of the served model, by its engine folder, as Ollama lists models."""

    def __init__(self, name: str, folder: Path, engine: Engine, abilities: Sequence[str]) -> None:
        """abilities: Ollama's names of what the model can do."""
        config = parse_json((folder / "config.json").read_bytes())
        model = config["pretrained_config"]
        architecture = str(model.get("base_model_architecture") or model["architecture"])
        self._family = architecture.removesuffix("ForCausalLM").removesuffix("LM").lower()
        manifest = folder / "manifest.json"
        identity = manifest if manifest.is_file() else folder / "config.json"
        files = [path.stat() for path in folder.rglob("*") if path.is_file()]
        self._digest = hashlib.sha256(identity.read_bytes()).hexdigest()
        self._size, self._time = sum(file.st_size for file in files), identity.stat().st_mtime
        self.name, self._engine, self._abilities = name, engine, list(abilities)

    @property
    def _details(self) -> dict[str, Any]:
        facts = self._engine.describe()
        return {
            "parent_model": "", "format": "specdec", "family": self._family,
            "families": [self._family], "parameter_size": "",
            "quantization_level": facts["quantization"] or facts["dtype"],
        }  # fmt: skip

    @property
    def _identity(self) -> dict[str, Any]:
        names = {"name": self.name, "model": self.name}
        return {**names, "size": self._size, "digest": self._digest, "details": self._details}

    def list_models(self) -> dict[str, Any]:
        """Return the answer of /api/tags."""
        return {"models": [{**self._identity, "modified_at": _format_time(self._time)}]}

    def list_running(self) -> dict[str, Any]:
        """Return the answer of /api/ps."""
        on_device = self._size if self._engine.describe()["device"] != "cpu" else 0
        more = {"expires_at": NEVER, "size_vram": on_device}
        length = {"context_length": self._engine.max_seq_len}
        return {"models": [{**self._identity, **more, **length}]}

    def show(self) -> dict[str, Any]:
        """Return the answer of /api/show."""
        facts = {
            "general.architecture": self._family, "general.basename": self.name,
            f"{self._family}.context_length": self._engine.max_seq_len,
        }  # fmt: skip
        return {
            "modelfile": "", "parameters": "", "license": "", "details": self._details,
            "template": str(self._engine.tokenizer.chat_template or ""), "model_info": facts,
            "capabilities": self._abilities, "modified_at": _format_time(self._time),
        }  # fmt: skip


def describe_version() -> dict[str, str]:
    """Return the answer of /api/version."""
    return {"version": API_VERSION, "specdec": __version__}
