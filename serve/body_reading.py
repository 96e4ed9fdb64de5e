"""Reading of bodies: JSON into dataclasses of the schema, each parameter checked by its rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from specdec.errors import shorten, suggest

from .foreign import FOREIGN, NEUTRAL, Foreign
from .protocol import BadRequest, refuse
from .schema import Body, Parameters, Rule

P = TypeVar("P", bound=Parameters)
B = TypeVar("B", bound=Body)


def list_rules(kind: type[Parameters]) -> dict[str, Rule | None]:
    """Return the rules of a class of Parameters by name; None for one without effect."""
    rules: dict[str, Rule | None] = dict.fromkeys(kind.ignored_names)
    return rules | {
        field.name: field.metadata["rule"] for field in dataclasses.fields(kind)
        if "rule" in field.metadata and field.name not in kind.not_offered
    }  # fmt: skip


def read_body(kind: type[B], document: Any) -> B:
    """Check a body; BadRequest names the parameter that is wrong, missing, unknown or not offered.

    kind: the class of the endpoint's bodies.
    """
    if not isinstance(document, dict):
        raise BadRequest("the body is not a JSON object")
    chosen_kind: type[B] = kind.choose(document)  # type: ignore[assignment]
    body = _read_object(chosen_kind, document, "")
    if kind.source and getattr(body, kind.source) is None and not body.asks_for_load:
        raise refuse(kind.source, "is missing")
    return body


def _read_object(kind: type[P], document: Mapping[str, Any], path: str) -> P:
    """Check an object; path: where it stands in the body, empty for the body itself."""
    reader = ObjectReader(kind)
    for full_name, name, value in _list_entries(kind, document, path):
        reader.add(full_name, name, value)
    return reader.finish()


class ObjectReader(Generic[P]):
    """Reader of an object's parameters, one after the other."""

    def __init__(self, kind: type[P]) -> None:
        self._kind, self._rules = kind, list_rules(kind)
        self._rows: Mapping[str, Foreign] = FOREIGN if issubclass(kind, Body) else {}
        self._values: dict[str, Any] = {}
        self._ignored: list[str] = []
        self._paths: dict[str, str] = {}
        self._refining: dict[str, Foreign] = {}  # parameters that refine others, by their paths

    def add(self, path: str, name: str, value: Any) -> None:
        """Check a parameter; path: its place in the body."""
        row = self._rows.get(name) if name not in self._rules else None
        field = row.field if row is not None and row.field in self._rules else name
        if field not in self._rules and not self._kind.ignores_others:
            if row is not None and row.refines and value not in (None, *(row.values or ())):
                self._refining[path] = row
            else:
                _check_default(name, value, path, row, self._rules)
        elif value is None:
            return
        elif (rule := self._rules.get(field)) is None:
            self._ignored.append(path)
        else:
            self._keep(path, field, _read_value(rule, value, path))

    def _keep(self, path: str, field: str, value: Any) -> None:
        """Keep a checked value; BadRequest where another name of it has another value."""
        other_value = self._values.get(field)
        if other_value is not None and other_value != value:
            reason = f"is {shorten(value)}, and another name of it has {shorten(other_value)}"
            raise refuse(path, reason)
        self._values[field] = value
        if isinstance(value, Parameters):
            self._ignored += value.ignored
        if path != field and self._rows:
            self._paths[field] = path

    def finish(self) -> P:
        """Return the object, if no parameter refines another one which has an effect."""
        for path, row in self._refining.items():
            for name in row.refines:
                if self._values.get(name) not in (None, NEUTRAL[name]):
                    raise refuse(
                        path, f"is not supported beside {name}", code="unsupported_parameter"
                    )
        ignored = (*self._ignored, *self._refining)
        return self._kind(ignored=ignored, paths=self._paths, **self._values)


def _list_entries(
    kind: type[Parameters], document: Mapping[str, Any], path: str
) -> Iterator[tuple[str, str, Any]]:
    """Yield an object's parameters, and those in its `options`: path, name and value."""
    for name, value in document.items():
        full_name = f"{path}.{name[:100]}" if path else name[:100]
        if name == "options" and issubclass(kind, Body) and kind.has_options:
            if value is None:
                continue
            if not isinstance(value, dict):
                raise refuse(full_name, f"is {shorten(value)}, not an object")
            for key, option in value.items():
                yield f"options.{key[:100]}", key, option
        else:
            yield full_name, name, value


def _read_value(rule: Rule, value: Any, path: str) -> Any:
    """Check the value of a parameter; return it, or the dataclass of an object."""
    if isinstance(rule, type):
        if not isinstance(value, dict):
            raise refuse(path, f"is {shorten(value)}, not an object")
        return _read_object(rule, value, path)
    is_good, expected = rule
    if not is_good(value):
        raise refuse(path, f"is {shorten(value)}, not {expected}")
    return value


def _check_default(
    name: str, value: Any, path: str, row: Foreign | None, rules: Mapping[str, Any]
) -> None:
    """Raise BadRequest for an unknown parameter, or a value of one that is not offered.

    path: its place in the body. row: what is known of it, None for nothing.
    """
    if row is not None and value is None:
        return
    if row is None or row.values is None:
        param = path.partition(".")[0]
        raise BadRequest(f"unknown parameter {shorten(path)}{suggest(name, list(rules))}", param)
    if not any(type(value) is type(default) and value == default for default in row.values):
        raise refuse(path, "is not supported", code="unsupported_parameter")


def check_model(model: str | None, served_model: str) -> None:
    """Raise BadRequest for another model than the one that is served."""
    if model not in (None, served_model, f"{served_model}:latest"):  # as Ollama's clients say it
        raise BadRequest(
            f"the model {shorten(model)} does not exist; this server has {served_model!r}",
            "model", 404, "model_not_found",
        )  # fmt: skip
