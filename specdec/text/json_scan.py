"""Reading of a JSON value in a text that grows, such as a call's arguments, and where it ends.

Models write at times what only Python reads, or a line break inside of a text, and Gemma 4 has
another quotation mark and bare keys. LFM2 writes arguments as Python's calls have them, `(key=1)`,
and LFM2.5 their texts between apostrophes as they are, `(key='it's')`. All of that becomes JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

GEMMA_MARK = '<|"|>'
_HALF_MARK = r'<(?:\|(?:"\|?)?)?\Z'
# Outside of texts: what JSON may have there, Python and Gemma.
_PIECE = re.compile(
    rf"""[\s:]+|(?P<comma>,\s*)|(?P<word>[\w.+-]+)(?P<space>\s*)(?P<colon>[:=]?)|["'{{}}\[\]()]"""
    rf"""|{re.escape(GEMMA_MARK)}|(?P<half>{_HALF_MARK})"""
)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
# Round brackets as JSON has them: around arguments, and within them.
_OUTER, _INNER = str.maketrans("()", "{}"), str.maketrans("()", "[]")
# Inside of texts, by their quotation marks: what ends them, or may not stand there as it is.
_STOPS = {
    '"': re.compile(r'["\\\x00-\x1f]'), "'": re.compile(r"""['"\\\x00-\x1f]"""),
    GEMMA_MARK: re.compile(rf'{re.escape(GEMMA_MARK)}|{_HALF_MARK}|["\\\x00-\x1f]'),
}  # fmt: skip
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_SO_FAR = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
# An apostrophe that ends an argument of a Python's call, by what follows; as far as that is there.
_ARGUMENT_END = re.compile(r"'\s*(?:,\s*(?:[\w-]+\s*=|\))|\)\s*(?:[\],<]|\Z))")
_ARGUMENT_END_SO_FAR = re.compile(r"'\s*(?:,\s*(?:[\w-]+\s*)?|\)\s*)?\Z")


class JsonScan:
    """Reading of a JSON value up to its end, in a text that grows."""

    def __init__(self, position: int, depth: int = 0) -> None:
        """position: where the value begins, or goes on in `depth` objects; moves to its end."""
        self.position, self.is_whole = position, False
        self._is_over = self._is_last = False
        self._mark = ""  # quotation mark of the text that is being read
        self._closings = ["}"] * depth  # those that are to come, the next one last
        self._written: list[str] = []

    def run(self, text: str, *, is_last: bool = False) -> bool:
        """Continue the search; return whether the value has ended, or cannot be JSON.

        is_last: whether no more text comes.
        """
        self._is_last = is_last
        while not self._is_over:
            has_moved = self._read_text(text) if self._mark else self._read_piece(text)
            if not has_moved:
                break
        return self._is_over

    def take(self) -> str:
        """Return, as JSON, what was read since the last call."""
        written, self._written = "".join(self._written), []
        return written

    def _write(self, written: str, end: int) -> bool:
        self._written.append(written)
        self.position = end
        return True

    def _read_piece(self, text: str) -> bool:
        """Read a piece outside of texts; return whether there is one that is certain."""
        match = _PIECE.match(text, self.position)
        if match is None:
            self._is_over = self.position < len(text)
            return False
        piece, end = match[0], match.end()
        is_open = match["comma"] or (match["word"] and not match["colon"])
        if match["half"] or (is_open and end == len(text)):
            return False  # what comes next tells what it is
        if piece in _STOPS:
            self._mark = piece
            return self._write('"', end)
        if piece in "{}[]()":
            bracket = self._take_bracket(piece)
            return bool(bracket) and self._write(bracket, end)
        return self._write(_rewrite(match, text[end : end + 1]), end)

    def _take_bracket(self, letter: str) -> str:
        """Return a bracket as JSON has it; empty where none can stand there.

        Round ones stand around a call's arguments and, within these, around lists.
        """
        is_outer = not self._closings
        if letter in _CLOSING:
            is_right = letter != "(" or is_outer or self._closings[0] == ")"
            self._closings.append(_CLOSING[letter])
        else:
            is_right = not is_outer and self._closings.pop() == letter
            is_outer = self.is_whole = is_right and not self._closings
        self._is_over = not is_right or self.is_whole
        return letter.translate(_OUTER if is_outer else _INNER) if is_right else ""

    def _read_text(self, text: str) -> bool:
        """Read a text's letters, or one that stands for another; return whether there is one."""
        match = _STOPS[self._mark].search(text, self.position)
        end = match.start() if match is not None else len(text)
        if end > self.position:
            return self._write(text[self.position : end], end)
        if match is None or match[0] in ("<", "<|", '<|"', '<|"|'):
            return False
        if match[0] == self._mark:
            return self._read_mark(text)
        if match[0] == "\\" and self._mark != GEMMA_MARK:
            return self._read_escape(text)
        return self._write(json.dumps(match[0])[1:-1], match.end())

    def _read_mark(self, text: str) -> bool:
        """Read a text's own mark, which ends it; return whether that is certain.

        LFM2.5 does not escape apostrophes: an argument has those that only its text can go on with.
        """
        end = self.position + len(self._mark)
        if self._mark == "'" and self._closings == [")"]:
            if not self._is_last and _ARGUMENT_END_SO_FAR.match(text, self.position):
                return False
            if not _ARGUMENT_END.match(text, self.position):
                return self._write("'", end)
        self._mark = ""
        return self._write('"', end)

    def _read_escape(self, text: str) -> bool:
        """Read a backslash and what it escapes; return whether that is there."""
        if (match := _ESCAPE.match(text, self.position)) is not None:
            return self._write(match[0], match.end())
        if _ESCAPE_SO_FAR.fullmatch(text, self.position) is not None:
            return False
        if text[self.position + 1] == "'":
            return self._write("'", self.position + 2)
        return self._write(r"\\", self.position + 1)  # JSON has no such escape


def _rewrite(match: re.Match[str], next_letter: str) -> str:
    """Return a piece outside of texts as JSON has it: a word before a colon is a key."""
    if match["comma"]:
        return match[0][1:] if next_letter in ("}", "]", ")") else match[0]
    if not (word := match["word"]):
        return match[0]
    if not match["colon"]:
        return _WORDS.get(word, word) + match["space"]
    return json.dumps(word) + match["space"] + ":"


def find_value(text: str, position: int = 0) -> tuple[Any, int]:
    """Return the value that a model wrote at a position, as JSON or not, and its end.

    ValueError where there is none.
    """
    scan = JsonScan(position)
    scan.run(text, is_last=True)
    return json.loads(scan.take()), scan.position


def rewrite_json(text: str) -> str:
    """Return a JSON value that a model wrote, perhaps as Python writes it; a text of none stays."""
    scan = JsonScan(0)
    scan.run(text, is_last=True)
    is_value = scan.is_whole and not text[scan.position :].strip()
    return scan.take() if is_value else text


def is_json(text: str) -> bool:
    """Return whether a text is JSON that can be read here."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def read_json_text(letters: str) -> str | None:
    """Return the text that JSON writes with these letters in quotation marks; None for none."""
    try:
        return str(json.loads(f'"{letters}"'))
    except ValueError:
        return None
