"""Body of OpenAI's responses: a chat in other words, whose messages are items.

Nothing is stored: a conversation is sent whole each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specdec.errors import shorten
from specdec.text.prompts import OBJECT, Check

from .protocol import refuse
from .schema import (
    LIMIT,
    TEXT,
    ConversationBody,
    Message,
    Parameters,
    ResponseFormat,
    StreamOptions,
    TextFormat,
    Turns,
    is_list,
    is_object,
    is_text,
    parameter,
)

LOGPROBS = "message.output_text.logprobs"  # the value of `include` that has an effect
ECHOED = ("prompt_cache_key", "user", "safety_identifier")  # names that an answer repeats
TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
# Tools that the client's host or OpenAI's servers run: without a schema the model cannot call them.
HOSTED = (
    "web_search", "web_search_preview", "local_shell", "shell", "apply_patch", "custom",
    "tool_search",
)  # fmt: skip
# Calls among a conversation's items, by the key of their arguments, and the items of their results.
CALL_ITEMS = {
    "function_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action",
}  # fmt: skip
OUTPUT_ITEMS = tuple(f"{name}_output" for name in CALL_ITEMS)
NAMESPACE = "namespace"  # type of a tool that holds functions
NOT_STORED: Check = (
    lambda v: False, "left out: nothing is stored, so send the whole conversation as input"
)  # fmt: skip
INPUT: Check = (lambda v: is_text(v) or is_list(v, is_object), "a text or a list of items")
NAMES: Check = (lambda v: isinstance(v, list) and all(map(is_text, v)), "a list of names")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseStreamOptions(StreamOptions):
    """Options of a response's stream, none of which has an effect."""

    not_offered = frozenset(("include_usage", "continuous_usage_stats"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions(Parameters):
    """Options of a response's text."""

    ignores_others = True

    format: TextFormat | None = parameter(TextFormat)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningOptions(Parameters):
    """Options of a response's reasoning."""

    ignores_others = True

    effort: str | None = parameter(TEXT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseBody(ConversationBody):
    """Body of /v1/responses."""

    source = "input"
    limit_name = "max_output_tokens"
    has_flat_tools = True
    ignored_names = (*ConversationBody.ignored_names, "max_tool_calls")
    not_offered = frozenset((
        "n", "best_of", "max_tokens", "response_format", "prompt_logprobs", "return_token_ids",
        "return_origins", "return_trees", "enable_thinking",
    ))  # fmt: skip

    input: str | list[dict[str, Any]] | None = parameter(INPUT)
    instructions: str | None = parameter(TEXT)
    max_output_tokens: int | None = parameter(LIMIT)
    text: TextOptions | None = parameter(TextOptions)
    reasoning: ReasoningOptions | None = parameter(ReasoningOptions)
    include: list[str] | None = parameter(NAMES)
    previous_response_id: None = parameter(NOT_STORED)
    conversation: None = parameter(NOT_STORED)
    prompt: None = parameter(NOT_STORED)
    background: bool | None = parameter(
        (lambda v: v is False, "false: answers come as soon as they are made")
    )
    truncation: str | None = parameter((lambda v: v == "disabled", "disabled"))
    stream_options: ResponseStreamOptions | None = parameter(ResponseStreamOptions)
    metadata: Mapping[str, Any] | None = parameter(OBJECT)  # an answer repeats it
    prompt_cache_key: str | None = parameter(TEXT)
    user: str | None = parameter(TEXT)
    safety_identifier: str | None = parameter(TEXT)

    @property
    def num_top_logprobs(self) -> int | None:
        is_included = LOGPROBS in (self.include or ())
        return 0 if self.top_logprobs is None and is_included else self.top_logprobs

    @property
    def effort(self) -> tuple[str, str | None]:
        return "reasoning.effort", self.reasoning.effort if self.reasoning is not None else None

    @property
    def output_format(self) -> tuple[str, ResponseFormat | TextFormat | None]:
        return "text.format", self.text.format if self.text is not None else None

    def list_ignored(self) -> list[str]:
        names = sorted(set(self.include or ()) - {LOGPROBS})
        unread_tools = [f"{path}.type" for path, tool in super().list_tools() if _is_hosted(tool)]
        return [*self.ignored, *(f"include.{name[:100]}" for name in names), *unread_tools]

    def list_tools(self) -> list[tuple[str, Any]]:
        """Return the functions, also of namespaces, and hosted tools that have a schema."""
        tools: list[tuple[str, Any]] = []
        for path, tool in super().list_tools():
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind == NAMESPACE:
                tools += _list_functions(tool, path)
            elif kind in HOSTED and not _is_hosted(tool):
                tools.append((path, {**tool, "type": "function"}))
            elif kind not in HOSTED:
                tools.append((path, tool))
        return tools

    def find_namespace(self, name: str) -> str | None:
        """Return the namespace of a function, None for none."""
        for path, tool in super().list_tools():
            if isinstance(tool, dict) and tool.get("type") == NAMESPACE:
                functions = [function for _, function in _list_functions(tool, path)]
                if any(is_object(f) and f.get("name") == name for f in functions):
                    return str(tool.get("name"))
        return None

    def list_turns(self) -> Turns:
        return _read_items(self.input, self.instructions)


def _is_hosted(tool: Any) -> bool:
    """Return whether a tool is a hosted one without a schema."""
    return is_object(tool) and tool.get("type") in HOSTED and not is_object(tool.get("parameters"))


def _list_functions(tool: Mapping[str, Any], path: str) -> list[tuple[str, Any]]:
    """Return the functions of a namespace after their paths."""
    if not is_text(tool.get("name")):
        raise refuse(f"{path}.name", f"is {shorten(tool.get('name'))}, not a text")
    functions = tool.get("tools")
    if not isinstance(functions, list):
        raise refuse(f"{path}.tools", f"is {shorten(functions)}, not a list of functions")
    return [(f"{path}.tools.{i}", function) for i, function in enumerate(functions)]


def _read_items(items: Any, instructions: str | None) -> Turns:
    """Convert items to messages, each with the path of its first item."""
    turns: Turns = []
    if instructions:
        turns.append(("instructions", {"role": "system", "content": instructions}))
    if isinstance(items, str):
        return [*turns, ("input", {"role": "user", "content": items})]
    thoughts: list[str] = []  # reasoning before the next item, if that is the assistant's
    for i, item in enumerate(items):
        path = f"input.{i}"
        item_type = item.get("type", "message" if "role" in item else None)
        if item_type == "reasoning":
            thoughts.append(_read_reasoning(item, path))
            continue
        message = _read_item(item, item_type, path)
        last_message = turns[-1][1] if turns else {}
        if item_type in CALL_ITEMS and last_message.get("role") == "assistant":
            last_message.setdefault("tool_calls", []).extend(message["tool_calls"])
            message = last_message
        else:
            turns.append((path, message))
        if thoughts and message["role"] == "assistant":
            reasoning = message.get("reasoning_content")
            message["reasoning_content"] = "\n".join([*filter(None, [reasoning]), *thoughts])
        thoughts = []
    if not turns:
        raise refuse("input", "has no message")
    return turns


def _read_item(item: Mapping[str, Any], item_type: Any, path: str) -> Message:
    """Convert one item to a message."""
    if item_type == "message":
        text = _read_text(item.get("content"), f"{path}.content")
        return {"role": item.get("role"), "content": text}
    if item_type in CALL_ITEMS:
        return _read_call(item, item_type, path)
    if item_type in OUTPUT_ITEMS:
        text = _read_text(item.get("output"), f"{path}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
    reason = "nothing is stored" if item_type == "item_reference" else "it is not supported"
    raise refuse(path, f"is of type {shorten(item_type)}: {reason}")


def _read_call(item: Mapping[str, Any], item_type: str, path: str) -> Message:
    """Convert a call to a message, also one of a tool that the client's host runs."""
    name = item.get("name", item_type.removesuffix("_call"))
    if not isinstance(name, str):
        raise refuse(f"{path}.name", f"is {shorten(name)}, not a text")
    key = CALL_ITEMS[item_type]
    arguments = {key: item.get(key)} if key == "input" else item.get(key)
    call = {
        "id": item.get("call_id"), "type": "function",
        "function": {"name": name, "arguments": arguments},
    }  # fmt: skip
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _read_reasoning(item: Mapping[str, Any], path: str) -> str:
    key = "content" if item.get("content") else "summary"
    return _read_text(item.get(key) or [], f"{path}.{key}")


def _read_text(content: Any, path: str) -> str:
    """Return the text of an item's content, which may be a list of texts with types."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        fault = f"is {shorten(content)}, not a text or a list of texts"
        raise refuse(path, "is missing" if content is None else fault)
    texts = []
    for block in blocks:
        block_type = block.get("type") if isinstance(block, dict) else None
        text = block.get("refusal" if block_type == "refusal" else "text") if block_type else None
        if block_type not in TEXT_TYPES or not isinstance(text, str):
            what = shorten(block) if block_type is None else f"a part of type {shorten(block_type)}"
            raise refuse(path, f"has {what}: only texts are supported")
        texts.append(text)
    return "".join(texts)
