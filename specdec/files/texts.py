"""A file of tokenized texts that several processes read and add to, such as `--suffix-cache`.

One line of JSON, then the tokens as little-endian int32, each text followed by -1. The file is
replaced as a whole, so that reading needs no lock; adding takes one on the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.reading import Array, open_file, parse_json
from specdec.system.locks import lock_file

FORMAT, VERSION = "specdec texts", 1
END = -1  # of a text
MAX_HEADER_BYTES = 10_000
MAX_TOKENS = 1 << 28  # 1 GiB


def read_texts(path: Path, vocabulary: dict[str, Any], max_tokens: int) -> list[list[int]]:
    """Read the newest texts of a file, at most `max_tokens` in all; none where there is no file.

    vocabulary: what the tokens are of, with `vocab_size`. Raises SpecDecError for a file of another
    vocabulary, or one that is damaged.
    """
    if not path.exists():
        return []
    with open_file(path) as file:
        line = file.readline(MAX_HEADER_BYTES)
        data = file.read(4 * MAX_TOKENS + 1)
    try:
        parsed = parse_json(line)
    except (SpecDecError, ValueError, RecursionError):
        parsed = None
    header = parsed if isinstance(parsed, dict) else {}
    tokens = np.frombuffer(data[: len(data) // 4 * 4], "<i4")
    are_tokens = ((tokens >= END) & (tokens < vocabulary["vocab_size"])).all()
    is_whole = len(data) <= 4 * MAX_TOKENS
    for is_good, fact in (
        (header.get("format") == FORMAT, "is not a file of texts that specdec wrote"),
        (header.get("version") == VERSION,
         f"is of version {header.get('version')}, this is for {VERSION}"),
        (header.get("vocabulary") == vocabulary, "holds texts of another tokenizer or model"),
        (is_whole and hashlib.sha256(data).hexdigest() == header.get("sha256"),
         "is damaged: its checksum is another"),
        (len(data) % 4 == 0 and are_tokens and (not len(tokens) or tokens[-1] == END),
         f"holds {len(data)} bytes that are not texts"),
    ):  # fmt: skip
        if not is_good:
            remedy = "give another name, or remove the file: it only holds earlier texts"
            raise SpecDecError(f"{path} {fact}", remedy)
    return _take_newest(_split(tokens), max_tokens)


def check_writable(path: Path) -> None:
    """Raise SpecDecError where texts could not be added to a file."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise SpecDecError(
            f"{path} cannot be written: {path.parent} is not a folder that can be",
            "check the path and its permissions",
        )


def add_texts(
    path: Path, texts: Sequence[Sequence[int]], vocabulary: dict[str, Any], max_tokens: int
) -> None:
    """Put texts after those of a file, whose oldest leave it beyond `max_tokens`.

    Raises SpecDecError where the file is of another kind or cannot be written.
    """
    try:
        with _hold(path.parent):
            earlier_texts = read_texts(path, vocabulary, max_tokens)
            _replace(path, _take_newest([*earlier_texts, *texts], max_tokens), vocabulary)
    except OSError as error:
        raise SpecDecError(
            f"{path} cannot be written: {error.strerror}", "check the folder and its permissions"
        ) from None


def _split(tokens: Array) -> list[list[int]]:
    ends = np.flatnonzero(tokens == END)
    return [text[:-1].tolist() for text in np.split(tokens, ends + 1)[:-1]]


def _take_newest(texts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return the last texts of at most so many tokens, ends counted; of a longer one, its end."""
    newest_texts: list[list[int]] = []
    room = max_tokens
    for text in reversed(texts):
        if newest_texts and len(text) + 1 > room:
            break
        newest_texts.append(list(text[max(0, len(text) - room + 1) :]))
        room -= len(newest_texts[-1]) + 1
    return newest_texts[::-1]


def _replace(path: Path, texts: Sequence[Sequence[int]], vocabulary: dict[str, Any]) -> None:
    data = np.array([t for text in texts for t in (*text, END)], "<i4").tobytes()
    header = {
        "format": FORMAT, "version": VERSION, "vocabulary": vocabulary,
        "sha256": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip
    # Only its owner may read it, as `mkstemp` makes it: the texts are what people asked.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(header).encode() + b"\n" + data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _hold(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock_file(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
