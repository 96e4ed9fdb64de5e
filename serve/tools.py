"""Tools in a chat: what a request says of them, how the model is told, and the grammar for calls.

A grammar is made where OpenAI's interface promises what a model does not: calls that are required
or named, one call at most, arguments that keep to the schema of a strict tool, and structured
output of a model that thinks first.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from specdec.decode.requests import Request
from specdec.errors import shorten
from specdec.text.grammar import space_schema
from specdec.text.schemas import describe_faults, fit_schema

from .formats import ChatFormats, ReasoningFormat, ToolFormat
from .parsing import Parser
from .protocol import BadRequest, refuse

NAME = re.compile(r"[\w.:/-]{1,200}")
MAX_TOOLS = 1024
_INTRODUCTION = """You can call functions. To do so, answer with nothing but a JSON list of calls:
[{"name": "...", "arguments": {...}}]
These are the functions, with the JSON schemas of their arguments:
"""


@dataclasses.dataclass(frozen=True)
class Calling:
    """What a chat says of tools.

    tools: as the template has them. schemas: of the arguments of those that may be called, by name.
    is_forced: whether one must be. is_single: whether at most one may be. is_strict: whether a
    grammar has to keep calls to the schemas. promised: the names of tools whose arguments must keep
    to all of their schema. places: where the schemas stand in the body, by the tools' names.
    """

    tools: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    is_forced: bool = False
    is_single: bool = False
    is_strict: bool = False
    promised: Set[str] = frozenset()
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_calling(asked: Mapping[str, Any], formats: ChatFormats) -> Calling | None:
    """What a body says of tools, None where none may be called; BadRequest if it is wrong."""
    given, choice = asked.get("tools") or [], asked.get("tool_choice", "auto")
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise refuse("tools", f"is {shorten(given)}, not a list of at most {MAX_TOOLS}")
    is_flat = "input" in asked  # as responses have it, without objects inside
    schemas: dict[str, Mapping[str, Any]] = {}
    tools, strict, places = list[Mapping[str, Any]](), dict[str, Any](), dict[str, str]()
    for at, tool in enumerate(given):
        function = _read_function(tool, f"tools.{at}", is_flat)
        if function["name"] in schemas:
            raise BadRequest(f"two tools are called {function['name']!r}", "tools")
        empty = {"properties": {}, "additionalProperties": False}
        schemas[function["name"]] = {"type": "object", **(function.get("parameters") or empty)}
        strict[function["name"]] = function.get("strict")
        places[function["name"]] = f"tools.{at}{'' if is_flat else '.function'}.parameters"
        tools.append({"type": "function", "function": function} if is_flat else tool)
    mode, names = _read_choice(choice, is_flat)
    for name in names or ():
        if not isinstance(name, str) or name not in schemas:
            raise refuse("tool_choice", f"names {shorten(name)}, which is no tool")
    if mode == "required" and not tools:
        raise refuse("tool_choice", "asks for a call, and there are no tools")
    if not tools or mode == "none":
        return None
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
    is_single = asked.get("parallel_tool_calls") is False
    keeps_all = mode == "required" or names is not None
    strict_names = {name for name, one in strict.items() if one is True}
    loose_names = {name for name, one in strict.items() if one is False}
    return Calling(
        tools,
        schemas if names is None else {name: schemas[name] for name in names},
        is_forced=mode == "required",
        is_single=is_single or isinstance(choice, dict) and choice.get("type") == "function",
        is_strict=bool(strict_names) or is_single or names is not None,
        promised=schemas.keys() - loose_names if keeps_all else strict_names,
        places=places,
    )


def _read_function(tool: Any, where: str, is_flat: bool) -> Mapping[str, Any]:
    if not isinstance(tool, dict):
        raise refuse(where, f"is {shorten(tool)}, not an object")
    if (kind := tool.get("type")) != "function":
        raise refuse(
            f"{where}.type", f"is {shorten(kind)}: only tools of type function are supported"
        )
    function = {k: v for k, v in tool.items() if k != "type"} if is_flat else tool.get("function")
    where = where if is_flat else f"{where}.function"
    if not isinstance(function, dict):
        raise refuse(where, f"is {shorten(function)}, not an object")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise refuse(f"{where}.name", f"is {shorten(name)}, not letters, digits and _.:/-")
    if parameters is not None and not isinstance(parameters, dict):
        raise refuse(f"{where}.parameters", f"is {shorten(parameters)}, not an object")
    if (kind := (parameters or {}).get("type", "object")) != "object":
        raise refuse(f"{where}.parameters.type", f"is {shorten(kind)}, not 'object'")
    return function


def _read_choice(choice: Any, is_flat: bool) -> tuple[str, list[Any] | None]:
    """The mode of a tool_choice, and the names that it allows, None for all."""

    def open_one(one: Any, kind: str) -> dict[str, Any]:
        is_one = isinstance(one, dict) and one.get("type") == kind
        found = (one if is_flat else one.get(kind)) if is_one else None
        return found if isinstance(found, dict) else {}

    if choice in ("none", "auto", "required"):
        return choice, None
    if function := open_one(choice, "function"):
        return "required", [function.get("name")]
    allowed = open_one(choice, "allowed_tools")
    tools, mode = allowed.get("tools"), allowed.get("mode")
    if isinstance(tools, list) and tools and mode in ("auto", "required"):
        return mode, [open_one(tool, "function").get("name") for tool in tools]
    example = '"name": "..."' if is_flat else '"function": {"name": "..."}'
    raise refuse(
        "tool_choice",
        f'is {shorten(choice)}, not none, auto, required or {{"type": "function", {example}}}',
    )


def write_messages(
    messages: Sequence[Mapping[str, Any]], template: str, calling: Calling | None,
    formats: ChatFormats,
) -> list[dict[str, Any]]:  # fmt: skip
    """A conversation as the chat template can read it, without fields that are empty.

    messages: as `read_messages` gives them. Where the template knows no tools, they and their calls
    become text of other messages.
    """
    written: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of called functions, by the ids of their calls
    result = None  # the message that holds the results so far
    for message in messages:
        one = {key: value for key, value in message.items() if value is not None and value != []}
        one.setdefault("content", None if "tool_calls" not in one else "")
        if one["role"] == "developer" and "developer" not in template:
            one["role"] = "system"
        if formats.as_text and (calls := one.pop("tool_calls", None)):
            names |= {str(call.get("id")): call["function"]["name"] for call in calls}
            one["content"] = one["content"] or _write_calls(calls)
        if formats.as_text and one["role"] == "tool":
            name = names.get(str(one.get("tool_call_id")), "the function")
            text = f"Result of {name}: {one['content'] or ''}"
            if result is not None:
                result["content"] += f"\n{text}"
                continue
            one = result = {"role": "user", "content": text}
        else:
            result = None
        written.append(one)
    if formats.as_text and calling is not None:
        functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in calling.tools]
        text = _INTRODUCTION + "\n".join(functions)
        if written[0]["role"] == "system":
            text = f"{written.pop(0)['content'] or ''}\n\n{text}"
        written.insert(0, {"role": "system", "content": text})
    return written


def _write_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    told = []
    for call in calls:
        arguments = call["function"].get("arguments") or "{}"
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        told.append(f'{{"name": {json.dumps(call["function"]["name"])}, "arguments": {text}}}')
    return f"[{', '.join(told)}]"


def find_thinking(form: ReasoningFormat | None, prompt: str) -> bool | None:
    """Whether an answer begins with reasoning: True, None for perhaps, False."""
    end = prompt.rstrip()
    if form is None or end.endswith(form.end):
        return False
    return True if form.is_assumed or end.endswith(form.begin) else None


def make_parser(calling: Calling | None, formats: ChatFormats, request: Request) -> Parser | None:
    """The parser of a request's answer, None where there is nothing to find in it."""
    thinking = find_thinking(formats.reasoning, request.input_text)
    reasoning = None if thinking is False else formats.reasoning
    if calling is None and reasoning is None:
        return None
    return Parser(
        formats.tools if calling is not None else None, reasoning, is_thinking=thinking is True,
        needs_marker=request.grammar is not None,
        schemas=calling.schemas if calling is not None else None,
        marks=formats.marks if request.form.skips_special else None,
    )  # fmt: skip


class GrammarWriter:
    """Writes the Lark grammar of an answer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rules: dict[str, str] = {}
        self.left_out: list[str] = []  # places of keywords of schemas that no grammar keeps to

    def write(
        self,
        calling: Calling | None,
        formats: ChatFormats,
        given: Mapping[str, Any] | None,
        prompt: str,
    ) -> Mapping[str, Any] | None:
        """The grammar of an answer, in the form of a prompt's; None where it is free.

        given: what the content has to keep to. A Lark grammar is of the whole answer, reasoning and
        calls included. Raises BadRequest for one beside required calls.
        """
        needs_calls = calling is not None and (calling.is_forced or calling.is_strict)
        thinking = find_thinking(formats.reasoning, prompt)
        if given is not None and "lark" in given:
            if calling is not None and calling.is_forced:
                raise BadRequest("a grammar has no place beside required calls", "tool_choice")
            return given
        if not needs_calls and (given is None or (calling is None and thinking is False)):
            return given
        self._rules = {"TEXT": r"/(.|\n)*/", "SPACE": r"/\s{1,4}/"}
        main = self._write_body(given) if given is not None else ""
        if calling is not None and formats.tools is not None:
            main = self._write_calls(calling, formats.tools, main)
        form = formats.reasoning
        if form is not None and thinking is not False:
            self._rules["think"] = self._write_text_to(form.end)
            begin = self._write_literal(form.begin)
            main = f"({begin})? think SPACE? ({main})" if thinking else (
                f"{begin} think SPACE? ({main}) | {main}"
            )  # fmt: skip
        self._rules = {"start": main, **self._rules}
        rules = (f"{name}: {rule}" for name, rule in self._rules.items())
        return {"lark": "%llguidance {}\n" + "\n".join(rules)}

    def _write_body(self, given: Mapping[str, Any]) -> str:
        """The rule of content that keeps to a JSON schema or a regular expression."""
        ((kind, value),) = given.items()
        self._rules["body"] = _write_json(value) if kind == "json_schema" else (
            "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", value) + "/"
        )  # fmt: skip
        return "body"

    def _write_calls(self, calling: Calling, form: ToolFormat, body: str) -> str:
        """The rule of an answer with calls, or with a body or free text where these are allowed."""
        calls = []
        for at, (name, schema) in enumerate(calling.schemas.items()):
            self._rules[f"args_{at}"] = _write_json(self._fit(calling, name, schema))
            calls.append(f"{self._write_literal(form.open(name))} args_{at}")
        self._rules["call"] = " | ".join(calls)
        between = "" if calling.is_single else f"({self._write_literal(form.between)} call)*"
        behind = f"call {between} {self._write_literal(form.last)}"
        self._rules["calls"] = f"{self._write_literal(form.first)} {behind}"
        if calling.is_forced:
            return "calls"
        if body:
            return f"calls | {body}"
        if form.is_bare:
            self._rules["PLAIN"] = r"/([^\s{\[`](.|\n)*)?/"
            return "calls | PLAIN"
        # What begins with the marker is a call; the marker is a token or is spelled.
        self._rules["trigger"] = self._write_text_to(form.begin)
        self._rules["rest"] = f"{self._write_literal(form.first[len(form.begin) :])} {behind}"
        return "TEXT | trigger rest" if calling.is_single else "(trigger rest)* TEXT"

    def _fit(self, calling: Calling, name: str, schema: Any) -> Any:
        """Return a tool's schema as a grammar keeps to it; BadRequest where more is promised."""
        fitted = fit_schema(schema, keeps_all=name in calling.promised)
        place = calling.places.get(name, name)
        if fitted.faults:
            raise BadRequest(
                f"{place} of the tool {name!r} is refused: {describe_faults(fitted)}. No grammar"
                ' keeps to that: leave it out, or give the tool "strict": false',
                "tools", code="unsupported_parameter",
            )  # fmt: skip
        self.left_out += [f"{place}.{path}".rstrip(".") for path in fitted.left_out]
        return fitted.schema

    def _write_text_to(self, marker: str) -> str:
        """The rule of any text up to a marker, which is a token of its own or is spelled."""
        self._rules[name := f"to_{len(self._rules)}[lazy]"] = f"TEXT {_quote(marker)}"
        token = self._write_literal(marker)
        rule = name.removesuffix("[lazy]")
        return rule if token == _quote(marker) else f"{rule} | TEXT {token}"

    def _write_literal(self, text: str) -> str:
        """A text in Lark, in which a marker that is a token of its own is that token."""
        markers = re.split(r"(\[[A-Z_/]+\]|</?\w+>|<\|\w+\|>)", text)
        parts = []
        for part in filter(None, markers):
            token = self._tokenizer.convert_tokens_to_ids(part)
            is_token = part in self._tokenizer.get_added_vocab()
            parts.append(f"<[{token}]>" if is_token else _quote(part))
        return " ".join(parts)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _write_json(schema: Any) -> str:
    return f"%json {json.dumps(space_schema(schema))}"
