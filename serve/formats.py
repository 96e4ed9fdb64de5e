"""Formats of tool calls and reasoning: a record for each, chosen by the chat template."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

AUTO = "auto"  # the format that the chat template shows
NO_FORMAT = "none"
FUNCTION = "<function="  # beginning of a call of Qwen3-Coder's


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Format of tool calls.

    begin, end: the markers around calls. inner: the beginning of a call behind the marker, where it
    identifies a call without a marker. is_bare: whether an answer that begins with the
    JSON of a call is one, without a marker. arguments: the key of the arguments in a call's JSON;
    empty where a call is its name, a marker and its arguments. sign: a regular expression that
    finds the format in a chat template; empty for none. prefix, separator, suffix: texts before,
    between and after the calls of a forced answer.
    """

    begin: str = ""
    end: str = ""
    inner: str = ""
    is_bare: bool = False
    arguments: str = "arguments"
    sign: str = ""
    prefix: str = ""
    separator: str = ""
    suffix: str = ""

    def open(self, name: str) -> str:
        """Return the text of a forced call up to its arguments."""
        if not self.arguments:
            return f"{name}[ARGS]"
        return f'{{"name": {json.dumps(name)}, "{self.arguments}": '


# In the order in which their signs are looked for. A forced call of qwen3_coder is written as JSON,
# which a grammar can keep to any schema; its parser reads both forms.
_TAGS: Any = {
    "begin": "<tool_call>", "end": "</tool_call>", "prefix": "<tool_call>\n",
    "separator": "}\n</tool_call>\n<tool_call>\n", "suffix": "}\n</tool_call>",
}  # fmt: skip
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "qwen3_coder": ToolFormat(**_TAGS, inner=FUNCTION, sign=FUNCTION),
    "hermes": ToolFormat(**_TAGS, sign=r"(?s)\A(?!.*<arg_key>).*<tool_call>"),
    "mistral": ToolFormat(
        begin="[TOOL_CALLS]", arguments="", prefix="[TOOL_CALLS]", separator="[TOOL_CALLS]",
        sign=r"\[ARGS\]",
    ),
    "mistral_list": ToolFormat(
        begin="[TOOL_CALLS]", prefix="[TOOL_CALLS][", separator="}, ", suffix="}]",
        sign=r"\[TOOL_CALLS\]",
    ),
    "llama3_json": ToolFormat(
        begin="<|python_tag|>", is_bare=True, arguments="parameters", separator="}; ", suffix="}",
        sign=r'\{\\?"name\\?": function name, \\?"parameters\\?":',
    ),
    "json": ToolFormat(is_bare=True, prefix="[", separator="}, ", suffix="}]"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """Markers around reasoning. is_assumed: whether each answer begins inside them."""

    begin: str
    end: str
    is_assumed: bool = False


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_assumed=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


@dataclasses.dataclass(frozen=True)
class ChatFormats:
    """Formats of the served model: None for a format that it lacks or that is unknown.

    reads_tools: whether its chat template reads tools. marks: the markers that are special
    tokens, by their ids; texts never hold these.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    reads_tools: bool = False
    marks: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def choose(cls, tools: str, reasoning: str, tokenizer: Any) -> ChatFormats:
        """Choose by the names of formats, or by what the chat template contains for `auto`."""
        template = str(tokenizer.chat_template or "")
        tool_format, reasoning_format = TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning)
        if tools == AUTO:
            template_formats = (
                f for f in TOOL_FORMATS.values() if f.sign and re.search(f.sign, template)
            )
            tool_format = next(template_formats, None)
        if reasoning == AUTO:
            marked = (form for form in REASONING_FORMATS.values() if form.end in template)
            reasoning_format = next(marked, None)
        marks = _find_marks(tool_format, reasoning_format, tokenizer)
        return cls(tool_format, reasoning_format, "tools" in template, marks)

    @property
    def can_call(self) -> bool:
        """True where an answer may call tools."""
        return self.tools is not None and (self.reads_tools or self.as_text)

    @property
    def as_text(self) -> bool:
        """True where tools and calls become messages' texts: the template reads no tools."""
        return self.tools is TOOL_FORMATS["json"] and not self.reads_tools


def _find_marks(
    tools: ToolFormat | None, reasoning: ReasoningFormat | None, tokenizer: Any
) -> dict[int, str]:
    """Return the markers of formats that are special tokens of the tokenizer, by their ids."""
    markers = {"[ARGS]", "[CALL_ID]"} if tools is not None else set[str]()
    for form in (tools, reasoning):
        markers |= {form.begin, form.end} if form is not None else set()
    tokens = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        token_id: str(token) for token_id, token in tokens.items()
        if token.special and str(token) in markers
    }  # fmt: skip


NO_FORMATS = ChatFormats()
