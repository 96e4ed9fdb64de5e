"""Recognition of a model's format of tool calls: its chat template writes calls that are known.

A conversation in which an assistant calls two tools is put into the template. Where names and
arguments stand in its text, and what stands around them, is the format. No model is known by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Sequence
from string import ascii_letters
from typing import Any, NamedTuple

from specdec.errors import shorten
from specdec.system.logs import get_logger
from specdec.text import harmony
from specdec.text.answer_parser import Parser
from specdec.text.call_formats import (
    AUTO,
    NAME_LETTERS,
    REASONING_FORMATS,
    TOOL_FORMATS,
    ChatFormats,
    TagForm,
    TemplateUse,
    ToolFormat,
    find_marks,
    make_python_format,
)
from specdec.text.call_search import CALLS, MAX_PATTERN, CallText, find_keys, split_calls
from specdec.text.json_scan import GEMMA_MARK, find_value
from specdec.text.tool_calls import render_calls

logger = get_logger(__name__)
Message = dict[str, Any]
CONTENT = "Ωanswer"  # begins with no letter that a marker begins with
RESULT, SYSTEM = "Ωresult", "Ωsystem"
MAX_VARIABLES = 16  # names in a template that are tried as its variable of tools
# A marker, a run of white space or a word: the pieces by which texts around calls are compared.
_PIECE = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]|\s+|\w+|.")
_CALL_MARKER = re.compile(r"<\|?tool_?calls?\|?>|\[TOOL_CALLS?\]", re.IGNORECASE)


_SCHEMA = {
    "type": "object", "required": ["key_a", "key_b"],
    "properties": {
        "key_a": {"type": "string", "description": "A text."},
        "key_b": {"type": "integer", "description": "A number."},
    },
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {"name": call.name, "description": "A tool.", "parameters": _SCHEMA},
    }
    for call in CALLS
]  # fmt: skip


def choose_formats(tools: str, reasoning: str, tokenizer: Any) -> ChatFormats:
    """Return a model's formats by their names, or by what its chat template writes for `auto`."""
    template = str(tokenizer.chat_template or "")
    tool_format, reasoning_format = TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning)
    use = TemplateUse()
    if harmony.is_harmony(template) and AUTO in (tools, reasoning):
        marks = harmony.find_marks(tokenizer)
        return ChatFormats(
            harmony.TOOLS,
            harmony.REASONING,
            TemplateUse("tools", marks_turns=True),
            marks,
            is_harmony=True,
        )
    if template:
        use, template_format = TemplateProbe(tokenizer).recognize()
        if tools == AUTO:
            tool_format = template_format
            _log_choice(use, template_format)
    if reasoning == AUTO:
        marked = (form for form in REASONING_FORMATS.values() if form.is_in(template))
        reasoning_format = next(marked, None)
    marks = find_marks(tool_format, reasoning_format, tokenizer)
    return ChatFormats(tool_format, reasoning_format, use, marks)


def _log_choice(use: TemplateUse, form: ToolFormat | None) -> None:
    """Log the format of calls that was found, or the remedy where it is unknown."""
    if form is not None:
        text = f"{form.prefix}{form.open('NAME')}" + "{...}" + form.suffix
        logger.info("tool calls: %s", " ".join(text.split()))
    else:
        logger.warning(
            "the chat template reads tools, and it is not known how the model writes calls: %s."
            " Requests with tools are refused; --tool-call-parser says the format, or json, which"
            " with tool_choice required works with any model",
            shorten(" ".join(use.example.split())),
        )  # fmt: skip


class TemplateProbe:
    """Probe of a tokenizer's chat template, by conversations of which all texts are known."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._template = tokenizer, str(tokenizer.chat_template)
        self._variables: dict[str, Any] = {}
        self._system: list[Message] = []

    def recognize(self) -> tuple[TemplateUse, ToolFormat | None]:
        """Return what the template reads, and the format of calls; None for one unknown."""
        variable, is_field, tools_text = self._find_tools()
        user = {"role": "user", "content": "hi"}
        has_system = SYSTEM in self._render([{"role": "system", "content": SYSTEM}, user])
        turns = [*self._system, user, {"role": "assistant", "content": "", "tool_calls": []}]
        call_text, example = self._read_calls(turns)
        shows_calls = bool(example)
        result = {"role": "tool", "tool_call_id": CALLS[0].number, "content": RESULT}
        called = {"role": "assistant", "content": "", "tool_calls": [CALLS[0].write()]}
        if not shows_calls:
            called = {"role": "assistant", "content": CONTENT}
        shows_results = RESULT in self._render([*turns[:-1], called, result])
        marks_turns = self._render([{"role": "user", "content": RESULT}]).strip() not in (
            "",
            RESULT,
        )
        if not variable:
            use = TemplateUse(has_system=has_system, marks_turns=marks_turns)
            return use, TOOL_FORMATS["json"]
        form = describe_calls(call_text) if call_text is not None else None
        if form is not None and form.tags is not None and "CDATA" in self._template:
            tags = dataclasses.replace(form.tags, has_cdata=True)
            form = dataclasses.replace(form, tags=tags)
        if form is not None and not _reads_back(form, example):
            form = None
        if not shows_calls:
            form = self._read_instructions(tools_text)
        use = TemplateUse(
            variable,
            is_field,
            shows_calls,
            shows_results,
            has_system,
            marks_turns,
            "" if form is not None else example or tools_text,
        )
        return use, self._add_token(form)

    def _find_tools(self) -> tuple[str, bool, str]:
        """Find how the template reads tools: the variable, whether it is a field, and the text."""
        plain = self._render([{"role": "user", "content": "hi"}], adds=True)
        for name in self._list_variables():
            text = self._render([{"role": "user", "content": "hi"}], adds=True, **{name: TOOLS})
            if CALLS[0].name in text:
                self._variables = {name: TOOLS}
                return name, False, _leave_common(text, plain)
        functions = json.dumps([tool["function"] for tool in TOOLS])
        system = {"role": "system", "content": SYSTEM, "tools": functions}
        text = self._render([system, {"role": "user", "content": "hi"}])
        if CALLS[0].name in text:
            self._system = [system]
            return "tools", True, ""
        return "", False, ""

    def _list_variables(self) -> list[str]:
        """List the variables in which the template may read tools: `tools`, then others like it."""
        words = set(re.findall(r"[A-Za-z_]\w*", self._template))
        names = sorted(word for word in words if word.endswith(("tools", "functions")))
        others = sorted(names, key=lambda name: "python" in name)[:MAX_VARIABLES]
        return list(dict.fromkeys(["tools", *others]))

    def _render(self, messages: Sequence[Message], *, adds: bool = False, **variables: Any) -> str:
        """Return a conversation in the template; an empty text where the template refuses it."""

        def apply(given: list[Message]) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    given, tokenize=False, add_generation_prompt=adds,
                    **(self._variables | variables),
                )
            )  # fmt: skip

        with contextlib.suppress(Exception):  # templates raise whatever they like
            return render_calls(apply, [dict(message) for message in messages], wants_text=False)[0]
        return ""

    def _read_calls(self, turns: Sequence[Message]) -> tuple[CallText | None, str]:
        """Return the parts of what the template writes for calls, and the text; empty for none."""
        answer = self._render([*turns[:-1], {"role": "assistant", "content": CONTENT}])
        for content in ("", None):
            for calls in (CALLS, CALLS[:1]):
                written_calls = [call.write() for call in calls]
                called = {**turns[-1], "content": content, "tool_calls": written_calls}
                text = self._render([*turns[:-1], called])
                text = _cut_answer(text, answer, str(self._tokenizer.eos_token or ""))
                if all(call.name in text for call in calls):
                    return split_calls(text, calls), text
        return None, ""

    def _read_instructions(self, text: str) -> ToolFormat | None:
        """Return the format that the template's text about tools asks for, or that of a token."""
        text = text.replace(json.dumps(TOOLS), "")
        markers = _CALL_MARKER.findall(text)
        if not markers:
            if TOOL_FORMATS["lfm2"].begin in self._list_tokens():
                return TOOL_FORMATS["lfm2"]
            markers = [name for name in self._list_tokens() if _CALL_MARKER.fullmatch(name)]
        if not markers:
            return None
        begin = markers[0]
        example = text.rpartition(begin)[2]
        key = "parameters" if re.match(r'[^"]*"name"[^"]*"parameters"', example) else "arguments"
        wants_list = not re.match(r"\s*\{", example)
        opening, closing = ("[", "]") if wants_list else ("\n", "\n")
        end = self._find_end(begin, example)
        separator = "}, " if wants_list else f"}}\n{end}\n{begin}\n"
        return ToolFormat(
            begin=begin, end=end, arguments=key, prefix=f"{begin}{opening}",
            separator=separator, suffix=f"}}{closing}{end}".rstrip(),
        )  # fmt: skip

    def _find_end(self, begin: str, example: str) -> str:
        """Return the marker that closes another one, by an example or the vocabulary."""
        ends = (begin[0] + "/" + begin[1:], begin.replace("<|", "<|/"))
        tokens = self._list_tokens()
        return next((end for end in ends if end in example or end in tokens), "")

    def _add_token(self, form: ToolFormat | None) -> ToolFormat | None:
        """Return a format of bare JSON with the marker that Llama's vocabularies have for calls."""
        marker = TOOL_FORMATS["llama3_json"].begin
        if form is None or form.begin or marker not in self._list_tokens():
            return form
        return dataclasses.replace(form, begin=marker)

    def _list_tokens(self) -> list[str]:
        tokens = getattr(self._tokenizer, "added_tokens_decoder", {})
        return [str(token) for token in tokens.values()]


def _reads_back(form: ToolFormat, text: str) -> bool:
    """Return whether a format finds in a template's text the calls that this was made for."""
    calls = [call for call in CALLS if call.name in text]
    schemas = {call.name: _SCHEMA for call in calls}
    parser = Parser(form, None, schemas=schemas)
    parser.feed(text)
    parser.finish()
    try:
        functions = [call["function"] for call in parser.calls]
        found_calls = [(f["name"], json.loads(f["arguments"])) for f in functions]
    except ValueError:
        return False
    return found_calls == [(call.name, call.arguments) for call in calls] and not parser.is_call_cut


def _leave_common(text: str, plain: str) -> str:
    """Return a text without its beginning and end that another text has as well."""
    start = _count_common(text, plain)
    end = _count_common(text[start:][::-1], plain[::-1])
    return text[start : len(text) - end]


def _count_common(text: Sequence[str], other_text: Sequence[str]) -> int:
    """Return the number of elements that two sequences share at their beginnings."""
    pairs = enumerate(zip(text, other_text, strict=False))
    return next(
        (i for i, (letter, other) in pairs if letter != other), min(len(text), len(other_text))
    )


def _cut_answer(text: str, answer: str, eos_token: str) -> str:
    """Return what a template wrote for calls: without the prompt, reasoning and the turn's end.

    answer: what it wrote for an answer that is CONTENT.
    """
    prompt, _, behind = answer.partition(CONTENT)
    start = _count_common(text, prompt)
    while start and prompt[:start] and _is_in_marker(prompt[:start]):
        start -= 1
    text = text[start:]
    first_call = text.find(CALLS[0].name)
    for form in REASONING_FORMATS.values():
        if 0 <= (end := text.rfind(form.end, 0, max(first_call, 0))):
            text = text[end + len(form.end) :]
            first_call = text.find(CALLS[0].name)
    pieces = [piece for piece in _PIECE.findall(behind) if piece.strip()]
    for end in (*pieces[:1], eos_token):
        if end and (at := text.find(end, text.rfind(CALLS[0].name))) >= 0 and len(end) > 1:
            text = text[:at]
    return text


def _is_in_marker(prompt: str) -> bool:
    """Return whether a text ends in the middle of a marker."""
    tail = prompt[-MAX_PATTERN:]
    return tail.rfind("<") > tail.rfind(">") or tail.rfind("[") > tail.rfind("]")


def describe_calls(parts: CallText) -> ToolFormat | None:
    """Return the format of calls by what a template wrote; None for a form that is not known."""
    call = CALLS[0]
    with contextlib.suppress(ValueError):
        if (keys := find_keys(json.loads(parts.first), call)) is not None:
            return _describe_objects(parts, *keys)
    if any(call.number in text for text in (parts.before, parts.between or "", parts.after)):
        return None
    if parts.first.startswith(f"{call.name}("):
        ending = parts.after.lstrip().removeprefix("]").strip()
        opening = parts.before.strip().removesuffix("[").strip()
        return make_python_format(opening, _take_marker(ending)) if opening else None
    end = parts.first.find("{")
    with contextlib.suppress(ValueError):
        if end >= 0 and find_value(parts.first, end)[0] == call.arguments:
            return _describe_named(parts, parts.first[len(call.name) : end])
    return _describe_tagged(parts)


class Markers(NamedTuple):
    """Markers around all calls and around each, of which the latter may be empty."""

    begin: str
    call_begin: str
    call_end: str
    end: str


def _find_markers(parts: CallText) -> Markers:
    """Return the markers by what two calls have in common at their beginnings and ends."""
    before, between, after = (_PIECE.findall(text or "") for text in (
        parts.before, parts.between, parts.after))  # fmt: skip
    if parts.between is None:
        between = before
    num_begin = _count_common(before[::-1], between[::-1])
    num_end = _count_common(after, between) if parts.between is not None else len(after)
    wrapper, call_begin = before[: len(before) - num_begin], before[len(before) - num_begin :]
    call_end, wrapper_end = after[:num_end], after[num_end:]
    outer, inner = "".join(wrapper).strip(), "".join(call_begin).strip()
    inner_end, outer_end = "".join(call_end).strip(), "".join(wrapper_end).strip()
    if outer:
        return Markers(outer, inner, inner_end, _take_marker(outer_end))
    # Each call has markers of its own: the first one begins it, the last one ends it.
    pieces = _PIECE.findall(inner)
    if len(pieces) > 1 and len(pieces[0]) > 2 and pieces[0][-1] in ">]":
        end_pieces = _PIECE.findall(inner_end) or [""]
        inner, inner_end = "".join(pieces[1:]).strip(), "".join(end_pieces[:-1]).strip()
        return Markers(pieces[0], inner, inner_end, end_pieces[-1])
    return Markers(inner, "", "", _take_marker(inner_end or outer_end))


def _take_marker(text: str) -> str:
    """Return the marker that a text begins with; what stands after it ends the turn."""
    pieces: list[str] = _PIECE.findall(text)
    if len(pieces) > 1 and len(pieces[0]) > 2:
        return pieces[0]
    return text.partition("\n")[0]


def _end_with(text: str, marker: str) -> str:
    """Return a text up to the end of a marker in it."""
    return text[: text.find(marker) + len(marker)] if marker else text.rstrip()


def _describe_objects(parts: CallText, name_key: str, arguments_key: str) -> ToolFormat:
    """Return the format of calls that are JSON, by themselves or in a list."""
    is_list = parts.before.rstrip().endswith("[")
    opening = parts.before.rstrip()[:-1] if is_list else parts.before
    ending = parts.after.lstrip().removeprefix("]") if is_list else parts.after
    markers = Markers(opening.strip(), "", "", _take_marker(ending.strip()))
    if not is_list:
        markers = _find_markers(parts)
    suffix = _end_with(parts.after, markers.end)
    between = parts.between if parts.between is not None else suffix + parts.before
    if markers.begin:
        return ToolFormat(
            begin=markers.begin, end=markers.end, call_begin=markers.call_begin,
            call_end=markers.call_end, name_key=name_key, arguments=arguments_key,
            prefix=parts.before.lstrip(), separator="}" + between,
            suffix="}" + suffix,
        )  # fmt: skip
    return ToolFormat(
        is_bare=True, name_key=name_key, arguments=arguments_key, prefix=parts.before.strip(),
        separator="}" + (between if between.strip() else "; "), suffix="}" + suffix,
    )  # fmt: skip


def _describe_named(parts: CallText, name_text: str) -> ToolFormat | None:
    """Return the format of calls that are a name and the JSON of the arguments."""
    markers = _find_markers(parts)
    if not markers.begin:
        return None
    texts: Any = {
        "begin": markers.begin, "end": markers.end, "arguments": "", "name_text": name_text,
        "prefix": parts.before.lstrip(), "separator": parts.between or "",
        "suffix": _end_with(parts.after, markers.end),
    }  # fmt: skip
    if markers.begin == TOOL_FORMATS["mistral"].begin:  # its parser takes ids as well
        return ToolFormat(**texts | {"name_text": TOOL_FORMATS["mistral"].name_text})
    return ToolFormat(
        **texts, call_begin=markers.call_begin, call_end=markers.call_end,
        inner=markers.call_begin, quote=GEMMA_MARK if GEMMA_MARK in parts.first else "",
        name_pattern=_write_pattern(name_text) + r"\s{0,8}(?=\{)",
    )  # fmt: skip


def _describe_tagged(parts: CallText) -> ToolFormat | None:
    """Return the format of calls whose arguments are texts between tags."""
    call, markers = CALLS[0], _find_markers(parts)
    (key, value), (second_key, second_value) = call.arguments.items()
    text = parts.first + parts.after + (parts.between or "")
    words = [call.name, key, str(value), second_key, str(second_value)]
    pieces = _split_at(text, words)
    if pieces is None or not markers.begin:
        return None
    name_text, key_text, between, second_text, _ = pieces
    num_begin = _count_common(_PIECE.findall(name_text)[::-1], _PIECE.findall(between)[::-1])
    name_pieces = _PIECE.findall(name_text)
    key_begin = "".join(name_pieces[len(name_pieces) - num_begin :]).strip()
    name_text = "".join(name_pieces[: len(name_pieces) - num_begin])
    value_end = between[: len(between) - len("".join(name_pieces[len(name_pieces) - num_begin :]))]
    key_end, value_begin = _split_key_text(key_text, second_text)
    ending = (parts.between or parts.after).lstrip()
    value_end = value_end.strip()
    if not key_begin or not key_end or not value_end or not ending.startswith(value_end):
        return None
    parts = parts._replace(
        after=_leave_out(parts.after, value_end),
        between=parts.between and _leave_out(parts.between, value_end),
    )
    markers = _find_markers(parts)
    tags = TagForm(key_begin, key_end, value_begin, value_end)
    form = ToolFormat(
        begin=markers.begin, end=markers.end, call_begin=markers.call_begin,
        call_end=markers.call_end, inner=markers.call_begin, tags=tags, name_text=name_text,
        name_pattern=_write_pattern(name_text) or f"(?!{NAME_LETTERS})(?=.|\\n)",
        prefix=markers.begin + "\n", separator=f"}}\n{markers.end}\n{markers.begin}\n",
        suffix=f"}}\n{markers.end}",
    )  # fmt: skip
    if re.fullmatch(r"\S+[>\]]", markers.begin):
        return form
    # A call in JSON has no place after a marker that a name continues.
    return dataclasses.replace(form, is_bare=True, prefix="", separator="}; ", suffix="}")


def _leave_out(text: str, beginning: str) -> str:
    return text.lstrip().removeprefix(beginning)


def _split_at(text: str, words: Sequence[str]) -> list[str] | None:
    """Return the texts after each of several words, in their order; None where one is missing."""
    pieces, position = list[str](), 0
    for word in words:
        start = text.find(word, position)
        if start < 0:
            return None
        pieces.append(text[position:start])
        position = start + len(word)
    return [*pieces[1:], text[position:]]


def _split_key_text(text: str, other_text: str) -> tuple[str, str]:
    """Return the text after a key and the one before its value, which two arguments share."""
    if text != other_text:  # it tells the value's type
        start = _count_common(text, other_text)
        end = _count_common(text[::-1], other_text[::-1])
        return text[:start].strip(), text[len(text) - end :].strip().lstrip(ascii_letters)
    pieces = text.split()
    return (pieces[0], "".join(pieces[1:])) if pieces else ("", "")


def _write_pattern(text: str) -> str:
    """Return a regular expression of what stands after a name, for all ids and spaces."""
    words = re.split(rf"({CALLS[0].number}|\s+|(?<=[:.])\d+)", text.strip())
    patterns = []
    for word in filter(None, words):
        if word == CALLS[0].number or word.isdigit():
            patterns.append(rf"[\w-]{{1,{MAX_PATTERN}}}")
        else:
            patterns.append(r"\s{0,8}" if word.isspace() else re.escape(word))
    return r"\s{0,8}" * bool(patterns) + "".join(patterns)
