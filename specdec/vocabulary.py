"""What a model's token ids mean, told by a hash, so that two models can be compared later."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError
from specdec.files.reading import read_json

KEY = "vocabulary"  # of a manifest
SPACE = "\u2581"  # what a SentencePiece tokenizer writes for a space
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # and for a byte of what it has no token for


def read_vocabulary(folder: Path) -> dict[str, Any] | None:
    """Return number and hash of the tokens of a Hugging Face folder's tokenizer, None without one.

    Hashed are the pairs of token and id, added tokens included: not the size of the model's tables,
    which padding changes, and not how text is split. The files of a tokenizer are read in the
    order in which transformers prefers them.
    """
    tokens: dict[str, int] = {}
    try:
        if (folder / "tokenizer.json").is_file():
            document = read_json(folder / "tokenizer.json")
            tokens = _list_tokens(document["model"]["vocab"])
            tokens |= {entry["content"]: entry["id"] for entry in document["added_tokens"]}
        elif (folder / "vocab.json").is_file():
            tokens = dict(read_json(folder / "vocab.json"))
            if (folder / "added_tokens.json").is_file():
                tokens |= read_json(folder / "added_tokens.json")
        if not all(type(number) is int for number in tokens.values()):
            return None
    except (SpecDecError, KeyError, TypeError, ValueError):
        return None  # of another kind; what cannot be read says nothing
    if not tokens:
        return None
    pairs = sorted((number, token) for token, number in tokens.items())
    text = json.dumps(pairs, ensure_ascii=True, separators=(",", ":"))
    return {"num_tokens": len(tokens), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _list_tokens(vocab: Any) -> dict[str, int]:
    """Token -> id of a tokenizer.json: an object, or of Unigram models a list of [token, score]."""
    if isinstance(vocab, dict):
        return dict(vocab)
    return {entry[0]: number for number, entry in enumerate(vocab)}


def read_recorded(folder: Path) -> dict[str, Any] | None:
    """Return the vocabulary that the manifest of a checkpoint or engine folder records."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    recorded = read_json(path).get(KEY)
    return recorded if isinstance(recorded, dict) else None


def read_piece(piece: str, letters: Mapping[str, int] | None) -> bytes:
    """The bytes that a token stands for, which may be a part of a character.

    letters: of `list_byte_letters` for byte-level BPE; None for SentencePiece's way of writing.
    """
    if letters is not None and all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    if letters is None and (found := BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(found[1], 16)])
    text = piece if letters is not None else piece.replace(SPACE, " ")
    return text.encode("utf-8", "surrogatepass")


@functools.cache
def list_byte_letters() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte, with that byte.

    GPT-2's table: printable bytes are themselves, the others follow from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + at): byte for at, byte in enumerate(others)
    }
