"""A chat's answer in its parts: reasoning, content and tool calls, found in the text as it comes.

A step with drafts brings several tokens at once, so a piece of text may hold half a marker or two
calls. The parts depend on the whole text only, never on where its pieces begin. So each reader
below is a generator that waits for more text, by `yield`, until it can decide.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from .arguments import read_argument
from .formats import FUNCTION, ReasoningFormat, ToolFormat

T = TypeVar("T")
Reading = Generator[None, None, T]
Delta = dict[str, Any]

_STRING = r'"((?:[^"\\]|\\.)*)"'
# The JSON of a call up to its arguments, where these may be told before the call has ended.
_HEAD = re.compile(
    rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*{_STRING}\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_KEYS = ("name", "arguments", "parameters", "type", "id", "function")
_NAME = re.compile(r"([^\s\[\]{}<>]+)((?:\[CALL_ID\][^\s\[\]{}<>]+)?(?:\[ARGS\])?)\s*(?=\{)")
_NAME_SO_FAR = re.compile(r"([^\s\[\]{}<>]+)((?:\[[^\s{}<>]*)?\s*)")
# An object's first key and, where it is a text, its value, as far as they have come.
_FIRST = re.compile(r'\{\s*(?:"([^"\\]*)(?:(")\s*(?::\s*(?:"([^"\\]*)("?))?)?)?)?')
_NO_NAME = re.compile(r"[\s{}<>]|.{200}")  # where no name of a tool goes on
# Outside of texts: what opens and closes, and what JSON cannot have.
_STRUCTURE = re.compile(r'["{}\[\]]|[^\w\s:,.+-]')
_TEXT_END = re.compile(r'["\\]')


class JsonScan:
    """Finds where a JSON value ends, in a text that grows."""

    def __init__(self, at: int, depth: int = 0) -> None:
        """at: where it begins, or goes on `depth` brackets deep. It moves to where it ends."""
        self.at, self._depth, self._is_in_text = at, depth, False
        self.is_whole = False

    def run(self, text: str) -> bool:
        """Go on; return whether the value has ended, whole or at what cannot be JSON."""
        while True:
            found = (_TEXT_END if self._is_in_text else _STRUCTURE).search(text, self.at)
            if found is None:
                self.at = len(text)
                return False
            letter = found[0]
            if letter == "\\":
                if found.end() == len(text):
                    self.at = found.start()
                    return False
                self.at = found.end() + 1
                continue
            if letter == '"':
                self._is_in_text = not self._is_in_text
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                self.is_whole = self._depth == 0
            else:
                self.at = found.start()
                return True
            self.at = found.end()
            if self.is_whole:
                return True


class Parser:
    """One answer. `feed` it text, then `finish`; both return what OpenAI's stream has as deltas."""

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        is_thinking: bool = False,
        needs_marker: bool = False,
        schemas: Mapping[str, Any] | None = None,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """is_thinking: whether the prompt has opened the reasoning. needs_marker: whether a call is
        certain to have its opening, where the format has one, as a grammar sees to. schemas: of the
        arguments, by the names of the tools. marks: the markers that are special tokens, by their
        ids: texts have none, so that whoever feeds them puts these where the tokens are.
        """
        self.marks = marks or {}
        self._format, self._reasoning = tools, reasoning
        self._is_thinking, self._schemas = is_thinking, schemas or {}
        self._needs_marker = needs_marker
        self._text, self._at, self._is_over = "", 0, False
        self._is_cut = False  # the answer, by a limit
        self._has_run_out = False  # the text, before it was clear whether it has a call
        self._deltas: list[Delta] = []
        self._texts = {"content": "", "reasoning_content": ""}
        self.reasoning_end = 0  # in the text that was fed
        self.calls: list[Delta] = []
        self.is_call_cut = False  # one of the calls: its arguments are not whole
        self._reader = self._read()
        next(self._reader)

    @property
    def content(self) -> str:
        return self._texts["content"]

    @property
    def reasoning(self) -> str:
        return self._texts["reasoning_content"]

    def feed(self, text: str) -> list[Delta]:
        """Take more of the answer; return what it adds."""
        self._text += text
        next(self._reader, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Return what is left where nothing more comes.

        is_cut: whether a limit ended the answer. What may then be the beginning of a call, without
        its name or with half a marker, is in no part of the answer.
        """
        self._is_over, self._is_cut = True, is_cut
        return self.feed("")

    def _read(self) -> Reading[None]:
        yield
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        form = self._format
        markers = [] if form is None else [form.begin] if form.begin else []
        if form is not None and (form.is_bare or not self._needs_marker):
            yield from self._read_bare(form)
            markers += [form.inner] if form.inner and not self._needs_marker else []
        while form is not None and markers:
            if not (marker := (yield from self._copy(*markers))):
                return
            begun = self._text.index(marker, self._at)
            behind, self._has_run_out = begun + len(marker), False
            is_bare = marker != form.begin
            ended = yield from self._read_calls(form, begun if is_bare else behind, is_bare)
            if ended is None and self._is_cut and self._has_run_out:
                ended = len(self._text)
            if ended is None:  # it is text that has a marker in it
                self._add(behind)
            else:
                self._at = yield from self._skip(ended)
        yield from self._copy()

    def _read_reasoning(self, form: ReasoningFormat) -> Reading[None]:
        at = yield from self._skip(self._at)
        if (yield from self._has(at, form.begin)):
            at = yield from self._skip(at + len(form.begin))
        elif not (self._is_thinking or form.is_assumed):
            return
        self._at = at
        if (yield from self._copy(form.end, part="reasoning_content")):
            at = self._text.index(form.end, self._at) + len(form.end)
            self.reasoning_end = at
            self._at = yield from self._skip(at)
        else:
            self.reasoning_end = len(self._text)

    def _copy(self, *markers: str, part: str = "content") -> Reading[str]:
        """Add text up to the first marker and the white space before it; return the marker."""
        while True:
            found = ((self._text.find(marker, self._at), marker) for marker in markers)
            end, marker = min((one for one in found if one[0] >= 0), default=(-1, ""))
            if not marker:
                keeps_half = self._is_over and not self._is_cut
                end = len(self._text) if keeps_half else self._find_half(markers)
            has_more = bool(marker) or not self._is_over or end < len(self._text)
            if has_more or self.calls:
                end = self._at + len(self._text[self._at : end].rstrip())
            self._add(end, part)
            if self._is_over and not marker:
                self._at = len(self._text)
            if marker or self._is_over:
                return marker
            yield

    def _find_half(self, markers: Sequence[str]) -> int:
        """Find where a marker may have begun with which the text ends; its end where none has."""
        size = max(map(len, markers), default=1) - 1
        starts = range(max(self._at, len(self._text) - size), len(self._text))
        halves = (at for at in starts if any(one.startswith(self._text[at:]) for one in markers))
        return next(halves, len(self._text))

    def _read_bare(self, form: ToolFormat) -> Reading[None]:
        """Read an answer that begins with a call of a tool that there is, without a marker.

        Where the format has no marker, the call may be marked as a block of code.
        """
        at = begun = yield from self._skip(self._at)
        fence = "```json" if form.is_bare and (yield from self._has(at, "```json")) else ""
        at = yield from self._skip(at + len(fence))
        if form.begin and (yield from self._has(at, form.begin)):
            return
        ended = yield from self._read_written(form, at, is_bare=True)
        if ended is None:
            if self._is_cut and self._has_run_out and begun < len(self._text):
                self._at = len(self._text)
            return
        self._at = yield from self._read_end("```" if fence else form.end, ended)

    def _read_end(self, word: str, at: int) -> Reading[int]:
        """Find the end of the word that may be behind a call, or half of which ends the text."""
        behind = yield from self._skip(at)
        if word and (yield from self._has(behind, word)):
            return behind + len(word)
        return len(self._text) if word.startswith(self._text[behind:]) else behind

    def _read_calls(self, form: ToolFormat, at: int, is_bare: bool) -> Reading[int | None]:
        """Read what is behind a marker; return where it ends, None where it is no call.

        is_bare: without the marker, which only a call of a tool that there is may be.
        """
        at = yield from self._skip(at)
        if (yield from self._has(at, FUNCTION)):
            ended: int | None = yield from self._read_function(at + len(FUNCTION), is_bare)
        else:
            ended = yield from self._read_written(form, at)
        return ended if ended is None else (yield from self._read_end(form.end, ended))

    def _read_written(
        self, form: ToolFormat, at: int, *, is_bare: bool = False
    ) -> Reading[int | None]:
        """Read calls in JSON, or Mistral's with names; return where they end, None for none."""
        if form.begin == "[TOOL_CALLS]" and self._text[at : at + 1] not in ("[", "{"):
            return (yield from self._read_named(at, is_bare=is_bare))
        return (yield from self._read_list(at, is_bare=is_bare))

    def _read_list(self, at: int, *, is_bare: bool = False) -> Reading[int | None]:
        """Read the JSON of a call, or a list of them; return where it ends, None for none."""
        ended = None
        if self._text[at : at + 1] == "[":
            at = yield from self._skip(at + 1)
        while True:
            after = yield from self._read_object(at, is_bare)
            if after is None:
                has_half = ended is not None and self._is_cut and self._has_run_out
                return len(self._text) if has_half else ended
            ended = after
            at = yield from self._skip(after)
            letter = self._text[at : at + 1]
            if letter in (",", ";", "]"):
                ended = at + 1
            if letter not in (",", ";"):
                return ended
            at = yield from self._skip(at + 1)

    def _read_object(self, at: int, is_bare: bool) -> Reading[int | None]:
        """Read the JSON of a call; a bare one must be of a tool that there is."""
        scan = JsonScan(at)
        if self._text[at : at + 1] != "{":
            self._has_run_out |= at == len(self._text)
            return None
        while not is_bare or self._may_be_call(at):
            head = _HEAD.match(self._text, at)
            if head is not None and (name := _read_text(head[1])) is not None:
                if is_bare and name not in self._schemas:
                    return None
                return (yield from self._read_arguments(name, head.end(), depth=1))
            if scan.run(self._text):
                is_call = scan.is_whole and self._take_object(self._text[at : scan.at], is_bare)
                return scan.at if is_call else None
            if self._is_over:
                self._has_run_out = True
                return None
            yield
        return None

    def _may_be_call(self, at: int) -> bool:
        """Return whether an object may be a call of a known tool, by its first key and value."""
        first = _FIRST.match(self._text, at)
        assert first is not None
        key, is_key, value, is_value = first.groups()
        is_last, rest = first.end() == len(self._text), self._text[first.end() : first.end() + 1]
        if not is_key:
            return is_last and any(one.startswith(key or "") for one in _KEYS)
        if key in ("name", "type"):
            words = self._schemas if key == "name" else ("function",)
            return is_last if value is None else is_a_beginning(value, words, bool(is_value))
        if key == "id":  # of something else as often, so that a limit leaves it content
            return not self._is_cut
        return key in _KEYS and value is None and (is_last or rest == "{")

    def _take_object(self, text: str, is_bare: bool) -> bool:
        """Add the call that an object is; return whether it is one."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return False
        call = call["function"] if isinstance(call.get("function"), dict) else call
        given = [call[key] for key in ("arguments", "parameters") if key in call]
        if not isinstance(call.get("name"), str) or (
            is_bare and (call["name"] not in self._schemas or not given)
        ):
            return False
        arguments = given[0] if given else None
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        self._begin_call(call["name"])
        self._add_arguments(arguments)
        return True

    def _read_arguments(self, name: str, at: int, depth: int) -> Reading[int]:
        """Read arguments, and what closes the `depth` brackets around them; return its end."""
        self._begin_call(name)
        scan, is_over = JsonScan(at), False
        while not is_over:
            is_over = scan.run(self._text)
            if self._is_over and not is_over:  # cut off, perhaps behind a backslash
                scan.at, is_over = len(self._text), True
            self._add_arguments(self._text[at : scan.at])
            at = scan.at
            if not is_over:
                yield
        self.is_call_cut |= not scan.is_whole
        scan = JsonScan(at, depth)
        while depth and not scan.run(self._text) and not self._is_over:
            yield
        return scan.at

    def _read_named(self, at: int, *, is_bare: bool = False) -> Reading[int | None]:
        """Read Mistral's newer calls: a name, perhaps an id, and the arguments."""
        while (head := _NAME.match(self._text, at)) is None:
            name = _NAME_SO_FAR.fullmatch(self._text, at)
            if is_bare and name and not is_a_beginning(name[1], self._schemas, bool(name[2])):
                return None
            if self._is_over:
                # A name alone is a word as well.
                self._has_run_out |= bool(name and "[" in name[2]) if is_bare else (
                    name is not None or at == len(self._text)
                )  # fmt: skip
                return None
            if name is None:
                return None
            yield
        if is_bare and (head[1] not in self._schemas or not (head[2] or head[0] == head[1])):
            return None
        return (yield from self._read_arguments(head[1], head.end(), depth=0))

    def _read_function(self, at: int, is_bare: bool) -> Reading[int | None]:
        """Read a call of Qwen3-Coder's: <function=NAME>, parameters as tags, </function>."""
        name = yield from self._read_name(at, is_bare)
        if not name:
            return None
        self._begin_call(name)
        at, begun = at + len(name) + 1, "{"
        while True:
            at = yield from self._skip(at)
            if not (yield from self._has(at, "<parameter=")):
                break
            close = yield from self._find(">", at)
            end = yield from self._find("</parameter>", close + 1)
            if close < 0 or end < 0:
                return self._cut_function(begun)
            key, text = self._text[at + len("<parameter=") : close], self._text[close + 1 : end]
            text = text.removeprefix("\n").removesuffix("\n")
            value = read_argument(text, key, self._schemas.get(name))
            self._add_arguments(f"{begun}{json.dumps(key)}: {value}")
            begun, at = ", ", end + len("</parameter>")
        if (yield from self._has(at, "</function>")):
            at += len("</function>")
        elif any(tag.startswith(self._text[at:]) for tag in ("<parameter=", "</function>")):
            return self._cut_function(begun)
        self._add_arguments("{}" if begun == "{" else "}")
        return at

    def _read_name(self, at: int, is_bare: bool) -> Reading[str | None]:
        """Read a name up to ">"; return None where that is no name, or a bare call's of no tool."""
        while True:
            close = self._text.find(">", at)
            name = self._text[at:] if close < 0 else self._text[at:close]
            is_name = not is_bare or is_a_beginning(name, self._schemas, close >= 0)
            if not is_name or _NO_NAME.search(name):
                return None
            if close >= 0:
                return name
            if self._is_over:
                self._has_run_out = True
                return None
            yield

    def _cut_function(self, begun: str) -> int:
        """Leave a call's arguments as they are, where the text ends in it; return that end."""
        self._add_arguments(begun if begun == "{" else "")
        self.is_call_cut = True
        return len(self._text)

    def _skip(self, at: int) -> Reading[int]:
        """Where the white space from `at` on ends."""
        while True:
            while at < len(self._text) and self._text[at].isspace():
                at += 1
            if at < len(self._text) or self._is_over:
                return at
            yield

    def _has(self, at: int, word: str) -> Reading[bool]:
        """Whether the text goes on with a word at `at`."""
        while not self._text.startswith(word, at):
            may_come = word.startswith(self._text[at:])
            if self._is_over or not may_come:
                self._has_run_out |= may_come
                return False
            yield
        return True

    def _find(self, word: str, at: int) -> Reading[int]:
        """Where a word is, from `at` on; -1 where the text ends without it."""
        while (found := self._text.find(word, at)) < 0:
            if self._is_over:
                return -1
            at = max(at, len(self._text) - len(word) + 1)
            yield
        return found

    def _add(self, end: int, part: str = "content") -> None:
        text, self._at = self._text[self._at : end], end
        if text:
            self._texts[part] += text
            self._deltas.append({part: text})

    def _begin_call(self, name: str) -> None:
        call: Delta = {
            "id": make_id(self._format), "type": "function",
            "function": {"name": name, "arguments": ""},
        }  # fmt: skip
        self.calls.append(call)
        self._tell_call(call | {"function": dict(call["function"])})

    def _add_arguments(self, text: str) -> None:
        if text:
            self.calls[-1]["function"]["arguments"] += text
            self._tell_call({"function": {"arguments": text}})

    def _tell_call(self, told: Delta) -> None:
        self._deltas.append({"tool_calls": [{"index": len(self.calls) - 1, **told}]})


def make_id(form: ToolFormat | None) -> str:
    """A new id of a call; Mistral's templates take nine letters and digits only."""
    is_short = form is not None and form.begin == "[TOOL_CALLS]"
    return secrets.token_hex(5)[:9] if is_short else f"call_{secrets.token_hex(12)}"


def is_a_beginning(text: str, words: Iterable[str], is_whole: bool) -> bool:
    """Return whether a text is one of several words, or begins one where it is not whole."""
    return any(text == word if is_whole else word.startswith(text) for word in words)


def _read_text(written: str) -> str | None:
    """The text that JSON writes so between quotation marks; None for what is none."""
    try:
        return str(json.loads(f'"{written}"'))
    except ValueError:
        return None
