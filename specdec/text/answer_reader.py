"""Reading of a text that grows, such as an answer: generators that wait for more of it, and deltas.

A step with drafts brings several tokens at once, so that new text may hold half a marker or two
calls. What is found depends on the whole text only, never on where new text begins. So each reader
is a generator that waits for more text, by `yield`, until it can decide.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from .call_formats import ReasoningFormat, ToolFormat, make_id

T = TypeVar("T")
Reading = Generator[None, None, T]
Delta = dict[str, Any]
FENCE = "```"  # around a block of code


class AnswerReader:
    """Reader of one answer. `feed` it text, then `finish`; both return a stream's deltas."""

    def __init__(self, tools: ToolFormat | None) -> None:
        self._format = tools
        self._text, self._position, self._is_over = "", 0, False
        self._is_cut = False  # whether a limit has ended the answer
        self._has_run_out = False  # whether the text ended before a call was certain
        self._deltas: list[Delta] = []
        self._texts = {"content": "", "reasoning_content": ""}
        self._text_end = ""  # the word that may end the content, where it has begun with one
        self.content_start = 0  # where the content begins in the text that was fed
        self.calls: list[Delta] = []
        self.is_call_cut = False  # whether a call's arguments are incomplete
        self._reader = self._read()
        next(self._reader)

    def _read(self) -> Reading[None]:
        """Read the whole answer, after a first `yield`."""
        raise NotImplementedError

    @property
    def content(self) -> str:
        return self._texts["content"]

    @property
    def reasoning(self) -> str:
        return self._texts["reasoning_content"]

    def feed(self, text: str) -> list[Delta]:
        """Parse more text of the answer; return the new deltas."""
        self._text += text
        next(self._reader, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """End the answer; return its last deltas.

        is_cut: whether a limit ended the answer. Text that may then be the beginning of a call,
        without its name or with half a marker, is in no part of the answer.
        """
        self._is_over, self._is_cut = True, is_cut
        return self.feed("")

    def _copy(self, *markers: str, field: str = "content") -> Reading[str]:
        """Add text up to the first marker and the white space before it; return the marker."""
        while True:
            end, marker = self._find_first(markers)
            if not marker:
                keeps_half = self._is_over and not self._is_cut
                end = len(self._text) if keeps_half else self._find_half(markers)
            has_more = bool(marker) or not self._is_over or end < len(self._text)
            if has_more or self.calls:
                end = self._position + len(self._text[self._position : end].rstrip())
            self._add(end, field)
            if marker:
                return marker
            if self._is_over:
                self._position = len(self._text)
                return ""
            yield

    def _find_first(self, markers: Sequence[str], position: int | None = None) -> tuple[int, str]:
        """Find where the first marker begins, and which it is; -1 and an empty text for none."""
        start = self._position if position is None else position
        starts = ((self._text.find(marker, start), marker) for marker in markers)
        return min((pair for pair in starts if pair[0] >= 0), default=(-1, ""))

    def _find_half(self, markers: Sequence[str]) -> int:
        """Return where half a marker begins that ends the text; the text's length for none.

        A text may well end with half a fence.
        """
        if self._is_over:
            markers = [marker for marker in markers if marker != FENCE]
        size = max(map(len, markers), default=1) - 1
        for start in range(max(self._position, len(self._text) - size), len(self._text)):
            if any(marker.startswith(self._text[start:]) for marker in markers):
                return start
        return len(self._text)

    def _skip(self, position: int) -> Reading[int]:
        """Return the end of the white space at a position."""
        while True:
            while position < len(self._text) and self._text[position].isspace():
                position += 1
            if position < len(self._text) or self._is_over:
                return position
            yield

    def _begin_text(self, form: ReasoningFormat) -> Reading[None]:
        """Pass over the word that begins a text after reasoning, whole or cut by a limit."""
        if form.text_begin and (yield from self._has(self._position, form.text_begin)):
            self._position = yield from self._skip(self._position + len(form.text_begin))
            self._text_end = form.text_end
        elif self._is_cut and form.text_begin.startswith(self._text[self._position :]):
            self._position = len(self._text)

    def _end_text(self, word: str, markers: Sequence[str]) -> Reading[None]:
        """Pass over a word that nothing follows, or a marker of calls; else it is content."""
        end = self._text.index(word, self._position) + len(word)
        next_start = yield from self._skip(end)
        is_last = next_start == len(self._text)
        for marker in markers:
            is_last = is_last or (yield from self._has(next_start, marker))
        if is_last:
            self._position = next_start
        else:
            self._add(end)

    def _has(self, position: int, word: str) -> Reading[bool]:
        """Return whether a word stands at a position."""
        while not self._text.startswith(word, position):
            may_come = word.startswith(self._text[position:])
            if self._is_over or not may_come:
                self._has_run_out |= may_come
                return False
            yield
        return True

    def _find(self, word: str, position: int) -> Reading[int]:
        """Return the position of a word, searched from a position; -1 for none."""
        while (start := self._text.find(word, position)) < 0:
            if self._is_over:
                return -1
            position = max(position, len(self._text) - len(word) + 1)
            yield
        return start

    def _add(self, end: int, field: str = "content") -> None:
        """Add the text up to an end to a field of the message."""
        start, self._position = self._position, end
        text = self._text[start:end]
        if text and field == "content" and not self.content:
            self.content_start = start
        if text:
            self._texts[field] += text
            self._deltas.append({field: text})

    def _begin_call(self, name: str) -> None:
        call: Delta = {
            "id": make_id(self._format), "type": "function",
            "function": {"name": name, "arguments": ""},
        }  # fmt: skip
        self.calls.append(call)
        self._add_call_delta(call | {"function": dict(call["function"])})

    def _add_arguments(self, text: str) -> None:
        if text:
            self.calls[-1]["function"]["arguments"] += text
            self._add_call_delta({"function": {"arguments": text}})

    def _add_call_delta(self, delta: Delta) -> None:
        self._deltas.append({"tool_calls": [{"index": len(self.calls) - 1, **delta}]})
