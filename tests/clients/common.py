"""What the scripts of clients share: the standard library only, for environments of their own.

A script's checks get the server's address and the model's name from `URL` and `MODEL`. `run` tries
each of them and prints, as one line of JSON, "yes" or what the client said.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL, MODEL = os.environ["CLIENT_URL"], os.environ["CLIENT_MODEL"]
BASE_URL = f"{URL}/v1"
PROMPT = "def read_lines(path):"
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12}, "is_large": {"type": "boolean"},
        "river": {"enum": ["Seine", "Thames"]},
    },
    "required": ["name", "is_large", "river"], "additionalProperties": False,
}  # fmt: skip
WEATHER = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "London"]}},
    "required": ["city"], "additionalProperties": False,
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER},
}  # fmt: skip


def check_city(city: Any) -> None:
    """An object of CITY's, as a dict or with attributes."""
    if not isinstance(city, dict):
        city = {name: value for name, value in vars(city).items() if name[0] != "_"}
    assert city.keys() == {"name", "is_large", "river"}, city
    assert len(city["name"]) <= 12, city
    assert isinstance(city["is_large"], bool), city


def check_arguments(arguments: Any) -> None:
    """Arguments of a call of TOOL, as an object or its JSON; a client's schema may allow more."""
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert arguments["city"] in ("Paris", "London"), arguments


def check_stream(pieces: list[str], whole: str | None = None) -> None:
    """Pieces of a stream: several, and together what a whole answer is."""
    assert len([piece for piece in pieces if piece]) > 1, pieces
    assert whole is None or "".join(pieces) == whole, ("".join(pieces), whole)


def run(**checks: Callable[[], Any]) -> None:
    """Try each check; print what works."""
    told = {}
    for name, check in checks.items():
        try:
            result = check()
            if inspect.isawaitable(result):
                asyncio.run(_wait(result))
            told[name] = "yes"
        except BaseException as error:  # noqa: BLE001 - whatever a client raises
            traceback.print_exc(file=sys.stderr)
            told[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print(json.dumps(told))


async def _wait(result: Any) -> Any:
    return await result
