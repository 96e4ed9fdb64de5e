"""Damaged files, thousands of them: read as they are, or refused; nothing else happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from specdec.convert.hf import HfFolder
from specdec.files.reading import read_json
from specdec.files.tensor_file import FOREIGN_BITS, TensorFile, TensorInfo, write_tensor_file
from tests.convert.fuzzing import attempt, fuzz

FUZZ = fuzz(700)
NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 8, 12, 2**31, 2**63, 2**64, 10**30, -1]) | st.integers()
TENSORS = {
    "a.weight": ("float32", (2, 3)), "b.weight": ("bfloat16", (4,)), "c": ("uint8", (5, 1)),
    "d": ("float32", ()), "empty": ("float16", (0, 7)), "größe": ("float8_e4m3fn", (3,)),
}  # fmt: skip


def make_file(path: Path) -> bytes:
    """Write a good file and return its bytes."""
    infos = {name: TensorInfo(dtype, shape) for name, (dtype, shape) in TENSORS.items()}
    storage = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
    arrays = {n: np.ones(s, storage.get(d, np.uint8)) for n, (d, s) in TENSORS.items()}
    write_tensor_file(path, infos, arrays.__getitem__, {"format": "pt"})
    return path.read_bytes()


def check_file(path: Path, content: bytes) -> bool:
    """Write and read a file; what we take, the format's own library must take and read alike."""
    path.write_bytes(content)
    file, error = attempt(lambda: TensorFile(path))
    if file is None:
        assert error is not None
        assert error.message.startswith(str(path))
        return False
    assert sum(info.num_bytes for info in file.tensors.values()) <= len(content)
    if any(info.dtype in FOREIGN_BITS for info in file.tensors.values()):
        return True  # the library knows each of them since a version of its own
    with safe_open(path, "numpy") as library:
        assert set(library.keys()) == set(file.tensors)
        for name, info in file.tensors.items():
            assert tuple(library.get_slice(name).get_shape()) == info.shape
            assert file.read(name).shape == info.shape
    return True


@st.composite
def damage(draw: st.DrawFn, good: bytes) -> bytes:
    """Bytes flipped, cut off, moved about, added; or a number of the header changed."""
    content = bytearray(good)
    size = 8 + int.from_bytes(good[:8], "little")
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["flip", "flip", "cut", "splice", "insert", "length"]))
        place = draw(st.integers(0, max(0, min(size, len(content)) - 1)))
        if kind == "flip" and content:
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del content[draw(st.integers(0, len(content))) :]
        elif kind == "splice":
            start = draw(st.integers(0, len(content)))
            part = content[start : start + draw(st.integers(0, 40))]
            content[place : place + draw(st.integers(0, 40))] = part
        elif kind == "insert":
            content[place:place] = draw(st.binary(max_size=8))
        else:
            content[:8] = (draw(NUMBERS) % 2**64).to_bytes(8, "little")
    return bytes(content)


@FUZZ
@given(st.data())
def test_damaged_tensor_files(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x.safetensors"
    check_file(path, data.draw(damage(make_file(path))))


VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=5)
    | st.sampled_from(["F32", "F4", "F8_E5M2", "I64", "F3", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), inner, max_size=3)
    ),
    max_leaves=5,
)  # fmt: skip


@st.composite
def change_header(draw: st.DrawFn, good: bytes) -> bytes:
    """A header with entries changed, dropped or added, before the same bytes."""
    size = int.from_bytes(good[:8], "little")
    header: dict[str, Any] = json.loads(good[8 : 8 + size])
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*TENSORS, "__metadata__", "new"]))
        kind = draw(st.sampled_from(["drop", "replace", "key", "number", "number", "number"]))
        entry = header.get(name)
        if kind == "drop":
            header.pop(name, None)
        elif kind == "replace" or not isinstance(entry, dict):
            header[name] = draw(VALUES)
        elif kind == "key":
            entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "x"]))] = draw(VALUES)
        else:
            numbers = entry.get(draw(st.sampled_from(["shape", "data_offsets"])))
            if isinstance(numbers, list) and numbers:
                numbers[draw(st.integers(0, len(numbers) - 1))] = draw(NUMBERS)
    text = json.dumps(header).encode()
    tail = good[8 + size :] + bytes(draw(st.integers(0, 9)))
    return len(text).to_bytes(8, "little") + text + tail


@FUZZ
@given(st.data())
def test_headers_that_lie(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x.safetensors"
    check_file(path, data.draw(change_header(make_file(path))))


def test_the_checks_see_good_and_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    good = make_file(path)
    assert check_file(path, good)
    assert not check_file(path, good[:-1])
    with pytest.raises(SafetensorError):
        safe_open(path, "numpy")


@FUZZ
@given(
    st.binary(max_size=60)
    | st.text(alphabet='{}[]":,0eE+-.Nafdu8\\', max_size=40)
    | st.dictionaries(st.text(max_size=3), VALUES, max_size=3).map(json.dumps)
)
def test_json_of_any_kind(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    document, error = attempt(lambda: read_json(path))
    assert error is None or error.message.startswith(str(path))
    json.dumps(document, allow_nan=False, ensure_ascii=False).encode()


def place_where_they_are(way: str) -> dict[str, Any]:
    """The index of the files below, each under a path of this form."""
    return {"weight_map": {n: way.format("ab"[i % 2]) for i, n in enumerate(TENSORS)}}


WAYS = ["{}.safetensors", "{}.safetensors", "../{}.safetensors", "sub/../{}.safetensors",
        "../model/{}.safetensors"]  # fmt: skip


FILENAMES = st.sampled_from(
    ["a.safetensors", "b.safetensors", "c.safetensors", "../a.safetensors", "/etc/passwd",
     "a.safetensors/x", "sub/../a.safetensors", "x" * 300 + ".safetensors", "\0", "", ".", "a.bin",
     "config.json", "a\\b", "\ud800", "CON", "a.safetensors "],
) | st.text(max_size=8)  # fmt: skip


INDEXES = st.one_of(
    VALUES,
    st.sampled_from(WAYS).map(place_where_they_are),
    st.fixed_dictionaries(
        {
            "weight_map": st.dictionaries(
                st.sampled_from(list(TENSORS)) | st.text(max_size=5), FILENAMES | VALUES, max_size=8
            )
        },
        optional={"metadata": VALUES},
    ),
)


def test_indexes_of_any_kind(tmp_path: Path) -> None:
    path = tmp_path / "model"
    (path / "sub").mkdir(parents=True)
    for part in ("a", "b"):
        names = list(TENSORS)["ab".index(part) :: 2]
        infos = {name: TensorInfo("uint8", (1,)) for name in names}
        for folder in (path, tmp_path):  # so that a way out of the folder leads somewhere
            file = folder / f"{part}.safetensors"
            write_tensor_file(file, infos, lambda _: np.ones(1, np.uint8))
    (path / "config.json").write_text("{}")
    num_read = 0

    @fuzz(400)
    @given(INDEXES)
    def check(index: Any) -> None:
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        folder, _ = attempt(lambda: HfFolder(path))
        if folder is not None:
            assert set(folder.tensors) == set(index["weight_map"])
            assert all(file.parent == path for file in folder.files)
            nonlocal num_read
            num_read += 1

    check()
    assert num_read > 10, "good indexes are among the examples"
