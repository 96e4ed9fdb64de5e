"""Search for the end of a JSON value in a text that grows, such as a call's arguments."""

from __future__ import annotations

import json
import re

# Outside of texts: quotation marks, brackets, and characters that JSON cannot have.
_STRUCTURE = re.compile(r'["{}\[\]]|[^\w\s:,.+-]')
_TEXT_END = re.compile(r'["\\]')
_CLOSING = {"{": "}", "[": "]"}


class JsonScan:
    """Search for the end of a JSON value, in a text that grows."""

    def __init__(self, position: int, depth: int = 0) -> None:
        """position: where the value begins, or goes on in `depth` objects; moves to its end."""
        self.position, self._is_in_text, self.is_whole = position, False, False
        self._closings = ["}"] * depth  # those that are to come, the next one last

    def run(self, text: str) -> bool:
        """Continue the search; return whether the value has ended, or cannot be JSON."""
        while True:
            match = (_TEXT_END if self._is_in_text else _STRUCTURE).search(text, self.position)
            if match is None:
                self.position = len(text)
                return False
            letter = match[0]
            if letter == "\\":
                if match.end() == len(text):
                    self.position = match.start()
                    return False
                self.position = match.end() + 1
                continue
            if letter == '"':
                self._is_in_text = not self._is_in_text
            elif not self._take_bracket(letter):
                self.position = match.start()
                return True
            self.position = match.end()
            if self.is_whole:
                return True

    def _take_bracket(self, letter: str) -> bool:
        """Note a letter outside of texts; return whether JSON can have it there."""
        if letter in _CLOSING:
            self._closings.append(_CLOSING[letter])
            return True
        if not self._closings or self._closings[-1] != letter:
            return False
        self._closings.pop()
        self.is_whole = not self._closings
        return True


def read_json_text(letters: str) -> str | None:
    """Return the text that JSON writes with these letters in quotation marks; None for none."""
    try:
        return str(json.loads(f'"{letters}"'))
    except ValueError:
        return None
