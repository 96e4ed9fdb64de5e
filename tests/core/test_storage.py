"""Tensor files and output folders: bytes, casts, damage, and what a failure leaves after."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import __version__
from specdec.errors import SpecDecError
from specdec.files import casts, staging
from specdec.files.casts import cast
from specdec.files.manifest import FORMAT_VERSION, JOURNAL_NAME, describe_file, write_manifest
from specdec.files.reading import hash_file, read_json, read_members
from specdec.files.staging import check_output_dir, place_file, stage_folder
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


# --- output folders ------------------------------------------------------------------------------


@contextlib.contextmanager
def refused(match: str, hint: str = "") -> Iterator[None]:
    with pytest.raises(SpecDecError, match=match) as caught:
        yield
    assert hint in caught.value.hint


def write_own(folder: Path, text: str, name: str = "x") -> None:
    """Write an output with a manifest, as specdec's are."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    write_manifest(folder, kind="toy", settings={}, sources=[])


def list_tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_everything_is_on_the_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    synced = []

    def note(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.relative_to(tmp_path).as_posix(), out.exists()))

    if not Path("/proc/self/fd").exists():
        pytest.skip("tells the name of an open file on Linux alone")
    with stage_folder(out, force=False) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "x").write_text("new")
        (partial / JOURNAL_NAME).write_text("")
        monkeypatch.setattr(os, "fsync", note)
    assert sorted(synced[:-1]) == [
        (".out.partial", False), (".out.partial/sub", False), (".out.partial/sub/x", False),
    ]  # fmt: skip
    assert synced[-1] == (".", True)
    assert list_tree(out) == ["sub", "sub/x"]


def test_resume_finds_and_keeps_what_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def fail() -> None:
        with stage_folder(out, force=False, resume=True) as partial:
            (partial / "x").write_text("half")
            raise SpecDecError("no", "yes")

    with pytest.raises(SpecDecError):
        fail()
    assert list_tree(tmp_path) == [".out.partial", ".out.partial/x"]
    with stage_folder(out, force=False, resume=True) as partial:
        assert list_tree(partial) == ["x"]
    assert list_tree(tmp_path) == ["out", "out/x"]


@pytest.mark.parametrize("error", [SpecDecError("no", "yes"), KeyboardInterrupt(), OSError(5, "x")])
def test_failure_leaves_the_old_output(tmp_path: Path, error: BaseException) -> None:
    out = tmp_path / "out"
    write_own(out, "old")

    def work() -> None:
        with stage_folder(out, force=True) as partial:
            (partial / "x").write_text("half")
            raise error

    with pytest.raises(type(error)):
        work()
    assert list_tree(tmp_path) == ["out", "out/manifest.json", "out/x"]
    assert (out / "x").read_text() == "old"


def test_force_replaces_everything(tmp_path: Path) -> None:
    """An empty folder needs none, and a file is never replaced."""
    out = tmp_path / "out"
    out.mkdir()
    with stage_folder(out, force=True) as partial:
        write_own(partial, "old", "stale")
    with refused("exists and is not empty", "--force"), stage_folder(out, force=False):
        pytest.fail("entered")
    with stage_folder(out, force=True) as partial:
        (partial / "x").write_text("new")
        assert list_tree(out) == ["manifest.json", "stale"]
    assert list_tree(tmp_path) == ["out", "out/x"]
    with refused("x is a file"):
        check_output_dir(out / "x", force=True)


def test_an_output_that_no_rename_can_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume of a container, a folder after a file, a disk that is read-only."""
    (tmp_path / "file").touch()
    with refused("cannot be written: .*/file is a file"):
        check_output_dir(tmp_path / "file" / "out", force=True)
    with refused("/proc is a mount point", "name a folder in it, such as /proc/output"):
        check_output_dir(Path("/proc"), force=True)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with refused(f"cannot be written: {tmp_path} is read-only"):
        check_output_dir(tmp_path / "new" / "out", force=False)


def test_inputs_and_current_folder_are_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "models" / "llama"
    model.mkdir(parents=True)
    for out in (model, tmp_path / "models", tmp_path / "x" / ".." / "models"):
        with refused("which it would replace"):
            check_output_dir(out, force=True, inputs=[model])
    check_output_dir(model / "engine", force=True, inputs=[model])
    monkeypatch.chdir(model)
    for out in (Path("."), Path("..")):
        with refused("which it would replace"):
            check_output_dir(out, force=True)


def test_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with stage_folder(tmp_path / "out", force=False) as partial:
        (partial / "x").write_text("new")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "x").read_text() == "new"


def test_second_writer_is_refused(tmp_path: Path) -> None:
    """Until what is to be done beside the finished output is done, too."""
    out = tmp_path / "out"

    def finish() -> None:
        assert (out / "x").is_file()
        with refused("another process is writing"), stage_folder(out, force=True):
            pytest.fail("entered")

    with stage_folder(out, force=False, finish=finish) as partial:
        write_own(partial, "first")
        with refused("another process is writing"), stage_folder(out, force=True):
            pytest.fail("entered")
    assert (out / "x").read_text() == "first"
    with stage_folder(out, force=True) as partial:
        (partial / "x").write_text("second")
    assert (out / "x").read_text() == "second"


def test_finished_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may finish the same output until we hold the lock."""
    out = tmp_path / "out"
    original = staging.hold_lock

    def finish_first(path: Path) -> Any:
        out.mkdir()
        (out / "x").write_text("theirs")
        return original(path)

    monkeypatch.setattr(staging, "hold_lock", finish_first)
    with refused("exists and is not empty"), stage_folder(out, force=False):
        pytest.fail("entered")
    assert (out / "x").read_text() == "theirs"


def make_newcomer(out: Path, is_folder: bool) -> None:
    if is_folder:
        out.mkdir()
    (out / "x" if is_folder else out).write_text("theirs")


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("moment", ["amid the work", "before the renaming"])
@pytest.mark.parametrize("resume", [True, False])
def test_what_appears_meanwhile_stays(
    moment: str, is_folder: bool, resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    kept = out / "x" if is_folder else out
    if moment == "before the renaming":
        monkeypatch.setattr(staging, "_sync_tree", lambda folder: make_newcomer(out, is_folder))

    def work(*, force: bool) -> None:
        with stage_folder(out, force=force, resume=resume) as partial:
            (partial / "y").write_text("ours")
            (partial / JOURNAL_NAME).write_text("")
            if moment == "amid the work":
                make_newcomer(out, is_folder)

    with pytest.raises(SpecDecError, match="it has been made since"):
        work(force=False)
    assert kept.read_text() == "theirs"
    assert (tmp_path / ".out.partial" / "y").exists() == resume
    if resume and moment == "amid the work":
        assert (tmp_path / ".out.partial" / JOURNAL_NAME).exists(), "can be gone on with"
    shutil.rmtree(out) if is_folder else out.unlink()
    with pytest.raises(SpecDecError, match="it has been made since"):
        work(force=True)
    assert kept.read_text() == "theirs"


def test_a_file_takes_its_name_from_none_but_with_force(tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / "partial"
    partial.write_text("ours")
    place_file(partial, out, force=False)
    assert out.read_text() == "ours"
    partial.write_text("later")
    with pytest.raises(SpecDecError, match="it has been made since"):
        place_file(partial, out, force=False)
    assert (out.read_text(), partial.read_text()) == ("ours", "later")
    place_file(partial, out, force=True)
    assert out.read_text() == "later"
    assert list_tree(tmp_path) == ["out"]


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("case", ["a project", "another tool's manifest", "a damaged one", "notes"])
def test_force_replaces_only_what_specdec_wrote(case: str, force: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_own(out, "old")
    if case == "a project":
        (out / "manifest.json").unlink()
    elif case == "another tool's manifest":
        (out / "manifest.json").write_text('{"outputs": [{"path": "x", "bytes": 3}]}')
    elif case == "a damaged one":
        (out / "manifest.json").write_text('{"tool": "specdec", "outputs": [')
    else:
        (out / "sub").mkdir()
        (out / "sub" / "notes.txt").touch()
    before = list_tree(tmp_path)
    fact = "specdec did not write: sub/notes.txt" if case == "notes" else "no manifest.json in it"
    expected = refused(f"out is not replaced: .*{fact}", "move away what is there") if force else (
        refused("out exists and is not empty", "choose another folder"))  # fmt: skip
    with expected, stage_folder(out, force=force):
        pytest.fail("entered")
    assert list_tree(tmp_path) == before


def test_files_that_were_added_meanwhile_are_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_own(out, "old")
    with refused("it has been made since"), stage_folder(out, force=True) as partial:
        (partial / "x").write_text("new")
        (out / "notes.txt").touch()
    assert list_tree(tmp_path) == ["out", "out/manifest.json", "out/notes.txt", "out/x"]


@pytest.mark.parametrize("left", [".out.old", ".out.old.removed"])
def test_what_is_left_of_a_replaced_output_goes(left: str, tmp_path: Path) -> None:
    """A kill between the placing of the new one and the end of the old one's removal."""
    out = tmp_path / "out"
    write_own(out, "new")
    write_own(tmp_path / left, "old")
    with stage_folder(out, force=True) as partial:
        write_own(partial, "newer")
        assert not (tmp_path / left).exists()
    assert list_tree(tmp_path) == ["out", "out/manifest.json", "out/x"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_backup_that_is_not_ours_stays(is_there: bool, tmp_path: Path) -> None:
    """Such as ~/.config.old, beside the output ~/config."""
    if is_there:
        write_own(tmp_path / "config", "ours")
    (tmp_path / ".config.old").mkdir()
    (tmp_path / ".config.old" / "settings").write_text("theirs")
    before = list_tree(tmp_path)
    with refused(".config.old has the name that .*/config gets while", "move it away"):
        with stage_folder(tmp_path / "config", force=True):
            pytest.fail("entered")
    assert list_tree(tmp_path) == before


def die_while_writing(out: Path) -> None:
    with stage_folder(out, force=True) as partial:
        (partial / "junk").write_text("half")
        os._exit(9)


def die_between_renames(out: Path) -> None:
    with stage_folder(out, force=True) as partial:
        (partial / "x").write_text("new")
        out.rename(out.parent / ".out.old")
        os._exit(9)


@pytest.mark.thorough
@pytest.mark.parametrize("die", [die_while_writing, die_between_renames])
def test_what_a_killed_process_left(die: Callable[[Path], None], tmp_path: Path) -> None:
    """Half of an output is removed; what was there before comes back."""
    out = tmp_path / "out"
    if die is die_between_renames:
        write_own(out, "old")
    process = multiprocessing.get_context("spawn").Process(target=die, args=(out,))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert not out.exists()
    assert any("partial" in name for name in list_tree(tmp_path))
    if die is die_between_renames:
        with refused("exists and is not empty"), stage_folder(out, force=False):
            pytest.fail("entered")
        assert (out / "x").read_text() == "old"
    else:
        with stage_folder(out, force=False) as partial:
            (partial / "x").write_text("new")
        assert list_tree(tmp_path) == ["out", "out/x"]


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
