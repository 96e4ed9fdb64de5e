"""Arguments that a model writes as texts, as the values that their tool's JSON schema asks for."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from specdec.decode.schemas import find_target

KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
# What Python prints, which templates put into prompts and models learn.
_CONSTANTS: Mapping[str, Any] = {"True": True, "False": False, "None": None}
_ONLY_TEXTS = frozenset(("pattern", "minLength", "maxLength", "format"))


def read_argument(text: str, name: str, schema: Any) -> str:
    """Return as JSON an argument that a model has written as a text.

    It is the value that the text is JSON of where the tool's schema allows that value, else the
    text itself where a text is allowed.
    """
    reader = _SchemaReader(schema)
    part = reader.find_argument(name, schema, set())
    value = text if part is None else _choose_value(text, part, reader)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # a number that JSON cannot write
        return json.dumps(text, ensure_ascii=False)


def _choose_value(text: str, part: Any, reader: _SchemaReader) -> Any:
    """The value of a text, by the part of the schema that is about it."""
    try:
        kinds = reader.find_kinds(part)
        try:
            value = json.loads(text)
        except ValueError:
            value = text if "string" in kinds else _CONSTANTS.get(text.strip(), text)
        is_text = isinstance(value, str)
        if reader.allows(value, part) and (not is_text or kinds == KINDS):
            return value
        for one in (text, value):
            if reader.allows(one, part):
                return one
        # The model kept to no part of the schema; what it meant is told by the kinds.
        return text if "string" in kinds and _find_kind(value) not in kinds else value
    except RecursionError:
        return text


class _SchemaReader:
    """The types and the values that a schema's parts allow; an unknown part allows anything.

    What decides is what tells a text from other values: types, values, objects' keys and what
    combines these, but no bounds and no patterns.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._kinds: dict[int, frozenset[str]] = {}
        self._allowed: dict[tuple[int, int], bool] = {}

    def find_argument(self, name: str, schema: Any, seen: set[int]) -> Any | None:
        """The part of an object's schema that is about one of its keys; None for no such key.

        seen: ids of the parts that were looked at, which it gains.
        """
        parts, options = list[Any](), list[Any]()
        for part in self._join(schema):
            named, rest = part.get("properties"), part.get("additionalProperties")
            patterns = part.get("patternProperties")
            if isinstance(named, dict) and name in named:
                parts.append(named[name])
            elif isinstance(patterns, dict) and patterns:
                others = [rest] if isinstance(rest, dict) else []
                parts.append({"anyOf": [*patterns.values(), *others]})
            elif isinstance(rest, dict):
                parts.append(rest)
            for option in (*_as_list(part.get("anyOf")), *_as_list(part.get("oneOf"))):
                if id(option) not in seen:
                    seen.add(id(option))
                    options.append(self.find_argument(name, option, seen))
        options = [option for option in options if option is not None]
        parts += [{"anyOf": options}] if options else []
        return None if not parts else parts[0] if len(parts) == 1 else {"allOf": parts}

    def find_kinds(self, schema: Any) -> frozenset[str]:
        """The JSON types of what a schema allows."""
        if (known := self._kinds.get(id(schema))) is not None:
            return known
        self._kinds[id(schema)] = frozenset()  # of a part that is inside of itself
        parts, kinds = list(self._join(schema)), KINDS
        for part in parts:
            kinds &= self._find_own_kinds(part)
        if kinds == KINDS and any(_ONLY_TEXTS & part.keys() for part in parts):
            kinds = frozenset(("string",))
        kinds |= {"null"} if _is_nullable(schema) else set()
        self._kinds[id(schema)] = kinds
        return kinds

    def _find_own_kinds(self, part: Mapping[str, Any]) -> frozenset[str]:
        kinds, given = KINDS, part.get("type")
        named = [kind for kind in _as_list(given) if isinstance(kind, str) and kind in KINDS]
        if named:
            kinds = frozenset([*named, "integer"] if "number" in named else named)
        if "const" in part:
            kinds &= _list_kinds([part["const"]])
        if isinstance(part.get("enum"), list):
            kinds &= _list_kinds(part["enum"])
        for keyword in ("anyOf", "oneOf"):
            if options := _as_list(part.get(keyword)):
                kinds &= frozenset().union(*map(self.find_kinds, options))
        return kinds | {"null"} if _is_nullable(part) else kinds

    def allows(self, value: Any, schema: Any) -> bool:
        """Whether a value is one of a schema's."""
        key = id(value), id(schema)
        if key not in self._allowed:
            self._allowed[key] = False  # of a part that is inside of itself
            self._allowed[key] = _find_kind(value) in self.find_kinds(schema) and (
                (value is None and _is_nullable(schema))
                or all(self._fits(value, part) for part in self._join(schema))
            )
        return self._allowed[key]

    def _fits(self, value: Any, part: Mapping[str, Any]) -> bool:
        if value is None and _is_nullable(part):
            return True
        given = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(given, list) and not any(_is_same(value, one) for one in given):
            return False
        if "not" in part and self.allows(value, part["not"]):
            return False
        for keyword in ("anyOf", "oneOf"):
            options = _as_list(part.get(keyword))
            if options and not any(self.allows(value, option) for option in options):
                return False
        if isinstance(value, dict):
            return self._fits_object(value, part)
        if isinstance(value, list):
            first, rest = _as_list(part.get("prefixItems")), part.get("items", True)
            rules = [*first, *[rest] * len(value)]
            return all(map(self.allows, value, rules[: len(value)]))
        return True

    def _fits_object(self, value: dict[str, Any], part: Mapping[str, Any]) -> bool:
        named, required = part.get("properties"), _as_list(part.get("required"))
        named, rest = named if isinstance(named, dict) else {}, part.get("additionalProperties")
        if any(isinstance(name, str) and name not in value for name in required):
            return False
        if rest is None or "patternProperties" in part:
            rest = True
        return all(self.allows(one, named.get(name, rest)) for name, one in value.items())

    def _join(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """The parts that all hold together: a schema, and what its $ref and allOf lead to."""
        waiting, seen = [schema], set[int]()
        while waiting:
            part = waiting.pop()
            if part is False:
                yield {"enum": []}
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            if (target := find_target(part.get("$ref"), self._root)) is not None:
                waiting.append(target[1])
            waiting += _as_list(part.get("allOf"))


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, list) else []


def _is_nullable(part: Any) -> bool:
    """Whether null is allowed besides, as OpenAPI says it."""
    return isinstance(part, dict) and part.get("nullable") is True


def _list_kinds(values: Collection[Any]) -> frozenset[str]:
    return frozenset(map(_find_kind, values))


def _find_kind(value: Any) -> str:
    """The JSON type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        is_whole = isinstance(value, int) or value.is_integer()
        return "integer" if is_whole else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _is_same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
