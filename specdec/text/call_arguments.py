"""Arguments that a model writes as texts, as the values that their tool's JSON schema asks for."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from specdec.text.json_scan import rewrite_json
from specdec.text.schemas import find_target

JSON_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
MAX_LITERAL = 10_000  # characters of a value that Python is asked to read
# Keywords of a schema that allow keys which its properties do not name.
KEY_KEYWORDS = frozenset((
    "$ref", "allOf", "anyOf", "oneOf", "enum", "const", "patternProperties", "if",
))  # fmt: skip
_FIRST_KEY = re.compile(r'\s*\{\s*(?:"((?:[^"\\]|\\.)*)"|(\}))')
_KEY_BEGINNING = re.compile(r'\s*(?:\{\s*(?:"(?:[^"\\]|\\.)*\\?)?)?')
TEXT_KEYWORDS = frozenset(("pattern", "minLength", "maxLength", "format"))


def read_argument(text: str, name: str, schema: Any) -> str:
    """Return as JSON an argument that a model has written as a text.

    It is the value that the text is JSON of where the tool's schema allows that value, else the
    text itself where a text is allowed.
    """
    reader = SchemaReader(schema)
    subschema = reader.find_property(name, schema, set())
    value = text if subschema is None else _choose_value(text, subschema, reader)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # a number that JSON cannot write
        return json.dumps(text, ensure_ascii=False)


def write_arguments(arguments: Any) -> str:
    """Return a call's arguments as JSON, which may be a text that is JSON already."""
    if isinstance(arguments, str):
        return rewrite_json(arguments.strip()) or "{}"
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def may_be_arguments(text: str, schema: Mapping[str, Any]) -> bool | None:
    """Return whether a text begins with arguments of a tool by their first key; None: not yet.

    schema: of the arguments. Grammars write its properties in their order, required ones first.
    """
    match = _FIRST_KEY.match(text)
    if match is None:
        return None if _KEY_BEGINNING.fullmatch(text) else False
    required_keys = schema.get("required") or ()
    if match[2]:
        return not required_keys
    names = {*(schema.get("properties") or ()), *required_keys}
    is_closed = bool(required_keys) or schema.get("additionalProperties") is False
    return not is_closed or bool(KEY_KEYWORDS & schema.keys()) or match[1] in names


def _choose_value(text: str, schema: Any, reader: SchemaReader) -> Any:
    """Return the value that a text stands for, by the schema of its argument."""
    try:
        types = reader.find_types(schema)
        try:
            value = json.loads(text)
        except ValueError:
            value = text if "string" in types else _read_literal(text)
        is_text = isinstance(value, str)
        if reader.allows(value, schema) and (not is_text or types == JSON_TYPES):
            return value
        for candidate in (text, value):
            if reader.allows(candidate, schema):
                return candidate
        # The model broke the schema: its types show which value it meant.
        return text if "string" in types and name_type(value) not in types else value
    except RecursionError:
        return text


def _read_literal(text: str) -> Any:
    """Parse a Python literal, which some templates and models write; else return the text."""
    if len(text) > MAX_LITERAL:
        return text
    try:
        value = json.loads(json.dumps(ast.literal_eval(text.strip()), allow_nan=False))
        return text if isinstance(value, str) else value
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


class SchemaReader:
    """Reader of the types and values that a schema allows; a schema without rules allows all.

    It goes by the rules that distinguish a text from other values: types, values, objects' keys and
    their combinations, but no bounds and no patterns.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._types: dict[int, frozenset[str]] = {}
        self._verdicts: dict[tuple[int, int], bool] = {}

    def find_property(self, name: str, schema: Any, seen_ids: set[int]) -> Any | None:
        """Return the schema of an object's property; None where the schema does not mention it.

        seen_ids: ids of alternatives that were examined; the method adds its own.
        """
        schemas, alternatives = list[Any](), list[Any]()
        for subschema in self._list_joined(schema):
            if (direct := _find_direct_property(name, subschema)) is not None:
                schemas.append(direct)
            for alternative in _list_alternatives(subschema):
                if id(alternative) not in seen_ids:
                    seen_ids.add(id(alternative))
                    alternatives.append(self.find_property(name, alternative, seen_ids))
        alternatives = [schema for schema in alternatives if schema is not None]
        schemas += [{"anyOf": alternatives}] if alternatives else []
        return None if not schemas else schemas[0] if len(schemas) == 1 else {"allOf": schemas}

    def names_property(self, name: str) -> bool:
        """Return whether the whole schema has a property of this name, not as one of several."""
        properties = (subschema.get("properties") for subschema in self._list_joined(self._root))
        return any(isinstance(names, dict) and name in names for names in properties)

    def allows_text(self, name: str) -> bool:
        """Return whether a property of the whole schema may be a text, or is not mentioned."""
        schema = self.find_property(name, self._root, set())
        return schema is None or "string" in self.find_types(schema)

    def find_types(self, schema: Any) -> frozenset[str]:
        """Return the JSON types of the values that a schema allows."""
        if (types := self._types.get(id(schema))) is not None:
            return types
        self._types[id(schema)] = frozenset()  # for a schema that contains itself
        subschemas, types = list(self._list_joined(schema)), JSON_TYPES
        for subschema in subschemas:
            types &= self._find_direct_types(subschema)
        if types == JSON_TYPES and any(
            TEXT_KEYWORDS & subschema.keys() for subschema in subschemas
        ):
            types = frozenset(("string",))
        types |= {"null"} if _is_nullable(schema) else set()
        self._types[id(schema)] = types
        return types

    def _find_direct_types(self, schema: Mapping[str, Any]) -> frozenset[str]:
        """Return the types that a schema allows by its own keywords, without $ref and allOf."""
        types, written_types = JSON_TYPES, _as_list(schema.get("type"))
        type_names = [name for name in written_types if isinstance(name, str)]
        if type_names := [name for name in type_names if name in JSON_TYPES]:
            more_names = ["integer"] if "number" in type_names else []
            types = frozenset([*type_names, *more_names])
        if (values := _list_values(schema)) is not None:
            types &= frozenset(map(name_type, values))
        for keyword in ("anyOf", "oneOf"):
            if alternatives := _as_list(schema.get(keyword)):
                types &= frozenset().union(*map(self.find_types, alternatives))
        return types | {"null"} if _is_nullable(schema) else types

    def allows(self, value: Any, schema: Any) -> bool:
        """Return whether a schema allows a value."""
        key = id(value), id(schema)
        if key not in self._verdicts:
            self._verdicts[key] = False  # for a schema that contains itself
            self._verdicts[key] = name_type(value) in self.find_types(schema) and (
                (value is None and _is_nullable(schema))
                or all(self._fits(value, subschema) for subschema in self._list_joined(schema))
            )
        return self._verdicts[key]

    def _fits(self, value: Any, schema: Mapping[str, Any]) -> bool:
        """Return whether a schema's own keywords allow a value, without $ref and allOf."""
        if value is None and _is_nullable(schema):
            return True
        values = _list_values(schema)
        if values is not None and not any(
            _is_equal(value, allowed_value) for allowed_value in values
        ):
            return False
        if "not" in schema and self.allows(value, schema["not"]):
            return False
        if not all(self._fits_any(value, schema.get(keyword)) for keyword in ("anyOf", "oneOf")):
            return False
        if isinstance(value, dict):
            return self._fits_object(value, schema)
        return not isinstance(value, list) or self._fits_list(value, schema)

    def _fits_any(self, value: Any, alternatives: Any) -> bool:
        """Return whether one of alternatives allows a value, or there are none."""
        schemas = _as_list(alternatives)
        return not schemas or any(self.allows(value, schema) for schema in schemas)

    def _fits_object(self, value: dict[str, Any], schema: Mapping[str, Any]) -> bool:
        properties, default = schema.get("properties"), schema.get("additionalProperties", True)
        properties = properties if isinstance(properties, dict) else {}
        required_names = [name for name in _as_list(schema.get("required")) if _is_text(name)]
        if any(name not in value for name in required_names):
            return False
        if "patternProperties" in schema:
            default = True
        return all(self.allows(item, properties.get(name, default)) for name, item in value.items())

    def _fits_list(self, value: list[Any], schema: Mapping[str, Any]) -> bool:
        prefix, items = _as_list(schema.get("prefixItems")), schema.get("items", True)
        if isinstance(items, list):  # positional items of older dialects
            prefix, items = items, schema.get("additionalItems", True)
        schemas = [*prefix, *[items] * len(value)][: len(value)]
        return all(map(self.allows, value, schemas))

    def _list_joined(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Yield a schema and those of its $ref and allOf: a value must fit all of them."""
        pending, seen_ids = [schema], set[int]()
        while pending:
            subschema = pending.pop()
            if subschema is False:
                yield {"enum": []}
            if not isinstance(subschema, dict) or id(subschema) in seen_ids:
                continue
            seen_ids.add(id(subschema))
            yield subschema
            if (target := find_target(subschema.get("$ref"), self._root)) is not None:
                pending.append(target[1])
            pending += _as_list(subschema.get("allOf"))


def name_type(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        is_whole = isinstance(value, int) or value.is_integer()
        return "integer" if is_whole else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _find_direct_property(name: str, schema: Mapping[str, Any]) -> Any | None:
    """Return the schema of a property by an object schema's own keywords; None for no keyword.

    Patterns of names are a client's, and may take ages to match: any of them may hold.
    """
    properties, default = schema.get("properties"), schema.get("additionalProperties")
    patterns = schema.get("patternProperties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    defaults = [default] if isinstance(default, dict) else []
    if isinstance(patterns, dict) and patterns:
        return {"anyOf": [*patterns.values(), *defaults]}
    return defaults[0] if defaults else None


def _list_alternatives(schema: Mapping[str, Any]) -> list[Any]:
    return [*_as_list(schema.get("anyOf")), *_as_list(schema.get("oneOf"))]


def _list_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; None where it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, list) else []


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_nullable(schema: Any) -> bool:
    """Return whether OpenAPI's `nullable` allows null."""
    return isinstance(schema, dict) and schema.get("nullable") is True


def _is_equal(value: Any, other_value: Any) -> bool:
    """Return whether two JSON values are equal, where true is not 1."""
    are_of_one_kind = isinstance(value, bool) == isinstance(other_value, bool)
    return bool(value == other_value) and are_of_one_kind
