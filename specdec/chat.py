"""Conversations: reading their formats, rendering them, and finding the assistant's part."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}

# For tokenizers without a chat template: Vicuna's form, with the end token after each answer.
PLAIN_TEMPLATE = (
    "{% if bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "ASSISTANT: {{ message['content'] }}{{ eos_token or '\n' }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] }} "
    "{% else %}{{ message['role'] | upper }}: {{ message['content'] }} {% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the (start, end) characters that the assistant wrote."""

    text: str
    spans: list[tuple[int, int]]


def parse_messages(row: dict[str, Any]) -> list[Message]:
    """Read `messages` [{role, content}] or `conversations` [{from, value}]; ValueError if wrong."""
    key = "messages" if "messages" in row else "conversations"
    turns = row[key]
    if not isinstance(turns, list):
        raise ValueError(f"{key} is a {type(turns).__name__}, not a list of turns")
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise ValueError(f"turn {number} is a {type(turn).__name__}, not an object")
        role = turn.get("role", turn.get("from"))
        content = _join_parts(turn.get("content", turn.get("value")))
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise ValueError(f"turn {number} has role {role!r}, not one of {', '.join(ROLES)}")
        if content is None:
            raise ValueError(f"turn {number} has no text as `content` or `value`")
        messages.append({"role": ROLES[role.lower()], "content": content})
    return messages


def _join_parts(content: Any) -> str | None:
    """Accept a text, or the list of text parts that chat servers use."""
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) else p for p in content]
        texts = [p for p in parts if isinstance(p, str)]
        return "".join(texts) if len(texts) == len(parts) else None
    return content if isinstance(content, str) else None


def render_messages(tokenizer: Any, messages: list[Message], *, ask: bool = False) -> str:
    """Render messages with the tokenizer's chat template; ValueError if it refuses.

    ask: end with what asks for an answer.
    """
    template = None if tokenizer.chat_template else PLAIN_TEMPLATE
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=ask
            )
        )
    except Exception as error:  # noqa: BLE001 - templates raise whatever they like
        raise ValueError(f"the chat template refuses it: {error}") from None


def render_conversation(tokenizer: Any, messages: list[Message]) -> list[Rendered]:
    """Render a conversation with the tokenizer's chat template; ValueError if it refuses.

    The assistant's part of a turn is what the turn adds to the prompt that asks for it, up to the
    token that ends it. Some templates render earlier turns differently later on (they drop the
    reasoning, for example). Such a conversation becomes one text per turn, each as the target sees
    it at that moment.
    """
    turns = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and number > 0:
            prompt = render_messages(tokenizer, messages[:number], ask=True)
            text = render_messages(tokenizer, messages[: number + 1])
            # Equal to the prompt's length unless the template opens the answer differently.
            start = len(os.path.commonprefix([prompt, text]))
            turns.append(Rendered(text, [(start, len(text.rstrip()))]))
    if not turns or all(turns[-1].text.startswith(turn.text) for turn in turns):
        return [Rendered(turns[-1].text, [t.spans[0] for t in turns])] if turns else []
    return turns


def mask_tokens(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> Mask:
    """Tell for each token, given its characters, whether it starts within one of the spans."""
    starts, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), bool)
    for begin, finish in spans:
        mask |= (starts >= begin) & (starts < finish)
    return mask & (ends > starts)
