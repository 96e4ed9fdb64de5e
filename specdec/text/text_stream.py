"""Text from tokens as they come: whole characters only, and nothing of or after a stop word."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"  # what a tokenizer decodes the first bytes of a character to


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextForm:
    """Rules by which a request's tokens become text.

    hidden: tokens that end the request, and have no text. includes_stop: a stop word that ends it
    is part of the text. skips_special: special tokens have no text. spaces_special: see
    transformers' spaces_between_special_tokens. min_tokens: the text of so many holds no stop word.
    """

    hidden: frozenset[int] = frozenset()
    includes_stop: bool = False
    skips_special: bool = True
    spaces_special: bool = True
    min_tokens: int = 0


PLAIN_FORM = TextForm()


def decode_text(tokenizer: Any, ids: Sequence[int], form: TextForm = PLAIN_FORM) -> str:
    """Return the text of tokens.

    Not tidied up, as Llama 3's tokenizer asks transformers 4 to do: that makes "a!= b" of "a != b".
    """
    decode_options = {} if form.spaces_special else {"spaces_between_special_tokens": False}
    text: str = tokenizer.decode(
        list(ids),
        skip_special_tokens=form.skips_special,
        clean_up_tokenization_spaces=False,
        **decode_options,
    )
    return text


def decode_output(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of a whole output, which is that of a stream.

    Decoded at once, a token of a byte that is a character, such as Llama 2's of a line's end, is
    U+FFFD where bytes of no whole character follow.
    """
    text = decode_text(tokenizer, ids)
    return read_stream(tokenizer, ids).finish() if INCOMPLETE in text else text


class TextStream:
    """Text of one request, which grows with its tokens.

    A tokenizer joins tokens differently at the start of a text than inside it, so each new piece is
    the text that decoding adds to that of the tokens just before.

    ends: by token, how many characters the text had with it; a token's own text starts where that
    of the one before ended, and what a stop word cuts off is not in the text.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), form: TextForm = PLAIN_FORM
    ) -> None:
        self._tokenizer, self._form = tokenizer, form
        self._stop_start = 0  # the first character at which a stop word may begin
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._context = 0  # index of the first token that is decoded together with new ones
        self._read = 0  # number of tokens whose text is in `_text`
        self._text = ""
        self._num_shown = 0
        self._is_ended = False
        self.ends: list[int] = []
        self.stop_word: str | None = None  # the one that ended the text

    def add(self, token: int) -> bool:
        """Take a token; return whether the text now holds a stop word, which then ends it."""
        if token in self._form.hidden:
            self.ends.append(len(self._text))
            return False
        self._ids.append(token)
        piece = self._decode_new()
        text = self._text + piece.rstrip(INCOMPLETE)
        max_stop_len = max(map(len, self._stop), default=0)
        if len(self._ids) <= self._form.min_tokens:
            self._stop_start = len(text)
        start = max(self._stop_start, len(self._text) - max_stop_len)
        matches = [
            (word_start, len(word), word)
            for word in self._stop
            if (word_start := text.find(word, start)) >= 0
        ]
        if matches:
            word_start, size, self.stop_word = min(matches)
            self._text = text[: word_start + size * self._form.includes_stop]
            self._is_ended = True
        elif not piece.endswith(INCOMPLETE):
            self._text = text
            if piece:  # a space after a special token is no longer one where a text begins
                self._context = self._read
            self._read = len(self._ids)
        self.ends.append(len(self._text))
        return self._is_ended

    @property
    def certain(self) -> str:
        """Text that further tokens do not change.

        The start of what may become a stop word is held back, and a character that is not whole.
        """
        num_held_back = 0
        if not self._is_ended:
            for word in self._stop:
                sizes = range(min(len(word) - 1, len(self._text)), 0, -1)
                num_held_back = max(
                    num_held_back, next((n for n in sizes if self._text.endswith(word[:n])), 0)
                )
        return self._text[: max(self._num_shown, len(self._text) - num_held_back)]

    @property
    def full_text(self) -> str:
        """Text as it is if no token follows; bytes of no whole character are U+FFFD."""
        return self._text if self._is_ended else self._text + self._decode_new()

    def take(self) -> str:
        """Return the text that has become certain since the last call."""
        certain = self.certain
        piece, self._num_shown = certain[self._num_shown :], len(certain)
        return piece

    def finish(self) -> str:
        """End the text, to which no token may be added then; return the whole of it."""
        if not self._is_ended:
            self._text = self.full_text
            self._read = len(self._ids)
            if self.ends:
                self.ends[-1] = len(self._text)
            self._is_ended = True
        return self._text

    def _decode_new(self) -> str:
        context_text = self._decode(self._ids[self._context : self._read])
        return self._decode(self._ids[self._context :])[len(context_text) :]

    def _decode(self, ids: list[int]) -> str:
        return decode_text(self._tokenizer, ids, self._form) if ids else ""


def read_stream(tokenizer: Any, ids: Sequence[int]) -> TextStream:
    """Return the finished text of tokens, which says where each token ends in it."""
    stream = TextStream(tokenizer)
    for token in ids:
        stream.add(token)
    stream.finish()
    return stream
