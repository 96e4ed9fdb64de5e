"""Conversations: reading their formats, rendering them, and finding the assistant's part."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.errors import shorten, summarize
from specdec.system.logs import get_logger
from specdec.text.learning_marks import read_turn
from specdec.text.tool_calls import render_calls

Mask = npt.NDArray[np.bool_]

# A data set's role -> whose turn it is.
ROLES = {
    role: speaker
    for speaker, roles in {
        "system": "system developer",
        "user": "user human",
        "assistant": "assistant gpt chatgpt bard bing model bot function_call tool_call",
        "tool": "tool function ipython observation tool_response",
    }.items()
    for role in roles.split()
}
CALL_ROLES = ("function_call", "tool_call")  # turns whose text is the JSON of one call or several
# A row's keys besides the conversation that a chat template takes.
OPTIONS = ("tools", "documents")
# Keys of what the turns of a row point to by a mark in their text, as LLaVA's data sets have them.
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# A row that lost one of these would teach another text than the target writes or is asked with.
NEEDED_FIELDS = (
    "content", "tool_calls", "reasoning_content", "reasoning", "thinking", "refusal", "audio",
    *OPTIONS,
)  # fmt: skip

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
PROBE = "SpecdecProbe"
# Texts of an answer, the one that is written last first.
ANSWER_TEXTS = ("content", "reasoning_content", "reasoning", "thinking")
CUT_REASONS = ("length", "max_tokens", "max_output_tokens", "MAX_TOKENS")
# A tag such as <think>, <|begin_of_thought|> or [THINK] at the end of a prompt, and an empty block
# that a template writes for an answer without thoughts.
OPENING_TAG = re.compile(r"([<\[])(\|?[A-Za-z][\w:-]*\|?)([>\]])\s*\Z")
EMPTY_BLOCK = re.compile(r"\s*(?:[<\[]([\w|:-]+)[>\]]\s*)?[<\[]/[\w|:-]+[>\]]\s*\Z")

logger = get_logger(__name__)
Message = dict[str, Any]


class ChatError(ValueError):
    """Error for a conversation that cannot be used, with a hint where the remedy is known."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class SeamError(ChatError):
    """An answer that the target cannot have written after the prompt that asks for it."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages with all their fields, and what else a chat template takes.

    A message's role is one of `ROLES`, and `assistant` wherever the assistant speaks. Its content
    is a text or a list of parts that are texts. unlearned: numbers of the assistant's messages that
    are marked as not to be learned. is_cut: whether the last answer ends before its end.
    """

    messages: list[Message]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unlearned: frozenset[int] = frozenset()
    is_cut: bool = False


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the (start, end) characters that the assistant wrote."""

    text: str
    spans: list[tuple[int, int]]


def get_speaker(message: Message) -> str:
    """Return whose turn a message is: system, user, assistant or tool."""
    return ROLES[message["role"]]


def join_parts(content: str | list[Any]) -> str:
    """Return a message's content as one text."""
    if isinstance(content, str):
        return content
    return "".join(
        text_part if isinstance(text_part, str) else text_part["text"] for text_part in content
    )


def parse_conversation(row: dict[str, Any]) -> Conversation:
    """Read `messages` [{role, content}] or `conversations` [{from, value}]; ChatError if wrong.

    A `system` text next to them comes first, as in Daring-Anteater; `tools`, `functions`,
    `documents` and `chat_template_kwargs` are for the chat template.
    """
    # Of rows of a table, which has every field, the empty one is another row's.
    key = "messages" if row.get("messages") is not None else "conversations"
    turns = row.get(key)
    _refuse_media(row)
    if not isinstance(turns, list):
        raise ChatError(f"{key} is a {type(turns).__name__}, not a list of turns")
    pairs = [_parse_turn(number, turn) for number, turn in enumerate(turns, 1)]
    system = _parse_system(row)
    if system and all(get_speaker(message) != "system" for message, _ in pairs):
        pairs.insert(0, ({"role": "system", "content": system}, True))
    return Conversation(
        [message for message, _ in pairs],
        _parse_options(row),
        frozenset(i for i, (_, is_learned) in enumerate(pairs) if not is_learned),
        is_answer_cut(row, turns),
    )


def _refuse_media(row: dict[str, Any]) -> None:
    """Raise ChatError for images, sounds or videos beside a row's turns."""
    for name in MEDIA:
        if row.get(name):
            raise ChatError(
                f"it has {name} besides its turns, {shorten(row[name])}",
                "leave such rows out: a drafter learns from text",
            )


def _parse_system(row: dict[str, Any]) -> str | None:
    """Return the system text that lies next to a row's turns."""
    system = row.get("system") or row.get("system_prompt")
    if system and not isinstance(system, str):
        raise ChatError(f"system is a {type(system).__name__}, not a text")
    return system


def is_answer_cut(row: dict[str, Any], turns: Sequence[Any] = ()) -> bool:
    """Return whether a row or its last turn says that the last answer met a limit of tokens."""
    last_turn = turns[-1] if turns and isinstance(turns[-1], dict) else {}
    return any(
        fields.get("truncated") is True
        or any(fields.get(key) in CUT_REASONS for key in ("finish_reason", "stop_reason"))
        for fields in (row, last_turn)
    )


def _parse_turn(number: int, turn: Any) -> tuple[Message, bool]:
    """Return a turn as a message, and whether it may be learned."""
    if not isinstance(turn, dict):
        raise ChatError(f"turn {number} is a {type(turn).__name__}, not an object")
    is_learned, marks = read_turn(turn, f"turn {number}")
    role = _parse_role(number, turn)
    speaker = ROLES[role]
    if speaker != "assistant" and is_learned:
        marks = []  # nobody's other turns are learned: the template's check tells of the field
    fields = _read_fields(turn, marks)
    content = turn.get("content", turn.get("value"))
    if role in CALL_ROLES:
        fields["tool_calls"] = _parse_calls(number, role, content)
        content = ""
    else:
        _move_function_call(number, fields)
    if "tool_calls" in fields:
        fields["tool_calls"] = wrap_calls(fields["tool_calls"], f"turn {number}: tool_calls")
    if content is None and speaker == "assistant" and any(name in NEEDED_FIELDS for name in fields):
        content = ""
    message = {"role": speaker if speaker in ("user", "assistant") else role}
    return {**message, "content": _check_content(number, content, turn), **fields}, is_learned


def _parse_role(number: int, turn: dict[str, Any]) -> str:
    """Return the role of a turn, one of `ROLES`."""
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise ChatError(f"turn {number} has role {role!r}, not one of {', '.join(ROLES)}")
    return role.lower()


def _read_fields(turn: dict[str, Any], marks: list[str]) -> Message:
    """Return a turn's fields beside role, content and marks of learning, without empty ones.

    Data sets kept as tables give every message each field; those of another message are empty.
    """
    return {
        name: value
        for name, value in turn.items()
        if name not in ("role", "from", "content", "value", *marks)
        and value is not None and value != [] and value != {}
    }  # fmt: skip


def _move_function_call(number: int, fields: Message) -> None:
    """Turn a `function_call`, OpenAI's form before tools, into `tool_calls`."""
    call = fields.pop("function_call", None)
    if isinstance(call, dict):
        fields.setdefault("tool_calls", [{"type": "function", "function": call}])
    elif call is not None:
        raise ChatError(f"turn {number}: function_call is a {type(call).__name__}")


def _check_content(number: int, content: Any, turn: dict[str, Any]) -> str | list[Any]:
    """Accept a text, or the list of text parts that chat servers use."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        field_names = ", ".join(name for name in turn if name not in ("role", "from")) or "nothing"
        raise ChatError(
            f"turn {number} has no text as `content` or `value`, it has {field_names}"
            if content is None
            else f"turn {number} has no text as `content` or `value`, but a"
            f" {type(content).__name__}"
        )
    for content_part in content:
        if not isinstance(content_part, (str, dict)):
            raise ChatError(f"turn {number} has no text as part of its content")
        if isinstance(content_part, dict) and not isinstance(content_part.get("text"), str):
            raise ChatError(
                f"turn {number} has no text as part of its content, but a part of type"
                f" {content_part.get('type')!r}",
                "leave such rows out: a drafter learns from text",
            )
    return content


def _parse_calls(number: int, role: str, content: Any) -> list[Message]:
    """Read the text of a turn that calls functions: {"name", "arguments"}, or a list of them."""
    try:
        calls = json.loads(content)
    except (TypeError, ValueError, RecursionError):
        calls = content
    return wrap_calls(calls if isinstance(calls, list) else [calls], f"turn {number} ({role})")


def wrap_calls(calls: Any, location: str) -> list[Message]:
    """Return calls of functions in OpenAI's form; ChatError for what is none, found at `where`."""
    wrapped: list[Message] = []
    for call in calls if isinstance(calls, list) else [calls]:
        if isinstance(call, dict) and "function" not in call:
            bare = {k: v for k, v in call.items() if k in ("name", "arguments")}
            call_fields = {k: v for k, v in call.items() if k not in bare}
            call = {"type": "function", **call_fields, "function": bare}
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ChatError(
                f"{location} holds {shorten(call)}, which is no call of a function, as"
                ' {"name": "...", "arguments": {...}}'
            )
        wrapped.append(call)
    return wrapped


def _parse_options(row: dict[str, Any]) -> dict[str, Any]:
    """Read what a row has for the chat template besides its messages."""
    options: dict[str, Any] = {}
    for name in (*OPTIONS, "functions"):
        objects = _read_objects(row, name)
        if objects and name != "documents":
            name, objects = "tools", [
                tool if "function" in tool or "name" not in tool
                else {"type": "function", "function": tool}
                for tool in objects
            ]  # fmt: skip
        if objects:
            options.setdefault(name, objects)
    template_options = row.get("chat_template_kwargs")
    if isinstance(template_options, dict):
        options |= {k: v for k, v in template_options.items() if v is not None and k not in options}
    return options


def _read_objects(row: dict[str, Any], name: str) -> list[Message]:
    """Return a row's list of objects under a name, also of a text of JSON; empty without one."""
    value = row.get(name)
    if isinstance(value, str) and value.strip():  # some data sets hold it as JSON
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ChatError(f"{name} is a text that is not JSON") from None
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ChatError(f"{name} is not a list of objects")
    return value


class ChatFormat:
    """Chat template of a tokenizer, with a check of the fields that it does not read.

    A template that leaves out a field that the target writes or is asked with makes ChatError; for
    every other field that it leaves out there is one log line.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._template = None if tokenizer.chat_template else PLAIN_TEMPLATE
        self._source = str(tokenizer.chat_template or PLAIN_TEMPLATE)
        self._wants_text = False  # as arguments of a call
        self._read: set[tuple[object, ...]] = set()
        self._logged_lines: set[tuple[str, ...]] = set()

    def render(self, conversation: Conversation, *, ask: bool = False) -> str:
        """Render a conversation; ChatError if the template refuses it or loses what it needs.

        ask: end with what asks for an answer.
        """
        self._check_fields(conversation)
        return self._render(conversation.messages, conversation.options, ask)

    def render_turns(self, conversation: Conversation) -> list[Rendered]:
        """Render a conversation with the spans that the assistant wrote.

        Raises ChatError as `render` does, and SeamError where an answer does not follow its prompt.
        The assistant's part of a turn is what the turn adds to the prompt that asks for it, up to
        the token that ends it. Some templates render earlier turns differently later on (they drop
        the reasoning, for example). Such a conversation becomes one text per turn, each as the
        target sees it at that moment.
        """
        self._check_fields(conversation)
        messages, options = conversation.messages, conversation.options
        turns = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number == 0 or number in conversation.unlearned:
                continue
            is_cut = conversation.is_cut and number == len(messages) - 1
            turns.append(self._render_answer(messages[: number + 1], options, is_cut))
        if not turns or all(turns[-1].text.startswith(turn.text) for turn in turns):
            return [Rendered(turns[-1].text, [t.spans[0] for t in turns])] if turns else []
        return turns

    def _render_answer(
        self, messages: Sequence[Message], options: Mapping[str, Any], is_cut: bool
    ) -> Rendered:
        """Render messages up to an answer, as the target sees them when it writes the answer.

        is_cut: whether the answer ends before its end; its text is then what the target wrote so
        far, after the prompt that asked for it, and nothing ends it.
        """
        prompt = self._render(messages[:-1], options, ask=True)
        text = self._render(messages, options)
        answer = messages[-1]
        content = join_parts(answer["content"])
        is_plain = not any(answer.get(name) for name in NEEDED_FIELDS if name != "content")
        if is_cut and is_plain:
            text = prompt + _drop_opening(content, prompt)
            return Rendered(text, [(len(prompt), len(text))])
        if not text.startswith(prompt):
            text = self._join_answer(messages, options, prompt, text)
        if is_cut:
            text = self._leave_out_end(messages, options, text)
        start = len(prompt)
        opening = text[start : max(start, text.find(content.strip(), start))]
        if is_plain and EMPTY_BLOCK.match(opening):
            self._tell_once(
                "the chat template writes %r before answers without thoughts: it is in their"
                " context and is not learned", opening,
            )  # fmt: skip
            start += len(opening)
        return Rendered(text, [(start, len(text.rstrip()))])

    def _leave_out_end(
        self, messages: Sequence[Message], options: Mapping[str, Any], text: str
    ) -> str:
        """Return the text of a cut answer without what the template writes after its last text.

        A cut answer with calls keeps its end: what the target wrote of the last call is not known.
        """
        answer = messages[-1]
        filled_names = [name for name in ANSWER_TEXTS if _is_filled(name, answer.get(name))]
        if answer.get("tool_calls") or not filled_names:
            return text
        probed = self._render([*messages[:-1], {**answer, filled_names[0]: PROBE}], options)
        _, probe, end = probed.rpartition(PROBE)
        return text.removesuffix(end) if probe else text

    def _join_answer(
        self, messages: Sequence[Message], options: Mapping[str, Any], prompt: str, text: str
    ) -> str:
        """Return the text of an answer after the prompt, where the template opens it otherwise.

        SeamError where the target cannot have written the answer after that prompt.
        """
        answer = messages[-1]
        num_shared = len(os.path.commonprefix([prompt, text]))
        seam = prompt[num_shared:]
        if not seam.strip():
            return prompt + text[num_shared:].lstrip()
        content = join_parts(answer["content"])
        tag = OPENING_TAG.search(seam)
        closing = f"{tag[1]}/{tag[2]}{tag[3]}" if tag else ""
        if closing not in content or any(answer.get(n) for n in NEEDED_FIELDS if n != "content"):
            raise SeamError(
                f"the prompt of an answer ends with {shorten(prompt[-40:])}, and the chat template"
                f" writes the answer after {shorten(text[:num_shared][-40:])}: the target is never"
                " asked for it like this",
                "let the target answer with `specdec-train data`, write the content as the target"
                f" does{f', its thoughts, {closing} and the answer' * bool(tag)}, or give"
                " chat_template_kwargs with which the template asks without it",
            )
        probed = self._render([*messages[:-1], {**answer, "content": PROBE}], options)
        return prompt + _drop_opening(content, prompt) + probed.rpartition(PROBE)[2]

    def _render(
        self, messages: Sequence[Message], options: Mapping[str, Any], ask: bool = False
    ) -> str:
        import jinja2

        prepared = [self._prepare(message) for message in messages]
        try:
            text, self._wants_text = render_calls(
                lambda given: self._apply(given, options, ask), prepared, self._wants_text
            )
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(
                f"the chat template has an error in line {error.lineno}: {summarize(error)}",
                "correct it beside the tokenizer, in chat_template.jinja or tokenizer_config.json",
            ) from None
        except Exception as error:  # noqa: BLE001 - templates raise whatever they like
            raise ChatError(
                f"the chat template refuses it: {summarize(error)}",
                "check the turns' roles, their order and fields, or leave such rows out",
            ) from None
        return text

    def _apply(self, messages: list[Message], options: Mapping[str, Any], ask: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=ask,
                **options,
            )  # fmt: skip
        )

    def _prepare(self, message: Message) -> Message:
        """Return a message with the role and the kind of content that the template knows."""
        role, content = message["role"], message["content"]
        if f"'{role}'" not in self._source and f'"{role}"' not in self._source:
            role = ROLES[role]
        if isinstance(content, list) and not self._takes_parts:
            content = join_parts(content)
        elif isinstance(content, str) and not self._takes_text and self._takes_parts:
            content = [{"type": "text", "text": content}]
        return {**message, "role": role, "content": content}

    @functools.cached_property
    def _takes_text(self) -> bool:
        return self._prints(PROBE)

    @functools.cached_property
    def _takes_parts(self) -> bool:
        return self._prints([{"type": "text", "text": PROBE}])

    def _prints(self, content: object) -> bool:
        try:
            text = self._apply([{"role": "user", "content": content}], {}, False)
        except Exception:  # noqa: BLE001 - as above
            return False
        return PROBE in text and "'type'" not in text

    def _check_fields(self, conversation: Conversation) -> None:
        """Render with and without each field, to find the fields that make no difference."""
        messages, options = conversation.messages, conversation.options
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
        prompt = messages[: next(iter(answers), len(messages))]
        for name in options:
            fewer_options = {k: v for k, v in options.items() if k != name}
            self._check("a row", name, (prompt, options, True), (prompt, fewer_options, True))
        for number in range(len(messages)):
            # As the target sees it: its own turn as soon as it is written, any other in the prompt.
            is_answer = number in answers
            stop = next((i for i in answers if i > number), len(messages))
            turns = messages[: number + 1 if is_answer else stop]
            self._check_turn(turns, number, options, asks=not is_answer)

    def _check_turn(
        self, turns: list[Message], number: int, options: Mapping[str, Any], *, asks: bool
    ) -> None:
        """Render turns with and without each field of one of them.

        asks: whether the turns end with what asks for an answer.
        """
        message = turns[number]
        content = join_parts(message["content"]).strip()
        filled_names = [
            name for name, value in message.items()
            if (content if name == "content" else _is_filled(name, value))
        ]  # fmt: skip
        has_calls = len(message.get("tool_calls", [])) > 1
        for name in filled_names:
            changed_turns = [*turns[:number], _leave_out(message, name), *turns[number + 1 :]]
            self._check(
                f"a turn of {message['role']}", name,
                (turns, options, asks), (changed_turns, options, asks),
                (*filled_names, number == 0, has_calls),
            )  # fmt: skip

    def _check(
        self, owner: str, name: str, arguments: tuple[Any, ...], reduced_arguments: tuple[Any, ...],
        circumstances: tuple[object, ...] = (),
    ) -> None:  # fmt: skip
        """Log a field that the template does not read; ChatError where it must not be lost.

        circumstances: what a template looks at, so that equal ones need no other rendering.
        """
        key = (owner, name, *circumstances)
        if key in self._read:
            return
        text = self._render(*arguments)
        try:
            is_read = text != self._render(*reduced_arguments)
        except ChatError:  # the template cannot do without it
            is_read = True
        if not is_read and name in NEEDED_FIELDS:
            template = "chat template" if self._template is None else "plain form of chats"
            raise ChatError(
                f"{owner} has {name}, which the tokenizer's {template} does not read: it would be"
                " missing in the tokens",
                f"use a tokenizer whose chat template reads {name}, rename it to what the template"
                " reads, or leave such rows out",
            )
        if not is_read:
            self._tell_once(
                "%s has %s, which the tokenizer's chat template does not read: it is not in the"
                " tokens", owner, name,
            )  # fmt: skip
        self._read.add(key)

    def _tell_once(self, *line: str) -> None:
        if line not in self._logged_lines:
            self._logged_lines.add(line)
            logger.warning(*line)


def _drop_opening(content: str, prompt: str) -> str:
    """Return an answer without the opening tag, where the prompt that asks for it ends with it."""
    tag = OPENING_TAG.search(prompt)
    answer = content.lstrip()
    if tag is None or not answer.startswith(opening := tag[0].rstrip()):
        return content
    return answer[len(opening) :].removeprefix(prompt[len(prompt.rstrip()) :])


def _leave_out(message: Message, name: str) -> Message:
    """Return a message without a field; its content becomes empty instead."""
    fields = {key: value for key, value in message.items() if key != name}
    return {**fields, "content": ""} if name == "content" else fields


def _is_filled(name: str, value: object) -> bool:
    """Return whether a message's field says something; 0 and False do where it is no text."""
    is_falsy_value = isinstance(value, (bool, int, float)) and name not in NEEDED_FIELDS
    return name != "role" and (bool(value) or is_falsy_value)


def mask_tokens(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> Mask:
    """Return for each token, by its characters, whether it starts within one of the spans.

    A tokenizer that trims its offsets (GPT-NeoX's) puts a token of spaces, without width, at the
    next character: it starts where the token before it ends. Tokens that a tokenizer adds to the
    text have no width there, and start in no span.
    """
    starts, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
    earlier_ends = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    starts = np.where(ends > starts, starts, earlier_ends)
    mask = np.zeros(len(starts), bool)
    for begin, finish in spans:
        mask |= (starts >= begin) & (starts < finish)
    return mask & (ends > starts)
