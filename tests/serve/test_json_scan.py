"""JSON in a text that grows, as models write it: the same value, and JSON stays as it is."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from specdec.text.json_scan import JsonScan

LETTERS = "ab \"'\\/\n\t{}[]:,é🙂<|>uTrue"


def make_value(dice: random.Random, depth: int) -> Any:
    """A value, and of texts those that look like other parts of JSON."""
    kind = dice.randrange(7 if depth else 5)
    if kind == 0:
        return dice.choice([True, False, None])
    if kind == 1:
        return dice.choice([0, -3, 1.5, 1e30, -2.5e-7])
    if kind < 5:
        return make_text(dice)
    values = [make_value(dice, depth - 1) for _ in range(dice.randrange(4))]
    return values if kind == 5 else {make_text(dice): value for value in values}


def make_text(dice: random.Random) -> str:
    return "".join(dice.choices(LETTERS, k=dice.randrange(9)))


def write_as_gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(write_as_gemma, value))}]"
    if isinstance(value, dict):
        pairs = (f"{write_as_gemma(key)}:{write_as_gemma(item)}" for key, item in value.items())
        return "{" + ",".join(pairs) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def scan(text: str, dice: random.Random) -> tuple[str, int, bool]:
    """What a scan writes of a text that comes in pieces, where it ends, and whether that is all."""
    rest = dice.choice(["", " ", "}", "\n</tool_call>", "]x"])
    cuts = sorted(dice.choices(range(len(text + rest) + 1), k=dice.randrange(9)))
    value, written = JsonScan(0), ""
    for _, end in itertools.pairwise([0, *cuts, len(text + rest)]):
        value.run((text + rest)[:end])
        written += value.take()
    return written, value.position, value.is_whole


@pytest.mark.parametrize("write", [json.dumps, repr, write_as_gemma])
def test_values_are_read_in_any_pieces(write: Any) -> None:
    dice = random.Random(3)
    for _ in range(400):
        value = {"k": make_value(dice, 3)}
        text = write(value)
        written, end, is_whole = scan(text, dice)
        assert (json.loads(written), end, is_whole) == (value, len(text), True), text
        assert written == text or write is not json.dumps


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('{"a": "x\ny\\d\\u12"}', r'{"a": "x\ny\\d\\u12"}'),
        ("{a: 1, 'b' : [True, ], c-d: null , }", '{"a": 1, "b" : [true ], "c-d": null  }'),
        ('{"a": ["it\\\'s"]}', '{"a": ["it\'s"]}'),
        ("(a = 1, b=[(2, ')'),], c={})", '{"a" : 1, "b":[[2, ")"]], "c":{}}'),
    ],
)
def test_what_is_no_json_becomes_it(text: str, written: str) -> None:
    dice = random.Random(3)
    for _ in range(50):
        assert scan(text, dice)[0] == written
    json.loads(written)


@pytest.mark.parametrize("text", ['{"a": [1}', '{"a": (1)}', "{'a': </x>"])
def test_a_scan_ends_where_no_value_can_go_on(text: str) -> None:
    value = JsonScan(0)
    assert value.run(text)
    assert not value.is_whole
    assert text[value.position] in "}(<"
