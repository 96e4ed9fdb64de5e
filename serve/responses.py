"""Answers of OpenAI's Responses API: lists of items, streamed as events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from specdec import Event

from .answers import ChatAnswer, Choice
from .protocol import BadRequest
from .response_body import ECHOED, ResponseBody

Item = dict[str, Any]


class ResponseAnswer(ChatAnswer):
    """Answer to a response's body: a list of items, sent event by event in a stream."""

    ending = b""
    body: ResponseBody

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.id = f"resp_{secrets.token_hex(24)}"
        self._items: list[Item] = []
        self._is_open = False  # whether the last item may still grow
        self._status, self._number = "in_progress", 0
        self._is_limited = False  # whether max_output_tokens ended the answer

    def to_json(self) -> dict[str, Any]:
        """Return the whole answer, when it is over."""
        body, is_over = self.body.list_given(), self._status != "in_progress"
        echoed_names = ("instructions", "max_output_tokens", "metadata", *ECHOED)
        reasons = {"reason": "max_output_tokens"} if self._is_limited else None
        return {
            "id": self.id, "object": "response", "created_at": self.created,
            "status": self._status, "background": False, "error": None,
            "incomplete_details": reasons, "model": self.model, "output": self._items,
            **{name: body.get(name) for name in echoed_names}, "previous_response_id": None,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "reasoning": {"effort": None, "summary": None} | body.get("reasoning", {}),
            "store": False, "temperature": body.get("temperature", 1.0),
            "text": {"format": {"type": "text"}} | body.get("text", {}),
            "tool_choice": body.get("tool_choice", "auto"), "tools": body.get("tools") or [],
            "top_logprobs": body.get("top_logprobs", 0), "top_p": body.get("top_p", 1.0),
            "truncation": "disabled", "usage": self._response_usage if is_over else None,
            **(self._last_fields if is_over else {}),
        }  # fmt: skip

    def open(self) -> Iterator[dict[str, Any]]:
        """Yield the events that a stream begins with."""
        yield self._make_event("response.created", response=self.to_json())
        yield self._make_event("response.in_progress", response=self.to_json())

    def add(self, choice: Choice, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """Yield the events of a choice's new text, calls and end."""
        for chunk in super().add(choice, events):
            (document,) = chunk["choices"]
            yield from self._add_delta(document["delta"], document["logprobs"])
            if document["finish_reason"] is not None:
                is_cut = choice.parser is not None and choice.parser.is_call_cut
                yield from self._finish(document["finish_reason"], is_cut)

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield nothing: the last event has the usage."""
        return iter(())

    def fail(self, error: BadRequest) -> dict[str, Any]:
        """Return the event of an error that ends a stream."""
        self._status = "failed"
        short_error = {"code": error.code or "server_error", "message": error.message}
        return self._make_event("response.failed", response=self.to_json() | {"error": short_error})

    def _add_delta(self, delta: Item, logprobs: Any) -> Iterator[dict[str, Any]]:
        if text := delta.get("content"):
            yield from self._open_text("message", "output_text")
            token_logprobs = logprobs["content"] if logprobs else []
            content = self._items[-1]["content"][0]
            content["text"] += text
            content["logprobs"] += token_logprobs
            yield self._make_item_event(
                "response.output_text.delta", delta=text, logprobs=token_logprobs
            )
        elif text := delta.get("reasoning_content"):
            yield from self._open_text("reasoning", "reasoning_text")
            self._items[-1]["content"][0]["text"] += text
            yield self._make_item_event("response.reasoning_text.delta", delta=text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                namespace = self.body.find_namespace(function["name"])
                yield from self._open(
                    {
                        **({} if namespace is None else {"namespace": namespace}),
                        "id": f"fc_{secrets.token_hex(24)}", "type": "function_call",
                        "call_id": call["id"], "name": function["name"], "arguments": "",
                    }
                )  # fmt: skip
            elif function["arguments"]:
                self._items[-1]["arguments"] += function["arguments"]
                yield self._make_item_event(
                    "response.function_call_arguments.delta", delta=function["arguments"]
                )

    def _open(self, item: Item) -> Iterator[dict[str, Any]]:
        yield from self._close_item()
        self._items.append(item | {"status": "in_progress"})
        self._is_open = True
        yield self._make_item_event("response.output_item.added", item=dict(self._items[-1]))

    def _open_text(self, kind: str, content_type: str) -> Iterator[dict[str, Any]]:
        """Begin an item of text, unless the last item is open and of this kind."""
        if self._is_open and self._items[-1]["type"] == kind:
            return
        fields: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
        prefix = "msg" if kind == "message" else "rs"
        name = f"{prefix}_{secrets.token_hex(24)}"
        yield from self._open({"id": name, "type": kind, "content": [], **fields})
        content: Item = {"type": content_type, "text": ""}
        content |= {"annotations": [], "logprobs": []} if kind == "message" else {}
        self._items[-1]["content"] = [content]
        yield self._make_item_event("response.content_part.added", part=dict(content))

    def _close_item(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        item = self._items[-1]
        if item["type"] == "function_call":
            yield self._make_item_event(
                "response.function_call_arguments.done", arguments=item["arguments"],
                name=item["name"],
            )  # fmt: skip
        else:
            (content,) = item["content"]
            fields = {"logprobs": content["logprobs"]} if "logprobs" in content else {}
            yield self._make_item_event(
                f"response.{content['type']}.done", text=content["text"], **fields
            )
            yield self._make_item_event("response.content_part.done", part=content)
        item["status"], self._is_open = status, False
        yield self._make_item_event("response.output_item.done", item=item)

    def _finish(self, reason: str, is_call_cut: bool) -> Iterator[dict[str, Any]]:
        self._is_limited = reason == "length"
        self._status = "incomplete" if self._is_limited or is_call_cut else "completed"
        if not self._items:
            yield from self._open_text("message", "output_text")
        is_whole_call = self._items[-1]["type"] == "function_call" and not is_call_cut
        yield from self._close_item("completed" if is_whole_call else self._status)
        yield self._make_event(f"response.{self._status}", response=self.to_json())

    def _make_item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the last item."""
        indices: Item = {"output_index": len(self._items) - 1}
        if "item" not in fields:
            indices["item_id"] = self._items[-1]["id"]
            indices |= {} if "function_call" in kind else {"content_index": 0}
        return self._make_event(kind, **indices, **fields)

    def _make_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

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
