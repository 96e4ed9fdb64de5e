"""How models write tool calls and reasoning: one record per format, chosen by the chat template."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

AUTO, NONE = "auto", "none"
FUNCTION = "<function="  # with which a call of Qwen3-Coder's begins


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """A way of writing tool calls.

    begin, end: the markers around calls. inner: what a call begins with behind the marker, where a
    call is known by it if the marker is missing. is_bare: whether an answer that begins with the
    JSON of a call is one, without a marker. arguments: the key of the arguments in a call's JSON;
    empty where a call is its name, a marker and its arguments. sign: a regular expression of what
    the chat templates of its models have; empty for none.
    first, between, last: what a forced answer has before, between and after its calls.
    """

    begin: str = ""
    end: str = ""
    inner: str = ""
    is_bare: bool = False
    arguments: str = "arguments"
    sign: str = ""
    first: str = ""
    between: str = ""
    last: str = ""

    def open(self, name: str) -> str:
        """The text of a forced call up to its arguments."""
        if not self.arguments:
            return f"{name}[ARGS]"
        return f'{{"name": {json.dumps(name)}, "{self.arguments}": '


# In the order in which their signs are looked for. A forced call of qwen3_coder is written as JSON,
# in which all that a schema asks for can be kept to; its parser reads both.
_TAGS: Any = {
    "begin": "<tool_call>", "end": "</tool_call>", "first": "<tool_call>\n",
    "between": "}\n</tool_call>\n<tool_call>\n", "last": "}\n</tool_call>",
}  # fmt: skip
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "qwen3_coder": ToolFormat(**_TAGS, inner=FUNCTION, sign=FUNCTION),
    "hermes": ToolFormat(**_TAGS, sign=r"(?s)\A(?!.*<arg_key>).*<tool_call>"),
    "mistral": ToolFormat(
        begin="[TOOL_CALLS]", arguments="", first="[TOOL_CALLS]", between="[TOOL_CALLS]",
        sign=r"\[ARGS\]",
    ),
    "mistral_list": ToolFormat(
        begin="[TOOL_CALLS]", first="[TOOL_CALLS][", between="}, ", last="}]",
        sign=r"\[TOOL_CALLS\]",
    ),
    "llama3_json": ToolFormat(
        begin="<|python_tag|>", is_bare=True, arguments="parameters", between="}; ", last="}",
        sign=r'\{\\?"name\\?": function name, \\?"parameters\\?":',
    ),
    "json": ToolFormat(is_bare=True, first="[", between="}, ", last="}]"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """The markers around reasoning. is_assumed: whether each answer begins inside them."""

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
    """How the served model writes: None for what it does not, or not in a way that is known.

    reads_tools: whether its chat template does. marks: the markers that are special tokens, which
    no text has, by their ids.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    reads_tools: bool = False
    marks: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def choose(cls, tools: str, reasoning: str, tokenizer: Any) -> ChatFormats:
        """Choose by the names of formats, or by what the chat template contains for `auto`."""
        template = str(tokenizer.chat_template or "")
        added = getattr(tokenizer, "added_tokens_decoder", {})
        found = (
            form for form in TOOL_FORMATS.values() if form.sign and re.search(form.sign, template)
        )
        thought = (form for form in REASONING_FORMATS.values() if form.end in template)
        calls = next(found, None) if tools == AUTO else TOOL_FORMATS.get(tools)
        thoughts = next(thought, None) if reasoning == AUTO else REASONING_FORMATS.get(reasoning)
        markers = {"[ARGS]", "[CALL_ID]"} if calls is not None else set[str]()
        markers |= {mark for form in (calls, thoughts) if form for mark in (form.begin, form.end)}
        marks = {
            token: str(one) for token, one in added.items() if one.special and str(one) in markers
        }
        return cls(calls, thoughts, "tools" in template, marks)

    @property
    def as_text(self) -> bool:
        """Whether tools and their calls become text of messages, for a template without them."""
        return self.tools is TOOL_FORMATS["json"] and not self.reads_tools


NO_FORMATS = ChatFormats()
