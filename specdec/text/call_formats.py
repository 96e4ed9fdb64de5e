"""Formats of tool calls and reasoning in answers, and how a chat template reads tools and calls."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from .json_scan import GEMMA_MARK

AUTO = "auto"  # the format that the chat template writes
NO_FORMAT = "none"
NAME_LETTERS = r"[\w.:/-]"  # of a tool's name
MAX_NAME = 200  # letters of a tool's name
_CDATA = re.compile(r"<!\[CDATA\[(.*)\]\]>", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class TagForm:
    """Form of arguments that are written as texts between tags.

    key_begin, key_end: the texts around a key. value_begin: the text after that of a key's end,
    empty where the value follows at once. value_end: the text after a value. has_cdata: whether
    a value may stand in an XML section of characters.
    """

    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    has_cdata: bool = False

    def clean(self, text: str) -> str:
        """Return a value's text without the line breaks and the section that a template adds."""
        text = text.removeprefix("\n").removesuffix("\n")
        section = _CDATA.fullmatch(text) if self.has_cdata else None
        return section[1] if section is not None else text


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Format of tool calls.

    begin, end: the markers around calls. call_begin, call_end: those around each call between
    them. inner: the beginning of a call after the marker, where it identifies a call without a
    marker. is_bare: whether an answer that begins with the JSON of a call is one, without a
    marker. name_key, arguments: keys of a call's JSON; no arguments where a call is its name and
    then its arguments. name_pattern: a regular expression of what stands between these, empty
    where calls are JSON. name_text: an example of it. tags: the form of arguments that are texts.
    quote: the mark around texts in arguments that are not JSON. is_python: whether calls are a list
    of Python's. A forced call of such a format is written as JSON.
    prefix, separator, suffix: texts before, between and after the calls of a forced answer.
    """

    begin: str = ""
    end: str = ""
    inner: str = ""
    is_bare: bool = False
    name_key: str = "name"
    arguments: str = "arguments"
    call_begin: str = ""
    call_end: str = ""
    name_pattern: str = ""
    name_text: str = ""
    tags: TagForm | None = None
    quote: str = ""
    is_python: bool = False
    prefix: str = ""
    separator: str = ""
    suffix: str = ""

    def open(self, name: str) -> str:
        """Return the text of a forced call up to its arguments."""
        if not self.arguments:
            return f"{name}{self.name_text}"
        return f'{{"{self.name_key}": {json.dumps(name)}, "{self.arguments}": '

    @functools.cached_property
    def name_regex(self) -> re.Pattern[str]:
        """Regular expression of a call's name and of what stands before its arguments."""
        return re.compile(f"({NAME_LETTERS}{{1,{MAX_NAME}}}?){self.name_pattern}")

    def may_begin_end(self, text: str) -> bool:
        """Return whether a text may begin what stands between a name and its arguments."""
        letters = "".join(text.split())
        expected = "".join(self.name_text.split()) + ("" if self.tags is not None else "{")
        has_wildcard = "[" in self.name_pattern
        is_short = len(text) <= len(expected) + MAX_NAME
        return expected.startswith(letters) or (has_wildcard and is_short)

    @property
    def is_wrapped(self) -> bool:
        """True where a call in JSON can stand after the marker."""
        return not self.name_pattern or bool(self.call_begin)

    @functools.cached_property
    def is_list(self) -> bool:
        """True where a comma stands between the ends and the beginnings of two calls."""
        between = self.separator.removeprefix(self.call_end).removesuffix(self.call_begin)
        return between.strip() == ","

    def list_marks(self) -> list[str]:
        """Return the texts that identify a call, in which special tokens may stand."""
        tags = self.tags or TagForm("", "", "", "")
        tag_marks = tags.key_begin, tags.key_end, tags.value_begin, tags.value_end
        marks = self.begin, self.call_begin, self.name_text, *tag_marks, self.call_end, self.end
        return [mark for mark in (*marks, self.quote) if mark]


def make_python_format(begin: str, end: str) -> ToolFormat:
    """Return the format of Python's calls between two markers."""
    return ToolFormat(
        begin=begin, end=end, is_python=True, prefix=f"{begin}[", separator="}, ",
        suffix=f"}}]{end}",
    )  # fmt: skip


def make_id(form: ToolFormat | None) -> str:
    """Make a new id of a call; Mistral's templates take nine letters and digits only."""
    is_short = form is not None and form.begin == "[TOOL_CALLS]"
    return secrets.token_hex(5)[:9] if is_short else f"call_{secrets.token_hex(12)}"


# A forced call of a format with tags is written as JSON, which a grammar can keep to any schema;
# the parser reads both forms.
_TAGS: Any = {
    "begin": "<tool_call>", "end": "</tool_call>", "prefix": "<tool_call>\n",
    "separator": "}\n</tool_call>\n<tool_call>\n", "suffix": "}\n</tool_call>",
}  # fmt: skip
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "qwen3_coder": ToolFormat(
        **_TAGS, inner="<function=", call_begin="<function=", call_end="</function>",
        name_pattern=r"\s{0,8}>", name_text=">",
        tags=TagForm("<parameter=", ">", "", "</parameter>"),
    ),
    "hermes": ToolFormat(**_TAGS),
    "mistral": ToolFormat(
        begin="[TOOL_CALLS]", arguments="", name_text="[ARGS]", prefix="[TOOL_CALLS]",
        separator="[TOOL_CALLS]",
    ),
    "mistral_list": ToolFormat(
        begin="[TOOL_CALLS]", prefix="[TOOL_CALLS][", separator="}, ", suffix="}]",
    ),
    "llama3_json": ToolFormat(
        begin="<|python_tag|>", is_bare=True, arguments="parameters", separator="}; ", suffix="}",
    ),
    "gemma4": ToolFormat(
        begin="<|tool_call>", end="<tool_call|>", inner="call:", arguments="", call_begin="call:",
        name_pattern=r"\s{0,8}(?=\{)", quote=GEMMA_MARK, prefix="<|tool_call>call:",
        separator="<tool_call|><|tool_call>call:", suffix="<tool_call|>",
    ),
    "lfm2": make_python_format("<|tool_call_start|>", "<|tool_call_end|>"),
    "json": ToolFormat(is_bare=True, prefix="[", separator="}, ", suffix="}]"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """Markers around reasoning.

    is_assumed: whether each answer begins inside them. text_marks: those that may stand around the
    text of the answer, which leaves them out. text_begin, text_end: words around a text after
    reasoning, which may stand within any text as well.
    """

    begin: str
    end: str
    is_assumed: bool = False
    text_marks: tuple[str, ...] = ()
    text_begin: str = ""
    text_end: str = ""

    def is_in(self, template: str) -> bool:
        """Return whether a chat template writes or asks for such reasoning."""
        return self.end in template and self.text_begin + self.text_end in template


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "granite": ReasoningFormat(
        "<think>", "</think>", text_begin="<response>", text_end="</response>"
    ),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_assumed=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
    "cohere": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>", text_marks=(
        "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>",
    )),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>"),
    "apriel": ReasoningFormat(
        "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]",
        text_marks=("[END FINAL RESPONSE]",),
    ),
}  # fmt: skip


def find_thinking(
    form: ReasoningFormat | None, prompt: str, continued_text: str = ""
) -> bool | None:
    """Return whether an answer begins with reasoning: True, None for perhaps, False.

    continued_text: the text of the assistant's message that the answer goes on with.
    """
    end, text = prompt.rstrip(), continued_text.strip()
    if form is None or end.endswith(form.end):
        return False
    if not text:
        return True if form.is_assumed or end.endswith(form.begin) else None
    begin_place, end_place = text.rfind(form.begin), text.rfind(form.end)
    if begin_place != end_place:
        return begin_place > end_place
    return end.removesuffix(text).rstrip().endswith(form.begin)


@dataclasses.dataclass(frozen=True)
class TemplateUse:
    """Use of a chat template for tools: what it reads, and what has to be written as text.

    tools_variable: the variable in which it reads tools; empty where it reads none. is_field:
    whether that is a field of the system message instead, which holds JSON as text.
    shows_calls, shows_results: whether it reads an assistant's calls, and messages of the role
    `tool`. has_system: whether it shows a system message. marks_turns: whether it writes anything
    around a user's message, as a chat model needs it. example: the text that it wrote for a
    call, where its format was not recognized.
    """

    tools_variable: str = ""
    is_field: bool = False
    shows_calls: bool = True
    shows_results: bool = True
    has_system: bool = True
    marks_turns: bool = False
    example: str = ""


@dataclasses.dataclass(frozen=True)
class ChatFormats:
    """Formats of a model: None for a format that it lacks or that is unknown.

    use: what its chat template reads of tools and calls. marks: the markers that are special
    tokens, by their ids; texts never hold these. is_harmony: whether answers are messages on
    channels, see harmony.py.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    use: TemplateUse = TemplateUse()
    marks: Mapping[int, str] = dataclasses.field(default_factory=dict)
    is_harmony: bool = False

    @property
    def reads_tools(self) -> bool:
        """True where the chat template reads tools."""
        return bool(self.use.tools_variable)

    @property
    def can_call(self) -> bool:
        """True where an answer may call tools."""
        return self.tools is not None and (self.reads_tools or self.as_text)

    @property
    def as_text(self) -> bool:
        """True where tools and calls become messages' texts: the template reads no tools."""
        return self.tools is TOOL_FORMATS["json"] and not self.reads_tools


def find_marks(
    tools: ToolFormat | None, reasoning: ReasoningFormat | None, tokenizer: Any
) -> dict[int, str]:
    """Return the special tokens of a tokenizer that stand in markers of formats, by their ids."""
    markers = tools.list_marks() if tools is not None else []
    if tools is not None and tools.begin == "[TOOL_CALLS]":
        markers += ["[ARGS]", "[CALL_ID]"]
    markers += [reasoning.begin, reasoning.end] if reasoning is not None else []
    tokens = getattr(tokenizer, "added_tokens_decoder", {})
    ends = {getattr(tokenizer, "eos_token_id", None)}
    return {
        token_id: str(token) for token_id, token in tokens.items()
        if token.special and token_id not in ends and any(str(token) in mark for mark in markers)
    }  # fmt: skip


NO_FORMATS = ChatFormats()
