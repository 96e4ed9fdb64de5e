"""Tools in a chat: their form in a body and in the prompt, and the grammar for calls.

A grammar is made where OpenAI's API promises more than a model does: calls that are required
or named, one call at most, arguments that keep to the schema of a strict tool, and structured
output of a model that thinks first.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from specdec.decode.requests import Request
from specdec.errors import shorten
from specdec.text.answer_parser import Parser
from specdec.text.call_formats import ChatFormats, ReasoningFormat, ToolFormat, find_thinking
from specdec.text.grammar import space_schema
from specdec.text.harmony import (
    ENDS,
    FINAL,
    MESSAGE,
    START,
    TOOLS,
    open_parser,
)
from specdec.text.schemas import describe_faults, fit_schema

from .protocol import BadRequest, refuse
from .schema import ConversationBody

NAME = re.compile(r"[\w.:/-]{1,200}")


@dataclasses.dataclass(frozen=True)
class Calling:
    """Tools that an answer may call.

    tools: documents for the template. schemas: argument schemas of the callable tools, by name.
    is_forced: whether an answer must call one. is_single: whether it may call at most one.
    is_strict: whether a grammar has to keep calls to the schemas. promised_names: tools whose
    arguments must keep to all of their schema. schema_paths: paths of the schemas in the body, by
    the tools' names.
    """

    tools: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    is_forced: bool = False
    is_single: bool = False
    is_strict: bool = False
    promised_names: Set[str] = frozenset()
    schema_paths: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Tool(NamedTuple):
    """Tool of a body: its document for the template, its argument schema and that one's path."""

    document: Mapping[str, Any]
    schema: Mapping[str, Any]
    schema_path: str
    strict: Any


class ToolChoice(NamedTuple):
    """Choice of tools by a body's `tool_choice`. names: allowed tools, None for all.

    names_function: whether it asks for a call of one function by name.
    """

    mode: str
    names: list[Any] | None = None
    names_function: bool = False


def read_calling(body: ConversationBody, formats: ChatFormats) -> Calling | None:
    """Return the tools that an answer may call, None for none; BadRequest where they are wrong."""
    tools = _read_tools(body)
    choice = _read_choice(body.choose_tools(), body.has_flat_tools)
    _check_choice(choice, tools)
    if not tools or choice.mode == "none":
        return None
    _check_formats(formats)
    is_single = body.is_single_call
    is_subset, is_forced = choice.names is not None, choice.mode == "required"
    return Calling(
        [tool.document for tool in tools.values()],
        {name: tools[name].schema for name in choice.names or tools},
        is_forced=is_forced,
        is_single=is_single or choice.names_function,
        is_strict=is_single or is_subset or any(tool.strict is True for tool in tools.values()),
        promised_names=_list_promised(tools, keeps_all=is_forced or is_subset),
        schema_paths={name: tool.schema_path for name, tool in tools.items()},
    )


def _check_choice(choice: ToolChoice, tools: Mapping[str, Tool]) -> None:
    """Raise BadRequest for a tool_choice that names tools which the body lacks."""
    for name in choice.names or ():
        if not isinstance(name, str) or name not in tools:
            raise refuse("tool_choice", f"names {shorten(name)}, which is no tool")
    if choice.mode == "required" and not tools:
        raise refuse("tool_choice", "asks for a call, and there are no tools")


def _list_promised(tools: Mapping[str, Tool], *, keeps_all: bool) -> Set[str]:
    """Return the names of tools whose arguments must keep to all of their schema.

    keeps_all: whether all tools are promised but those with "strict": false.
    """
    if keeps_all:
        return {name for name, tool in tools.items() if tool.strict is not False}
    return {name for name, tool in tools.items() if tool.strict is True}


def _read_tools(body: ConversationBody) -> dict[str, Tool]:
    """Parse a body's tools, by name."""
    is_flat, tools = body.has_flat_tools, dict[str, Tool]()
    for path, document in body.list_tools():
        function = _read_function(document, path, body)
        if function["name"] in tools:
            raise BadRequest(f"two tools are called {function['name']!r}", "tools")
        empty = {"properties": {}, "additionalProperties": False}
        tools[function["name"]] = Tool(
            {"type": "function", "function": function} if is_flat else document,
            {"type": "object", **(function.get("parameters") or empty)},
            f"{path}{'' if is_flat else '.function'}.{body.schema_key}",
            function.get("strict"),
        )
    return tools


def _check_formats(formats: ChatFormats) -> None:
    """Raise BadRequest where the served model's format of calls is unknown."""
    reason = None
    if formats.tools is None:
        reason = (
            "this server does not know how its model writes tool calls; its --tool-call-parser"
            " says it, or json, which works with any model"
        )
    elif not formats.reads_tools and not formats.as_text:
        reason = (
            "the chat template does not read tools; a server with --tool-call-parser json writes"
            " them into the system message"
        )
    if reason is not None:
        raise BadRequest(reason, "tools", code="unsupported_parameter")


def _read_function(tool: Any, path: str, body: ConversationBody) -> Mapping[str, Any]:
    """Return the function of a tool, its name and its parameters checked."""
    if not isinstance(tool, dict):
        raise refuse(path, f"is {shorten(tool)}, not an object")
    if (kind := tool.get("type")) != "function":
        raise refuse(
            f"{path}.type", f"is {shorten(kind)}: only tools of type function are supported"
        )
    if body.has_flat_tools:
        function: Any = {key: value for key, value in tool.items() if key != "type"}
    else:
        path, function = f"{path}.function", tool.get("function")
    if not isinstance(function, dict):
        raise refuse(path, f"is {shorten(function)}, not an object")
    _check_function(function, path, body.schema_key)
    return function


def _check_function(function: Mapping[str, Any], path: str, schema_key: str) -> None:
    """Raise BadRequest for a function whose name, parameters or `strict` are wrong.

    schema_key: the key of the parameters in the body.
    """
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise refuse(f"{path}.name", f"is {shorten(name)}, not letters, digits and _.:/-")
    if parameters is not None and not isinstance(parameters, dict):
        raise refuse(f"{path}.{schema_key}", f"is {shorten(parameters)}, not an object")
    if (kind := (parameters or {}).get("type", "object")) != "object":
        raise refuse(f"{path}.{schema_key}.type", f"is {shorten(kind)}, not 'object'")
    if not isinstance(strict := function.get("strict"), (bool, type(None))):
        raise refuse(f"{path}.strict", f"is {shorten(strict)}, not true or false")


def _read_choice(choice: Any, is_flat: bool) -> ToolChoice:
    """Parse a tool_choice, which is "auto" where the body has none."""

    def open_object(document: Any, kind: str) -> dict[str, Any]:
        if not isinstance(document, dict) or document.get("type") != kind:
            return {}
        content = document if is_flat else document.get(kind)
        return content if isinstance(content, dict) else {}

    if choice is None:
        return ToolChoice("auto")
    if choice in ("none", "auto", "required"):
        return ToolChoice(choice)
    if function := open_object(choice, "function"):
        return ToolChoice("required", [function.get("name")], names_function=True)
    subset = open_object(choice, "allowed_tools")
    tools, mode = subset.get("tools"), subset.get("mode")
    if isinstance(tools, list) and tools and mode in ("auto", "required"):
        return ToolChoice(mode, [open_object(tool, "function").get("name") for tool in tools])
    example = '"name": "..."' if is_flat else '"function": {"name": "..."}'
    raise refuse(
        "tool_choice",
        f'is {shorten(choice)}, not none, auto, required or {{"type": "function", {example}}}',
    )


def make_parser(calling: Calling | None, formats: ChatFormats, request: Request) -> Parser | None:
    """Return the parser of a request's answer, None for an answer without calls and reasoning."""
    prompt, continued_text = request.input_text, request.continued_text
    has_reasoning = find_thinking(formats.reasoning, prompt, continued_text) is not False
    has_marks = formats.reasoning is not None and bool(formats.reasoning.text_marks)
    if calling is None and not (has_reasoning or has_marks or formats.is_harmony):
        return None
    return open_parser(
        formats, prompt, None if calling is None else calling.schemas,
        continued_text=continued_text,
        needs_marker=request.grammar is not None,
        marks=formats.marks if request.form.skips_special else None,
    )  # fmt: skip


class GrammarWriter:
    """Writer of the Lark grammar of an answer.

    left_out: paths of the schemas' keywords that no grammar can keep to.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rules: dict[str, str] = {}
        self.left_out: list[str] = []

    def write(
        self,
        calling: Calling | None,
        formats: ChatFormats,
        body_grammar: Mapping[str, Any] | None,
        prompt: str,
        continued_text: str = "",
    ) -> Mapping[str, Any] | None:
        """Return the grammar of an answer, in a Prompt's form; None for a free answer.

        body_grammar: the grammar that the body asks for. A Lark grammar describes the whole answer,
        reasoning and calls included; beside required calls it raises BadRequest. continued_text: as
        of a Request.
        """
        thinking = find_thinking(formats.reasoning, prompt, continued_text)
        if body_grammar is not None and "lark" in body_grammar:
            if calling is not None and calling.is_forced:
                raise BadRequest("a grammar has no place beside required calls", "tool_choice")
            return body_grammar
        needs_calls = calling is not None and (calling.is_forced or calling.is_strict)
        has_more = body_grammar is not None and (calling is not None or thinking is not False)
        if not needs_calls and not has_more:
            return body_grammar
        return self._write_rules(calling, formats, body_grammar, thinking)

    def _write_rules(
        self,
        calling: Calling | None,
        formats: ChatFormats,
        body_grammar: Mapping[str, Any] | None,
        thinking: bool | None,
    ) -> dict[str, str]:
        """Return the Lark grammar of reasoning, calls and content; thinking: of find_thinking."""
        self._rules = {"TEXT": r"/(.|\n)*/", "SPACE": r"/\s{1,4}/"}
        if formats.is_harmony:
            main = self._write_messages(calling, body_grammar, thinking)
            self._rules = {"start": main, **self._rules}
            return {"lark": self._join_rules()}
        main = self._write_body(body_grammar) if body_grammar is not None else ""
        if calling is not None and formats.tools is not None:
            main = self._write_calls(calling, formats.tools, main)
        if formats.reasoning is not None and thinking is not False:
            main = self._write_reasoning(formats.reasoning, bool(thinking), main)
        self._rules = {"start": main, **self._rules}
        return {"lark": self._join_rules()}

    def _join_rules(self) -> str:
        rules = (f"{name}: {rule}" for name, rule in self._rules.items())
        return "%llguidance {}\n" + "\n".join(rules)

    def _write_messages(
        self,
        calling: Calling | None,
        body_grammar: Mapping[str, Any] | None,
        thinking: bool | None,
    ) -> str:
        """Return the rule of harmony's messages: reasoning, then one call or one final text.

        Comments are content: none comes before a text that a grammar describes. An answer that goes
        on with a message ends it before a call.
        """
        literal, end = self._write_literal, self._write_literal(f"{ENDS[0]}{START}assistant")
        names = ("analysis", "commentary") if body_grammar is None else ("analysis",)
        channels = (literal(f"<|channel|>{name}{MESSAGE}") for name in names)
        self._rules["before"] = " | ".join(f"{channel} TEXT {end}" for channel in channels)
        calls, texts = list[str](), list[str]()
        if calling is not None:
            rules = self._write_arguments(calling)
            calls = [f"{literal(TOOLS.prefix + TOOLS.open(name))} {rule}" for name, rule in rules]
        if calling is None or not calling.is_forced:
            texts = [self._write_body(body_grammar)]
        if thinking is False:  # the message that goes on is the final one
            calls = [f"TEXT {end} before* ({' | '.join(calls)})"] if calls else []
            return " | ".join(calls + texts)
        parts = calls + [f"{literal(FINAL)} {text}" for text in texts]
        return f"{f'TEXT {end} ' if thinking else ''}before* ({' | '.join(parts)})"

    def _write_reasoning(self, form: ReasoningFormat, is_thinking: bool, main: str) -> str:
        """Return the rule of reasoning before `main`; is_thinking: whether reasoning is certain."""
        self._rules["think"] = self._write_text_to(form.end)
        begin = self._write_literal(form.begin)
        if is_thinking:
            return f"({begin})? think SPACE? ({main})"
        return f"{begin} think SPACE? ({main}) | {main}"

    def _write_body(self, body_grammar: Mapping[str, Any] | None) -> str:
        """Return the rule of content, which a JSON schema or a regular expression may describe."""
        if body_grammar is None:
            return "TEXT"
        ((kind, value),) = body_grammar.items()
        self._rules["body"] = _write_json(value) if kind == "json_schema" else (
            "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", value) + "/"
        )  # fmt: skip
        return "body"

    def _write_calls(self, calling: Calling, form: ToolFormat, body: str) -> str:
        """Return the rule of an answer: calls, or a body or free text where these are allowed."""
        self._rules["call"] = " | ".join(
            f"{self._write_literal(form.open(name))} {rule}"
            for name, rule in self._write_arguments(calling)
        )
        between = "" if calling.is_single else f"({self._write_literal(form.separator)} call)*"
        ending = f"call {between} {self._write_literal(form.suffix)}"
        self._rules["calls"] = f"{self._write_literal(form.prefix)} {ending}"
        if calling.is_forced:
            return "calls"
        if body:
            return f"calls | {body}"
        if form.is_bare:
            self._rules["PLAIN"] = r"/([^\s{\[`](.|\n)*)?/"
            return "calls | PLAIN"
        # Text after the marker is a call; the marker is one token or is spelled out.
        self._rules["trigger"] = self._write_text_to(form.begin)
        self._rules["rest"] = f"{self._write_literal(form.prefix[len(form.begin) :])} {ending}"
        return "TEXT | trigger rest" if calling.is_single else "(trigger rest)* TEXT"

    def _write_arguments(self, calling: Calling) -> Iterator[tuple[str, str]]:
        """Write the rules of the tools' arguments; yield each tool's name and its rule's."""
        for i, (name, schema) in enumerate(calling.schemas.items()):
            self._rules[f"args_{i}"] = _write_json(self._fit(calling, name, schema))
            yield name, f"args_{i}"

    def _fit(self, calling: Calling, name: str, schema: Any) -> Any:
        """Return a tool's schema for the grammar; BadRequest where the schema promises more."""
        fitted = fit_schema(schema, keeps_all=name in calling.promised_names)
        schema_path = calling.schema_paths.get(name, name)
        if fitted.faults:
            raise BadRequest(
                f"{schema_path} of the tool {name!r} is refused: {describe_faults(fitted)}. No"
                ' grammar keeps to that: leave it out, or give the tool "strict": false',
                "tools", code="unsupported_parameter",
            )  # fmt: skip
        self.left_out += [f"{schema_path}.{path}".rstrip(".") for path in fitted.left_out]
        return fitted.schema

    def _write_text_to(self, marker: str) -> str:
        """Return the rule of any text up to a marker, which is one token or is spelled out."""
        self._rules[name := f"to_{len(self._rules)}[lazy]"] = f"TEXT {_quote(marker)}"
        token = self._write_literal(marker)
        rule = name.removesuffix("[lazy]")
        return rule if token == _quote(marker) else f"{rule} | TEXT {token}"

    def _write_literal(self, text: str) -> str:
        """Return a text in Lark's syntax, in which markers that are single tokens stay tokens."""
        literals = []
        for piece in filter(None, re.split(r"(\[[A-Z_/]+\]|<[^<>\s]+>)", text)):
            token = self._tokenizer.convert_tokens_to_ids(piece)
            is_token = piece in self._tokenizer.get_added_vocab()
            literals.append(f"<[{token}]>" if is_token else _quote(piece))
        return " ".join(literals)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _write_json(schema: Any) -> str:
    return f"%json {json.dumps(space_schema(schema))}"
