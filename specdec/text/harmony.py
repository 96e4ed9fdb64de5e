"""Harmony, gpt-oss's format of answers: messages on channels become reasoning, content and calls.

An answer goes on after `<|start|>assistant`. Each message has a header, which names its channel
and perhaps whom it is for, and ends with a special token. Text on the channel `analysis` is
reasoning, a message for `functions.NAME` is a call, all else is content
(https://github.com/openai/harmony).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specdec.text.answer_parser import Parser
from specdec.text.answer_reader import Reading
from specdec.text.call_formats import ChatFormats, ReasoningFormat, ToolFormat, find_thinking
from specdec.text.text_stream import INCOMPLETE, TextForm, decode_text

START, MESSAGE, ENDS = "<|start|>", "<|message|>", ("<|end|>", "<|return|>", "<|call|>")
# Special tokens whose places a text without them must tell.
MARKS = (START, MESSAGE, "<|channel|>", "<|constrain|>", "<|end|>")
NAMESPACE = "functions."
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
REASONING = ReasoningFormat(ANALYSIS, FINAL)
TOOLS = ToolFormat(
    begin="<|channel|>commentary", arguments="", name_text=" <|constrain|>json<|message|>",
    prefix=f"<|channel|>commentary to={NAMESPACE}",
)  # fmt: skip
# A header up to its end, as far as it has come. White space belongs to what stands after it: a
# pattern with several places for it would try all its divisions.
_HEADER = re.compile(
    r"(?=(?P<space>\s*))(?P=space)(?:<\|start\|>(?:\s*[^\s<]+)?|assistant)?(?P<to>\s*to=[^\s<]*)?"
    r"(?P<channel>\s*<\|channel\|>(?:\s*\w+)?)?(?P<then>\s*to=[^\s<]*)?"
    r"(?P<kind>\s*<\|constrain\|>)?(?:\s*\w+)?\s*"
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
Message = dict[str, Any]


class Header(NamedTuple):
    """Channel of a message, and whom it is for; each may be empty."""

    channel: str
    recipient: str


def is_harmony(template: str) -> bool:
    """Return whether a chat template writes an assistant's messages on harmony's channels."""
    return FINAL in template and f"{START}assistant" in template


def find_opening(prompt: str) -> str:
    """Return the last message of a prompt after `<|start|>`, which the answer goes on with."""
    return prompt.rpartition(START)[2]


def find_marks(tokenizer: Any) -> dict[int, str]:
    """Return the special tokens of a tokenizer that are harmony's marks, by their ids."""
    tokens = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        token_id: str(token) for token_id, token in tokens.items()
        if token.special and str(token) in MARKS
    }  # fmt: skip


class HarmonyParser(Parser):
    """Parser of one answer in harmony; opening: of `find_opening`."""

    def __init__(self, tools: ToolFormat | None, opening: str, **options: Any) -> None:
        super().__init__(tools, REASONING, **options)
        self._text, self._offset = opening, len(opening)

    def _read(self) -> Reading[None]:
        yield
        while not (self._is_over and self._position >= len(self._text)):
            header = yield from self._read_header()
            if header is not None:
                yield from self._read_message(header)
            yield from self._read_message_end()

    def _read_header(self) -> Reading[Header | None]:
        """Read a message's header; return None for text without one, which is content."""
        while True:
            end = self._text.find(MESSAGE, self._position)
            stop = self._cut_half() if end < 0 else end
            match = _HEADER.fullmatch(self._text, self._position, stop)
            if match is None and self._text.startswith(START, self._position):
                return (yield from self._read_odd_header())
            if match is None or (self._is_over and end < 0 and not self._has_mark(match)):
                return Header("", "")
            if end >= 0:
                self._position = end + len(MESSAGE)
                return self._make_header(match)
            if self._is_over:  # a limit has cut the header off
                self._position = len(self._text)
                return None
            yield

    @staticmethod
    def _make_header(match: re.Match[str]) -> Header:
        """Return the channel and the recipient that a header names."""
        recipient = (match["to"] or match["then"] or "").strip().removeprefix("to=")
        return Header((match["channel"] or "").rpartition(">")[2].strip(), recipient)

    def _read_odd_header(self) -> Reading[Header]:
        """Read a header that breaks the format; without its end, what it holds is content."""
        self._position += len(START)
        if (yield from self._has(self._position, "assistant")):
            self._position += len("assistant")
        while True:
            end, marker = self._find_first((MESSAGE, START, *ENDS))
            if marker == MESSAGE:
                channel = _CHANNEL.search(self._text, self._position, end)
                self._position = end + len(MESSAGE)
                return Header(channel[1] if channel is not None else "", "")
            if marker or self._is_over:
                if not marker and self._is_cut and self._text.startswith("<|", self._position):
                    self._position = len(self._text)
                return Header("", "")
            yield

    def _cut_half(self) -> int:
        """Return the end of the text without half a mark that may stand there."""
        start = self._text.rfind("<", self._position)
        half = self._text[start:]
        is_half = start >= 0 and any(mark.startswith(half) and mark != half for mark in MARKS)
        return start if is_half else len(self._text)

    def _has_mark(self, match: re.Match[str]) -> bool:
        """Return whether what was read of a header cannot be content."""
        word = match[0].strip().removeprefix("assistant").strip()
        return not word or (self._is_cut and "to=".startswith(word)) or any(
            (match["to"], match["channel"], match["kind"], START in match[0])
        )  # fmt: skip

    def _read_message(self, header: Header) -> Reading[None]:
        """Read a message's text as its header says; it ends where `_read_message_end` goes on."""
        self._position = max(self._position, self._offset)
        name = header.recipient.removeprefix(NAMESPACE)
        is_call = name in self._schemas or header.recipient.startswith(NAMESPACE)
        if is_call and self._format is not None:
            self._end_reasoning()
            position = yield from self._skip(self._position)
            self._position = yield from self._read_arguments(name, position, depth=0)
            return
        is_hidden = header.channel == "analysis" or bool(header.recipient and not is_call)
        field = "reasoning_content" if is_hidden else "content"
        if not is_hidden:
            self._end_reasoning()
        if self._texts[field]:
            yield from self._separate(field)
        yield from self._copy(START, *ENDS, field=field)
        if is_hidden and self._is_over and self._position >= len(self._text):
            self.reasoning_end = len(self._text) - self._offset

    def _separate(self, field: str) -> Reading[None]:
        """Put an empty line between two messages of one field, where the second has a text."""
        position = yield from self._skip(self._position)
        is_mark = yield from self._has(position, "<|")
        if position < len(self._text) and not is_mark:
            self._texts[field] += "\n\n"
            self._deltas.append({field: "\n\n"})
            self._position = position

    def _read_message_end(self) -> Reading[None]:
        """Skip to the next header, after the mark that ends a message."""
        while True:
            end, marker = self._find_first((START, *ENDS))
            if marker:
                self._position = end if marker == START else end + len(marker)
                return
            if self._is_over:
                self._position = len(self._text)
                return
            yield

    def _end_reasoning(self) -> None:
        """Note where the reasoning ends, once, in the text that was fed."""
        if not self.reasoning_end and self.reasoning:
            self.reasoning_end = max(0, self._position - self._offset)


def open_parser(
    formats: ChatFormats, prompt: str, schemas: Mapping[str, Any] | None, *,
    continued_text: str = "", **options: Any,
) -> Parser:  # fmt: skip
    """Return the parser of the answer to a prompt.

    schemas: of the callable tools' arguments, by name; None where none may be called.
    continued_text: the text of the assistant's message that the answer goes on with. options: of
    `Parser`.
    """
    tools = formats.tools if schemas is not None else None
    if formats.is_harmony:
        return HarmonyParser(tools, find_opening(prompt), schemas=schemas, **options)
    thinking = find_thinking(formats.reasoning, prompt, continued_text)
    reasoning = formats.reasoning
    is_begun = reasoning is not None and not prompt.rstrip().endswith(reasoning.begin)
    return Parser(
        tools, reasoning, thinking=thinking, schemas=schemas,
        has_thoughts=bool(continued_text.strip()) and is_begun, **options,
    )  # fmt: skip


class AnswerText:
    """Content of an answer in harmony by its tokens, which grow; its parser has the other parts."""

    def __init__(self, tokenizer: Any, prompt: str) -> None:
        self._tokenizer, self._length = tokenizer, 0
        self.parser = HarmonyParser(TOOLS, find_opening(prompt))

    def take(self, ids: Sequence[int], *, is_over: bool) -> str:
        """Return what the content has gained; ids: of the whole answer so far."""
        text = decode_text(self._tokenizer, ids, TextForm(skips_special=False))
        text = text if is_over else text.rstrip(INCOMPLETE)
        deltas = self.parser.feed(text[self._length :])
        self._length = len(text)
        deltas += self.parser.finish() if is_over else []
        return "".join(delta.get("content", "") for delta in deltas)


def open_answer(tokenizer: Any, request: Any) -> AnswerText | None:
    """Return the text of a request's answer; None where it is not harmony, or shown as it is."""
    is_asked = is_harmony(str(getattr(tokenizer, "chat_template", "") or ""))
    prompt = request.input_text
    is_turn = START in prompt and find_opening(prompt).startswith("assistant")
    if not (is_asked and is_turn) or request.stop or not request.form.skips_special:
        return None
    return AnswerText(tokenizer, prompt)


def write_turns(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a conversation as harmony's template takes it.

    Reasoning is called `thinking`. A message has one call: of several each is written before its
    own result, and a text alongside calls and reasoning is a message before them.
    """
    turns: list[Message] = []
    results = {message.get("tool_call_id"): message for message in messages if _is_result(message)}
    placed: set[int] = set()  # results that stand after their calls
    for message in messages:
        if id(message) in placed:
            continue
        turn = _name_thinking(message)
        calls = turn.get("tool_calls") or []
        if calls and turn.get("content") and turn.get("thinking"):
            turns.append({"role": "assistant", "content": turn["content"]})
            turn["content"] = ""
        if len(calls) < 2:
            turns.append(turn)
            continue
        pairs = [(call, results.get(call.get("id"))) for call in calls]
        placed |= {id(result) for _, result in pairs}
        turns += _split_calls(turn, pairs)
    return turns


def _split_calls(turn: Message, pairs: Sequence[tuple[Any, Any]]) -> Iterator[Message]:
    """Yield a message for each of a turn's calls, and after it the call's result if there is."""
    for number, (call, result) in enumerate(pairs):
        start = turn if number == 0 else {"role": "assistant", "content": ""}
        yield {**start, "tool_calls": [call]}
        if result is not None:
            yield dict(result)


def _is_result(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" and message.get("tool_call_id") is not None


def _name_thinking(message: Mapping[str, Any]) -> Message:
    """Return a message whose reasoning has the name that the template reads."""
    turn = dict(message)
    for name in ("reasoning_content", "reasoning"):
        text = turn.pop(name, None) if turn["role"] == "assistant" else None
        if text:
            turn.setdefault("thinking", text)
    return turn
