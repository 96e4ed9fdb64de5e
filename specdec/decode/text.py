"""Text from tokens as they come: whole characters only, and nothing of or after a stop word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"  # what a tokenizer decodes the first bytes of a character to


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, special ones left out.

    Not tidied up, as Llama 3's tokenizer asks transformers 4 to do: that makes "a!= b" of "a != b".
    """
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


class TextStream:
    """The text of one request.

    A tokenizer joins tokens differently at the start of a text than inside it, so each new piece is
    what decoding adds to that of the tokens just before.

    ends: by token, how many characters the text had with it; a token's own text starts where that
    of the one before ended, and what a stop word cuts off is not in the text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._context = 0  # where the tokens start that are decoded together with new ones
        self._read = 0  # tokens whose text is in `_text`
        self._text = ""
        self._shown = 0
        self._is_ended = False
        self.ends: list[int] = []

    def add(self, token: int) -> bool:
        """Take a token; return whether the text now holds a stop word, which then ends it."""
        self._ids.append(token)
        piece = self._decode_new()
        text = self._text + piece.rstrip(INCOMPLETE)
        longest = max(map(len, self._stop), default=0)
        start = max(0, len(self._text) - longest)
        found = [at for word in self._stop if (at := text.find(word, start)) >= 0]
        if found:
            self._text, self._is_ended = text[: min(found)], True
        elif not piece.endswith(INCOMPLETE):
            self._text = text
            self._context, self._read = self._read, len(self._ids)
        self.ends.append(len(self._text))
        return self._is_ended

    def take(self) -> str:
        """Return the text that has become certain since the last call.

        The start of what may become a stop word is held back.
        """
        held = 0
        if not self._is_ended:
            for word in self._stop:
                sizes = range(min(len(word) - 1, len(self._text)), 0, -1)
                held = max(held, next((n for n in sizes if self._text.endswith(word[:n])), 0))
        end = max(self._shown, len(self._text) - held)
        piece = self._text[self._shown : end]
        self._shown = end
        return piece

    def finish(self) -> str:
        """Return the whole text; bytes that never became a character end it as U+FFFD."""
        if not self._is_ended:
            self._text += self._decode_new()
            self._read = len(self._ids)
            self._is_ended = True
        return self._text

    def _decode_new(self) -> str:
        before = self._decode(self._ids[self._context : self._read])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return decode_text(self._tokenizer, ids) if ids else ""
