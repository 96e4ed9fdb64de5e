"""Conversations of bodies: checked messages, and the fields that the chat template reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec import Prompt, SpecDecError
from specdec.errors import shorten
from specdec.text.chat import ChatError, join_parts, wrap_calls
from specdec.text.encoding import render_chat

from .protocol import BadRequest, refuse
from .schema import FULL_TEXT, ConversationBody, Message, is_text

MAX_FIELDS = 64  # fields and variables that are probed: the template is rendered once for each
MEDIA = ("image", "video", "audio", "file")  # in the types of a content's other parts
TEXT_KEYS = ("type", "text")  # of a message's content that is given as a list of texts


def read_messages(body: ConversationBody) -> tuple[list[Message], list[str]]:
    """Return a conversation's messages, with texts as contents, and the paths that are ignored.

    Raises BadRequest for anything but a message.
    """
    messages, ignored = list[Message](), list[str]()
    for path, message in body.list_turns():
        fields = {
            name: value for name, value in message.items()
            if name not in ("role", "content") and value is not None and value != []
        }  # fmt: skip
        role = message.get("role")
        if not FULL_TEXT[0](role):
            reason = f"is {shorten(role)}, not a text" if "role" in message else "is missing"
            raise refuse(f"{path}.role", reason)
        content = _take_content(message, fields)
        if content is None and not fields:
            raise refuse(f"{path}.content", "is missing")
        text, ignored_keys = _read_text(content, f"{path}.content")
        ignored += ignored_keys
        if "tool_calls" in fields:
            try:
                fields["tool_calls"] = wrap_calls(fields["tool_calls"], f"{path}.tool_calls")
            except ChatError as error:
                raise BadRequest(str(error), body.source) from None
        messages.append({"role": role, "content": text, **fields})
    return messages, ignored


def _take_content(message: Message, fields: Message) -> Any:
    """Return a message's content; that of an assistant may be a refusal, taken from the fields."""
    content = message.get("content")
    is_refusal = message["role"] == "assistant" and is_text(fields.get("refusal"))
    return fields.pop("refusal") if content is None and is_refusal else content


def _read_text(content: Any, path: str) -> tuple[str | None, list[str]]:
    """Return a content's text, which may come as a list of texts, and its keys that are ignored."""
    if content is None or isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        raise _refuse_content(content, path)
    content = [_read_refusal(block) for block in content]
    ignored = _check_texts(content, path)
    return join_parts(content), ignored


def _read_refusal(block: Any) -> Any:
    """Return a part of a content, which is a text where it is a refusal."""
    is_refusal = isinstance(block, dict) and block.get("type") == "refusal"
    return {"type": "text", "text": block.get("refusal")} if is_refusal else block


def _check_texts(content: list[Any], path: str) -> list[str]:
    """Check a content that is a list of texts; return the paths of its keys that are ignored."""
    if not all(isinstance(block, dict) for block in content):
        raise _refuse_content(content, path)
    for block in content:
        if block.get("type") != "text" or not is_text(block.get("text")):
            kind = str(block.get("type"))
            if any(name in kind for name in MEDIA):
                raise refuse(path, f"has a part of type {shorten(kind)}: this server reads texts")
            only = 'of parts only {"type": "text", "text": "..."} is supported'
            raise refuse(path, f"is {shorten(content)}: {only}")
    return [
        f"messages.content.{key[:100]}" for block in content for key in block
        if key not in TEXT_KEYS
    ]  # fmt: skip


def _refuse_content(content: Any, path: str) -> BadRequest:
    return refuse(path, f"is {shorten(content)}: give a text, or a list of parts of text")


def list_unread_fields(
    prompt: Mapping[str, Any], tokenizer: Any, source: str, paths: Mapping[str, str]
) -> list[str]:
    """List the messages' fields and the template's variables that leave the prompt as it is.

    prompt: a Prompt's fields of a chat. source: the parameter that has the conversation. paths: of
    the variables in the body.
    BadRequest for calls that the chat template does not show.
    """

    def render(**changes: Any) -> str:
        chat = Prompt(**{**prompt, **changes})
        return render_chat(chat, chat.messages, tokenizer)

    reduced = _list_reduced(prompt, source, paths)
    if len(reduced) > MAX_FIELDS:
        raise refuse(source, f"and the template's variables have {len(reduced)} names beside role"
                     f" and content, at most {MAX_FIELDS} are read")  # fmt: skip
    try:
        full_text = render() if reduced else ""
        unread_names = [name for name, changes in reduced.items() if render(**changes) == full_text]
    except SpecDecError:  # prepare() refuses it with the error
        return []
    for i, message in enumerate(prompt["messages"]):
        for name in ("tools", "tool_calls", "function_call"):
            if name in message and f"{source}.{name}" in unread_names:
                raise BadRequest(f"the chat template does not read {source}.{i}.{name}", source)
    return unread_names


def _list_reduced(
    prompt: Mapping[str, Any], source: str, paths: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return a prompt's changes that each leave out one field or variable, by its path."""
    messages, variables = prompt["messages"], prompt["chat_template_kwargs"]
    changes: dict[str, dict[str, Any]] = {}
    for name in variables:
        fewer_variables = {key: variables[key] for key in variables if key != name}
        changes[paths[name]] = {"chat_template_kwargs": fewer_variables}
    for name in dict.fromkeys(name for message in messages for name in message):
        if name not in ("role", "content"):
            reduced = [{key: m[key] for key in m if key != name} for m in messages]
            changes[f"{source}.{name[:100]}"] = {"messages": reduced}
    return changes
