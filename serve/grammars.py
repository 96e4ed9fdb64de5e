"""Grammars that bodies ask for, in the form of a Prompt's grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from specdec.errors import summarize
from specdec.files.reading import parse_json
from specdec.text.grammar import SPACING, space_schema, write_choice
from specdec.text.schemas import fit_schema

from .protocol import BadRequest, refuse
from .schema import GenerationBody, ResponseFormat, StructuredOutputs, TextFormat

# Kinds of grammars by the parameters that ask for them, vLLM's and llama.cpp's.
GUIDED = {
    "guided_json": "json_schema", "json_schema": "json_schema", "guided_regex": "regex",
    "guided_choice": "choice", "guided_grammar": "lark", "grammar": "lark",
}  # fmt: skip
# Kinds of grammars by the keys of vLLM's `structured_outputs`.
STRUCTURED = {
    "json": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice",
    "grammar": "lark",
}  # fmt: skip


class BodyGrammar(NamedTuple):
    """Grammar that a body asks for.

    param: the parameter that asks for it, None where no parameter does. grammar: its form as a
    Prompt has it. ignored: paths of keywords of a JSON schema, and of white space, without effect.
    """

    param: str | None
    grammar: dict[str, Any] | None
    ignored: list[str]


def find_grammar(body: GenerationBody) -> BodyGrammar:
    """Return the grammar that an answer keeps to; BadRequest where a body asks for several."""
    grammars, spacings = _list_grammars(body), _list_spacings(body)
    for paths in (list(grammars), list(spacings)):
        if len(paths) > 1:
            raise BadRequest(f"{' and '.join(paths)} are both given", paths[0].partition(".")[0])
    if not grammars:
        return BodyGrammar(None, None, list(spacings))
    path, (kind, value) = next(iter(grammars.items()))
    param = path.partition(".")[0]
    if body.ignore_eos:
        raise BadRequest("ignore_eos has no place beside a grammar", "ignore_eos")
    grammar = _complete(path, kind, value, next(iter(spacings.values()), SPACING))
    if "json_schema" not in grammar:
        return BodyGrammar(param, grammar, list(spacings))
    # Other keywords that no grammar can keep to are refused when the grammar is compiled.
    fitted = fit_schema(grammar["json_schema"])
    if fitted.faults:
        return BodyGrammar(param, grammar, [])
    ignored = [f"{param}.{keyword_path}" for keyword_path in fitted.left_out]
    return BodyGrammar(param, {"json_schema": fitted.schema}, ignored)


def _list_grammars(body: GenerationBody) -> dict[str, tuple[str, Any]]:
    """List the kinds and values of grammars by the paths of the parameters that ask for them."""
    grammars = {
        name: (kind, value) for name, kind in GUIDED.items()
        if (value := getattr(body, name)) is not None
    }  # fmt: skip
    path, output_format = body.output_format
    if output_format is not None and (grammar := _read_format(path, output_format)) is not None:
        grammars[path] = grammar
    structured = body.structured_outputs or StructuredOutputs()
    return grammars | {
        f"structured_outputs.{name}": (kind, value) for name, kind in STRUCTURED.items()
        if (value := getattr(structured, name)) not in (None, False)
    }  # fmt: skip


def _list_spacings(body: GenerationBody) -> dict[str, Mapping[str, Any]]:
    """List llguidance's options for the white space of a JSON text by the paths that give them."""
    structured = body.structured_outputs or StructuredOutputs()
    patterns = {
        "structured_outputs.whitespace_pattern": structured.whitespace_pattern,
        "guided_whitespace_pattern": body.guided_whitespace_pattern,
    }
    spacings: dict[str, Mapping[str, Any]] = {
        path: {"whitespace_flexible": True, "whitespace_pattern": pattern}
        for path, pattern in patterns.items() if pattern is not None
    }  # fmt: skip
    if structured.disable_any_whitespace:
        spacings["structured_outputs.disable_any_whitespace"] = {"whitespace_flexible": False}
    return spacings


def _read_format(path: str, form: ResponseFormat | TextFormat) -> tuple[str, Any] | None:
    """Return the kind of grammar that a format asks for and its value; None for free text."""
    if form.type is None:
        raise refuse(f"{path}.type", "is missing")
    is_flat, schema = isinstance(form, TextFormat), form.schema
    types = {"schema": "json_schema"} if is_flat else {
        "json_schema": "json_schema", "schema": "json_object"  # where llama.cpp takes a schema
    }  # fmt: skip
    for name, needed_type in types.items():
        if form.type != needed_type and getattr(form, name) is not None:
            reason = f"{name} has no place beside {path}.type {form.type!r}"
            raise BadRequest(reason, path.partition(".")[0])
    if form.type == "text":
        return None
    if isinstance(form, ResponseFormat) and form.json_schema is not None:
        schema = form.json_schema.schema
    if schema is not None:
        return "json_schema", schema
    if form.type == "json_object":
        return "json_object", True
    raise refuse(path, f"has no {'' if is_flat else 'json_schema.'}schema")


def _complete(path: str, kind: str, value: Any, spacing: Mapping[str, Any]) -> dict[str, Any]:
    """Return a grammar in a Prompt's form: schemas parsed and spaced, choices as a pattern."""
    if kind == "choice":
        return {"regex": write_choice(value)}
    if kind not in ("json_schema", "json_object"):
        return {kind: value}
    if isinstance(value, str):
        try:
            value = parse_json(value.encode())
        except ValueError as error:
            raise refuse(path, f"is not JSON: {summarize(error)}") from None
    schema = value if kind == "json_schema" else {"type": "object"}
    return {"json_schema": space_schema(schema, spacing)}
