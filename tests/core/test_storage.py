"""Tensor files and output folders: bytes, casts, damage, and what a failure leaves after."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import __version__
from specdec.errors import SpecDecError
from specdec.files import casts
from specdec.files.casts import cast
from specdec.files.manifest import FORMAT_VERSION, describe_file, write_manifest
from specdec.files.reading import hash_file, read_json, read_members
from specdec.files.tensor_file import DTYPES, TensorFile, TensorInfo, write_tensor_file

FLOATS = ("float64", "float32", "float16", "bfloat16")


def to_storage(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's bits in the numpy type that stores them."""
    dtype = np.dtype(DTYPES[str(tensor.dtype).removeprefix("torch.")][1])
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    stored: np.ndarray[Any, Any] = raw.view(dtype).reshape(tuple(tensor.shape))
    return stored


def write_torch(path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> str:
    infos = {
        name: TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in tensors.items()
    }
    return write_tensor_file(path, infos, lambda name: to_storage(tensors[name]), metadata)


def make_tensors(*dtypes: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for i, dtype in enumerate(dtypes):
        values = torch.rand(40, generator=generator) * 100
        parts = {"z.matrix": values.reshape(5, 8), "a.vector": values[:3], "m.scalar": values[0]}
        parts["e.empty"] = values[:0].reshape(0, 4)
        for name, part in parts.items():
            tensors[f"{name}.{i}"] = part.clone().to(dtype)
    tensors['größe.\n"quoted"'] = torch.zeros(2, 2, dtype=dtypes[0])
    return tensors


ALL_TYPES = tuple(getattr(torch, name) for name in DTYPES)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.float16,), (torch.bfloat16,), ALL_TYPES[::-1]], ids=str
)
def test_bytes_equal_the_library_s(tmp_path: Path, dtypes: tuple[torch.dtype, ...]) -> None:
    tensors = make_tensors(*dtypes)
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    reordered = dict(sorted(tensors.items(), key=lambda item: hash_text(item[0])))
    digest = write_torch(tmp_path / "ours", reordered, format="pt")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()
    assert digest == hash_file(tmp_path / "ours")
    (tmp_path / "large").write_bytes(b"abc" * 700_000)  # more than is read at a time
    assert hash_file(tmp_path / "large") == hashlib.sha256(b"abc" * 700_000).hexdigest()


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_round_trips_with_the_library(tmp_path: Path) -> None:
    tensors = make_tensors(*ALL_TYPES)
    write_torch(tmp_path / "ours", tensors)
    loaded = load_file(tmp_path / "ours")
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    read = TensorFile(tmp_path / "library")
    assert read.metadata == {"format": "pt"}
    assert set(read.tensors) == set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        expected = to_storage(tensor)
        assert to_storage(loaded[name]).tobytes() == expected.tobytes()
        assert loaded[name].dtype == tensor.dtype
        array = read.read(name)
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
        assert array.tobytes() == expected.tobytes()
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def list_hard_values(dtype: str) -> torch.Tensor:
    """Every 16-bit pattern, or for wider types: ties, limits, subnormals, and their neighbours."""
    torch_type = getattr(torch, dtype)
    if torch_type.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch_type)
    patterns = np.arange(2**16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        halves = patterns.view(np.float16).astype(np.float64)
        brains = (patterns.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        points = [halves, brains]
        # Midpoints between neighbours are the ties; a hair to either side is not.
        for grid in (halves, brains):
            middle = (grid[:-1] + grid[1:]) / 2
            points += [middle, middle * (1 + 2.0**-40), middle * (1 - 2.0**-40)]
        points.append(np.array([1e-320, 5e-324, 1e300, -1e300, 3.4028235677973366e38, 65519.999]))
        values = np.concatenate(points)
        singles = values.astype(np.float32)
        near = [np.nextafter(singles, np.float32(sign * np.inf)) for sign in (-1, 1)]
        if dtype == "float32":
            return torch.from_numpy(np.concatenate([singles, *near]))
        return torch.from_numpy(np.concatenate([values, *(n.astype(np.float64) for n in near)]))


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_cast_is_bit_exact_with_torch(source: str, target: str) -> None:
    values = list_hard_values(source)
    expected = values.to(getattr(torch, target))
    ours = cast(to_storage(values), source, target)
    bits = np.dtype(f"u{ours.dtype.itemsize}")
    is_nan = expected.isnan().numpy()
    assert 0 < is_nan.sum() < is_nan.size / 10
    assert torch.equal(as_torch(ours, target).isnan(), expected.isnan())
    # A NaN stays one; which of its bit patterns differs between torch's own vector and scalar code.
    np.testing.assert_array_equal(
        ours.view(bits)[~is_nan], to_storage(expected).view(bits)[~is_nan]
    )
    for value in (values[:1].reshape(()), values[:0].reshape(3, 0)):
        converted = cast(to_storage(value), source, target)
        assert converted.shape == tuple(value.shape)
        assert converted.dtype == np.dtype(DTYPES[target][1])


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_cast_of_many_is_the_cast_of_each(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks, their last one, and tables in place of arithmetic change nothing."""
    values = to_storage(list_hard_values(source))
    monkeypatch.setattr(casts, "CAST_ITEMS", 1 << 30)
    once = cast(values[: 1 << 16], source, target)
    monkeypatch.setattr(casts, "CAST_ITEMS", 1000)
    many = cast(np.tile(values[: 1 << 16], 3)[:-7], source, target)
    expected = np.tile(once, 3)[:-7]
    bits = f"u{expected.itemsize}"
    np.testing.assert_array_equal(many.view(bits), expected.view(bits))


def as_torch(array: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, dtype))


def test_cast_takes_non_contiguous_arrays_and_refuses_integers() -> None:
    values = torch.arange(12.0).reshape(3, 4) / 7
    ours = cast(values.numpy().T, "float32", "bfloat16")
    np.testing.assert_array_equal(ours, to_storage(values.T.to(torch.bfloat16)))
    with pytest.raises(SpecDecError, match="cannot convert int64 to float32"):
        cast(np.zeros(2, np.int64), "int64", "float32")


# --- damaged files -------------------------------------------------------------------------------


def pack(header: Any, data: bytes = b"", claimed: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if claimed is None else claimed).to_bytes(8, "little") + text + data


def entry(begin: Any, end: Any, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


DAMAGE: list[tuple[str, bytes, str]] = [
    ("empty", b"", "has 0 bytes"),
    ("seven bytes", b"\0" * 7, "has 7 bytes"),
    ("no header", pack(b""), "not JSON"),
    ("header past the end", pack({}, claimed=1000), "claims a header of 1000 bytes"),
    ("absurd header", pack({}, claimed=2**64 - 1), "claims a header of 18446744073709551615"),
    ("not utf-8", pack(b'{"\xff": 1}'), "not JSON"),
    ("not json", pack(b"{"), "not JSON"),
    ("deep", pack(b"[" * 100_000), "not JSON"),
    ("endless number", pack(b'{"a":' + b"9" * 5000 + b"}"), "not JSON"),
    ("list", pack([1]), "not an object"),
    ("twin names", pack(b'{"a": {}, "a": {}}'), "not JSON"),
    ("twin keys", pack(b'{"a": {"dtype": "F32", "dtype": "F16"}}'), "not JSON"),
    ("no entry", pack({"a": 3}), "unreadable entry for 'a'"),
    ("no dtype", pack({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"0" * 4), "unreadable"),
    ("strange dtype", pack({"a": entry(0, 4, dtype="F3")}, b"0" * 4), "'F3', which is not supp"),
    ("list dtype", pack({"a": entry(0, 4, dtype=[])}, b"0" * 4), "unreadable"),
    ("negative offset", pack({"a": entry(-4, 0)}, b"0" * 4), "unreadable"),
    ("negative shape", pack({"a": entry(0, 4, [-1])}, b"0" * 4), "unreadable"),
    ("boolean shape", pack({"a": entry(0, 4, [True])}, b"0" * 4), "unreadable"),
    ("float shape", pack({"a": entry(0, 4, [1.0])}, b"0" * 4), "unreadable"),
    ("three offsets", pack({"a": entry(0, 4) | {"data_offsets": [0, 4, 8]}}), "unreadable"),
    ("text offsets", pack({"a": entry("0", "4")}, b"0" * 4), "unreadable"),
    ("backwards", pack({"a": entry(4, 0)}, b"0" * 4), "gives 'a' -4 bytes"),
    ("wrong size", pack({"a": entry(0, 4, [2])}, b"0" * 4), "4 bytes, its shape [2] needs 8"),
    ("hole", pack({"a": entry(0, 4), "b": entry(8, 12)}, b"0" * 12), "byte 8, expected 4"),
    ("overlap", pack({"a": entry(0, 4), "b": entry(0, 4)}, b"0" * 4), "byte 0, expected 4"),
    ("truncated", pack({"a": entry(0, 4)}, b"0" * 3), "describes 4 bytes of tensors but holds 3"),
    ("trailing", pack({"a": entry(0, 4)}, b"0" * 5), "describes 4 bytes of tensors but holds 5"),
    ("huge empty", pack({"a": entry(0, 0, [0, 2**62, 2**62])}), "unreadable"),
    ("many axes", pack({"a": entry(0, 4, [1] * 65)}, b"0" * 4), "unreadable"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE]
)
def test_damaged_file_is_named_with_its_fault(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(SpecDecError) as caught:
        TensorFile(path)
    assert caught.value.message.startswith(str(path))
    assert message in caught.value.message


# --- JSON and manifests --------------------------------------------------------------------------


def test_manifest_describes_every_file_but_itself(tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text("source")
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)
    (out / "b.bin").write_bytes(b"12345")
    (out / "sub" / "a.txt").write_text("hello")
    for _ in range(2):  # the second time a manifest is there already
        write_manifest(
            out, kind="toy", settings={"n": 1}, sources=[describe_file(source)],
            hashes={"b.bin": "known"}, note="extra",
        )  # fmt: skip
    manifest = read_json(out / "manifest.json")
    assert manifest["outputs"] == [
        {"path": "b.bin", "bytes": 5, "sha256": "known"},
        {"path": "sub/a.txt", "bytes": 5, "sha256": hash_text("hello")},
    ]
    assert manifest["sources"] == [{"path": str(source), "bytes": 6, "sha256": hash_text("source")}]
    assert (manifest["kind"], manifest["note"], manifest["settings"]) == ("toy", "extra", {"n": 1})
    assert manifest["format_version"] == FORMAT_VERSION
    assert (manifest["tool"], manifest["tool_version"]) == ("specdec", __version__)


def test_a_file_that_was_shortened_since_it_was_opened(tmp_path: Path) -> None:
    """To read what is mapped would end the process."""
    path = tmp_path / "x.safetensors"
    tensors = {name: TensorInfo("uint8", (1 << 16,)) for name in ("a", "b")}
    write_tensor_file(path, tensors, lambda name: np.ones(1 << 16, np.uint8))
    file = TensorFile(path)
    os.truncate(path, file.get_offset("b") + 100)
    assert file.read("a").all()
    with pytest.raises(SpecDecError, match=r"x.safetensors ends at byte \d+: it was shortened"):
        file.read("b")


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, {"b": "}"}], "model": {"vocab": {"x": 0}}}', '{\n "model" : {}, "a":null }',
        "{}", '{"b": 1}', '{"b": 1, "c": 2, "a": "\\u00e9"} ',
    ],
)  # fmt: skip
def test_some_members_are_those_of_the_whole(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert read_members(path, ("a", "c")) == {key: read_json(path).get(key) for key in "ac"}


def test_members_behind_the_last_one_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1, "vocabulary": {"x": 0, "x"')
    assert read_members(path, ("a",)) == {"a": 1}
    with pytest.raises(SpecDecError, match="is not JSON"):
        read_members(path, ("b",))
