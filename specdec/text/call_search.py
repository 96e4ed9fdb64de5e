"""Search for calls that are known in a chat template's text: where they begin and end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdec.text.json_scan import find_value

MAX_PATTERN = 64  # letters of an id or a number between a name and its arguments


class ProbeCall(NamedTuple):
    """Call that a template is asked to write."""

    name: str
    number: str  # its id; some templates take nine letters and digits only
    arguments: Mapping[str, Any]

    def write(self) -> dict[str, Any]:
        """Return the call in OpenAI's form."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"id": self.number, "type": "function", "function": function}


CALLS = (
    ProbeCall("probe_one", "callid001", {"key_a": "text one", "key_b": 48213}),
    ProbeCall("probe_two", "callid002", {"key_a": "text two", "key_b": 59327}),
)


class Location(NamedTuple):
    """Place of a whole call in a text."""

    start: int
    end: int


class CallText(NamedTuple):
    """Text that a template wrote for calls, in parts.

    before, between, after: the texts around the calls; between is None for a template that writes
    one call at most. first: the text of the first call.
    """

    before: str
    between: str | None
    after: str
    first: str


def split_calls(text: str, calls: Sequence[ProbeCall]) -> CallText | None:
    """Split what a template wrote for calls at these; None where they are not found."""
    for find in (_find_object, _find_named, _find_python, _find_tagged):
        locations, position = list[Location](), 0
        for call in calls:
            location = find(text, call, position)
            if location is None:
                break
            locations.append(location)
            position = location.end
        if len(locations) == len(calls):
            first, last = locations[0], locations[-1]
            between = text[first.end : last.start] if len(calls) > 1 else None
            return CallText(
                text[: first.start], between, text[last.end :], text[first.start : first.end]
            )
    return None


def _find_object(text: str, call: ProbeCall, start: int) -> Location | None:
    """Find the JSON of a call, with its name and its arguments as values."""
    while (start := text.find("{", start)) >= 0:
        with contextlib.suppress(ValueError):
            document, end = json.JSONDecoder().raw_decode(text, start)
            if find_keys(document, call) is not None:
                return Location(start, end)
        start += 1
    return None


def find_keys(document: Any, call: ProbeCall) -> tuple[str, str] | None:
    """Return the keys of a call's name and arguments in its JSON; None where it has not both."""
    fields = document.get("function", document) if isinstance(document, dict) else None
    if not isinstance(fields, dict):
        return None
    name_keys = [key for key, value in fields.items() if value == call.name]
    argument_keys = [
        key for key, value in fields.items()
        if value == call.arguments or value == json.dumps(call.arguments)
    ]  # fmt: skip
    return (name_keys[0], argument_keys[0]) if name_keys and argument_keys else None


def _find_named(text: str, call: ProbeCall, start: int) -> Location | None:
    """Find a call that is its name and then the JSON of its arguments."""
    if (name_start := text.find(call.name, start)) < 0:
        return None
    name_end = name_start + len(call.name)
    opening = text.find("{", name_end)
    if opening < 0 or opening - name_end > MAX_PATTERN:
        return None
    return _locate(text, call, name_start, opening)


def _find_python(text: str, call: ProbeCall, start: int) -> Location | None:
    """Find a call as Python writes it."""
    if (name_start := text.find(f"{call.name}(", start)) < 0:
        return None
    return _locate(text, call, name_start, name_start + len(call.name))


def _locate(text: str, call: ProbeCall, name_start: int, opening: int) -> Location | None:
    """Return the place of a call by its name, if its arguments stand at an opening bracket."""
    with contextlib.suppress(ValueError):
        arguments, end = find_value(text, opening)
        if arguments == call.arguments:
            return Location(name_start, end)
    return None


def _find_tagged(text: str, call: ProbeCall, start: int) -> Location | None:
    """Find a call that is its name and then each argument's key and value, as texts."""
    name_start = position = text.find(call.name, start)
    for word in (call.name, *(str(word) for pair in call.arguments.items() for word in pair)):
        position = text.find(word, position)
        if position < 0:
            return None
        position += len(word)
    return Location(name_start, position) if name_start >= 0 else None
