"""A chat's answer in its parts: reasoning, content and tool calls, found in the text as it comes.

A step with drafts brings several tokens at once, so a piece of text may hold half a marker or two
calls. The parts depend on the whole text only, never on where its pieces begin. So each reader
below is a generator that waits for more text, by `yield`, until it can decide.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Generator, Mapping
from typing import Any, TypeVar

from .formats import ReasoningFormat, ToolFormat

T = TypeVar("T")
Reading = Generator[None, None, T]
Delta = dict[str, Any]

_STRING = r'"((?:[^"\\]|\\.)*)"'
# The JSON of a call up to its arguments, where these may be told before the call has ended.
_HEAD = re.compile(
    rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*{_STRING}\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(rf"\{{\s*{_STRING}")
_KEYS = ("name", "arguments", "parameters", "type", "id", "function")
_NAME = re.compile(r"([^\s\[\]{}<>]+)((?:\[CALL_ID\][^\s\[\]{}<>]+)?(?:\[ARGS\])?)\s*(?=\{)")
_NAME_SO_FAR = re.compile(r"[^\s\[\]{}<>]+(?:\[[^\s{}<>]*)?\s*")
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
        schemas: Mapping[str, Any] | None = None,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """is_thinking: whether the prompt has opened the reasoning. schemas: of the arguments, by
        the names of the tools. marks: the markers that are special tokens, by their ids: texts have
        none, so that whoever feeds them puts these where the tokens are.
        """
        self.marks = marks or {}
        self._format, self._reasoning = tools, reasoning
        self._is_thinking, self._schemas = is_thinking, schemas or {}
        self._text, self._at, self._is_over = "", 0, False
        self._deltas: list[Delta] = []
        self._texts = {"content": "", "reasoning_content": ""}
        self.reasoning_end = 0  # in the text that was fed
        self.calls: list[Delta] = []
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

    def finish(self) -> list[Delta]:
        """Return what is left where nothing more comes."""
        self._is_over = True
        return self.feed("")

    def _read(self) -> Reading[None]:
        yield
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        form = self._format
        if form is not None and form.is_bare:
            yield from self._read_bare(form)
        while form is not None and form.begin:
            if not (yield from self._copy(form.begin)):
                return
            begun = self._text.index(form.begin, self._at) + len(form.begin)
            ended = yield from self._read_calls(form, begun)
            if ended is None:  # it is text that has a marker in it
                self._add(begun)
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
        if (yield from self._copy(form.end, "reasoning_content")):
            at = self._text.index(form.end, self._at) + len(form.end)
            self.reasoning_end = at
            self._at = yield from self._skip(at)
        else:
            self.reasoning_end = len(self._text)

    def _copy(self, marker: str = "", part: str = "content") -> Reading[bool]:
        """Add text up to a marker and the white space before it; return whether there is one."""
        while True:
            end = self._text.find(marker, self._at) if marker else -1
            is_found = end >= 0
            if not is_found:
                tail = self._text[max(self._at, len(self._text) - len(marker) + 1) :]
                sizes = range(0 if self._is_over else len(tail), 0, -1)
                end = len(self._text) - next((n for n in sizes if marker.startswith(tail[-n:])), 0)
            if is_found or not self._is_over or self.calls:
                end = self._at + len(self._text[self._at : end].rstrip())
            self._add(end, part)
            if is_found or self._is_over:
                return is_found
            yield

    def _read_bare(self, form: ToolFormat) -> Reading[None]:
        """Read an answer that begins with the JSON of a call, perhaps marked as a block of code."""
        at = yield from self._skip(self._at)
        fence = "```json" if (yield from self._has(at, "```json")) else ""
        at = yield from self._skip(at + len(fence))
        if form.begin and (yield from self._has(at, form.begin)):
            return
        ended = yield from self._read_list(at, is_bare=True)
        if ended is None:
            return
        at = yield from self._skip(ended)
        if fence and (yield from self._has(at, "```")):
            at = yield from self._skip(at + 3)
        self._at = at

    def _read_calls(self, form: ToolFormat, at: int) -> Reading[int | None]:
        """Read what is behind a marker; return where it ends, None where it is no call."""
        at = yield from self._skip(at)
        if (yield from self._has(at, "<function=")):
            ended: int | None = yield from self._read_function(at + len("<function="))
        elif form.begin == "[TOOL_CALLS]" and self._text[at : at + 1] not in ("[", "{"):
            ended = yield from self._read_named(at)
        else:
            ended = yield from self._read_list(at)
        if ended is not None and form.end:
            at = yield from self._skip(ended)
            if (yield from self._has(at, form.end)):
                ended = at + len(form.end)
            elif form.end.startswith(self._text[at:]):  # cut off
                ended = len(self._text)
        return ended

    def _read_list(self, at: int, *, is_bare: bool = False) -> Reading[int | None]:
        """Read the JSON of a call, or a list of them; return where it ends, None for none."""
        ended = None
        if self._text[at : at + 1] == "[":
            at = yield from self._skip(at + 1)
        while (after := (yield from self._read_object(at, is_bare))) is not None:
            ended = after
            at = yield from self._skip(after)
            letter = self._text[at : at + 1]
            if letter in (",", ";", "]"):
                ended = at + 1
            if letter not in (",", ";"):
                break
            at = yield from self._skip(at + 1)
        return ended

    def _read_object(self, at: int, is_bare: bool) -> Reading[int | None]:
        """Read the JSON of a call; a bare one must be of a tool that there is."""
        scan = JsonScan(at)
        if self._text[at : at + 1] != "{":
            return None
        while True:
            head = _HEAD.match(self._text, at)
            if head is not None and (name := _read_text(head[1])) is not None:
                if is_bare and name not in self._schemas:
                    return None
                return (yield from self._read_arguments(name, head.end(), depth=1))
            if scan.run(self._text):
                is_call = scan.is_whole and self._take_object(self._text[at : scan.at], is_bare)
                return scan.at if is_call else None
            first = _FIRST_KEY.match(self._text, at)
            if self._is_over or (is_bare and first is not None and first[1] not in _KEYS):
                return None
            yield

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
        scan = JsonScan(at, depth)
        while depth and not scan.run(self._text) and not self._is_over:
            yield
        return scan.at

    def _read_named(self, at: int) -> Reading[int | None]:
        """Read Mistral's newer calls: a name, perhaps an id, and the arguments."""
        while (head := _NAME.match(self._text, at)) is None:
            if self._is_over or not _NAME_SO_FAR.fullmatch(self._text, at):
                return None
            yield
        return (yield from self._read_arguments(head[1], head.end(), depth=0))

    def _read_function(self, at: int) -> Reading[int | None]:
        """Read a call of Qwen3-Coder's: <function=NAME>, parameters as tags, </function>."""
        close = yield from self._find(">", at)
        name = self._text[at:close]
        if close < 0 or not name or _NO_NAME.search(name):
            return None
        self._begin_call(name)
        at, begun = close + 1, "{"
        while True:
            at = yield from self._skip(at)
            if not (yield from self._has(at, "<parameter=")):
                break
            close = yield from self._find(">", at)
            end = yield from self._find("</parameter>", close + 1)
            if close < 0 or end < 0:
                self._add_arguments(begun if begun == "{" else "")
                return len(self._text)
            key, text = self._text[at + len("<parameter=") : close], self._text[close + 1 : end]
            value = _read_parameter(text, self._schemas.get(name), key)
            self._add_arguments(f"{begun}{json.dumps(key)}: {value}")
            begun, at = ", ", end + len("</parameter>")
        if (yield from self._has(at, "</function>")):
            at += len("</function>")
        elif self._is_over and at == len(self._text):  # cut off
            self._add_arguments(begun if begun == "{" else "")
            return at
        self._add_arguments("{}" if begun == "{" else "}")
        return at

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
            if self._is_over or not word.startswith(self._text[at:]):
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


def _read_text(written: str) -> str | None:
    """The text that JSON writes so between quotation marks; None for what is none."""
    try:
        return str(json.loads(f'"{written}"'))
    except ValueError:
        return None


def _read_parameter(text: str, schema: Any, name: str) -> str:
    """A parameter of Qwen3-Coder's as JSON: of another type than text where the schema says so."""
    text = text.removeprefix("\n").removesuffix("\n")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    own = properties.get(name) if isinstance(properties, dict) else None
    if isinstance(own, dict) and own.get("type", "string" if "enum" in own else "") != "string":
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)
