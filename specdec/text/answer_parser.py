"""Parser of a chat's answer: reasoning, content and tool calls, found in the text as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .answer_reader import FENCE, Delta, Reading
from .call_arguments import may_be_arguments, write_arguments
from .call_formats import MAX_NAME, NAME_LETTERS, ReasoningFormat, ToolFormat
from .json_scan import JsonScan, is_json, read_json_text
from .tag_reader import TagReader

_STRING = r'"((?:[^"\\]|\\.)*)"'
# The JSON of a call up to its arguments, which a stream may send before the call has ended.
_HEAD = re.compile(
    rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*{_STRING}\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_KEYS = ("name", "arguments", "parameters", "type", "id", "function")
_WORD = rf"[^\s\[\]{{}}<>]{{1,{MAX_NAME}}}"
_NAME = re.compile(rf"({_WORD})((?:\[CALL_ID\]{_WORD})?(?:\[ARGS\])?)\s*(?=\{{)")
_NAME_SO_FAR = re.compile(rf"({_WORD})((?:\[[^\s{{}}<>]{{0,{2 * MAX_NAME}}})?\s*)")
# An object's first key and, where it is a text, its value, as far as they have come.
_FIRST_KEY = re.compile(r'\{\s*(?:"([^"\\]*)(?:(")\s*(?::\s*(?:"([^"\\]*)("?))?)?)?)?')
_NAME_LETTERS = re.compile(f"{NAME_LETTERS}*")
_PYTHON_NAME = re.compile(rf"({NAME_LETTERS}{{1,{MAX_NAME}}})\s*(?=\()")
_PYTHON_NAME_SO_FAR = re.compile(rf"{NAME_LETTERS}{{0,{MAX_NAME}}}\s*")


class Parser(TagReader):
    """Parser of one answer. `feed` it text, then `finish`; both return a stream's deltas."""

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        thinking: bool | None = None,
        has_thoughts: bool = False,
        needs_marker: bool = False,
        schemas: Mapping[str, Any] | None = None,
        marks: Mapping[int, str] | None = None,
        is_inner: bool = False,
    ) -> None:
        """Begin an answer.

        thinking: whether the answer begins with reasoning, of `find_thinking`. has_thoughts:
        whether the prompt has some of that, which the answer goes on with. needs_marker: whether a
        call is certain to have its opening, where the format has one, as a grammar sees to.
        schemas: of the arguments, by the names of the tools. marks: the markers that are special
        tokens, by their ids: texts have none, so that whoever feeds them puts these where the
        tokens are. is_inner: whether another parser asks for the calls that a text begins with.
        """
        self.marks = marks or {}
        self._reasoning, self._thinking, self._has_thoughts = reasoning, thinking, has_thoughts
        self._needs_marker, self._is_inner = needs_marker, is_inner
        self.reasoning_end = 0  # position in the text that was fed
        super().__init__(tools, schemas or {})

    def _read(self) -> Reading[None]:
        yield
        if self._reasoning is not None and self._thinking is not False:
            yield from self._read_reasoning(self._reasoning)
        form, markers = self._format, list[str]()
        if form is not None:
            markers += [form.begin] if form.begin else []
            if form.is_bare or not self._needs_marker:
                yield from self._read_bare(form)
                markers += [form.inner] if form.inner and not self._needs_marker else []
            if self._needs_marker and form.is_bare and form.tags is not None:
                markers = []  # a grammar writes calls as JSON alone
        yield from self._read_content(form, markers)

    def _read_content(self, form: ToolFormat | None, markers: list[str]) -> Reading[None]:
        """Read content and the calls that begin with markers; leave out the marks around a text."""
        marks = self._reasoning.text_marks if self._reasoning is not None else ()
        fences = [FENCE] if form is not None and not (self._needs_marker or self._is_inner) else []
        ends = [self._text_end] if self._text_end else []
        while marker := (yield from self._copy(*marks, *ends, *markers, *fences)):
            if form is not None and marker == FENCE:
                yield from self._read_last_calls(form, FENCE, "content")
            elif form is not None and marker in markers:
                yield from self._read_marked(form, marker)
            elif marker in ends:
                yield from self._end_text(marker, markers)
            else:
                end = self._text.index(marker, self._position) + len(marker)
                self._position = yield from self._skip(end)

    def _read_marked(self, form: ToolFormat, marker: str) -> Reading[None]:
        """Read the calls after a marker; without a call there, the marker is content."""
        marker_start = self._text.index(marker, self._position)
        marker_end, self._has_run_out = marker_start + len(marker), False
        is_bare = marker != form.begin
        start = marker_start if is_bare else marker_end
        end = yield from self._read_calls(form, start, is_bare)
        if end is None and self._is_cut and self._has_run_out:
            end = len(self._text)
        if end is None:
            self._add(marker_end)
        else:
            self._position = yield from self._skip(end)

    def _read_reasoning(self, form: ReasoningFormat) -> Reading[None]:
        position = self._position
        if not self._has_thoughts:
            position = yield from self._skip(position)
        if (yield from self._has(position, form.begin)):
            position = yield from self._skip(position + len(form.begin))
        elif not (self._thinking or form.is_assumed):
            return
        self._position = position
        tools = self._format if not self._needs_marker else None
        markers = (form.end, tools.begin) if tools is not None and tools.begin else (form.end,)
        while marker := (yield from self._copy(*markers, field="reasoning_content")):
            if tools is None or marker == form.end:
                position = self._text.index(form.end, self._position) + len(form.end)
                self.reasoning_end = position
                self._position = yield from self._skip(position)
                yield from self._begin_text(form)
                return
            start = self._text.index(tools.begin, self._position)
            if (
                yield from self._read_last_calls(tools, tools.begin, "reasoning_content", form.end)
            ):
                self.reasoning_end = start
                return
        self.reasoning_end = len(self._text)

    def _read_last_calls(
        self, form: ToolFormat, marker: str, field: str, field_end: str = ""
    ) -> Reading[bool]:
        """Read calls that end an answer in the middle of a field; return whether there are some.

        Models leave out the end of reasoning before a call at times, or write a call as a block of
        code. What comes before more of the field, or before its end, is only told of.
        """
        start = position = self._text.index(marker, self._position)
        parser, deltas = Parser(form, None, schemas=self._schemas, is_inner=True), list[Delta]()
        while True:
            deltas += parser.feed(self._text[position:])
            deltas += parser.finish(is_cut=self._is_cut) if self._is_over else []
            end = self._text.find(field_end, max(start, position - len(field_end)))
            has_end = bool(field_end) and end >= 0
            if has_end or not self._may_end_with(parser, field):
                # Calls before more text end no answer: none of them is examined again.
                passed = max(len(marker), parser.content_start if field_end else 0)
                limit = min(start + passed, end) if has_end else start + passed
                self._add(start + len(self._text[start:limit].rstrip()), field)
                return False
            if self._is_over:
                break
            position = len(self._text)
            yield
        self.calls, self.is_call_cut = parser.calls, parser.is_call_cut
        self._deltas += deltas
        self._position = len(self._text)
        return True

    def _may_end_with(self, parser: Parser, field: str) -> bool:
        """Return whether an answer may end with the calls that an inner parser finds.

        Of half a call, which a limit cuts, nothing is shown where its marker tells it.
        """
        if parser.content or self.calls:
            return False
        if self._is_over and not parser.calls and not (self._is_cut and field != "content"):
            return False
        return all(call["function"]["name"] in self._schemas for call in parser.calls)

    def _read_bare(self, form: ToolFormat) -> Reading[None]:
        """Read an answer that begins with a call without a marker, of a tool of the request."""
        start = yield from self._skip(self._position)
        end = yield from self._read_unmarked(form, start)
        if end is not None:
            self._position = yield from self._skip(end)
        elif self._is_cut and self._has_run_out and start < len(self._text):
            self._position = len(self._text)

    def _read_unmarked(self, form: ToolFormat, start: int) -> Reading[int | None]:
        """Read calls without a marker; return their end, None where no such call stands there.

        They may be blocks of code, as Qwen2.5-Coder writes them.
        """
        if self._needs_marker and not (yield from self._is_opened(form, start)):
            return None
        end: int | None = None
        while True:
            fence, position = yield from self._read_fence(start)
            if form.begin and (yield from self._has(position, form.begin)):
                return end
            call_end = yield from self._read_written(form, position, is_bare=True)
            if call_end is None:
                return self._pass_half(end)
            end = yield from self._read_end(fence or form.end, call_end)
            start, self._has_run_out = (yield from self._skip(end)), False
            if not fence or start == len(self._text):
                return end

    def _pass_half(self, end: int | None) -> int | None:
        """Return the end of calls, if there are any, and of half a call after them."""
        has_half = end is not None and self._is_cut and self._has_run_out
        return len(self._text) if has_half else end

    def _read_fence(self, position: int) -> Reading[tuple[str, int]]:
        """Return the beginning of a block of code, if there is one, and where its text begins."""
        if not (yield from self._has(position, FENCE)):
            return "", position
        position += len(FENCE)
        if (yield from self._has(position, "json")):
            position += len("json")
        return FENCE, (yield from self._skip(position))

    def _is_opened(self, form: ToolFormat, position: int) -> Reading[bool]:
        """Return whether a call stands at a position as a grammar writes it, letter by letter.

        Other JSON there is structured output, also where it looks like a call. Without a text
        before a call, the arguments' first key has to be one of the tool's.
        """
        openings = {form.prefix + form.open(name): name for name in self._schemas}
        while True:
            text = self._text[position:]
            opening = next((opening for opening in openings if text.startswith(opening)), None)
            if opening is not None:
                schema, arguments = self._schemas[openings[opening]], text[len(opening) :]
                is_certain = True if form.prefix else may_be_arguments(arguments, schema)
                if is_certain is not None or self._is_over:
                    return is_certain is not False
            elif not any(opening.startswith(text) for opening in openings):
                return False
            elif self._is_over:
                self._has_run_out = True
                return False
            yield

    def _read_end(self, word: str, position: int, *, is_last: bool = True) -> Reading[int]:
        """Return the end of a word that may stand after a call, whole or cut by the text's end.

        Brackets before it close nothing, as models write one too many at times; where it is not
        the last word they may belong to the next one.
        """
        behind = end = yield from self._skip(position)
        while True:
            if word and (yield from self._has(end, word)):
                return end + len(word)
            if word.startswith(self._text[end:]):
                return len(self._text)
            if self._text[end] not in "}]":
                return end if is_last else behind
            end = yield from self._skip(end + 1)

    def _read_calls(self, form: ToolFormat, position: int, is_bare: bool) -> Reading[int | None]:
        """Read the calls after a marker; return their end, None where no call stands there.

        is_bare: whether the marker is missing; a call must then name a tool of the request.
        """
        end: int | None = None
        while True:
            position = yield from self._skip(position)
            call_end = yield from self._read_wrapped(form, position, is_bare)
            if call_end is None:
                if (half_end := self._pass_half(end)) != end:
                    return half_end
                break
            position = end = call_end
            if not form.call_begin:
                break
            if form.is_list:
                position = yield from self._skip(end)
                position += self._text[position : position + 1] == ","
        if end is None and (form.is_wrapped or not form.call_begin):
            end = yield from self._read_written(form, position)
        return end if end is None else (yield from self._read_end(form.end, end))

    def _read_wrapped(self, form: ToolFormat, position: int, is_bare: bool) -> Reading[int | None]:
        """Read one call between its own markers; return its end, None for another form of calls."""
        if not (form.name_pattern or form.call_begin):
            return None
        if not (yield from self._has(position, form.call_begin)):
            return None
        position = yield from self._skip(position + len(form.call_begin))
        if not form.name_pattern:
            end = yield from self._read_object(position, is_bare)
        elif self._text[position : position + 1] in ("[", "{"):
            return None
        else:
            end = yield from self._read_function(form, position, is_bare)
        if end is None or not form.call_end:
            return end
        return (yield from self._read_end(form.call_end, end, is_last=False))

    def _read_written(
        self, form: ToolFormat, position: int, *, is_bare: bool = False
    ) -> Reading[int | None]:
        """Read calls in JSON, or Mistral's with names; return where they end, None for none."""
        if (
            form.is_python
            and not is_bare
            and (end := (yield from self._read_python(position))) is not None
        ):
            return end
        if form.begin == "[TOOL_CALLS]" and self._text[position : position + 1] not in ("[", "{"):
            return (yield from self._read_named(position, is_bare=is_bare))
        return (yield from self._read_list(position, is_bare=is_bare))

    def _read_list(self, position: int, *, is_bare: bool = False) -> Reading[int | None]:
        """Read the JSON of a call, or a list of them; return where it ends, None for none."""
        end, is_list = None, self._text[position : position + 1] == "["
        if is_list:
            position = yield from self._skip(position + 1)
        while True:
            call_end = yield from self._read_object(position, is_bare)
            if call_end is None:
                return self._pass_half(end)
            end = call_end
            position = yield from self._skip(call_end)
            while is_list and self._text[position : position + 1] == "}":  # one too many
                position = yield from self._skip(position + 1)
            letter = self._text[position : position + 1]
            if letter in (",", ";", "]"):
                end = position + 1
            if letter not in (",", ";", "{"):
                return end
            position = yield from self._skip(position + (letter != "{"))

    def _read_object(self, position: int, is_bare: bool) -> Reading[int | None]:
        """Read the JSON of a call; a bare one must name a tool of the request."""
        scan = JsonScan(position)
        if self._text[position : position + 1] != "{":
            self._has_run_out |= position == len(self._text)
            return None
        while not is_bare or self._may_be_call(position):
            head = _HEAD.match(self._text, position)
            if head is not None and (name := read_json_text(head[1])) is not None:
                if is_bare and name not in self._schemas:
                    return None
                return (yield from self._read_arguments(name, head.end(), depth=1))
            if scan.run(self._text):
                is_call = scan.is_whole and self._take_object(scan.take(), is_bare)
                return scan.position if is_call else None
            if self._is_over:
                self._has_run_out = True
                return None
            yield
        return None

    def _may_be_call(self, position: int) -> bool:
        """Return whether an object may be a call of a known tool, by its first key and value."""
        match = _FIRST_KEY.match(self._text, position)
        assert match is not None
        key, is_key, value, is_value = match.groups()
        next_letter = self._text[match.end() : match.end() + 1]
        is_last = not next_letter
        if not is_key:
            return is_last and is_a_beginning(key or "", _KEYS, is_whole=False)
        if key in ("name", "type"):
            words = self._schemas if key == "name" else ("function",)
            return is_last if value is None else is_a_beginning(value, words, bool(is_value))
        if key == "id":  # other objects have ids as often: after a limit, it is content
            return not self._is_cut
        return key in _KEYS and value is None and (is_last or next_letter == "{")

    def _take_object(self, text: str, is_bare: bool) -> bool:
        """Add the call that an object is; return whether it is one."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return False
        name_key = self._format.name_key if self._format is not None else "name"
        call = call["function"] if isinstance(call.get("function"), dict) else call
        name = call.get(name_key, call.get("name"))
        values = [call[key] for key in ("arguments", "parameters") if key in call]
        if not isinstance(name, str) or (is_bare and (name not in self._schemas or not values)):
            return False
        self._begin_call(name)
        arguments = write_arguments(values[0] if values else None)
        self._add_arguments(arguments)
        self.is_call_cut |= not is_json(arguments)
        return True

    def _read_arguments(
        self, name: str, position: int, depth: int, *, begins: bool = True
    ) -> Reading[int]:
        """Read arguments and the `depth` closing brackets after them; return their end.

        begins: whether the call has to be begun.
        """
        if begins:
            self._begin_call(name)
        scan, is_over = JsonScan(position), False
        while not is_over:
            is_over = scan.run(self._text, is_last=self._is_over and not self._is_cut)
            if self._is_over and not is_over:  # cut off, perhaps after a backslash
                scan.position, is_over = len(self._text), True
            self._add_arguments(scan.take())
            if not is_over:
                yield
        self.is_call_cut |= not is_json(self.calls[-1]["function"]["arguments"])
        position = yield from self._skip(scan.position)
        if not depth or self._text[position : position + 1] not in ("}", ","):
            return scan.position
        scan = JsonScan(position, depth)
        while not scan.run(self._text) and not self._is_over:
            yield
        return scan.position

    def _read_named(self, position: int, *, is_bare: bool = False) -> Reading[int | None]:
        """Read Mistral's newer calls: a name, perhaps an id, and the arguments."""
        while (head := _NAME.match(self._text, position)) is None:
            name = _NAME_SO_FAR.fullmatch(self._text, position)
            if is_bare and name and not is_a_beginning(name[1], self._schemas, bool(name[2])):
                return None
            if self._is_over:
                self._has_run_out |= self._ends_in_name(name, position, is_bare)
            if self._is_over or name is None:
                return None
            yield
        if is_bare and (head[1] not in self._schemas or not (head[2] or head[0] == head[1])):
            return None
        return (yield from self._read_arguments(head[1], head.end(), depth=0))

    def _read_python(self, position: int) -> Reading[int | None]:
        """Read calls as Python writes them, perhaps in a list; return their end, None for none."""
        end = None
        if self._text[position : position + 1] == "[":
            position = yield from self._skip(position + 1)
        while True:
            while (head := _PYTHON_NAME.match(self._text, position)) is None:
                may_come = _PYTHON_NAME_SO_FAR.fullmatch(self._text, position) is not None
                self._has_run_out |= may_come
                if self._is_over or not may_come:
                    return self._pass_half(end)
                yield
            end = yield from self._read_arguments(head[1], head.end(), depth=0)
            position = yield from self._skip(end)
            letter = self._text[position : position + 1]
            end = position + 1 if letter in (",", "]") else end
            if letter != ",":
                return end
            position = yield from self._skip(end)

    def _ends_in_name(self, name: re.Match[str] | None, position: int, is_bare: bool) -> bool:
        """Return whether the text ends in a call's possible name; a bare name may be any word."""
        if is_bare:
            return name is not None and "[" in name[2]
        return name is not None or position == len(self._text)

    def _read_function(self, form: ToolFormat, position: int, is_bare: bool) -> Reading[int | None]:
        """Read a call that is a name and then its arguments; return their end, None for no call."""
        head = yield from self._read_name(form, position, is_bare)
        if head is None:
            return None
        self._begin_call(head[1])
        if form.tags is None:
            start = yield from self._skip(head.end())
            return (yield from self._read_arguments(head[1], start, depth=0, begins=False))
        return (yield from self._read_tags(form, form.tags, head[1], head.end()))

    def _read_name(
        self, form: ToolFormat, position: int, is_bare: bool
    ) -> Reading[re.Match[str] | None]:
        """Read a name and what stands between it and the arguments; None for no name.

        A bare call must name a tool of the request.
        """
        while True:
            head = form.name_regex.match(self._text, position)
            if head is not None:
                return head if not is_bare or head[1] in self._schemas else None
            letters = _NAME_LETTERS.match(self._text, position)
            assert letters is not None
            rest = self._text[letters.end() :]
            begins = (
                self._begins_bare(letters[0], rest, form) if is_bare else form.may_begin_end(rest)
            )
            if not begins or len(letters[0]) > MAX_NAME:
                return None
            if self._is_over:
                self._has_run_out = True
                return None
            yield

    def _begins_bare(self, letters: str, rest: str, form: ToolFormat) -> bool:
        """Return whether letters and the text after them may begin a tool's name and its end.

        The end may begin with such letters, as Kimi's colon and number do.
        """
        return any(
            (not rest and name.startswith(letters))
            or (letters.startswith(name) and form.may_begin_end(letters[len(name) :] + rest))
            for name in self._schemas
        )


def is_a_beginning(text: str, words: Iterable[str], is_whole: bool) -> bool:
    """Return whether a text is one of several words, or begins one where it is not whole."""
    return any(text == word if is_whole else word.startswith(text) for word in words)
