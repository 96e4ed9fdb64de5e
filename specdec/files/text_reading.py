"""Comparison of how tokenizers read texts: the ids of a fixed set of texts.

Two tokenizers of equal tokens and ids may still split, normalize or decode a text differently.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from specdec.errors import shorten

# Digits, runs of spaces and newlines, contractions, a leading and a trailing space, letters of many
# scripts, composed and decomposed ones, code.
TEXTS = (
    "Answer:\n\n1. first\n\n2. second", "x =  12 + 345\ny =   6789", " one leading space",
    "   three,\tand a tab ", "It's the DON'T  case: we'LL see", "def f(a1):\n      return  7\n\n\n",
    "caf\u00e9 cafe\u0301 \ufb01ve \u212b \u00bd", "\u65e5\u672c\u8a9e\u3002\ud55c\uad6d\uc5b4",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u03b1\u03b2\u03b3 \u0645\u0631\u062d\u0628\u0627",
    "\U0001f642\U0001f469\u200d\U0001f680!!", "\r\n\r\nsnake_case HTTPServer camelCase",
    "3.14159 1,000,000 2026-11-27", "<s>[INST] Hi [/INST]", "\u2014\u201cquotes\u201d\u2026", "a",
)  # fmt: skip
MAX_TOKENS = 8  # special tokens that texts are put beside
NUM_WORDS = 48  # tokens of a vocabulary that are joined to texts: the longest, and as many others
MAX_SHOWN = 12  # ids of a text that a message shows


class ReadingDifference(NamedTuple):
    """The first text that two tokenizers read differently, with the ids of each."""

    text: str
    ids: tuple[list[int], list[int]]

    def describe(self, first_owner: str, second_owner: str) -> str:
        """Name the text and both lists of ids, with the tokenizers that they are of."""
        first_ids, second_ids = (show_ids(ids) for ids in self.ids)
        return f"{shorten(self.text)} is {first_ids} {first_owner}, {second_ids} {second_owner}"


def show_ids(ids: list[int]) -> str:
    """Return ids as a list, cut where it is long."""
    ellipsis = ", ..." if len(ids) > MAX_SHOWN else ""
    return f"[{', '.join(map(str, ids[:MAX_SHOWN]))}{ellipsis}]"


def list_texts(special_tokens: Iterable[str]) -> list[str]:
    """List texts to compare by: the fixed ones, and some around a tokenizer's special tokens."""
    around = [f" a{token}[INST] b {token} c" for token in list(special_tokens)[:MAX_TOKENS]]
    return [*TEXTS, *around]


def find_difference(
    read_first: Callable[[str], list[int]],
    read_second: Callable[[str], list[int]],
    texts: Iterable[str],
) -> ReadingDifference | None:
    """Find the first text that two tokenizers read differently."""
    for text in texts:
        ids = list(read_first(text)), list(read_second(text))
        if ids[0] != ids[1]:
            return ReadingDifference(text, ids)
    return None


def hash_reading(path: Path) -> str | None:
    """Hash how a tokenizer.json reads and writes texts; None where it cannot be loaded.

    Hashed are the ids of texts, and what the decoder makes of these: not how the file spells it,
    which changes when it is saved again, nor what tokenizer_config.json may choose: tokens that are
    special, and those at a text's ends.
    """
    try:
        return _hash_reading(path)
    except BaseException as error:
        # A bare Exception for a file that it cannot read, a panic for a step that fails: who loads
        # the tokenizer says more.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            return None
        raise


def _hash_reading(path: Path) -> str:
    from tokenizers import Tokenizer

    backend: Any = Tokenizer.from_file(str(path))
    digest = hashlib.sha256()
    for text in [*TEXTS, *_join_tokens(backend)]:
        ids = read_plainly(backend, text)
        read = [ids, backend.decode(ids, skip_special_tokens=False)]
        digest.update(json.dumps(read).encode() + b"\n")
    return digest.hexdigest()


def read_plainly(backend: Any, text: str) -> list[int]:
    """Return a text's ids without regard to special and added tokens."""
    normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    splits = backend.pre_tokenizer
    pieces = [normal] if splits is None else [p for p, _ in splits.pre_tokenize_str(normal)]
    return [token.id for piece in pieces for token in backend.model.tokenize(piece)]


def _join_tokens(backend: Any) -> list[str]:
    """List texts of a tokenizer's own tokens, which are merged only where nothing splits them."""
    vocab = backend.get_vocab(with_added_tokens=False)
    longest_tokens = heapq.nlargest(
        NUM_WORDS, vocab.items(), key=lambda item: (len(item[0]), -item[1])
    )
    ids = [number for _, number in longest_tokens]
    ids += range(0, len(vocab), max(1, len(vocab) // NUM_WORDS))
    words = [backend.decode([number], skip_special_tokens=False) for number in ids]
    return [between.join(words) for between in ("", " ", "  ", "\n", "7", ".")]
