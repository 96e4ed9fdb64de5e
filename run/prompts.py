"""Prompts from flags and files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from specdec.decode.prompts import read_entries, read_line, read_lines
from specdec.errors import SpecDecError, UsageError

from .settings import RunSettings

STDIN = Path("-")


def read_prompts(settings: RunSettings) -> list[dict[str, Any]]:
    """Return one object a prompt with the keys of a .jsonl line."""
    if bool(settings.input_text) == (settings.input_file is not None):
        raise UsageError(
            "give exactly one of --input-text and --input-file",
            'for example --input-text "def main():"',
        )
    if settings.input_file is None:
        return [{"prompt": text} for text in settings.input_text]
    path = settings.input_file
    if path == STDIN:
        lines = _read_stdin()
        suffix = ".jsonl" if lines and lines[0].lstrip().startswith("{") else ".txt"
    else:
        lines, suffix = read_lines(path, "--input-file"), path.suffix
    return [entry for entry in read_entries(path, lines, suffix, read_line) if entry]


def _read_stdin() -> list[str]:
    """Lines of stdin: request objects if the first one starts with a brace, else texts."""
    try:
        lines = [
            line for line in sys.stdin.read().removeprefix("\ufeff").split("\n") if line.strip()
        ]
        "".join(lines).encode()  # in some locales Python lets other bytes through
    except UnicodeError:
        raise SpecDecError("stdin is not UTF-8 text", "convert it to UTF-8") from None
    return lines
