"""Weights that torch.save wrote: read as weights alone, in every form that torch gives them."""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.convert.hf import HfFolder
from specdec.convert.torch_file import TorchFile
from specdec.errors import SpecDecError
from specdec.files.tensor_file import DTYPES
from tests.conftest import make_llama
from tests.convert.conftest import Converter

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
BIN = "pytorch_model.bin"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_llama(tmp_path)


@pytest.fixture
def expected(model: Path, convert: Converter) -> bytes:
    """What the model's conversion from safetensors gives."""
    return read_rank(convert(model_dir=model))


def read_rank(folder: Path) -> bytes:
    return (folder / "rank0.safetensors").read_bytes()


def take_state(model: Path) -> dict[str, torch.Tensor]:
    """Read the weights and remove the file that holds them."""
    state = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    return state


def use_strides(state: dict[str, torch.Tensor]) -> None:
    """Store tensors as trainers may: transposed, in steps, as parts of others, as parameters."""
    state[Q_PROJ] = state[Q_PROJ].T.contiguous().T
    wide = torch.zeros(64, 128)
    wide[:, ::2] = state["model.layers.1.self_attn.q_proj.weight"]
    state["model.layers.1.self_attn.q_proj.weight"] = wide[:, ::2]
    both = torch.cat([state["model.layers.0.mlp.gate_proj.weight"],
                      state["model.layers.0.mlp.up_proj.weight"]])  # fmt: skip
    state["model.layers.0.mlp.gate_proj.weight"] = both[:112]
    state["model.layers.0.mlp.up_proj.weight"] = both[112:]
    state["model.norm.weight"] = torch.nn.Parameter(state["model.norm.weight"])


@pytest.mark.parametrize("is_old", [False, True])
def test_a_target_in_one_file(
    is_old: bool, model: Path, expected: bytes, convert: Converter, log: pytest.LogCaptureFixture
) -> None:
    state = take_state(model)
    use_strides(state)
    # A buffer of whole numbers that older Llamas carry is no weight.
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(8)
    torch.save(state, model / BIN, _use_new_zipfile_serialization=not is_old)
    assert not TorchFile(model / BIN).read(Q_PROJ).flags.c_contiguous
    size = (model / BIN).stat().st_size / 1e6
    assert (f"all of its {size:.1f} MB go into memory" in log.text) == is_old
    assert read_rank(convert(model_dir=model, force=True, tp_size=1)) == expected
    sources = json.loads((convert.output / "manifest.json").read_text())["sources"]
    assert [Path(source["path"]).name for source in sources] == ["config.json", BIN]


def test_a_tied_target(tmp_path: Path, convert: Converter) -> None:
    model = make_llama(tmp_path, tied=True)
    expected = read_rank(convert(model_dir=model))
    state = take_state(model)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]  # one storage, as torch ties
    torch.save(state, model / BIN)
    assert read_rank(convert(model_dir=model, force=True)) == expected


def test_a_target_in_shards(model: Path, expected: bytes, convert: Converter) -> None:
    state = take_state(model)
    weight_map: dict[str, str] = {}
    for number in (1, 2):
        part = {name: state[name] for name in sorted(state)[number - 1 :: 2]}
        filename = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save(part, model / filename)
        weight_map |= dict.fromkeys(part, filename)
    index = model / f"{BIN}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert read_rank(convert(model_dir=model, force=True)) == expected
    (model / "pytorch_model-00001-of-00002.bin").unlink()
    error = convert.fail(model_dir=model, force=True)
    assert f"{index} names 1 of 2 files that are not there" in error.message


def test_safetensors_are_preferred(
    model: Path, convert: Converter, log: pytest.LogCaptureFixture
) -> None:
    (model / BIN).write_bytes(b"never looked at")
    convert(model_dir=model)
    assert f"reading model.safetensors, not {BIN}" in log.text


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_type_is_read_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    torch_type = getattr(torch, dtype)
    tensor = torch.arange(24).reshape(4, 6).to(torch_type)
    torch.save({"a": tensor, "t": tensor.T, "s": tensor[1, 2], "e": tensor[:0]}, tmp_path / "x.bin")
    save_file({"a": tensor, "t": tensor.T.contiguous()}, tmp_path / "x.safetensors")
    file = TorchFile(tmp_path / "x.bin")
    library = load_file(tmp_path / "x.safetensors")
    for name in ("a", "t"):
        array = file.read(name)
        assert array.dtype == DTYPES[dtype][1]
        raw = library[name].reshape(-1).view(torch.uint8).numpy()
        assert np.ascontiguousarray(array).tobytes() == raw.tobytes()
    assert file.read("s").shape == ()
    assert file.read("e").shape == (0, 6)
    assert file.read_block("a", 1, 3, (2, 4)).tobytes() == file.read("a")[1:3, 2:4].tobytes()
    assert file.tensors["t"].shape == (6, 4)


def test_types_that_nothing_reads_are_listed(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "x.bin")
    assert TorchFile(tmp_path / "x.bin").tensors["a"].dtype == "C64"
    assert TorchFile(tmp_path / "x.bin").tensors["a"].num_bytes == 16
    torch.save({"a": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "x.bin")
    with pytest.raises(SpecDecError, match="stores 'a' as complex128, which is not supported"):
        TorchFile(tmp_path / "x.bin")


class Trap:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("is_old", [False, True])
def test_code_in_a_pickle_is_never_run(
    is_old: bool, model: Path, tmp_path: Path, convert: Converter
) -> None:
    state = take_state(model)
    touched = tmp_path / "touched"
    torch.save(
        {**state, "trap": Trap(touched)}, model / BIN, _use_new_zipfile_serialization=not is_old
    )
    error = convert.fail(model_dir=model)
    assert "it holds posix.system, which is not a tensor, and might run code" in error.message
    assert "state_dict" in error.hint
    assert not touched.exists()
    (model / BIN).write_bytes(pickle.dumps(Trap(touched)))
    assert "cannot be read as weights alone" in convert.fail(model_dir=model).message
    assert not touched.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, 2).to_sparse(), "sparse, quantized or empty-shelled tensors, 'a' first"),
        (torch.ones(2, device="meta"), "sparse, quantized or empty-shelled tensors, 'a' first"),
        ({"b": torch.ones(1)}, "is not a flat dictionary of tensors"),
        (3, "is not a flat dictionary of tensors"),
    ],
    ids=["sparse", "meta", "nested", "number"],
)
def test_what_is_no_plain_tensor(value: Any, message: str, tmp_path: Path) -> None:
    torch.save({"a": value}, tmp_path / "x.bin")
    with pytest.raises(SpecDecError, match=re.escape(message)):
        TorchFile(tmp_path / "x.bin")


def test_damaged_files(model: Path, convert: Converter) -> None:
    torch.save(take_state(model), model / BIN)
    data = (model / BIN).read_bytes()
    for content in (b"", b"P", data[:3], data[:-100], data[: len(data) // 2], b"\0" * 100):
        (model / BIN).write_bytes(content)
        error = convert.fail(model_dir=model)
        assert f"{model / BIN} cannot be read as weights alone" in error.message
        assert "download it again" in error.hint
        assert "weights_only" not in error.message, "nobody is told to load it unsafely"


def zip_again(path: Path, method: int, changed: Mapping[str, bytes] = {}) -> None:
    """Pack a file of torch.save as any zip tool may; changed: the contents of some records."""
    with zipfile.ZipFile(path) as old:
        records = {name: changed.get(Path(name).name, old.read(name)) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", method) as new:
        for name, data in records.items():
            new.writestr(name, data)


def test_compressed_records_are_unpacked(
    model: Path, expected: bytes, convert: Converter, log: pytest.LogCaptureFixture
) -> None:
    torch.save(take_state(model), model / BIN)
    zip_again(model / BIN, zipfile.ZIP_STORED)
    assert read_rank(convert(model_dir=model, force=True)) == expected
    assert "into memory" not in log.text
    zip_again(model / BIN, zipfile.ZIP_DEFLATED)
    assert read_rank(convert(model_dir=model, force=True)) == expected
    assert "compressed records" in log.text


def test_another_byte_order(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """torch turns it in a mapping whose changes would be lost with its memory."""
    tensor = torch.arange(1000, dtype=torch.float32)
    torch.save({"a": tensor}, path := tmp_path / "x.bin")
    turned = tensor.numpy().byteswap().tobytes()
    zip_again(path, zipfile.ZIP_STORED, {"byteorder": b"big", "0": turned})
    file = TorchFile(path)
    assert (file.read("a") == tensor.numpy()).all()
    file.release()
    assert (file.read("a") == tensor.numpy()).all()


def test_what_unpacks_to_more_than_any_model_is_not_unpacked(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1 << 20)}, path := tmp_path / "x.bin")
    for method, bomb in ((zipfile.ZIP_STORED, 3 << 20), (zipfile.ZIP_DEFLATED, 30 << 20)):
        zip_again(path, method, {"data.pkl": b"\x80\x02" + b"]" * bomb})
        with pytest.raises(SpecDecError, match=rf"x.bin holds .* data.pkl has {bomb + 2} bytes"):
            TorchFile(path)
    torch.save({"a": torch.ones(1 << 20)}, path)
    zip_again(path, zipfile.ZIP_DEFLATED)  # ones alone: a file of 4 MB in some KB
    with pytest.raises(SpecDecError, match="they unpack to 419"):
        TorchFile(path)


@pytest.mark.thorough
def test_a_damaged_list_of_records(tmp_path: Path) -> None:
    """Whatever a byte of it says, the weights are the file's own or there is an error."""
    tensor = torch.arange(1, 300, dtype=torch.float32)
    torch.save({"a": tensor, "b": tensor}, path := tmp_path / "x.bin")
    whole, random = path.read_bytes(), np.random.default_rng(0)
    begin = whole.index(b"PK\x01\x02")
    for _ in range(150):
        data = bytearray(whole)
        data[random.integers(begin, len(data))] = random.integers(0, 256)
        path.write_bytes(data)
        try:
            file = TorchFile(path)
        except SpecDecError:
            continue
        assert (file.read("a") == tensor.numpy()).all()


def test_a_record_without_its_header(tmp_path: Path) -> None:
    """As a piece that is missing in the middle of a download leaves it."""
    torch.save({"a": torch.ones(300), "b": torch.ones(300)}, path := tmp_path / "x.bin")
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("x/data/1")
    data[info.header_offset : info.header_offset + 30] = bytes(30)
    path.write_bytes(data)
    with pytest.raises(SpecDecError, match="record 'x/data/1' is not where"):
        TorchFile(path)


def test_a_file_that_changes_size_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save({"a": torch.ones(1000)}, path)
    file = TorchFile(path)
    os.truncate(path, 2000)
    with pytest.raises(SpecDecError, match="has 2000 bytes, .* when it was opened"):
        file.read("a")


def measure_resident(path: Path) -> int:
    """Bytes of a mapped file that are in this process's memory."""
    text = Path("/proc/self/smaps").read_text()
    entries = re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", text)
    assert entries
    return sum(map(int, entries)) * 1024


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what is mapped")
def test_memory_is_let_go(tmp_path: Path) -> None:
    path = (tmp_path / "x.bin").resolve()
    torch.save({"a": torch.ones(4 << 20), "b": torch.full((1 << 20,), 2.0)}, path)
    file = TorchFile(path)
    assert file.read("a").sum() == 4 << 20
    assert measure_resident(path) > 16 << 20
    file.release()
    assert measure_resident(path) < 1 << 20
    assert file.read("a").sum() == 4 << 20
    assert file.read("b").max() == 2


def test_a_folder_s_list_of_weight_files_goes_first(model: Path) -> None:
    save_file({"a": torch.ones(1)}, model / "heads.safetensors")
    folder = HfFolder(model, weight_files=("none.safetensors", "heads.safetensors"))
    assert list(folder.tensors) == ["a"]
