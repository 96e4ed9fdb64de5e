"""Messages with tools, calls and results, in the form that a chat template reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.text import harmony
from specdec.text.call_formats import TOOL_FORMATS, ChatFormats, ToolFormat
from specdec.text.tool_calls import convert_arguments

Message = dict[str, Any]
_INTRODUCTION = """You can call functions. To do so, answer with nothing but a JSON list of calls:
[{"name": "...", "arguments": {...}}]
These are the functions, with the JSON schemas of their arguments:
"""


def write_messages(
    messages: Sequence[Mapping[str, Any]], template: str, tools: Sequence[Mapping[str, Any]],
    formats: ChatFormats,
) -> list[Message]:  # fmt: skip
    """Return a conversation in the chat template's form, without empty fields.

    messages: with contents that are texts. tools: documents of the callable tools. For a template
    that reads no tools, calls or results, these become text of other messages.
    """
    written_messages = [_clean_message(message, template) for message in messages]
    if formats.is_harmony:
        return harmony.write_turns(written_messages)
    return _write_tools(written_messages, tools, formats)


def _write_tools(
    written_messages: list[Message], tools: Sequence[Mapping[str, Any]], formats: ChatFormats
) -> list[Message]:
    """Return a conversation in which tools, calls and results stand where a template reads them."""
    use = formats.use
    if formats.as_text or (not use.shows_calls and formats.tools is not None):
        form = formats.tools or TOOL_FORMATS["json"]
        moves_results = formats.as_text or not use.shows_results
        written_messages = _write_calls_as_text(written_messages, form, moves_results)
    functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    if functions and formats.as_text:
        _introduce(written_messages, _INTRODUCTION + "\n".join(functions), use.has_system)
    elif functions and use.is_field:
        _add_field(written_messages, use.tools_variable, functions)
    return written_messages


def _add_field(messages: list[Message], field: str, functions: Sequence[str]) -> None:
    """Put functions into a field of the system message, as a text of JSON."""
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": ""})
    messages[0] = {**messages[0], field: f"[{', '.join(functions)}]"}


def _introduce(messages: list[Message], text: str, has_system: bool) -> None:
    """Put the text about tools before a conversation: a system message, or the user's first text.

    has_system: whether the chat template shows a system message.
    """
    role = "system" if has_system else "user"
    if messages[0]["role"] != role:
        messages.insert(0, {"role": role, "content": text})
        return
    content = messages[0]["content"] or ""
    joined = f"{content}\n\n{text}" if has_system else f"{text}\n\n{content}"
    messages[0] = {**messages[0], "content": joined}


def _clean_message(message: Mapping[str, Any], template: str) -> Message:
    """Return a message without empty fields, of a role that the template knows."""
    fields = {key: value for key, value in message.items() if value is not None and value != []}
    fields.setdefault("content", None if "tool_calls" not in fields else "")
    if fields["role"] == "developer" and "developer" not in template:
        fields["role"] = "system"
    return fields


def _write_calls_as_text(
    messages: Sequence[Message], form: ToolFormat, moves_results: bool
) -> list[Message]:
    """Write calls as text.

    moves_results: whether all results after a call become one message of the user.
    """
    written_messages: list[Message] = []
    names: dict[str, str] = {}  # function names by the ids of their calls
    result = None  # the message that holds the results so far
    for message in messages:
        calls = message.pop("tool_calls", None) if message["role"] == "assistant" else None
        if calls:
            names |= {str(call.get("id")): call["function"]["name"] for call in calls}
            texts = (message["content"], _write_calls(calls, form))
            message["content"] = "\n".join(filter(None, texts))
        if message["role"] != "tool" or not moves_results:
            result = None
            written_messages.append(message)
            continue
        name = names.get(str(message.get("tool_call_id")), "the function")
        text = f"Result of {name}: {message['content'] or ''}"
        if result is not None:
            result["content"] += f"\n{text}"
        else:
            result = {"role": "user", "content": text}
            written_messages.append(result)
    return written_messages


def _write_calls(calls: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    """Return calls as text in a format, as a forced answer or, in Python, the model has them."""
    if form.is_python:
        return f"{form.begin}[{', '.join(map(_write_python, calls))}]{form.end}"
    texts = []
    for call in calls:
        arguments = call["function"].get("arguments") or "{}"
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        texts.append(form.open(call["function"]["name"]) + text)
    return form.prefix + form.separator.join(texts) + form.suffix


def _write_python(call: Mapping[str, Any]) -> str:
    """Return a call as Python writes it; one whose arguments are no object has none."""
    function = call["function"]
    (message,) = convert_arguments([{"tool_calls": [call]}], to_text=False)
    arguments = message["tool_calls"][0]["function"]["arguments"]
    pairs = arguments.items() if isinstance(arguments, dict) else ()
    return f"{function['name']}({', '.join(f'{key}={value!r}' for key, value in pairs)})"
