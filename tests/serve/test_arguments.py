"""Arguments that are written as texts get the types that their tool's schema says in any way."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from specdec.text.answer_parser import Parser
from specdec.text.call_arguments import read_argument
from specdec.text.call_formats import TOOL_FORMATS

TEXT, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}
DEFINITIONS: dict[str, Any] = {
    "Text": TEXT, "Code": {"enum": ["1", "2"]}, "Number": INTEGER, "a/b": TEXT,
    "Itself": {"anyOf": [{"$ref": "#/$defs/Itself"}, TEXT]},
    "List": {"type": "array", "items": {"$ref": "#/$defs/Text"}},
}  # fmt: skip


def to(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


TEXTS = [
    TEXT, {"anyOf": [TEXT, NULL]}, {"oneOf": [NULL, TEXT]}, {"type": ["string", "null"]},
    {"type": ["null", "string"]}, to("Text"), to("a~1b"), to("Itself"), {"allOf": [to("Text")]},
    {"allOf": [to("Text")], "default": None}, {"allOf": [{}, {"anyOf": [TEXT, NULL]}]},
    {"const": "1"}, {"enum": ["1", None]}, to("Code"), {"anyOf": [to("Code"), NULL]},
    {"type": "string", "nullable": True}, {"anyOf": [{"type": "object"}, {"pattern": "1"}]},
    {"pattern": "[0-9]"}, {"anyOf": [{"type": "array"}, TEXT]}, {"allOf": [{"anyOf": [TEXT]}]},
    {"anyOf": [{"type": "integer", "enum": [7]}, TEXT]}, {"anyOf": [{"const": 2}, {"const": "1"}]},
]  # fmt: skip
OTHERS: list[tuple[Any, str, Any]] = [
    ({"anyOf": [TEXT, NULL]}, "null", None), ({"anyOf": [TEXT, NULL]}, "true", "true"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"allOf": [to("Text")], "nullable": True}, "null", None),
    ({"type": ["string", "integer"]}, "5", 5), ({"type": ["string", "integer"]}, "05", "05"),
    ({"anyOf": [INTEGER, NULL]}, "5", 5), ({"anyOf": [INTEGER, NULL]}, "None", None),
    ({"const": 5}, "5", 5), ({"enum": ["a", 1]}, "1", 1), ({"allOf": [to("Number")]}, "5", 5),
    ({"type": "boolean"}, "True", True), (TEXT, "True", "True"), (TEXT, '"a"', '"a"'),
    ({"type": "object"}, "{'a': [True, None]}", {"a": [True, None]}), (TEXT, "{'a'}", "{'a'}"),
    (INTEGER, "{1, 2}", "{1, 2}"), ({"type": "array"}, "(1, 2)", [1, 2]), (INTEGER, "1j", "1j"),
    ({"enum": ["a"]}, '"a"', "a"), ({}, "5", 5), ({}, '"a"', "a"), (True, "[1]", [1]),
    ({"anyOf": [to("List"), TEXT]}, '["1"]', ["1"]), ({"anyOf": [to("List"), TEXT]}, "[1]", "[1]"),
    ({"anyOf": [{"type": "object", "required": ["k"]}, TEXT]}, '{"k": 1}', {"k": 1}),
    ({"oneOf": [TEXT, {"properties": {"k": TEXT}, "type": "object"}]}, '{"k": 1}', '{"k": 1}'),
    ({"type": "object", "required": ["k"]}, '{"a": 1}', {"a": 1}), (INTEGER, "1.5", 1.5),
    (INTEGER, "five", "five"), ({"type": "number"}, "NaN", "NaN"),
    ({"type": "number"}, "1e999", "1e999"), ({"not": TEXT}, "5", 5),
    # What is no schema asks for nothing, and ends nothing.
    ({"type": [{}], "enum": 5, "anyOf": {}, "allOf": "q", "$ref": 5, "required": [{}]}, "5", 5),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "value"), [*((s, "1", "1") for s in TEXTS), *OTHERS])
def test_schemas(schema: Any, text: str, value: Any) -> None:
    whole = {"$defs": DEFINITIONS, "properties": {"x": schema}}
    assert json.loads(read_argument(text, "x", whole)) == value
    parser = Parser(TOOL_FORMATS["qwen3_coder"], None, schemas={"f": whole})
    parser.feed(
        f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
    )
    (call,) = parser.calls
    assert json.loads(call["function"]["arguments"]) == {"x": value}


@pytest.mark.parametrize(
    "schema",
    [
        {"additionalProperties": TEXT}, {"patternProperties": {"(x+)+$": TEXT}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"x": TEXT}}}},
        {"allOf": [{"properties": {"x": TEXT}}]}, {"properties": {"y": INTEGER}}, {}, None,
        {"anyOf": [{"properties": {"x": TEXT}}, {"properties": {"y": INTEGER}}]},
        {"properties": {"x": TEXT}, "anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, {"properties": []},
    ],
)  # fmt: skip
def test_where_a_schema_has_its_keys(schema: Any) -> None:
    assert read_argument("1", "x", schema) == '"1"'


def test_no_schema_takes_long() -> None:
    begun, two = time.monotonic(), {}
    for at in range(60):
        two[f"a{at + 1}"] = {"anyOf": [to(f"a{at}"), to(f"a{at}")]}
    schema = {"$defs": {"a0": TEXT, **two}, "properties": {"x": to("a60")}}
    assert read_argument("1", "x", schema) == '"1"'
    nested = {"$defs": {"r": {"items": to("r")}}, "properties": {"x": to("r")}}
    for text in ("[" * 100_000, "[" * 900 + "]" * 900):
        assert json.loads(read_argument(text, "x", nested))
    assert time.monotonic() - begun < 30
