"""Anthropic's Messages API: its bodies as conversations, its answers as blocks, its errors."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec import Event
from specdec.errors import shorten
from specdec.text.prompts import Check

from .answers import ChatAnswer, Choice
from .protocol import BadRequest, refuse
from .schema import (
    MAX_STOP_LETTERS,
    MAX_STOPS,
    STOP,
    TEXT,
    ConversationBody,
    Message,
    Parameters,
    ResponseFormat,
    TextFormat,
    Thinking,
    Turns,
    is_list,
    is_object,
    is_text,
    parameter,
)

Block = dict[str, Any]
# Anthropic's kinds of errors by the status of the answer.
ERROR_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip
CONTEXT_END = "model_context_window_exceeded"  # stop_reason of an output that the room has ended
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
# Modes of OpenAI's tool_choice by the types of Anthropic's; "tool" names one.
MODES = {"auto": "auto", "any": "required", "none": "none"}
IGNORED = (
    "metadata", "cache_control", "service_tier", "inference_geo", "speed", "diagnostics",
    "user_profile_id", "workspace_id", "betas", "context_management", "billing_policy",
)  # fmt: skip
SYSTEM: Check = (lambda v: is_text(v) or is_list(v, is_object), "a text or a list of texts")
STOP_SEQUENCES: Check = (
    lambda v: isinstance(v, list) and STOP[0](v),
    f"a list of at most {MAX_STOPS} texts of at most {MAX_STOP_LETTERS} characters",
)


def describe_error(error: BadRequest) -> dict[str, Any]:
    """Return an error in Anthropic's form, whose text names the parameter."""
    kind = ERROR_KINDS.get(error.status)
    kind = kind or ("invalid_request_error" if error.status < 500 else "api_error")
    message = error.named_message
    if (excess := error.excess) is not None:  # Anthropic's words, which agents shorten a prompt by
        length, limit = excess.num_prompt_tokens, excess.max_prompt_tokens
        message = f"prompt is too long: {length} tokens > {limit} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputConfig(Parameters):
    """Effort of the reasoning, and the format of an answer."""

    effort: str | None = parameter(TEXT)
    format: TextFormat | None = parameter(TextFormat)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessagesBody(ConversationBody):
    """Body of /v1/messages."""

    source = "messages"
    continues_last_text = True
    limit_name = "max_tokens"
    has_flat_tools = True
    schema_key = "input_schema"
    has_options = False
    clamps_output = True
    stop_names = ("stop_sequences", "stop_token_ids")
    ignored_names = tuple(dict.fromkeys((*ConversationBody.ignored_names, *IGNORED)))
    not_offered = frozenset((
        "n", "best_of", "stop", "response_format", "prompt_logprobs", "top_logprobs",
        "stream_options", "parallel_tool_calls", "return_token_ids", "return_origins",
        "return_trees", "enable_thinking",
    ))  # fmt: skip

    messages: list[Message] | None = parameter(
        (lambda v: is_list(v, is_object), "a list of messages")
    )
    system: str | list[Message] | None = parameter(SYSTEM)
    stop_sequences: list[str] | None = parameter(STOP_SEQUENCES)
    thinking: Thinking | None = parameter(Thinking)
    output_config: OutputConfig | None = parameter(OutputConfig)

    @property
    def num_top_logprobs(self) -> int | None:
        return None

    @property
    def stop_words(self) -> list[str]:
        return [word for word in self.stop_sequences or () if word]

    @property
    def effort(self) -> tuple[str, str | None]:
        config = self.output_config
        return "output_config.effort", None if config is None else config.effort

    @property
    def thinking_switch(self) -> tuple[str, bool | None]:
        return "thinking.type", None if self.thinking is None else self.thinking.is_on

    @property
    def output_format(self) -> tuple[str, ResponseFormat | TextFormat | None]:
        config = self.output_config
        return "output_config.format", None if config is None else config.format

    @property
    def is_single_call(self) -> bool:
        choice = self.tool_choice
        return isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True

    def list_ignored(self) -> list[str]:
        unread_tools = [f"{path}.type" for path, tool in super().list_tools() if _is_hosted(tool)]
        return [*self.ignored, *unread_tools]

    def list_tools(self) -> list[tuple[str, Any]]:
        """Return the tools that have a schema, in the form of a response's.

        Those without one are run by Anthropic's servers or known to its models alone.
        """
        return [
            (path, _convert_tool(tool, path)) for path, tool in super().list_tools()
            if not _is_hosted(tool)
        ]  # fmt: skip

    def choose_tools(self) -> Any:
        choice = self.tool_choice
        if choice is None:
            return None
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind == "tool":
            return {"type": "function", "name": choice.get("name")}
        if kind not in MODES:
            raise refuse(
                "tool_choice", f'is {shorten(choice)}, not {{"type": "auto", "any", "none" or'
                ' "tool" with a "name"}',
            )  # fmt: skip
        return MODES[kind]

    def list_turns(self) -> Turns:
        turns: Turns = []
        if self.system:
            turns.append(("system", {"role": "system", "content": self.system}))
        for i, message in enumerate(self.messages or ()):
            turns += _read_message(message, f"messages.{i}")
        return turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountBody(MessagesBody):
    """Body of /v1/messages/count_tokens."""


def _is_hosted(tool: Any) -> bool:
    """Return whether a tool is one that Anthropic defines, without a schema of its own."""
    is_named = isinstance(tool, dict) and tool.get("type") not in (None, "custom")
    return is_named and "input_schema" not in tool


def _convert_tool(tool: Any, path: str) -> Any:
    """Return a tool in the form of a response's, its schema checked."""
    if not isinstance(tool, dict):
        return tool  # which is refused where all tools are read
    if not is_object(tool.get("input_schema")):
        raise refuse(f"{path}.input_schema", f"is {shorten(tool.get('input_schema'))}, not an"
                     " object")  # fmt: skip
    names = {"name": "name", "description": "description", "input_schema": "parameters",
             "strict": "strict"}  # fmt: skip
    function = {key: tool[name] for name, key in names.items() if tool.get(name) is not None}
    return {"type": "function", **function}


def _read_message(message: Message, path: str) -> Turns:
    """Convert a message to turns: results of tools are turns of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refuse(f"{path}.role", f"is {shorten(role)}, not user, assistant or system")
    if isinstance(content, str):
        return [(path, {"role": role, "content": content})]
    if not isinstance(content, list) or not is_list(content, is_object):
        raise refuse(f"{path}.content", f"is {shorten(content)}, not a text or a list of blocks")
    if role == "assistant":
        return [(path, _read_assistant(content, path))]
    turns: Turns = []
    for i, block in enumerate(content):
        block_path = f"{path}.content.{i}"
        if block.get("type") == "tool_result" and role == "user":
            turns.append((block_path, _read_result(block, block_path)))
            continue
        text = _read_text(block, block_path)
        if not turns or turns[-1][1]["role"] != role:
            turns.append((block_path, {"role": role, "content": []}))
        turns[-1][1]["content"].append(text)
    return turns


def _read_text(block: Block, path: str) -> Block:
    """Return a block that is a text; BadRequest for any other."""
    if block.get("type") != "text" or not is_text(block.get("text")):
        kind = block.get("type")
        if kind == "text":
            raise refuse(f"{path}.text", f"is {shorten(block.get('text'))}, not a text")
        raise refuse(f"{path}.type", f"is {shorten(kind)}, which is not supported here")
    return block


def _read_result(block: Block, path: str) -> Message:
    """Convert the result of a tool to a message."""
    name, content = block.get("tool_use_id"), block.get("content") or ""
    if not is_text(name):
        raise refuse(f"{path}.tool_use_id", f"is {shorten(name)}, not a text")
    if not is_text(content):
        if not is_list(content, is_object):
            raise refuse(f"{path}.content", f"is {shorten(content)}, not a text or texts")
        content = [_read_text(part, f"{path}.content.{i}") for i, part in enumerate(content)]
    mark = {"is_error": True} if block.get("is_error") else {}
    return {"role": "tool", "tool_call_id": name, "content": content, **mark}


def _read_assistant(content: Sequence[Block], path: str) -> Message:
    """Convert the blocks of an assistant's message to one message."""
    texts, thoughts, calls = list[Block](), list[str](), list[Block]()
    for i, block in enumerate(content):
        block_path, kind = f"{path}.content.{i}", block.get("type")
        if kind == "thinking":
            if not is_text(block.get("thinking")):
                reason = f"is {shorten(block.get('thinking'))}, not a text"
                raise refuse(f"{block_path}.thinking", reason)
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_read_call(block, block_path))
        elif kind != "redacted_thinking":  # nothing in it can be read
            texts.append(_read_text(block, block_path))
    message: Message = {"role": "assistant", "content": texts or None}
    message |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    if calls:
        message["tool_calls"] = calls
    elif not texts:
        message["content"] = ""
    return message


def _read_call(block: Block, path: str) -> Block:
    """Convert a call that an earlier answer made."""
    for name, is_good in (("name", is_text), ("id", is_text), ("input", is_object)):
        if not is_good(value := block.get(name)):
            kind = "an object" if name == "input" else "a text"
            raise refuse(f"{path}.{name}", f"is {shorten(value)}, not {kind}")
    function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"id": block["id"], "type": "function", "function": function}


class MessagesAnswer(ChatAnswer):
    """Answer to a body of messages: a list of blocks, sent event by event in a stream."""

    ending = b""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.id = f"msg_{secrets.token_hex(12)}"
        self._blocks: list[Block] = []
        self._is_open = False  # whether the last block may still grow
        self._arguments = ""  # JSON of the last block's input
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def to_json(self) -> dict[str, Any]:
        """Return the whole answer, when it is over."""
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": self._blocks, **self._stop, "usage": self._message_usage,
            **(self._last_fields if self._stop["stop_reason"] is not None else {}),
        }  # fmt: skip

    def open(self) -> Iterator[dict[str, Any]]:
        """Yield the events that a stream begins with."""
        yield {"type": "message_start", "message": self.to_json()}
        yield {"type": "ping"}

    def add(self, choice: Choice, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """Yield the events of a choice's new text, calls and end."""
        for chunk in super().add(choice, events):
            (document,) = chunk["choices"]
            yield from self._add_delta(document["delta"])
            if (reason := document["finish_reason"]) is not None:
                stop_word = choice.stop_word if reason == "stop" else None
                default = "end_turn" if stop_word is None else "stop_sequence"
                stop_reason = STOP_REASONS.get(reason, default)
                if reason == "length" and self._fills_context(choice):
                    stop_reason = CONTEXT_END
                self._stop = {"stop_reason": stop_reason, "stop_sequence": stop_word}
                yield from self._close_block()

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield the events that a stream ends with."""
        usage = self._message_usage
        yield {"type": "message_delta", "delta": self._stop, "usage": usage, **self._last_fields}
        yield {"type": "message_stop"}

    def fail(self, error: BadRequest) -> dict[str, Any]:
        return describe_error(error)

    def _fills_context(self, choice: Choice) -> bool:
        """Return whether an output has ended for want of room, before the limit that was asked."""
        limit, room = self.body.max_tokens, choice.request.max_output_len
        return choice.num_seen >= room and (limit is None or not 0 < limit <= room)

    def _add_delta(self, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if text := delta.get("reasoning_content"):
            yield from self._add_text("thinking", text, {"signature": ""})
        if text := delta.get("content"):
            yield from self._add_text("text", text, {})
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
                yield from self._open_block({**block, "input": {}})
            if arguments := function["arguments"]:
                self._arguments += arguments
                yield self._make_delta({"type": "input_json_delta", "partial_json": arguments})

    def _add_text(self, kind: str, text: str, fields: Block) -> Iterator[dict[str, Any]]:
        """Yield the events of more text, in a block of its kind."""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            yield from self._open_block({"type": kind, kind: "", **fields})
        self._blocks[-1][kind] += text
        yield self._make_delta({"type": f"{kind}_delta", kind: text})

    def _open_block(self, block: Block) -> Iterator[dict[str, Any]]:
        yield from self._close_block()
        self._blocks.append(block)
        self._is_open, self._arguments = True, ""
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _close_block(self) -> Iterator[dict[str, Any]]:
        """End the last block; a call that a limit has cut keeps an empty input."""
        if not self._is_open:
            return
        block, self._is_open = self._blocks[-1], False
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(self._arguments or "{}")
            except ValueError:
                block["input"] = {}
        elif block["type"] == "thinking":
            yield self._make_delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _make_delta(self, delta: Block) -> dict[str, Any]:
        """Return the event of what the last block has gained."""
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    @property
    def _message_usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        }  # fmt: skip
