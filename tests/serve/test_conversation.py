"""Messages of a body, and the fields that a chat template does not read, alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.serve import conversation
from specdec.serve.conversation import list_unread_fields, read_messages
from specdec.serve.protocol import BadRequest
from specdec.serve.schema import ChatBody

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def read(*messages: Any) -> Any:
    return read_messages(ChatBody(messages=list(messages)))


def test_contents_are_texts() -> None:
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache": 1}]
    messages, ignored = read(
        {"role": "user", "content": "x", "name": None, "refusal": []},
        {"role": "user", "content": texts, "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    )
    assert messages[0] == {"role": "user", "content": "x"}
    assert messages[1]["name"] == "me"
    assert messages[1]["content"].replace("\n", "") == "ab"
    assert (messages[2]["content"], messages[2]["tool_calls"]) == (None, [CALL])
    assert ignored == ["messages.content.cache"]


def test_a_refusal_is_the_assistants_text() -> None:
    """As OpenAI's SDK gives an answer back."""
    part = {"type": "refusal", "refusal": "I cannot."}
    messages, ignored = read(
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [part]},
        {"role": "assistant", "content": "a", "refusal": None},
    )
    said = [{"role": "assistant", "content": text} for text in ("No.", "I cannot.", "a")]
    assert (messages, ignored) == (said, [])


@pytest.mark.parametrize(
    ("message", "fact"),
    [
        ({"content": "a"}, "messages.1.role is missing"),
        ({"role": "assistant", "content": None, "refusal": None}, "messages.1.content is missing"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": 3}]}, "messages.1.content is"),
        ({"role": 3, "content": "a"}, "messages.1.role is 3, not a text"),
        ({"role": "user"}, "messages.1.content is missing"),
        ({"role": "user", "content": None, "name": None}, "messages.1.content is missing"),
        ({"role": "user", "content": 5},
         "messages.1.content is 5: give a text, or a list of parts of text"),
        ({"role": "user", "content": ["a"]},
         "messages.1.content is ['a']: give a text, or a list of parts of text"),
        ({"role": "user", "content": [{"type": "image", "text": "a"}]},
         "messages.1.content has a part of type 'image': this server reads texts"),
        ({"role": "user", "content": [{"type": "other", "text": "a"}]}, "of parts only"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "of parts only"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls"),
    ],
)  # fmt: skip
def test_what_is_no_message(message: dict[str, Any], fact: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read({"role": "user", "content": "a"}, message)
    assert fact in caught.value.message
    assert (caught.value.param, caught.value.status) == ("messages", 400)


def render(names: set[str]) -> Any:
    """A template that shows the fields and variables of these names."""

    def render_chat(chat: Any, messages: Any, tokenizer: Any) -> str:
        shown = [[(k, m[k]) for k in sorted(m) if k in names] for m in messages]
        variables = chat.chat_template_kwargs or {}
        return str([shown, [(k, variables[k]) for k in sorted(variables) if k in names]])

    return render_chat


def list_unread(
    monkeypatch: pytest.MonkeyPatch, names: set[str], messages: list[Any], **variables: Any
) -> list[str]:
    monkeypatch.setattr(conversation, "render_chat", render(names))
    prompt = {"messages": messages, "chat_template_kwargs": variables}
    paths = {name: f"chat_template_kwargs.{name}" for name in variables}
    return list_unread_fields(prompt, SimpleNamespace(), "messages", paths)


def test_fields_that_leave_the_prompt_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [
        {"role": "user", "content": "a", "name": "me"},
        {"role": "user", "content": "b", "name": "you", "mood": "good"},
    ]
    unread = list_unread(monkeypatch, {"content", "name", "think"}, messages, think=1, style=2)
    assert unread == ["chat_template_kwargs.style", "messages.mood"]
    assert list_unread(monkeypatch, {"content"}, messages) == ["messages.name", "messages.mood"]
    assert list_unread(monkeypatch, set(), [{"role": "user", "content": "a"}]) == []


def test_calls_that_a_template_does_not_show_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [CALL]},
    ]
    assert list_unread(monkeypatch, {"content", "tool_calls"}, messages) == []
    with pytest.raises(BadRequest, match=r"does not read messages\.1\.tool_calls"):
        list_unread(monkeypatch, {"content"}, messages)
    many = {f"field{n}": n for n in range(conversation.MAX_FIELDS + 1)}
    with pytest.raises(BadRequest, match="have 65 names beside role and content, at most 64"):
        list_unread(monkeypatch, {"content"}, [{"role": "user", "content": "a", **many}])
    del many["field0"]
    fields = list_unread(monkeypatch, set(), [{"role": "user", "content": "a", **many}])
    assert len(fields) == conversation.MAX_FIELDS
