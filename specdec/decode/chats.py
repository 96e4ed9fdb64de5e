"""Chats of the public API: messages and tools as a prompt, and the answer as a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.decode.outputs import Output
from specdec.errors import PromptError, shorten
from specdec.text.call_formats import ChatFormats
from specdec.text.call_messages import write_messages
from specdec.text.chat import ChatError, join_parts, wrap_calls
from specdec.text.harmony import open_parser
from specdec.text.prompts import Prompt

Message = Mapping[str, Any]


def make_chat_prompt(
    messages: Sequence[Message], tools: Sequence[Message], formats: ChatFormats, tokenizer: Any,
    options: Mapping[str, Any],
) -> Prompt:  # fmt: skip
    """Return the prompt of a conversation; PromptError for wrong messages or tools.

    options: other fields of the prompt.
    """
    if tokenizer is None:
        raise PromptError(
            "messages need a tokenizer, and the engine has none",
            "give Engine.load a tokenizer", field="messages",
        )  # fmt: skip
    _check_messages(messages)
    functions = _read_tools(tools)
    if functions and not formats.can_call:
        raise PromptError(
            "it is not known how the model writes tool calls: "
            + (shorten(formats.use.example) if formats.use.example else "it has no chat template"),
            "leave tools out, or load the engine with a chat_template whose calls are known",
            field="tools",
        )
    written_messages = write_messages(
        [{**m, "content": _join(m.get("content"))} for m in messages],
        str(tokenizer.chat_template or ""), functions, formats,
    )  # fmt: skip
    variables = dict(options.get("chat_template_kwargs") or {})
    if functions and formats.reads_tools and not formats.use.is_field:
        variables[formats.use.tools_variable] = functions
    fields: dict[str, Any] = {"messages": written_messages, "chat_template_kwargs": variables}
    if formats.marks:  # markers that are special tokens are to be seen in the text
        fields["skip_special_tokens"] = False
    return Prompt(**{**options, **fields})


def read_answer(
    output: Output, tools: Sequence[Message], formats: ChatFormats, continued_text: str = ""
) -> dict[str, Any]:
    """Return an answer as a message: content, reasoning_content and tool_calls, where there are.

    continued_text: as of a Request.
    """
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters") or {}
        for tool in _read_tools(tools)
    }  # fmt: skip
    parser = open_parser(formats, output.prompt, schemas or None, continued_text=continued_text)
    parser.feed(output.text)
    parser.finish(is_cut=output.finish_reason == "length")
    message: dict[str, Any] = {"role": "assistant", "content": parser.content}
    if parser.reasoning:
        message["reasoning_content"] = parser.reasoning
    if parser.calls:
        message["tool_calls"] = parser.calls
    return message


def _check_messages(messages: Sequence[Message]) -> None:
    """Raise PromptError for a conversation that is none."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise PromptError(
            f"messages is {shorten(messages)}, not a list of messages",
            'give [{"role": "user", "content": "..."}]', field="messages",
        )  # fmt: skip
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(
                f"message {number} is {shorten(message)}, which has no role",
                'give {"role": "user", "content": "..."}', field="messages",
            )  # fmt: skip
        if not _is_content(content := message.get("content")):
            raise PromptError(
                f"message {number}: content is {shorten(content)}, neither a text nor a list of"
                " texts",
                'give "..." or [{"type": "text", "text": "..."}]', field="messages",
            )  # fmt: skip
        try:
            wrap_calls(message.get("tool_calls") or [], f"message {number}: tool_calls")
        except ChatError as error:
            raise PromptError(str(error), "correct it", field="messages") from None


def _is_content(value: Any) -> bool:
    """Return whether `_join` can join a message's content."""
    return value is None or isinstance(value, str) or (
        isinstance(value, (list, tuple))
        and all(
            isinstance(part, str)
            or (isinstance(part, Mapping) and isinstance(part.get("text"), str))
            for part in value
        )
    )  # fmt: skip


def _join(content: Any) -> str | None:
    return content if content is None else join_parts(content)


def _read_tools(tools: Sequence[Message]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form, which has the function in a field of its own."""
    if not isinstance(tools, (list, tuple)):
        raise PromptError(
            f"tools is {shorten(tools)}, not a list", "give a list of functions", field="tools"
        )
    documents = []
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PromptError(
                f"tool {number} is {shorten(tool)}, which is no function",
                'give {"type": "function", "function": {"name": ..., "parameters": {...}}}',
                field="tools",
            )
        documents.append({"type": "function", "function": dict(function)})
    return documents
