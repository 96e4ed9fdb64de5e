"""Opening and reading files that may be damaged, hostile or in flux."""

from __future__ import annotations

import codecs
import collections
import contextlib
import contextvars
import hashlib
import json
import math
import os
import re
import stat
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from specdec.errors import SpecDecError, shorten
from specdec.system.memory import pause_collection

Array = npt.NDArray[Any]
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_JSON_BYTES = 100_000_000
MAX_JSON_DEPTH = 100  # what can be printed and written again from anywhere
MAX_JSON_DIGITS = 300  # of a whole number, so that a float can hold it


# A file's size and time of last change, by which it is noticed that another process changes it.
FileStates = dict[Path, tuple[int, int]]
_noted_states = contextvars.ContextVar[FileStates | None]("noted_states", default=None)


@contextlib.contextmanager
def note_states() -> Iterator[FileStates]:
    """Note the state of every file that the body opens, as it is when it is opened first."""
    states: FileStates = {}
    token = _noted_states.set(states)
    try:
        yield states
    finally:
        _noted_states.reset(token)


def describe_state(status: os.stat_result) -> tuple[int, int]:
    """Return what `FileStates` holds of a file."""
    return status.st_size, status.st_mtime_ns


def check_states(states: FileStates) -> None:
    """Raise SpecDecError for a file that is no longer in the state in which it was opened."""
    for path, state in states.items():
        if not path.exists() or describe_state(path.stat()) != state:
            raise SpecDecError(
                f"{path} was changed while it was read",
                "let nothing write to the file, and run it again",
            )


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading; raise SpecDecError where it is absent, unreadable or not a file."""
    try:
        # A pipe would keep us waiting for a writer; opened like this, it is seen for what it is.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise SpecDecError(
                f"{path} does not exist: it is a link to {path.readlink()}, and no file is there",
                "download or copy the file itself again: a link of the Hub's cache leads to it in"
                " the cache alone",
            ) from None
        raise SpecDecError(
            f"{path} does not exist", f"check that {path.parent} is the folder you mean"
        ) from None
    except OSError as error:
        raise SpecDecError(
            f"{path} cannot be read: {error.strerror}", "check the path and its permissions"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SpecDecError(
            f"{path} is a folder, pipe or device, not a file", "put the file itself in its place"
        )
    if os.pread(descriptor, len(LFS_POINTER), 0) == LFS_POINTER:
        os.close(descriptor)
        raise SpecDecError(
            f"{path} is a pointer of Git LFS in the place of the file",
            "run `git lfs pull` in its folder, or download the file itself",
        )
    if (states := _noted_states.get()) is not None:
        states.setdefault(path, describe_state(os.fstat(descriptor)))
    return os.fdopen(descriptor, "rb")


def read_into(descriptor: int, array: Array, offset: int, path: Path) -> None:
    """Fill an array with a file's bytes from an offset on; raise SpecDecError if it ends before."""
    view = array.reshape(-1).view(np.uint8).data
    while view:
        num_bytes = os.preadv(descriptor, [view], offset)
        if num_bytes == 0:
            check_length(descriptor, offset + len(view), path)
        view, offset = view[num_bytes:], offset + num_bytes


def check_length(descriptor: int, num_bytes: int, path: Path) -> None:
    """Raise SpecDecError where a file that was opened has become shorter than this."""
    if (size := os.fstat(descriptor).st_size) < num_bytes:
        raise SpecDecError(
            f"{path} ends at byte {size}: it was shortened while it was read",
            "let nothing write to the file, and run it again",
        )


def is_inside(name: str) -> bool:
    """Return whether a name stays in its folder; a file that is a link is the user's own doing."""
    path = PurePosixPath(name)
    return (
        bool(name) and not path.is_absolute() and ".." not in path.parts
        and "\\" not in name and "\0" not in name
    )  # fmt: skip


def hash_file(path: Path, is_ending: threading.Event | None = None) -> str:
    """Return the sha256 of a file, or anything once `is_ending` is set: nobody asks any more."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            if is_ending is not None and is_ending.is_set():
                break
            digest.update(chunk)
    return digest.hexdigest()


def parse_json(data: bytes) -> Any:
    """Read JSON that others can read too; raise ValueError that says what is wrong with it.

    Beyond Python's own reader, what would be lost, or fail later, is refused: a key given twice, a
    number that is none or has no end, half of a character.
    """
    if data.startswith(codecs.BOM_UTF8):
        raise ValueError("it begins with a byte order mark")
    try:
        document = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_refuse_twins,
            parse_int=_parse_int if _LONG_NUMBER in data.translate(_DIGITS_AS_ZEROS) else None,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
        )
        if _may_have_half(data):
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("half of a character, an escape between \\ud800 and \\udfff") from None
    except RecursionError:
        raise ValueError("values nested too deeply") from None
    return document


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; a key given twice is an error, not the last one's victory."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        twin = counts.most_common(1)[0][0]
        raise ValueError(f"the key {shorten(twin)} is given twice")
    return entries


# A vocabulary has millions of bytes, which methods of bytes search many times as fast as patterns.
_LONG_NUMBER = b"0" * (MAX_JSON_DIGITS + 1)
_DIGITS_AS_ZEROS = bytes(48 if byte in b"0123456789" else 0 for byte in range(256))
_PAIR = re.compile(rb"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")  # two escapes, one character


def _may_have_half(data: bytes) -> bool:
    """Return whether escapes of JSON stand for halves of characters besides whole ones."""
    escapes = data.replace(b"\\\\", b"__").lower()  # without escaped backslashes
    return b"\\ud" in escapes and b"\\ud" in _PAIR.sub(b"", escapes)


def _parse_int(text: str) -> int:
    if len(text) > MAX_JSON_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {shorten(text)} is too large")
    return number


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _check_depth(document: Any) -> None:
    level, depth = [document] if isinstance(document, (dict, list)) else [], 0
    while level:
        if (depth := depth + 1) > MAX_JSON_DEPTH:
            raise ValueError(f"values nested more than {MAX_JSON_DEPTH} deep")
        items = [item.values() if isinstance(item, dict) else item for item in level]
        level = [child for item in items for child in item if isinstance(child, (dict, list))]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise an error that names the file."""
    try:
        with pause_collection():  # a vocabulary takes half the time without
            document = parse_json(_read_bytes(path))
        _check_depth(document)
    except ValueError as error:
        raise SpecDecError(f"{path} is not JSON: {error}", "correct or replace the file") from None
    if not isinstance(document, dict):
        raise SpecDecError(f"{path} holds no JSON object", "correct or replace the file")
    return document


def _read_bytes(path: Path) -> bytes:
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_JSON_BYTES:
            fact = f"{path} has {size} bytes, more than the {MAX_JSON_BYTES} that are read"
            raise SpecDecError(fact, "correct or replace the file")
        return file.read()


def read_members(path: Path, keys: Collection[str]) -> dict[str, Any]:
    """Read some members of a JSON object; None for those that it lacks.

    Members after the last of them are not looked at: a tokenizer.json ends with a vocabulary,
    whose hundred thousands of objects take longer than all else that is read to load a model.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_refuse_twins, parse_constant=_refuse_constant)
    members: dict[str, Any] = {}
    try:
        text = _read_bytes(path).decode("utf-8")
        position = _pass_mark(text, 0, "{")
        while not members.keys() >= {*keys}:
            key, position = decoder.raw_decode(text, position)
            members[key], position = decoder.raw_decode(text, _pass_mark(text, position, ":"))
            position = _pass_mark(text, position, ",")
    except (ValueError, RecursionError):  # such as where the object ends, or what is no JSON
        members = read_json(path)
    return {key: members.get(key) for key in keys}


def _pass_mark(text: str, position: int, mark: str) -> int:
    """Return the place after a mark and the spaces around it; ValueError where it is not there."""
    position = _pass_spaces(text, position)
    if not text.startswith(mark, position):
        raise ValueError(f"Expecting {mark!r} at character {position}")
    return _pass_spaces(text, position + 1)


def _pass_spaces(text: str, position: int) -> int:
    while text.startswith((" ", "\t", "\n", "\r"), position):
        position += 1
    return position


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object with a stable layout."""
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
