"""Hashes of what a model's token ids mean and how text is read, to compare two models later."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError
from specdec.files.reading import hash_file, read_json
from specdec.files.text_reading import hash_reading

KEY = "vocabulary"  # of a manifest
TOKEN_KEYS = ("num_tokens", "sha256")  # what token ids mean
READING_KEY = "reading_sha256"  # how text becomes ids; manifests of older versions have none
FILE_KEY = "tokenizer_sha256"  # of tokenizer.json, where there is one: equal files need no reading
SPACE = "\u2581"  # what a SentencePiece tokenizer writes for a space
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # and for a byte of what it has no token for


def read_vocabulary(folder: Path) -> dict[str, Any] | None:
    """Return number and hashes of the tokens of a folder's tokenizer, None without one.

    Hashed are the pairs of token and id, added tokens included: not the size of the model's tables,
    which padding changes. How a tokenizer.json reads text has a hash of its own, and so has the
    file. The files of a tokenizer are read in the order in which transformers prefers them.
    """
    tokens: dict[str, int] = {}
    file_hashes: dict[str, str] = {}
    try:
        if (folder / "tokenizer.json").is_file():
            document = read_json(folder / "tokenizer.json")
            tokens = _list_tokens(document["model"]["vocab"])
            tokens |= {entry["content"]: entry["id"] for entry in document["added_tokens"]}
            file_hashes = _hash_tokenizer(folder / "tokenizer.json")
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
    token_hash = hashlib.sha256(text.encode()).hexdigest()
    return {"num_tokens": len(tokens), "sha256": token_hash, **file_hashes}


def _hash_tokenizer(path: Path) -> dict[str, str]:
    """Return the hashes of a tokenizer.json: of its bytes, and of how it reads text if it can."""
    reading = hash_reading(path)
    hashes = {} if reading is None else {READING_KEY: reading}
    return {**hashes, FILE_KEY: hash_file(path)}


def has_recorded_file(folder: Path, vocabulary: Mapping[str, Any]) -> bool:
    """Return whether a folder has the tokenizer.json of a vocabulary, which says all of it."""
    path = folder / "tokenizer.json"
    return FILE_KEY in vocabulary and path.is_file() and hash_file(path) == vocabulary[FILE_KEY]


def list_differences(
    first_vocabulary: Mapping[str, Any], second_vocabulary: Mapping[str, Any]
) -> list[str]:
    """List the keys by which two vocabularies differ, of those that both have."""
    keys = (*TOKEN_KEYS, READING_KEY)
    return [
        key
        for key in keys
        if key in first_vocabulary
        and key in second_vocabulary
        and first_vocabulary[key] != second_vocabulary[key]
    ]


def has_same_tokens(
    first_vocabulary: Mapping[str, Any], second_vocabulary: Mapping[str, Any]
) -> bool:
    """Return whether token ids mean the same in two vocabularies, however text becomes ids."""
    return not set(list_differences(first_vocabulary, second_vocabulary)) & set(TOKEN_KEYS)


def keep_tokens(vocabulary: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a vocabulary says of its token ids, for what is given and kept as ids."""
    return {key: value for key, value in (vocabulary or {}).items() if key in TOKEN_KEYS}


def _list_tokens(vocab: Any) -> dict[str, int]:
    """Map tokens to ids: a tokenizer.json's object, or a Unigram model's list of [token, score]."""
    if isinstance(vocab, dict):
        return dict(vocab)
    return {entry[0]: number for number, entry in enumerate(vocab)}


def read_recorded(folder: Path) -> dict[str, Any] | None:
    """Return the vocabulary that the manifest of a checkpoint or engine folder records."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    vocabulary = read_json(path).get(KEY)
    return vocabulary if isinstance(vocabulary, dict) else None


def read_piece(piece: str, letters: Mapping[str, int] | None) -> bytes:
    """Return the bytes that a token stands for, which may be a part of a character.

    letters: of `list_byte_letters` for byte-level BPE; None for SentencePiece's way of writing.
    """
    if letters is not None and all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    if letters is None and (byte_match := BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(byte_match[1], 16)])
    text = piece if letters is not None else piece.replace(SPACE, " ")
    return text.encode("utf-8", "surrogatepass")


@functools.cache
def list_byte_letters() -> dict[str, int]:
    """Return each letter of byte-level BPE with the byte that it stands for.

    GPT-2's table: printable bytes are themselves, the others follow from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(unprintable)
    }
