"""JSON schemas and the grammars of llguidance: what of a schema no grammar keeps to, by its place.

Nothing here is a list of what llguidance knows: each keyword is tried, in the installed release.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from specdec.errors import cut_middle

# Keywords that hold schemas: by names, in lists, or one.
NAMED_PARTS = ("properties", "patternProperties")
LISTED_PARTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE_PARTS = ("items", "additionalProperties", "additionalItems")
DEFINITIONS = ("$defs", "definitions")
# Keywords without effect: by their values, or without others beside them.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "not": (False,), "propertyNames": (True, {}, {"type": "string"}),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), (True, {})),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}  # fmt: skip
_PARTNERS = {
    "if": {"then", "else"}, "then": {"if"}, "else": {"if"},
    "minContains": {"contains"}, "maxContains": {"contains"},
}  # fmt: skip
_MAX_FAULTS = 5  # that a message names
_MAX_TRIALS = 3000  # of keywords and of parts, some 0.1 ms each


@dataclasses.dataclass(frozen=True)
class Fault:
    """A keyword that no grammar keeps to, in the `subschema` that has it.

    path: of the keyword; of the part, or empty for the whole, where it is no keyword's alone.
    """

    path: str
    reason: str
    subschema: dict[str, Any] | None = None
    keyword: str = ""

    def __str__(self) -> str:
        location = f" (at {self.path})" if self.path else ""
        return f"{cut_middle(' '.join(self.reason.split()), 200)}{location}"


@dataclasses.dataclass(frozen=True)
class FittedSchema:
    """A schema that a grammar can keep to, unless it has `faults`. left_out: paths of keywords."""

    schema: Any
    left_out: list[str] = dataclasses.field(default_factory=list)
    faults: list[Fault] = dataclasses.field(default_factory=list)


def fit_schema(schema: Any, *, keeps_all: bool = True) -> FittedSchema:
    """Leave out of a schema what no grammar keeps to.

    That is what only describes, and with keeps_all False also what narrows, which otherwise is a
    fault. The schema itself is not changed. Without llguidance nothing is left out.
    """
    if importlib.util.find_spec("llguidance") is None or not _find_error(schema):
        return FittedSchema(schema)
    fitter = _Fitter(json.loads(json.dumps(schema)))
    faults = fitter.find_faults()
    while faults and not keeps_all:
        for fault in faults:
            fitter.left_out.append(fault.path)
            if fault.subschema is None:
                return FittedSchema({"type": "object"}, fitter.left_out)
            value = fault.subschema.pop(fault.keyword, None)
            if fault.keyword == "oneOf":
                fault.subschema.setdefault("anyOf", value)
        faults = fitter.find_faults()
    return FittedSchema(fitter.root, fitter.left_out, faults)


def describe_faults(fitted: FittedSchema) -> str:
    """Name the keywords that no grammar keeps to, and why, for a message."""
    descriptions = list(map(str, fitted.faults))
    return "; ".join(descriptions[:_MAX_FAULTS]) + (
        "; ..." if len(descriptions) > _MAX_FAULTS else ""
    )


def find_target(pointer: Any, root: Any) -> tuple[str, Any] | None:
    """Find the part of a schema that a $ref points to, with its path; None where there is none."""
    if pointer == "#":
        return "", root
    if not isinstance(pointer, str) or not pointer.startswith("#/"):
        return None
    names = [
        name.replace("~1", "/").replace("~0", "~")
        for name in urllib.parse.unquote(pointer[2:]).split("/")
    ]
    target = root
    for name in names:
        if isinstance(target, dict) and name in target:
            target = target[name]
        elif isinstance(target, list) and name in map(str, range(len(target))):
            target = target[int(name)]
        else:
            return None
    return ".".join(names), target


class _Fitter:
    """One schema, from which `find_faults` takes what has no effect or only describes."""

    def __init__(self, root: Any) -> None:
        self.root, self.left_out = root, list[str]()
        self._num_trials = 0
        if self._try(self._choose(("$schema",))):  # a dialect that is only named
            del root["$schema"]
            self.left_out.append("$schema")

    def find_faults(self) -> list[Fault]:
        """List the keywords that no grammar has; else the smallest part that is no grammar."""
        faults = [
            fault
            for path, subschema in self._walk()
            for fault in self._try_keywords(path, subschema)
        ]
        if faults or not (error := _find_error(self.root)):
            return faults
        definitions = self._choose(DEFINITIONS)
        subschemas = list(self._walk())
        for path, subschema in reversed(subschemas):
            if self._try({**definitions, **subschema}) == error:
                return [self._name_keyword(path, subschema, definitions, error)]
        return [Fault("", error)]

    def _walk(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each part once that the root leads to, with its path, outer ones first."""
        pending, seen_ids = [("", self.root)], set[int]()
        while pending:
            path, subschema = pending.pop()
            if not isinstance(subschema, dict) or id(subschema) in seen_ids:
                continue
            seen_ids.add(id(subschema))
            yield path, subschema
            inner_schemas = list(_list_parts(path, subschema))
            if (target := find_target(subschema.get("$ref"), self.root)) is not None:
                inner_schemas.append(target)
            pending += reversed(inner_schemas)

    def _try_keywords(self, path: str, subschema: dict[str, Any]) -> Iterator[Fault]:
        """Try each keyword of a part by itself; take away those without effect."""
        _open_choice(subschema)
        base = self._choose(("$schema", "x-guidance"))
        for keyword, value in list(subschema.items()):
            trial, keyword_path = self._make_trial(keyword, value), _join(path, keyword)
            error = "" if trial is None else self._try({**base, keyword: trial})
            has_partner = keyword not in _PARTNERS or _PARTNERS[keyword] & subschema.keys()
            if not error:
                continue
            if not has_partner or value in _NEUTRAL.get(keyword, ()):
                del subschema[keyword]
            elif keyword in ("format", "$schema") and isinstance(value, str):  # only described
                del subschema[keyword]
                self.left_out.append(keyword_path)
            else:
                yield Fault(keyword_path, error, subschema, keyword)

    def _make_trial(self, keyword: str, value: Any) -> Any:
        """Return a keyword's value without the parts that it holds; None where nothing is left."""
        if keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
            is_path = value.startswith("#/")
            return value if is_path and find_target(value, self.root) is None else None
        if keyword in NAMED_PARTS and isinstance(value, dict):
            return dict.fromkeys(value, {})
        return None if _holds_schemas(keyword, value) else value

    def _name_keyword(
        self, path: str, subschema: dict[str, Any], definitions: Mapping[str, Any], error: str
    ) -> Fault:
        """Return the fault of a part, by the keyword without which it is a grammar."""
        for keyword in sorted(subschema, key=lambda name: name == "type"):  # which many others need
            remainder = {key: value for key, value in subschema.items() if key != keyword}
            if keyword not in definitions and not self._try({**definitions, **remainder}):
                return Fault(_join(path, keyword), error, subschema, keyword)
        return Fault(path, error)

    def _choose(self, keywords: tuple[str, ...]) -> dict[str, Any]:
        root = self.root if isinstance(self.root, dict) else {}
        return {name: root[name] for name in keywords if name in root}

    def _try(self, schema: Any) -> str:
        self._num_trials += 1
        return _find_error(schema) if self._num_trials <= _MAX_TRIALS else ""


def _list_parts(path: str, subschema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that a part holds, with their paths."""
    for keyword, value in subschema.items():
        keyword_path = _join(path, keyword)
        if keyword in NAMED_PARTS and isinstance(value, dict):
            yield from ((_join(keyword_path, name), inner) for name, inner in value.items())
        elif keyword in (*LISTED_PARTS, "items") and isinstance(value, list):
            paths = (_join(keyword_path, str(index)) for index in range(len(value)))
            yield from zip(paths, value, strict=True)
        elif keyword in SINGLE_PARTS:
            yield keyword_path, value


def _open_choice(subschema: dict[str, Any]) -> None:
    """Let one of several values be any of them, where none is there twice: grammars have no oneOf.

    llguidance does so for types and for keys of objects.
    """
    options = subschema.get("oneOf")
    if not isinstance(options, list) or "anyOf" in subschema:
        return
    values = []
    for option in options:
        if not isinstance(option, dict) or not ("const" in option or "enum" in option):
            return
        listed_values = [option["const"]] if "const" in option else option["enum"]
        if not isinstance(listed_values, list):
            return
        values += [json.dumps(value) for value in listed_values]
    if len(set(values)) == len(values):
        subschema["anyOf"] = subschema.pop("oneOf")


def _join(path: str, name: str) -> str:
    return f"{path}.{name[:100]}" if path else name[:100]


def _find_error(schema: Any) -> str:
    """Return why llguidance makes no grammar of a schema; empty where it does."""
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        # It also says by which $ref it came there, which the path does better.
        return str(LLMatcher.validate_grammar(grammar, None)).partition("\n  while processing")[0]
    except (TypeError, ValueError) as error:
        return str(error)


def _holds_schemas(keyword: str, value: Any) -> bool:
    """Return whether a keyword's value is a list of schemas, a schema, or definitions."""
    if isinstance(value, list) and keyword in (*LISTED_PARTS, "items"):
        return True
    return keyword in DEFINITIONS or (isinstance(value, dict) and keyword in SINGLE_PARTS)
