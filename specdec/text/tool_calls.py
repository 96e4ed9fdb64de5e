"""Arguments of tool calls in messages: as objects or as texts, whichever a template reads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]


def convert_arguments(messages: Sequence[Message], *, to_text: bool) -> list[Message]:
    """Return the messages with the arguments of tool calls as objects, or as texts of JSON.

    Servers send texts; most chat templates want objects, and so servers make them ones.
    """

    def convert(call: Message) -> Message:
        function = call.get("function")
        if not isinstance(function, dict):
            return call
        arguments = {} if function.get("arguments") is None else function["arguments"]
        if to_text and isinstance(arguments, (dict, list)):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not to_text and isinstance(arguments, str):
            try:
                parsed = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else arguments
        return {**call, "function": {**function, "arguments": arguments}}

    return [
        {**message, "tool_calls": [convert(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def render_calls(
    apply: Callable[[list[Message]], str], messages: Sequence[Message], wants_text: bool
) -> tuple[str, bool]:
    """Render messages with the arguments of tool calls in the form that a chat template can read.

    wants_text: whether texts are tried before objects. Returns the text, and which form it was.
    Raises what the template raises.
    """
    first_form = convert_arguments(messages, to_text=wants_text)
    second_form = convert_arguments(messages, to_text=not wants_text)
    try:
        text = apply(first_form)
        if wants_text or second_form == first_form or not _shows_objects(first_form, text):
            return text, wants_text
    except Exception:
        if second_form == first_form:
            raise
        with contextlib.suppress(Exception):  # the first one tells more
            return apply(second_form), not wants_text
        raise
    return apply(second_form), not wants_text


def _shows_objects(messages: Sequence[Message], text: str) -> bool:
    """Return whether a template printed arguments as Python does: it wants texts."""
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    functions = [call["function"] for call in calls if isinstance(call.get("function"), dict)]
    arguments = [function.get("arguments") for function in functions]
    return any(
        isinstance(argument_object, dict) and argument_object and str(argument_object) in text
        for argument_object in arguments
    )
