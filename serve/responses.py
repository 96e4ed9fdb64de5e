"""OpenAI's responses: their bodies, which are chats in other words, and their events.

Nothing is stored: a conversation is sent whole each time.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from specdec import Event
from specdec.errors import shorten
from specdec.text.prompts import BOOL, OBJECT

from .answers import Answer, Choice
from .protocol import refuse
from .schema import (
    ANY,
    ASKED,
    FORMAT,
    LIMIT,
    NAMED_SCHEMA,
    TEMPLATE_SETTINGS,
    TEXT,
    TOP,
    Asked,
    Parameters,
)

Item = dict[str, Any]
_STORED = (lambda v: False, "left out: nothing is stored, so send the whole conversation as input")
_TOLD_AGAIN = ("prompt_cache_key", "user", "safety_identifier")
RESPONSE: Parameters = {
    name: rule for name, rule in ASKED.items()
    if name not in ("n", "best_of", "max_tokens", "response_format", "prompt_logprobs")
    and not name.startswith("return_")
} | {
    **TEMPLATE_SETTINGS,
    "input": (
        lambda v: isinstance(v, str) or (
            isinstance(v, list) and bool(v) and all(isinstance(item, dict) for item in v)
        ),
        "a text or a list of items",
    ),
    "instructions": TEXT,
    "max_output_tokens": LIMIT,
    "top_logprobs": TOP,
    "tools": ANY,
    "tool_choice": ANY,
    "parallel_tool_calls": BOOL,
    "text": {"format": {"type": FORMAT, **NAMED_SCHEMA}, "*": None},
    "reasoning": {"effort": TEXT, "*": None},
    "include": (
        lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v),
        "a list of names",
    ),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), _STORED),
    "background": (lambda v: v is False, "false: answers come as soon as they are made"),
    "truncation": (lambda v: v == "disabled", "disabled"),
    "metadata": OBJECT,  # told again, as are the names of whom the answer is for
    **dict.fromkeys(_TOLD_AGAIN, TEXT),
    "max_tool_calls": None,  # of tools that a server calls itself
    "stream_options": {"*": None},
}  # fmt: skip
LOGPROBS = "message.output_text.logprobs"  # what can be included
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


def read_response(asked: Asked) -> None:
    """Add to a response's body what a chat has; BadRequest for what is not offered.

    "places" has the names of the messages' places.
    """
    read = _read_input(asked["input"], asked.get("instructions"))
    asked["places"], asked["messages"] = map(list, zip(*read, strict=True))
    if "effort" in asked.get("reasoning", {}):
        asked["reasoning_effort"] = asked["reasoning"]["effort"]
    include = set(asked.get("include", ()))
    asked["ignored"] += [f"include.{name[:100]}" for name in sorted(include - {LOGPROBS})]
    if "top_logprobs" in asked or LOGPROBS in include:
        asked["logprobs"] = True


def _read_input(given: Any, instructions: str | None) -> list[tuple[str, Item]]:
    """The messages that items mean, each with the place of its first item."""
    read: list[tuple[str, Item]] = []
    if instructions:
        read.append(("instructions", {"role": "system", "content": instructions}))
    if isinstance(given, str):
        return [*read, ("input", {"role": "user", "content": given})]
    thought: list[str] = []  # reasoning before the assistant's next message
    for at, item in enumerate(given):
        where = f"input.{at}"
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "reasoning":
            thought.append(_read_text(item.get("content") or item.get("summary") or [], where))
            continue
        if kind == "message":
            text = _read_text(item.get("content"), where)
            message = {"role": item.get("role"), "content": text}
        elif kind == "function_call":
            name = item.get("name")
            if not isinstance(name, str):
                raise refuse(f"{where}.name", f"is {shorten(name)}, not a text")
            function = {"name": name, "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if read and read[-1][1]["role"] == "assistant":
                read[-1][1].setdefault("tool_calls", []).append(call)
                continue
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind == "function_call_output":
            text = _read_text(item.get("output"), where)
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
        else:
            reason = "nothing is stored" if kind == "item_reference" else "it is not supported"
            raise refuse(where, f"is of type {shorten(kind)}: {reason}")
        if thought and message["role"] == "assistant":
            message["reasoning_content"], thought = "\n".join(thought), []
        read.append((where, message))
    if not read:
        raise refuse("input", "has no message")
    return read


def _read_text(content: Any, where: str) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise refuse(where, f"has {shorten(content)} where a text belongs")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if kind not in _TEXTS or not isinstance(text, str):
            raise refuse(where, f"has {shorten(part)}: only texts are supported")
        texts.append(text)
    return "".join(texts)


class ResponseAnswer(Answer):
    """The answer to a response's body: a list of items, told event by event in a stream."""

    ending = b""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.id = f"resp_{secrets.token_hex(24)}"
        self._items: list[Item] = []
        self._is_open = False  # whether the last item goes on
        self._status, self._number = "in_progress", 0
        self._is_limited = False  # by max_output_tokens

    def to_json(self) -> dict[str, Any]:
        """The whole answer, when it is over."""
        body, is_over = self.asked, self._status != "in_progress"
        same = ("instructions", "max_output_tokens", "metadata", *_TOLD_AGAIN)
        reasons = {"reason": "max_output_tokens"} if self._is_limited else None
        return {
            "id": self.id, "object": "response", "created_at": self.created,
            "status": self._status, "background": False, "error": None,
            "incomplete_details": reasons, "model": self.model, "output": self._items,
            **{name: body.get(name) for name in same}, "previous_response_id": None,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "reasoning": {"effort": None, "summary": None} | body.get("reasoning", {}),
            "store": False, "temperature": body.get("temperature", 1.0),
            "text": {"format": {"type": "text"}} | body.get("text", {}),
            "tool_choice": body.get("tool_choice", "auto"), "tools": body.get("tools") or [],
            "top_logprobs": body.get("top_logprobs", 0), "top_p": body.get("top_p", 1.0),
            "truncation": "disabled", "usage": self._response_usage if is_over else None,
            **(self._told_last if is_over else {}),
        }  # fmt: skip

    def open(self) -> Iterator[dict[str, Any]]:
        """The events that a stream begins with."""
        yield self._make("response.created", response=self.to_json())
        yield self._make("response.in_progress", response=self.to_json())

    def add(self, choice: Choice, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """The events of what the answer has gained."""
        for chunk in super().add(choice, events):
            (part,) = chunk["choices"]
            yield from self._add_delta(part["delta"], part["logprobs"])
            if part["finish_reason"] is not None:
                is_cut = choice.parser is not None and choice.parser.is_call_cut
                yield from self._finish(part["finish_reason"], is_cut)

    def close(self) -> Iterator[dict[str, Any]]:
        """Nothing: the last event has the usage."""
        return iter(())

    def fail(self, error: dict[str, Any]) -> dict[str, Any]:
        """The event of an error that ends a stream."""
        self._status = "failed"
        told = {"code": error["code"] or "server_error", "message": error["message"]}
        return self._make("response.failed", response=self.to_json() | {"error": told})

    def _add_delta(self, delta: Item, logprobs: Any) -> Iterator[dict[str, Any]]:
        if text := delta.get("content"):
            yield from self._open_text("message", "output_text")
            part, told = self._items[-1]["content"][0], logprobs["content"] if logprobs else []
            part["text"] += text
            part["logprobs"] += told
            yield self._tell("response.output_text.delta", delta=text, logprobs=told)
        elif text := delta.get("reasoning_content"):
            yield from self._open_text("reasoning", "reasoning_text")
            self._items[-1]["content"][0]["text"] += text
            yield self._tell("response.reasoning_text.delta", delta=text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self._open(
                    {
                        "id": f"fc_{secrets.token_hex(24)}", "type": "function_call",
                        "call_id": call["id"], "name": function["name"], "arguments": "",
                    }
                )  # fmt: skip
            elif function["arguments"]:
                self._items[-1]["arguments"] += function["arguments"]
                yield self._tell(
                    "response.function_call_arguments.delta", delta=function["arguments"]
                )

    def _open(self, item: Item) -> Iterator[dict[str, Any]]:
        yield from self._close_item()
        self._items.append(item | {"status": "in_progress"})
        self._is_open = True
        yield self._tell("response.output_item.added", item=dict(self._items[-1]))

    def _open_text(self, kind: str, part: str) -> Iterator[dict[str, Any]]:
        """Let the last item be one of text."""
        if self._is_open and self._items[-1]["type"] == kind:
            return
        more: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
        prefix = "msg" if kind == "message" else "rs"
        name = f"{prefix}_{secrets.token_hex(24)}"
        yield from self._open({"id": name, "type": kind, "content": [], **more})
        begun: Item = {"type": part, "text": ""}
        begun |= {"annotations": [], "logprobs": []} if kind == "message" else {}
        self._items[-1]["content"] = [begun]
        yield self._tell("response.content_part.added", part=dict(begun))

    def _close_item(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        item = self._items[-1]
        if item["type"] == "function_call":
            yield self._tell(
                "response.function_call_arguments.done", arguments=item["arguments"],
                name=item["name"],
            )  # fmt: skip
        else:
            (part,) = item["content"]
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._tell(f"response.{part['type']}.done", text=part["text"], **more)
            yield self._tell("response.content_part.done", part=part)
        item["status"], self._is_open = status, False
        yield self._tell("response.output_item.done", item=item)

    def _finish(self, reason: str, is_call_cut: bool) -> Iterator[dict[str, Any]]:
        self._is_limited = reason == "length"
        self._status = "incomplete" if self._is_limited or is_call_cut else "completed"
        if not self._items:
            yield from self._open_text("message", "output_text")
        is_whole_call = self._items[-1]["type"] == "function_call" and not is_call_cut
        yield from self._close_item("completed" if is_whole_call else self._status)
        yield self._make(f"response.{self._status}", response=self.to_json())

    def _tell(self, kind: str, **told: Any) -> dict[str, Any]:
        """An event of the last item."""
        where: Item = {"output_index": len(self._items) - 1}
        if "item" not in told:
            where["item_id"] = self._items[-1]["id"]
            where |= {} if "function_call" in kind else {"content_index": 0}
        return self._make(kind, **where, **told)

    def _make(self, kind: str, **told: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **told}

    @property
    def _response_usage(self) -> dict[str, Any]:
        usage = self.usage
        details = usage.get("completion_tokens_details", {})
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0} | details,
            "total_tokens": usage["total_tokens"],
        }
